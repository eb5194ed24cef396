"""The kernel as users get it: `hfpatch kernel build` first, or KERNEL=org/name@v1 from the Hub."""

import os
from pathlib import Path

import kernels
import pytest
import torch

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
# A PyTorch for GPUs asks for a build for GPUs, also where there is none.
BACKEND = None if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session")
def kernel():
    name, _, version = os.environ.get("KERNEL", "").partition("@v")
    if name:
        return kernels.get_kernel(
            name, version=int(version), backend=BACKEND, trust_remote_code=True
        )
    return kernels.get_local_kernel(Path(__file__).parents[1], backend=BACKEND)


@pytest.fixture(params=DEVICES)
def device(request):
    return torch.device(request.param)
