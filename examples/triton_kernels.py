"""Two Triton kernels in a model: an RMS norm for every module that computes one, and the forward of
an MLP with a Mish gate. They are those of `hfpatch kernel new my-triton --template triton`.

    python examples/triton_kernels.py

On a GPU, or, where there is none, under Triton's interpreter: slow, and the same numbers.
"""

import os
import sys

import torch
from torch import nn

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported
try:
    import triton  # noqa: F401
except ImportError:
    sys.exit("Triton is not installed: `pip install triton`, on Linux")

import hfpatch
from hfpatch.kernel_project.new import TEMPLATES

sys.path.insert(0, str(TEMPLATES.with_name("templates_triton")))
import example_kernel


class MishMLP(nn.Module):
    """What none of hfpatch's own kernels computes: `down(mish(gate(x)) * up(x))`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, 2 * width, bias=False)
        self.up_proj = nn.Linear(width, 2 * width, bias=False)
        self.down_proj = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.mish(self.gate_proj(x)) * self.up_proj(x))


@torch.no_grad()
def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    width = 1024 if device == "cuda" else 48
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.RMSNorm(width, eps=1e-6), MishMLP(width)) for _ in range(2))
    model = nn.Sequential(*layers).to(device)
    x = torch.randn(2, 16, width, device=device)
    before = model(x)
    handles = example_kernel.install("^MishMLP$")
    report = hfpatch.apply(model, kernels={"rms_norm": "example-kernel"})
    print(report)
    after = model(x)
    print(f"largest difference: {(after - before).abs().max():.2e}")
    hfpatch.restore(model)
    print(f"restored, bit for bit: {torch.equal(model(x), before)}")
    for handle in handles:
        handle.remove()


if __name__ == "__main__":
    main()
