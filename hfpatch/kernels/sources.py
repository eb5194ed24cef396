"""Where a kernel comes from: the local build, a Hub repository, a registered function, or torch."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import BuiltinFunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch

from hfpatch import forks
from hfpatch.errors import KernelLoadError, KernelUntrustedError
from hfpatch.hub import HubOptions, HubSpec
from hfpatch.kernels import builds
from hfpatch.kernels.choices import RESERVED, Choices, Source, require_op
from hfpatch.kernels.config import FOUND_MAY_CHOOSE, check_kernel_variables, read_defaults
from hfpatch.ops import OPS
from hfpatch.planning.elsewhere import Elsewhere, as_one_operator
from hfpatch.text import meant

if TYPE_CHECKING:
    from hfpatch.hub.load import HubPackage

LOCAL_BUILD = Path(__file__).parents[1] / "_kernels"
REBUILD = "pip install --force-reinstall --no-deps ."
_ARCH = re.compile(r"(\d+)\.(\d+)([af]?)(\+PTX)?", re.ASCII)


@dataclass(frozen=True)
class Kernel:
    """A function for one op, from one source.

    Attributes:
        op: the op's name.
        fn: called with the signature of `OPS[op].reference`; differentiable if `differentiable`.
        raw: the same as a bare operator (tensors, then `OPS[op].encode`d codes), without autograd.
        raw_into: `raw` with the tensors to write before all others; returns nothing.
        calls: the package's `calls`: `raw` and `raw_into` bound to their codes, past the dispatcher
            where nothing listens to it.
        source: what the report calls it: "local", "torch", "org/repo@v1", or a registered name.
        version: identifies the code, for the report and for the cache of probes.
        devices: device types that it has code for; None when it does not say.
        archs: CUDA architectures that it was built for, e.g. "9.0", "12.1+PTX"; empty: unknown.
        own: this project's code, or PyTorch's operators. Others are verified in any case and asked
            more, see `hfpatch.foreign`.
        adapted: another project's, called through an adapter: verified in any case, and never
            assumed to be faster than a single kernel of PyTorch's.
        accepts: why it cannot take given parameters of the op, or None.
        min_capability: the lowest CUDA compute capability that it runs on.
        widens: of a kernel for calls under autocast, whether it makes what is normed or activated
            fp32 first, as autocast does for some operators; None: for other calls.
    """

    op: str
    fn: Callable[..., torch.Tensor]
    source: str
    version: str = ""
    raw: Callable[..., torch.Tensor] | None = None
    devices: frozenset[str] | None = None
    archs: tuple[str, ...] = ()
    differentiable: bool = True
    raw_into: Callable[..., None] | None = None
    adapted: bool = False
    accepts: Callable[[Mapping[str, Any]], str | None] | None = None
    min_capability: tuple[int, int] | None = None
    calls: Any = None
    widens: bool | None = None
    own: bool = False
    remedy: str = ""  # what to do where it has no code for a device, after the reason
    #: Makes of a binding, its parameters and whether it trains what is called in its place.
    watch: Callable[[Callable[..., Any], dict[str, Any], bool], Callable[..., Any]] | None = None

    def bind(self, params: dict[str, Any], training: bool = False) -> Callable[..., torch.Tensor]:
        """A callable of the op's tensors alone, as cheap as this source allows."""
        call = self._bind(params, training)
        if self.watch is not None:
            call = self.watch(call, params, training)
        if not self.widens:
            return call
        if self.op == "gated_rms_norm":
            return lambda x, gate, *rest: call(x.float(), gate.float(), *rest)
        return lambda x, *rest: call(x.float(), *rest)

    def _bind(self, params: dict[str, Any], training: bool) -> Callable[..., torch.Tensor]:
        if training or self.raw is None:
            fn = self.fn
            return lambda *tensors: fn(*tensors, **params)
        raw = self.raw
        codes = OPS[self.op].encode(params)
        if self.calls is not None and (bound := self.calls.bind(self.op, codes)) is not None:
            return bound  # type: ignore[no-any-return]
        if OPS[self.op].scratch:  # every op with scratch memory has one result
            return lambda *tensors: raw(*tensors, *codes)[0]
        return lambda *tensors: raw(*tensors, *codes)

    def guard(
        self, bound: Callable[..., Any], *tensors: torch.Tensor | None
    ) -> Callable[..., Any] | None:
        """What `bind` returned, for tensors like these: NotImplemented for any other call, and
        where autograd would record or autocast is on. None if this source has no such callable."""
        if self.calls is None or not isinstance(bound, BuiltinFunctionType):
            return None
        return self.calls.guard(bound, *tensors)  # type: ignore[no-any-return]

    def of_module(
        self, guarded: Callable[..., Any], *what: Any
    ) -> Callable[[Any, Any], Any] | None:
        """What `guard` returned, called with a module and its input; `calls.of_module` says how.
        None if this source is older than it."""
        made = getattr(self.calls, "of_module", None)
        return None if made is None else made(guarded, *what)

    def bind_into(self, outputs: int, params: dict[str, Any]) -> Callable[..., None]:
        """A callable of the `outputs` tensors to write, then of the op's tensors; inference only.

        What is written may be strided where the op allows it, and may be an input itself.
        """
        if self.watch is None and (raw := self.raw_into) is not None:
            codes = OPS[self.op].encode(params)
            if self.calls is not None and (bound := self.calls.bind(self.op, codes, True)):
                return bound  # type: ignore[no-any-return]
            return lambda *tensors: raw(*tensors, *codes)
        call = self.bind(params) if self.watch is not None else None
        fn = self.fn

        def into(*tensors: Any) -> None:
            given = tensors[outputs:]
            results = fn(*given, **params) if call is None else call(*given)
            made = results if outputs > 1 else (results,)
            for out, result in zip(tensors[:outputs], made, strict=True):
                out.copy_(result)

        return into

    def refuses(self, device: str) -> str | None:
        """Why this kernel cannot run on `device` ("cpu", "cuda"), or None."""
        if self.devices is not None and device not in self.devices:
            others = self.own and (device == "xpu" or torch.version.hip is not None)
            remedy = OTHER_DEVICES if others else self.remedy
            return f"kernel `{self.source}` has no code for {device_name(device)}{remedy}"
        if device != "cuda" or not (self.archs or self.min_capability) or torch.version.hip:
            return None  # ROCm's capabilities are other numbers
        for index in range(torch.cuda.device_count()):
            found = torch.cuda.get_device_capability(index)
            why = unsupported_capability(self.archs, found)
            if why is None and self.min_capability is not None and found < self.min_capability:
                why = f"it needs compute capability {'.'.join(map(str, self.min_capability))}"
            if why is not None:
                return f"kernel `{self.source}` cannot run on cuda:{index}: {why}{self.remedy}"
        return None


#: What can be done on devices that hfpatch has no kernels of its own for.
OTHER_DEVICES = (
    "; hfpatch's own kernels are for CUDA and the CPU. On this device it uses those of others that "
    "you name: of the Hub (`kernels='org/name@v1'`), or registered (`hfpatch.register`)"
)


def device_name(device: str) -> str:
    """A device type as people call it: to torch, ROCm is cuda."""
    if device == "cuda" and torch.version.hip is not None:
        return f"ROCm (hip {torch.version.hip})"
    return device


def torch_kernel(op: str) -> Kernel:
    """The op on PyTorch's own operators."""
    return Kernel(op, OPS[op].aten, "torch", torch.__version__, own=True)


def reference_kernel(op: str) -> Kernel:
    """The op's formula; what the probe compares with."""
    return Kernel(op, OPS[op].reference, "reference", torch.__version__, own=True)


_registered: dict[str, Kernel] = {}
#: Those that a later one of the same name stands before, until it is taken back.
_covered: dict[str, list[Kernel]] = {}
_registering = forks.lock()
_registrations = itertools.count()  # each is proven afresh: other devices, a function as changed


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
    if not name.strip() or name in (*RESERVED, "none") or "/" in name:
        raise ValueError(
            f"`name` {name!r} is reserved: pick one without '/' that is not empty, 'hub', 'local', "
            "'torch' or 'none'"
        )
    kernel = Kernel(
        op,
        fn,
        name,
        f"{fn.__module__}.{getattr(fn, '__qualname__', name)}#{next(_registrations)}",
        devices=devices,
        differentiable=differentiable,
    )
    key = f"{op}:{name}"
    with _registering:
        if key in _registered:
            _covered.setdefault(key, []).append(_registered[key])
        _registered[key] = kernel
    return kernel


# ------------------------------------------------------------------------------ local build


@dataclass(frozen=True)
class KernelPackage:
    """A loaded kernel package (ours, local or from the Hub) and what it was built for."""

    module: ModuleType
    source: str
    variant: str
    devices: frozenset[str]
    archs: tuple[str, ...] = ()
    own: bool = False
    remedy: str = ""

    def kernel(self, op: str) -> Kernel:
        fn = getattr(self.module, op, None)
        if fn is None:
            raise KernelLoadError(
                f"kernel `{self.source}` exports no `{op}`; it has: "
                f"{', '.join(n for n in getattr(self.module, '__all__', ()) if n in OPS) or 'none'}"
            )
        return Kernel(
            op,
            fn,
            self.source,
            self.variant,
            raw=self._raw(op) if op not in OPS or OPS[op].direct else None,
            devices=self.devices,
            archs=self.archs,
            raw_into=self._raw(f"{op}_out"),
            calls=getattr(self.module, "calls", None),
            own=self.own,
            remedy=self.remedy,
        )

    def _raw(self, name: str) -> Callable[..., Any] | None:
        packet = getattr(getattr(self.module, "ops", None), name, None)
        raw = getattr(packet, "default", None)
        # the dispatcher's own entry: an OpOverload adds a Python frame to every call
        return getattr(raw, "_op", raw)


def local_package(root: Path | None = None) -> KernelPackage:
    """The kernels that are on this machine, see `hfpatch.kernels.builds`; loaded once.

    Args:
        root: look there alone.

    Raises:
        KernelLoadError: nothing was built, nothing fits this system, or the files are damaged.
        ValueError: an environment variable that they read means nothing.
    """
    return _load_local(LOCAL_BUILD if root is None else root, root is None)


@cache
def _load_local(root: Path, beside: bool) -> KernelPackage:
    check_kernel_variables()
    roots = [root] if (root / "build").is_dir() else []
    if beside:
        roots += builds.beside()
    if not roots:
        raise KernelLoadError(
            f"no compiled kernels in this installation: {_reason(root) or 'it was not built'}. "
            f"`hfpatch setup` downloads or compiles them; or install a C++ compiler (and nvcc for "
            f"CUDA) and run `{REBUILD}`"
        )
    found, why = builds.fitting(roots)
    if found is None:
        raise KernelLoadError(
            f"no local kernel build fits this system:\n{why}\nRebuild for this torch with "
            f"`{REBUILD}`, or `hfpatch setup`"
        )
    path = found.root / "build" / found.variant
    metadata = verified_metadata(path)
    try:
        from kernels import get_local_kernel

        module = get_local_kernel(found.root, backend=found.backend)
    except Exception as e:
        raise KernelLoadError(
            f"the local kernel build `{path.name}` could not be loaded: {e}. "
            f"It may be for another torch; rebuild with `{REBUILD}`"
        ) from e
    info = metadata.get("backend", {})
    devices = {"cpu", "cuda"} if info.get("type") == "cuda" else {"cpu"}
    return KernelPackage(
        module,
        "local",
        f"{path.name}:{metadata['id']}",
        frozenset(devices),
        tuple(info.get("archs") or ()),
        own=True,
        remedy=_remedy(found.root, path.name),
    )


def _remedy(root: Path, variant: str) -> str:
    """What is said of a local build that has no code for a device: which it is, and what to do."""
    found = _reason(root)
    said = f" ({found})" if found else ""
    return f"; the local build is `{variant}`{said}. Rebuild it here with `{REBUILD}`"


def _reason(root: Path) -> str:
    """What the build recorded of what it left out."""
    try:
        return str(json.loads((root / "REASON.json").read_text(encoding="utf-8"))["reason"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def verified_metadata(path: Path) -> dict[str, Any]:
    """metadata.json of a variant, after its files were checked against the digests in it.

    A damaged shared library can take the process down when it is loaded, so it is not loaded.
    """
    try:
        metadata: dict[str, Any] = json.loads((path / "metadata.json").read_text(encoding="utf-8"))
        digest = metadata["digest"]
        hasher = getattr(hashlib, digest["algorithm"])
        for name, expected in digest["files"].items():
            got = base64.b64encode(hasher((path / name).read_bytes()).digest()).decode()
            if got != expected:
                raise KernelLoadError(
                    f"`{path.name}/{name}` is damaged: {digest['algorithm']} is {got}, expected "
                    f"{expected}. Rebuild with `{REBUILD}`"
                )
    except (OSError, KeyError, ValueError, AttributeError) as e:
        raise KernelLoadError(
            f"the local kernel build `{path.name}` is damaged ({type(e).__name__}: {e}). "
            f"Rebuild with `{REBUILD}`"
        ) from e
    return metadata


def unsupported_capability(archs: tuple[str, ...], capability: tuple[int, int]) -> str | None:
    """Why a build for `archs` (e.g. "9.0", "12.1+PTX") cannot run on `capability`, or None."""
    known = [a for a in map(_arch, archs) if a is not None]
    if not known or any(runs(capability) for runs in known):
        return None  # names that are not known say nothing
    return (
        f"the build has no code for compute capability {capability[0]}.{capability[1]}, "
        f"only for {', '.join(archs)}"
    )


def _arch(text: str) -> Callable[[tuple[int, int]], bool] | None:
    """Which capabilities code for "9.0", "9.0a", "10.0f" or "12.1+PTX" runs on; None: unknown."""
    match = _ARCH.fullmatch(text)
    if match is None:
        return None
    least = int(match[1]), int(match[2])
    if match[3] == "a":
        return lambda found: found == least
    if match[4] and not match[3]:
        return lambda found: found >= least
    return lambda found: found[0] == least[0] and found >= least


# ------------------------------------------------------------------------------ resolution


@dataclass
class Sources:
    """The kernel that each op uses in one `apply`, by the user's choice and what can be loaded.

    Each op has sources in order of preference, by default ("local", "torch"). One that fails is
    noted in `notes` and the next is tried; under `strict` the failure is raised. Where the list
    ends without a kernel, `missing` says why. A Hub repository is asked for once, whatever comes of
    it.

    `block=True` asks for a fused block, which calls kernels of this project's own kind only: of a
    list, another project's is passed over for the next.
    """

    choices: Choices
    strict: bool = False
    hub: HubOptions = field(default_factory=HubOptions)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)  # those of the notes that are of kernels
    #: As they were when the choice was made: one may be taken back by another thread meanwhile, or
    #: before a late proof asks for it.
    registered: Mapping[str, Kernel] = field(default_factory=dict)
    _kernels: dict[tuple[str, bool], Kernel | None] = field(default_factory=dict)
    _missing: dict[tuple[str, bool], str] = field(default_factory=dict)
    _after: dict[tuple[str, str], Kernel | None] = field(default_factory=dict)
    _packages: dict[str, HubPackage | KernelLoadError] = field(default_factory=dict)
    _unreached: str = ""
    _found: str = ""  # a config file that nobody named, which chose these sources
    assumed: Elsewhere | None = None  # the machine of a plan that is made without it

    @classmethod
    def parse(cls, kernels: Any, strict: bool, hub: Any = None) -> Sources:
        """From the `kernels=` and `hub=` arguments, completed by environment and config file."""
        defaults = read_defaults()
        options = HubOptions.of(hub, defaults.hub)
        registered = _registered.copy()
        try:
            choices = Choices.parse(defaults.kernels if kernels is None else kernels)
            for op in OPS:
                for source in choices.of(op) or ():
                    _check_source(op, source, options, registered)
        except (TypeError, ValueError) as e:
            if kernels is not None or not defaults.origin:
                raise
            raise ValueError(f"{defaults.origin}: {e}") from e
        notes = [defaults.note] if defaults.note and kernels is None else []
        if defaults.hub_note and options != HubOptions.of(
            hub
        ):  # the arguments may have said it all
            notes.append(defaults.hub_note)
        found = defaults.origin if kernels is None and defaults.found else ""
        return cls(choices, strict, options, notes, registered=registered, _found=found)

    def explicit(self, op: str) -> bool:
        """Whether the user named one source for `op`: it is used even where it gains nothing."""
        return self.choices.explicit(op)

    def remote(self, op: str) -> bool:
        """Whether a kernel for `op` might have to be downloaded."""
        sources = self.choices.of(op) or ()
        return any(isinstance(s, str) and (s == "hub" or "/" in s) for s in sources)

    def kernel(self, op: str, block: bool = False) -> Kernel | None:
        """The kernel for `op`; None if it is switched off (`{op: None}`) or `missing`."""
        if (op, block) not in self._kernels:
            self._kernels[op, block] = self._resolve(op, block)
        return self._kernels[op, block]

    def missing(self, op: str, block: bool = False) -> str | None:
        """Why no source gave a kernel for `op`; None if one did, or it is switched off."""
        self.kernel(op, block)
        return self._missing.get((op, block))

    def after(self, op: str, kernel: Kernel) -> Kernel | None:
        """The kernel that follows in the order of preference, for what `kernel` cannot take."""
        key = (op, kernel.source)
        if key not in self._after:
            names = [_name(source) for source in self.order(op)]
            start = names.index(kernel.source) + 1 if kernel.source in names else len(names)
            self._after[key] = self._first(op, start, False, [])
        return self._after[key]

    def pass_over(self, op: str, kernel: Kernel, why: str) -> None:
        """Note why `kernel` is not used where it was preferred, and what is."""
        following = self.after(op, kernel)
        self.note(_sentences(why, _follows(None if following is None else following.source)))

    def order(self, op: str) -> tuple[Source, ...]:
        """What is tried for `op`, in order; "hub" as the repositories that it stands for."""
        found: list[Source] = []
        for source in self.choices.of(op) or ():
            if source == "hub":
                from hfpatch.hub.kernel import served_by_the_hub

                found += served_by_the_hub(op, self.hub)
            else:
                found.append(source)
        return tuple(found)

    def _resolve(self, op: str, block: bool) -> Kernel | None:
        if self.choices.of(op) is None:
            return None
        failures: list[str] = []
        kernel = self._first(op, 0, block and not self.explicit(op), failures)
        if kernel is None:
            why = failures[-1] if failures else f"no source that was named has `{op}`"
            self._missing[op, block] = why
        return kernel

    def _first(
        self, op: str, start: int, pass_others_over: bool, failures: list[str]
    ) -> Kernel | None:
        """The first kernel from a place in the order on; failures to load are noted."""
        order = self.order(op)
        for i, source in enumerate(order[start:], start + 1):
            if pass_others_over and _has_adapter(source):
                continue
            try:
                kernel = self._load(op, source)
            except KernelLoadError as e:
                if self.strict:
                    raise
                failures.append(str(e))
                following = _name(order[i]) if i < len(order) else None
                text = _sentences(str(e), _follows(following))
                self.note(text)
                if text not in self.failures:
                    self.failures.append(text)
                continue
            if not (pass_others_over and kernel.accepts is not None):
                return kernel
        return None

    def note(self, note: str) -> None:
        """Say something in the report, once."""
        if note not in self.notes:
            self.notes.append(note)

    def _load(self, op: str, source: Source) -> Kernel:
        if self._found and source not in FOUND_MAY_CHOOSE:
            raise KernelUntrustedError(
                f"{self._found} names `{_name(source)}` for `{op}`, but nobody named that file: "
                "one that is found in the working directory or above it may choose `local`, "
                "`torch` and `none` only. Name it in HFPATCH_CONFIG, or the kernel in `kernels=`"
            )
        if not isinstance(source, str):
            return Kernel(op, source, _name(source), f"#{id(source)}", differentiable=False)
        if source == "torch":
            return torch_kernel(op)
        if source == "local":
            if self.assumed is not None:
                return _assumed_kernel(op, self.assumed)
            return local_package().kernel(op)
        if (found := self.registered.get(f"{op}:{source}")) is not None:
            return found
        if self.assumed is not None:
            raise KernelLoadError(
                f"Hub kernel `{source}`: which of its builds is loaded is decided on the machine "
                f"that loads it, so a plan for `{self.assumed}` leaves it out"
            )
        from hfpatch.hub.kernel import kernel_of

        return kernel_of(self._package(source), op)

    def _package(self, source: str) -> HubPackage:
        from hfpatch.hub.cache import CachedRepo
        from hfpatch.hub.explain import unreached
        from hfpatch.hub.kernel import hub_package

        if source not in self._packages:
            spec = HubSpec.parse(source, self.hub.allow_branches)
            here = spec.commit or CachedRepo(spec.repo).commit_of(spec.ref) or self.hub.lockfile
            try:
                if self._unreached and not here:  # a Hub that is away is waited for once
                    raise KernelLoadError(
                        f"Hub kernel `{source}` is not in the cache, and the Hub gave no answer "
                        f"about `{self._unreached}`"
                    )
                self._packages[source] = package = hub_package(source, self.hub)
                for note in package.notes:
                    self.note(note)
            except KernelLoadError as e:
                self._packages[source] = e
                if unreached(e):
                    self._unreached = source
        found = self._packages[source]
        if isinstance(found, KernelLoadError):
            raise found
        return found


def _assumed_kernel(op: str, assumed: Elsewhere) -> Kernel:
    """The kernel that an installation on that machine has: proven by the CPU's code of it, or,
    where there is none here, by its formula."""
    if (why := assumed.lacks()) is not None:
        raise KernelLoadError(why)
    version = f"for {assumed}"
    try:
        here = local_package().kernel(op)
        return replace(here, version=version, devices=None, archs=(), remedy="")
    except KernelLoadError:
        return Kernel(op, as_one_operator(OPS[op].reference), "local", version, own=True)


def compiled_here() -> bool:
    """Whether a compiled build can be loaded."""
    try:
        local_package()
    except KernelLoadError:
        return False
    return True


def _name(source: Source) -> str:
    """What reports call a source: `Kernel.source` of what is loaded from it."""
    name = source if isinstance(source, str) else getattr(source, "__name__", None)
    return name if isinstance(name, str) else "function"


def _follows(source: str | None) -> str:
    """What is tried after a failure, as a sentence."""
    if source is None:
        return "The modules stay as they are."
    if source == "torch":
        return "Using torch's own operators instead."
    return f"Trying `{source}` instead."


def _sentences(first: str, second: str) -> str:
    return f"{first} {second}" if first.endswith(".") else f"{first}. {second}"


def _has_adapter(source: Source) -> bool:
    """Whether this is a repository of another project, which need not be loaded to know that."""
    if not (isinstance(source, str) and "/" in source):
        return False
    from hfpatch.hub.adapters import ADAPTERS

    return any(source == a.spec for a in ADAPTERS)


def _check_source(
    op: str, source: Source, options: HubOptions, registered: Mapping[str, Kernel]
) -> None:
    if not isinstance(source, str) or source in RESERVED or f"{op}:{source}" in registered:
        return
    if "/" in source:
        HubSpec.parse(source, options.allow_branches)  # raises the error that says how to pin
        return
    names = sorted(k.source for k in registered.values() if k.op == op)
    raise ValueError(
        f"unknown kernel source {source!r} for op `{op}`.{meant(source, (*RESERVED, *names))} "
        "Expected 'hub', 'local', 'torch', a pinned Hub kernel like 'org/name@v1', or a registered "
        f"name ({', '.join(names) or 'none yet'})"
    )


def unregister_kernel(kernel: Kernel) -> None:
    """Forget a registered kernel; unknown ones are ignored."""
    key = f"{kernel.op}:{kernel.source}"
    with _registering:
        covered = [k for k in _covered.pop(key, ()) if k is not kernel]
        if _registered.get(key) is kernel:
            del _registered[key]
            if covered:
                _registered[key] = covered.pop()
        if covered:
            _covered[key] = covered
