import torch


def reference(q, k, v, **_):
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return torch.softmax(scores, -1) @ v


def work(q, **_):
    batch, heads, length, width = q.shape
    return {"bytes": 4 * 2 * q.numel(), "flops": 4 * batch * heads * length * length * width}
