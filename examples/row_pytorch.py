"""What the programs in examples/c, examples/rust and examples/go compute, in PyTorch.

    python examples/row_pytorch.py FILE TOKEN

One row of a tiny language model: the token's embedding, an RMSNorm, a gated MLP with a residual,
the logits, and five tokens drawn from them; on the CPU, and on a GPU if there is one. FILE is a
safetensors file; one that is not there is written first, with random weights
(examples/row.safetensors was).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from hfpatch.ops.sample import sample

VOCABULARY, WIDTH, HIDDEN = 40, 32, 48


def random_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    return {
        "embed": torch.randn(VOCABULARY, WIDTH, generator=generator),
        "norm": 1 + 0.1 * torch.randn(WIDTH, generator=generator),
        "gate": normal(HIDDEN, WIDTH),
        "up": normal(HIDDEN, WIDTH),
        "down": normal(WIDTH, HIDDEN),
        "head": 3 * normal(VOCABULARY, WIDTH),
    }


def run(w: dict[str, torch.Tensor], token: int) -> None:
    x = w["embed"][token]
    normed = torch.nn.functional.rms_norm(x, x.shape, w["norm"], eps=1e-6)
    inner = torch.nn.functional.silu(w["gate"] @ normed) * (w["up"] @ normed)
    y = x + w["down"] @ inner
    logits = w["head"] @ y
    seeds = torch.arange(5, device=x.device)
    tokens = sample(logits.expand(5, -1), seeds, temperature=0.8, top_k=10, top_p=0.95)
    print("y      ", *(f"{v:.4f}" for v in y[:4].tolist()))
    print("logits ", *(f"{v:.4f}" for v in logits[:4].tolist()))
    print("tokens ", *tokens.tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("token", type=int)
    args = parser.parse_args()
    if not args.file.exists():
        save_file(random_weights(), args.file)
    weights = load_file(args.file)
    print("cpu")
    run(weights, args.token)
    there = torch.cuda.is_available()
    print("cuda:0" if there else "cuda:0  not run: PyTorch finds no GPU")
    if there:
        run({name: w.to("cuda:0") for name, w in weights.items()}, args.token)


if __name__ == "__main__":
    main()
