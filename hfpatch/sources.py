"""Where a kernel comes from: the local build, a Hub repository, a registered function, or torch."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from hfpatch.errors import KernelLoadError
from hfpatch.ops import OPS

#: What `kernels=` accepts for one op, or for all of them.
KernelChoice = str | Callable[..., torch.Tensor] | None

LOCAL_BUILD = Path(__file__).parent / "_kernels"
_HUB_SPEC = re.compile(r"^[\w.-]+/[\w.-]+@(v(?P<version>\d+)|(?P<revision>[0-9a-f]{40}))$")


@dataclass(frozen=True)
class Kernel:
    """A function for one op, from one source.

    Attributes:
        op: the op's name.
        fn: called with the signature of `OPS[op].reference`; differentiable if `differentiable`.
        raw: the same as a bare operator (tensors, then `OPS[op].encode`d codes), without autograd.
        source: what the report calls it: "local", "torch", "org/repo@v1", or a registered name.
        version: identifies the code, for the report and for the cache of probes.
        devices: device types that it has code for; None when it does not say.
        archs: CUDA architectures that it was built for, e.g. "9.0", "12.1+PTX"; empty: unknown.
    """

    op: str
    fn: Callable[..., torch.Tensor]
    source: str
    version: str = ""
    raw: Callable[..., torch.Tensor] | None = None
    devices: frozenset[str] | None = None
    archs: tuple[str, ...] = ()
    differentiable: bool = True

    def bind(self, params: dict[str, Any], training: bool = False) -> Callable[..., torch.Tensor]:
        """A callable of the op's tensors alone, as cheap as this source allows."""
        if training or self.raw is None:
            fn = self.fn
            return lambda *tensors: fn(*tensors, **params)
        raw = self.raw
        codes = OPS[self.op].encode(params)
        if self.op == "rms_norm":  # the most called of all: without packing and unpacking
            a, b, c = codes
            return lambda x, w, bias: raw(x, w, bias, a, b, c)
        if OPS[self.op].scratch:  # every op with scratch memory has one result
            return lambda *tensors: raw(*tensors, *codes)[0]
        return lambda *tensors: raw(*tensors, *codes)

    def refuses(self, device: str) -> str | None:
        """Why this kernel cannot run on `device` ("cpu", "cuda"), or None."""
        if self.devices is not None and device not in self.devices:
            return f"kernel `{self.source}` has no code for {device}"
        if device == "cuda" and self.archs:
            for index in range(torch.cuda.device_count()):
                why = unsupported_capability(self.archs, torch.cuda.get_device_capability(index))
                if why is not None:
                    return f"kernel `{self.source}` cannot run on cuda:{index}: {why}"
        return None


def torch_kernel(op: str) -> Kernel:
    """The op on PyTorch's own operators."""
    return Kernel(op, OPS[op].aten, "torch", torch.__version__)


def reference_kernel(op: str) -> Kernel:
    """The op's formula; what the probe compares with."""
    return Kernel(op, OPS[op].reference, "reference", torch.__version__)


_registered: dict[str, Kernel] = {}


def register_kernel(
    op: str,
    fn: Callable[..., torch.Tensor],
    name: str,
    devices: frozenset[str] | None = None,
    differentiable: bool = False,
) -> Kernel:
    """Make `fn` known under `name`, for `kernels={op: name}`."""
    require_op(op)
    if not callable(fn):
        raise TypeError(f"`kernel` for op `{op}` must be callable, got {type(fn).__name__}")
    if name in ("local", "torch") or "/" in name:
        raise ValueError(
            f"`name` {name!r} is reserved: pick one without '/' that is not 'local' or 'torch'"
        )
    kernel = Kernel(
        op,
        fn,
        name,
        f"{fn.__module__}.{getattr(fn, '__qualname__', name)}#{id(fn)}",
        devices=devices,
        differentiable=differentiable,
    )
    _registered[f"{op}:{name}"] = kernel
    return kernel


def require_op(op: str) -> None:
    if op not in OPS:
        raise ValueError(f"unknown op `{op}`; the ops are: {', '.join(sorted(OPS))}")


# ------------------------------------------------------------------------------ local build


@dataclass(frozen=True)
class KernelPackage:
    """A loaded kernel package (ours, local or from the Hub) and what it was built for."""

    module: ModuleType
    source: str
    variant: str
    devices: frozenset[str]
    archs: tuple[str, ...] = ()

    def kernel(self, op: str) -> Kernel:
        fn = getattr(self.module, op, None)
        if fn is None:
            raise KernelLoadError(
                f"kernel `{self.source}` exports no `{op}`; it has: "
                f"{', '.join(n for n in getattr(self.module, '__all__', ()) if n in OPS) or 'none'}"
            )
        packet = getattr(getattr(self.module, "ops", None), op, None)
        raw = getattr(packet, "default", None)
        # the dispatcher's own entry: an OpOverload adds a Python frame to every call
        raw = getattr(raw, "_op", raw)
        return Kernel(
            op, fn, self.source, self.variant, raw=raw, devices=self.devices, archs=self.archs
        )


def local_package(root: Path | None = None) -> KernelPackage:
    """The kernels that `pip install` built on this machine; loaded once.

    Raises:
        KernelLoadError: nothing was built, nothing fits this system, or the files are damaged.
    """
    return _load_local(root or LOCAL_BUILD)


@cache
def _load_local(root: Path) -> KernelPackage:
    reason_file = root / "REASON.json"
    if not (root / "build").is_dir():
        reason = "it was not built"
        if reason_file.is_file():
            reason = str(json.loads(reason_file.read_text())["reason"])
        raise KernelLoadError(
            f"no compiled kernels in this installation: {reason}. "
            "Install a C++ compiler (and nvcc for CUDA) and run "
            "`pip install --force-reinstall --no-deps .`"
        )
    from kernels.variants import get_variants_local, resolve_variant, variants_trace_str

    variants = get_variants_local(root / "build")
    variant, trace = resolve_variant(variants)
    backend = None
    if variant is None:  # e.g. a CUDA torch with kernels that were built for the CPU only
        variant, cpu_trace = resolve_variant(variants, "cpu")
        backend = "cpu"
    if variant is None:
        raise KernelLoadError(
            f"no local kernel build fits this system:\n{variants_trace_str(trace or cpu_trace)}\n"
            "Rebuild for this torch with `pip install --force-reinstall --no-deps .`"
        )
    path = root / "build" / variant.variant_str
    metadata = _verified_metadata(path)
    try:
        from kernels import get_local_kernel

        module = get_local_kernel(root, backend=backend)
    except Exception as e:
        raise KernelLoadError(
            f"the local kernel build `{path.name}` could not be loaded: {e}. "
            "It may be for another torch; rebuild with `pip install --force-reinstall --no-deps .`"
        ) from e
    info = metadata.get("backend", {})
    devices = {"cpu", "cuda"} if info.get("type") == "cuda" else {"cpu"}
    return KernelPackage(
        module,
        "local",
        f"{path.name}:{metadata['id']}",
        frozenset(devices),
        tuple(info.get("archs") or ()),
    )


def _verified_metadata(path: Path) -> dict[str, Any]:
    """metadata.json of a variant, after its files were checked against the digests in it.

    A damaged shared library can take the process down when it is loaded, so it is not loaded.
    """
    try:
        metadata: dict[str, Any] = json.loads((path / "metadata.json").read_text())
        digest = metadata["digest"]
        hasher = getattr(hashlib, digest["algorithm"])
        for name, expected in digest["files"].items():
            got = base64.b64encode(hasher((path / name).read_bytes()).digest()).decode()
            if got != expected:
                raise KernelLoadError(
                    f"`{path.name}/{name}` is damaged: {digest['algorithm']} is {got}, expected "
                    f"{expected}. Rebuild with `pip install --force-reinstall --no-deps .`"
                )
    except (OSError, KeyError, ValueError, AttributeError) as e:
        raise KernelLoadError(
            f"the local kernel build `{path.name}` is damaged ({type(e).__name__}: {e}). "
            "Rebuild with `pip install --force-reinstall --no-deps .`"
        ) from e
    return metadata


def unsupported_capability(archs: tuple[str, ...], capability: tuple[int, int]) -> str | None:
    """Why a build for `archs` (e.g. "9.0", "12.1+PTX") cannot run on `capability`, or None."""
    for arch in archs:
        number, _, ptx = arch.partition("+")
        major, minor = (int(part) for part in number.rstrip("af").split("."))
        if ptx and capability >= (major, minor):
            return None
        if number[-1] == "a" and capability == (major, minor):
            return None
        if number[-1] != "a" and capability[0] == major and capability[1] >= minor:
            return None
    if not archs:
        return None
    return (
        f"the build has no code for compute capability {capability[0]}.{capability[1]}, "
        f"only for {', '.join(archs)}"
    )


# ------------------------------------------------------------------------------ the Hub


def hub_package(spec: str) -> KernelPackage:
    """A kernel package from the Hub, pinned: `org/name@v1` or `org/name@<40-digit commit>`.

    Raises:
        ValueError: `spec` is not pinned.
        KernelLoadError: it cannot be had or loaded here.
    """
    match = _HUB_SPEC.match(spec)
    if match is None:
        raise ValueError(
            f"`{spec}` is not a pinned Hub kernel: write `org/name@v1` (a version) or "
            "`org/name@<40-digit commit>`; a branch name can change under you"
        )
    from kernels import get_kernel

    repo = spec.split("@")[0]
    try:
        if match["version"]:
            module = get_kernel(repo, version=int(match["version"]))
        else:
            module = get_kernel(repo, revision=match["revision"])
    except Exception as e:
        raise KernelLoadError(f"Hub kernel `{spec}` could not be loaded: {e}") from e
    return KernelPackage(module, spec, spec, frozenset({"cpu", "cuda"}))


# ------------------------------------------------------------------------------ resolution


@dataclass
class Sources:
    """The kernel that each op uses in one `apply`, by the user's choice and what can be loaded.

    With no choice the order is: local build, then torch. A choice that fails to load falls back to
    torch with the reason in `notes` (or raises under `strict`).
    """

    choices: Mapping[str, KernelChoice]
    strict: bool = False
    notes: list[str] = field(default_factory=list)
    _kernels: dict[str, Kernel | None] = field(default_factory=dict)

    @classmethod
    def parse(cls, kernels: Any, strict: bool) -> Sources:
        """From the `kernels=` argument: None, one choice for every op, or {op: choice}."""
        if isinstance(kernels, Mapping):
            for op, choice in kernels.items():
                require_op(op)
                _check_choice(op, choice)
            return cls(dict(kernels), strict)
        if kernels is None:
            return cls({}, strict)
        if not isinstance(kernels, str):
            raise TypeError(
                "`kernels` must be None, a source name, or a dict of op to source, got "
                f"{type(kernels).__name__}"
            )
        for op in OPS:
            _check_choice(op, kernels)
        return cls(dict.fromkeys(OPS, kernels), strict)

    def explicit(self, op: str) -> bool:
        """Whether the user named a source for `op`: then it is used even where it gains nothing."""
        return op in self.choices and self.choices[op] is not None

    def kernel(self, op: str) -> Kernel | None:
        """The kernel for `op`; None when the user switched the op off with `{op: None}`."""
        if op not in self._kernels:
            self._kernels[op] = self._resolve(op)
        return self._kernels[op]

    def _resolve(self, op: str) -> Kernel | None:
        if op in self.choices and self.choices[op] is None:
            return None
        choice = self.choices.get(op, "local")
        try:
            if callable(choice):
                return Kernel(
                    op,
                    choice,
                    getattr(choice, "__name__", "function"),
                    f"#{id(choice)}",
                    differentiable=False,
                )
            assert isinstance(choice, str)
            if choice == "torch":
                return torch_kernel(op)
            if choice == "local":
                return local_package().kernel(op)
            if f"{op}:{choice}" in _registered:
                return _registered[f"{op}:{choice}"]
            return hub_package(choice).kernel(op)
        except KernelLoadError as e:
            if self.strict:
                raise
            note = f"{e} Using torch's own operators instead."
            if note not in self.notes:
                self.notes.append(note)
            return torch_kernel(op)


def _check_choice(op: str, choice: Any) -> None:
    if choice is None or callable(choice) or choice in ("local", "torch"):
        return
    if not isinstance(choice, str):
        raise TypeError(
            f"`kernels[{op!r}]` must be a source name, a function or None, got "
            f"{type(choice).__name__}"
        )
    if f"{op}:{choice}" in _registered or _HUB_SPEC.match(choice):
        return
    if "/" in choice:
        hub_package(choice)  # raises the error that says how to pin
    names = sorted(k.split(":")[1] for k in _registered if k.startswith(f"{op}:"))
    raise ValueError(
        f"unknown kernel source {choice!r} for op `{op}`: expected 'local', 'torch', a pinned Hub "
        f"kernel like 'org/name@v1', or a registered name ({', '.join(names) or 'none yet'})"
    )


def unregister_kernel(kernel: Kernel) -> None:
    """Forget a registered kernel; unknown ones are ignored."""
    key = f"{kernel.op}:{kernel.source}"
    if _registered.get(key) is kernel:
        del _registered[key]
