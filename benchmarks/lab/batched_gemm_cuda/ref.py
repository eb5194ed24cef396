import torch


def setup(batch, m, n, k, seed=0, device="cuda"):
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator, device=device)

    c = torch.empty(batch, m, n, device=device)
    sizes = {"batch": batch, "m": m, "n": n, "k": k}
    return {"a": draw(batch, m, k), "b": draw(batch, k, n), "c": c, **sizes}


def reference(a, b, **_):
    return torch.bmm(a, b)
