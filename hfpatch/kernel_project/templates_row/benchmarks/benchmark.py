"""`kernels benchmark org/name` runs this on the published kernel; run as a script, on the build."""

from pathlib import Path

import torch
from kernels.benchmark import Benchmark


class RMSNormBenchmark(Benchmark):
    """The norm of a decoder: 4096 tokens, 4096 wide."""

    seed = 0

    def setup(self):
        dtype = torch.float32 if self.device == "cpu" else torch.bfloat16
        self.x = torch.randn(4096, 4096, device=self.device, dtype=dtype)
        self.weight = torch.rand(4096, device=self.device, dtype=dtype)
        self.out = torch.empty_like(self.x)

    def benchmark_rms_norm(self):
        self.out = self.kernel.rms_norm(self.x, self.weight)

    def verify_rms_norm(self):
        return self.kernel.reference.rms_norm(self.x, self.weight)


def main():
    from kernels import get_local_kernel
    from torch.utils.benchmark import Timer

    case = RMSNormBenchmark()
    case.device = "cuda" if torch.cuda.is_available() else "cpu"
    # a PyTorch for GPUs asks for a build for GPUs, also where there is none
    backend = None if torch.cuda.is_available() else "cpu"
    case.kernel = get_local_kernel(Path(__file__).resolve().parents[1], backend=backend)
    case.setup()
    ours, theirs = (
        Timer(
            "f(x, w)",
            globals={"f": f, "x": case.x, "w": case.weight},
            num_threads=torch.get_num_threads(),
        ).blocked_autorange(min_run_time=0.5)
        for f in (case.kernel.rms_norm, case.kernel.reference.rms_norm)
    )
    # every element is read once and written once
    bandwidth = 2 * case.x.nbytes / ours.median / 1e9
    print(f"{case.device}, {tuple(case.x.shape)}, {case.x.dtype}")
    print(f"rms_norm     {ours.median * 1e6:10.1f} us   {bandwidth:.0f} GB/s")
    print(f"reference    {theirs.median * 1e6:10.1f} us   {theirs.median / ours.median:.2f}x")


if __name__ == "__main__":
    main()
