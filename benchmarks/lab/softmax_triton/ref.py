import torch


def reference(x, **_):
    return torch.softmax(x, -1)
