def reference(x, **_):
    chains = [x, x + 1, x + 2, x + 3]
    for _ in range(512):
        chains = [c * 0.9990234375 + 0.0009765625 for c in chains]
    return (chains[0] + chains[1]) + (chains[2] + chains[3])


def work(x, **_):
    return {"bytes": 8 * x.numel(), "flops": 2 * 4 * 512 * x.numel()}
