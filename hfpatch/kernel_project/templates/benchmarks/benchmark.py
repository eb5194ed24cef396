"""`kernels benchmark org/name` runs this on the published kernel; run as a script, on the build."""

from pathlib import Path

import torch
from kernels.benchmark import Benchmark


class ReluSquaredBenchmark(Benchmark):
    """The activation of an MLP: 4096 tokens, 8192 wide."""

    seed = 0

    def setup(self):
        dtype = torch.float32 if self.device == "cpu" else torch.bfloat16
        self.x = torch.randn(4096, 8192, device=self.device, dtype=dtype)
        self.out = torch.empty_like(self.x)

    def benchmark_relu_squared(self):
        self.out = self.kernel.relu_squared(self.x)

    def verify_relu_squared(self):
        return self.kernel.reference.relu_squared(self.x)


def main():
    from kernels import get_local_kernel
    from torch.utils.benchmark import Timer

    case = ReluSquaredBenchmark()
    case.device = "cuda" if torch.cuda.is_available() else "cpu"
    # a PyTorch for GPUs asks for a build for GPUs, also where there is none
    backend = None if torch.cuda.is_available() else "cpu"
    case.kernel = get_local_kernel(Path(__file__).resolve().parents[1], backend=backend)
    case.setup()
    ours, theirs = (
        Timer(
            "f(x)", globals={"f": f, "x": case.x}, num_threads=torch.get_num_threads()
        ).blocked_autorange(min_run_time=0.5)
        for f in (case.kernel.relu_squared, case.kernel.reference.relu_squared)
    )
    # every element is read once and written once
    bandwidth = 2 * case.x.nbytes / ours.median / 1e9
    print(f"{case.device}, {tuple(case.x.shape)}, {case.x.dtype}")
    print(f"relu_squared {ours.median * 1e6:10.1f} us   {bandwidth:.0f} GB/s")
    print(f"reference    {theirs.median * 1e6:10.1f} us   {theirs.median / ours.median:.2f}x")


if __name__ == "__main__":
    main()
