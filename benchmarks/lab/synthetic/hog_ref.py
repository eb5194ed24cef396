import torch


def reference(x, n, **_):
    each = 64 * 64
    rows = torch.nn.functional.pad(x, (0, -n % each)).reshape(-1, 64, 64)
    return rows.cumsum(1).reshape(-1)[:n]
