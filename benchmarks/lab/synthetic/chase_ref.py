import torch

#: One cycle through 64 MB, more than an L2 cache holds.
LENGTH = 1 << 24


def setup(threads, steps, seed=0, device="cuda"):
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(seed)).to(device)
    following = torch.empty(LENGTH, dtype=torch.int32, device=device)
    following[order] = order.roll(-1).to(torch.int32)
    last = torch.empty(threads, dtype=torch.int32, device=device)
    return {"next": following, "last": last, "threads": threads, "steps": steps}


def reference(next, threads, steps, **_):
    place = torch.arange(threads, device=next.device)
    for _ in range(steps):
        place = next[place].long()
    return place.to(torch.int32)


def work(threads, steps, **_):
    return {"bytes": 32 * threads * steps}  # a sector for each load
