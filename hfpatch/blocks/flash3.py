"""FlashAttention-3, where it is installed and pays: found, proven on this GPU, called.

Only its compiled operator is used. The packages' Python interfaces wrap it in a custom operator,
which takes four seconds at its first call and a tenth of a millisecond of the host at each one.
"""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any, NamedTuple

import torch
from torch.compiler import is_compiling

from hfpatch.announce import announce_in_call
from hfpatch.kernels.config import attention_choice
from hfpatch.proof.subject import Tensor

#: Distributions that have it: the compiled module is `_C` in the folder, which is the name of the
#: operators' namespace too. The official build first: it has all dtypes and head dims.
PACKAGES = {"flash-attn-3": "flash_attn_3", "fa3-fwd": "fa3_fwd"}
#: The architecture that its kernels are for; its code for others is no faster than PyTorch's.
CAPABILITY = (9, 0)
#: From so many FLOP up it takes an H100 0.76 to 0.91 of cuDNN's time; with less work cuDNN is
#: mostly ahead (9e10: an image's 4096 tokens), with few keys by up to 1.3 times.
LARGE = 1e11


class Form(NamedTuple):
    """What an attention is beside its sizes; each form is proven by itself."""

    causal: bool = False
    window: bool = False
    grouped: bool = False  # fewer heads of k and v than of q
    softcap: bool = False


PLAIN = Form()


def serves(q: Tensor, k: Tensor, v: Tensor, form: Form = PLAIN) -> bool:
    """Whether FlashAttention-3 computes this attention of [B, S, H, D] tensors without a mask.

    It does not where autograd records (one of the packages has no gradient), nor while a model is
    compiled: the operator has no fake, and compiled blocks are the originals anyway.
    """
    return (
        not is_compiling()
        and _pays(q, k, form)
        and _takes(q, k, v, form)
        and _left_to_us()
        and _proven(q.device, q.dtype, q.shape[-1], form)
    )


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The attention of tensors that it `serves`: [B, S, H, D], contiguous.

    Args:
        scale, causal, window, softcap: as `hfpatch.attention.attention` takes them.
    """
    package = find()
    assert package is not None
    return _call(package.operator, q, k, v, **_options(scale, causal, window, softcap))


def _options(
    scale: float | None, causal: bool, window: int | None, softcap: float | None
) -> dict[str, Any]:
    """The operator's arguments, of those that differ from its defaults."""
    found: dict[str, Any] = {}
    if scale is not None:
        found["softmax_scale"] = scale
    if window is not None:
        found |= {"window_size_left": window - 1, "window_size_right": 0}
    elif causal:
        found["is_causal"] = True
    if softcap is not None:
        found["softcap"] = softcap
    return found


def _call(operator: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    out: Tensor = operator(q, k, v, num_splits=1, **options)[0]  # one: the same bits at every call
    return out


# -------------------------------------------------------------------------------------------------
# Whether it may and should


def pays(queries: Any, keys: Any, causal: bool = False, window: int | None = None) -> bool:
    """Whether there is so much work, by shapes of [B, H, S, D]."""
    batch, heads, length, dim = queries
    flops = 4 * batch * heads * length * dim * min(keys[2], window or keys[2])
    return bool(flops >= (2 * LARGE if causal and window is None else LARGE))


def _pays(q: Tensor, k: Tensor, form: Form = PLAIN) -> bool:
    if form.window:  # which the caller looked at: its length is not known here
        return True
    return pays(q.transpose(1, 2).shape, k.transpose(1, 2).shape, form.causal)


def _takes(q: Tensor, k: Tensor, v: Tensor, form: Form) -> bool:
    """What the kernel is for. It does not look at alignment itself, and takes fewer heads of k and
    v than of q, which for PyTorch is an error where it is not said."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return False
    batch, _, heads, dim = q.shape
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and q.dtype == k.dtype == v.dtype
        and q.device == k.device == v.device
        and k.shape == v.shape == (batch, k.shape[1], k.shape[2] if form.grouped else heads, dim)
        and heads % k.shape[2] == 0
        and (not form.causal or q.shape[1] <= k.shape[1])
        and dim <= 256
        and dim % 8 == 0
        and all(map(_aligned, (q, k, v)))
    )


def _aligned(t: Tensor) -> bool:
    """Whether the GPU's copy engine (TMA) can read it: 16 bytes at a time, 2 bytes a number."""
    *outer, last = t.stride()
    return last == 1 and t.data_ptr() % 16 == 0 and all(s > 0 and s % 8 == 0 for s in outer)


def _left_to_us() -> bool:
    """Whether nobody has chosen: who switched off one of PyTorch's fast kernels, by the
    `sdpa_kernel` context for example, wants the others."""
    cuda: Any = torch.backends.cuda
    enabled = bool(cuda.flash_sdp_enabled() and cuda.cudnn_sdp_enabled())
    return enabled and attention_choice() is None


# -------------------------------------------------------------------------------------------------
# Finding it


@dataclass(frozen=True)
class Package:
    """An installed FlashAttention-3: its operator, or the reason why it cannot be called."""

    name: str
    operator: Any = None
    problem: str | None = None


@functools.cache
def find() -> Package | None:
    """The first package that can be called, else the first that is there, else None."""
    broken = None
    for distribution, folder in PACKAGES.items():
        package = _load(distribution, folder)
        if package is not None and package.problem is None:
            return package
        broken = broken or package
    return broken


def _load(distribution: str, folder: str) -> Package | None:
    """The package as it is; None if it is not installed. Nothing that its import raises gets out:
    one for another build of PyTorch or CUDA fails in many ways."""
    module = f"{folder}._C"
    try:
        import_module(module)
        operator = getattr(torch.ops, folder).fwd.default
        return Package(_title(distribution), operator, _odd(operator._schema))
    except Exception as e:
        if isinstance(e, ModuleNotFoundError) and e.name in (folder, module):
            return None
        return Package(_title(distribution), problem=_said(e))


def _odd(schema: Any) -> str | None:
    """Why an operator of this schema cannot be called as `_call` does."""
    needed = [a.name for a in schema.arguments if not a.has_default_value()]
    if needed != ["q", "k", "v"]:
        return f"its operator needs {', '.join(needed)}; expected q, k, v alone"
    if all(a.name != "num_splits" for a in schema.arguments):
        return "its operator has no argument `num_splits`"
    return None


def _title(distribution: str) -> str:
    try:
        return f"{distribution} {metadata.version(distribution)}"
    except metadata.PackageNotFoundError:  # built in place
        return distribution


def _said(error: Exception) -> str:
    """An exception on one line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"


# -------------------------------------------------------------------------------------------------
# Proving it

_Key = tuple[torch.device, torch.dtype, int]
#: Device, dtype and head dim: why it is not used for them, or None where it is.
_proofs: dict[_Key, str | None] = {}
#: The same of forms other than the plain one.
_forms: dict[tuple[_Key, Form], str | None] = {}
_lock = threading.Lock()


def _proven(device: torch.device, dtype: torch.dtype, dim: int, form: Form) -> bool:
    """Whether it computes attention there; found out at the first call.

    Not in the capture of a CUDA graph, where nothing can be compared: what was never called before
    is PyTorch's kernel there. A graph of ours is recorded at the second call of its kind.
    """
    key = (device, dtype, dim)
    if key not in _proofs:
        if _capability(device) != CAPABILITY:
            _proofs[key] = f"{device} has not compute capability 9.0"
        elif _capturing(device):
            return False
        else:
            try:
                _decide(key)
            except torch.OutOfMemoryError:  # the next call tries again
                return False
    if form == PLAIN or _proofs[key] is not None:
        return _proofs[key] is None
    if (key, form) not in _forms:
        if _capturing(device):
            return False
        try:
            _decide(key, form)
        except torch.OutOfMemoryError:
            return False
    return _forms[key, form] is None


def _capability(device: torch.device) -> tuple[int, int] | None:
    if device.type != "cuda" or torch.version.hip is not None:  # whose capabilities are others
        return None
    return torch.cuda.get_device_capability(device)


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _decide(key: _Key, form: Form = PLAIN) -> None:
    """Prove it for `key`, and say if it is there and not used."""
    device, dtype, dim = key
    with _lock:
        if form != PLAIN:
            package = find()
            if (key, form) not in _forms and package is not None:
                _forms[key, form] = _prove(package.operator, device, dtype, dim, form)
            return
        if key in _proofs:  # another thread was first
            return
        package = find()
        if package is None:
            _proofs[key] = "it is not installed"
            return
        why = package.problem or _prove(package.operator, device, dtype, dim)
        _proofs[key] = why
    if why is not None:
        announce_in_call(
            f"FlashAttention-3 (`{package.name}`) is not used for {_short(dtype)} at head "
            f"dim {dim} on {device}, PyTorch's attention is: {why}",
            stacklevel=6,
        )


def _prove(
    operator: Any, device: torch.device, dtype: torch.dtype, dim: int, form: Form = PLAIN
) -> str | None:
    """Why it is not right for small random tensors; None if it is.

    The lengths are no multiples of its tiles, k and v are views of one tensor. Its probabilities
    and its result are rounded to the dtype, by half an epsilon at most each, and in the norm by far
    less: what is farther than one epsilon from fp64 is wrong.
    """
    generator = torch.Generator().manual_seed(0)  # leaves the user's random numbers alone

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cpu", generator=generator).to(dtype)

    q, kv = draw(1, 136, 4 if form.grouped else 2, dim), draw(1, 200, 2, 2, dim)
    window, softcap = 72 if form.window else None, 3.0 if form.softcap else None
    # on the CPU: loading a GPU's fp64 kernels for this would take longer than all the rest
    k, v = kv.unbind(2)
    truth = _formula(q.double(), k.double(), v.double(), form.causal, window, softcap)
    try:
        options = _options(None, form.causal, window, softcap)
        ours = _call(operator, q.to(device), *kv.to(device).unbind(2), **options)
        error = ((ours.cpu().double() - truth).norm() / truth.norm()).item()
    except torch.OutOfMemoryError:
        raise
    except Exception as e:
        return _said(e)
    limit = torch.finfo(dtype).eps
    return None if error <= limit else f"it is off by {error:.2e}, expected <= {limit:.2e}"


def _formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """In PyTorch's plain operators, which no switch of its attention kernels touches."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if causal:
        late = k.shape[2] - q.shape[2]
        seen = torch.ones(scores.shape[2:], dtype=torch.bool).tril(late)
        if window is not None:
            seen = seen.triu(late - window + 1)
        scores = scores.masked_fill(~seen, float("-inf"))
    return (torch.softmax(scores, -1) @ v).transpose(1, 2)


# -------------------------------------------------------------------------------------------------
# What a person sees


def in_use() -> list[str]:
    """What it was proven for, and so has computed, in this process: a line each."""
    package = find() if _proofs else None
    return [
        f"attention: FlashAttention-3 (`{package.name}`) for {_short(dtype)} at head dim {dim} on "
        f"{device}, from {LARGE:.0e} FLOP up"
        for (device, dtype, dim), why in list(_proofs.items())
        if package is not None and why is None
    ]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def describe() -> dict[str, str]:
    """For `hfpatch env`: the package, and why it is not used here."""
    package = find()
    if package is None:
        return {"problem": "not installed"}
    problem = package.problem or _not_here()
    return {"package": package.name} | ({} if problem is None else {"problem": problem})


def _not_here() -> str | None:
    if attention_choice() is not None:
        return "switched off by HFPATCH_ATTENTION"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if all(torch.cuda.get_device_capability(i) != CAPABILITY for i in range(count)):
        return "no GPU of compute capability 9.0"
    return None
