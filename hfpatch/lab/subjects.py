"""What is made faster: a version of a lab, loaded, with its inputs, its reference and a call of it.

| kind    | the version is                    | called                                          |
|---------|-----------------------------------|-------------------------------------------------|
| solve   | a .cu, .c or .cpp file            | `solve(pointers, sizes)`; pointers that are not |
|         |                                   | to const are its outputs                        |
| python  | a .py file, Triton's or any       | `run_kernel(**inputs)`                          |
| project | a kernel project's source tree    | the function of its package                     |
| op      | a .py file that calls an op of    | `run_kernel(**inputs)`; with `--project` the    |
|         | hfpatch, or hfpatch's sources     | sources are built for each version              |
"""

from __future__ import annotations

import ctypes
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hfpatch.lab.compiling import library
from hfpatch.lab.signature import Parameter, parse_solve
from hfpatch.lab.workspace import Lab

Inputs = dict[str, Any]
Sizes = Mapping[str, float]


class Unfit(Exception):
    """The subject cannot be called as the lab calls it; the message says what was expected."""


@dataclass(frozen=True)
class Reference:
    """`reference(**kwargs)`, called with those of the inputs that it takes."""

    function: Callable[..., Any]

    def __call__(self, inputs: Inputs) -> Any:
        return _called(self.function, inputs)

    def compiled(self, inputs: Inputs) -> Callable[[], Any]:
        """A call of it under torch.compile, on these inputs."""
        taken = _taken(self.function, inputs)
        function = torch.compile(self.function, dynamic=False)
        return lambda: function(**taken)


@dataclass
class Subject:
    """One version, loaded.

    Attributes:
        outputs: names of the inputs that it writes its results to; empty where it returns them.
        inout: those of them that it also reads.
        run: a call; returns what the kernel returns.
        device: where its tensors are.
        capturable: whether its launches go to the current stream, so that a CUDA graph can have
            them.
    """

    name: str
    device: torch.device
    outputs: tuple[str, ...]
    inout: tuple[str, ...]
    make: Callable[[int, Sizes], Inputs]
    run: Callable[[Inputs], Any]
    refer: Reference | None
    work: Callable[[Inputs], dict[str, float]]
    settings: dict[str, Any]
    capturable: bool = True

    @property
    def wanted(self) -> tuple[str, ...]:
        """The outputs that are results, and no scratch."""
        scratch = self.settings.get("SCRATCH", ())
        return tuple(name for name in self.outputs if name not in scratch)

    def results(self, inputs: Inputs, returned: Any) -> dict[str, Tensor]:
        """The results of a call by name: outputs that were written, or what was returned.

        Raises:
            Unfit: there is none.
        """
        if self.outputs:
            found = {name: inputs[name] for name in self.wanted}
        else:
            found = _named(returned)
        if not found:
            raise Unfit(
                f"`{self.name}` returned no tensor, and `setup` names no `outputs` that it writes "
                'to: return {"inputs": {…}, "outputs": ["name"]} from it'
            )
        return found

    def reference(self, inputs: Inputs) -> dict[str, Tensor]:
        """What the reference makes of inputs, under the names of `results`. Raises Unfit."""
        if self.refer is None:
            raise Unfit("there is no reference; give one by `hfpatch lab init --ref`")
        before = {n: t._version for n, t in inputs.items() if isinstance(t, Tensor)}
        returned = self.refer(inputs)
        found = _named(returned)
        if not found:  # it wrote to the outputs
            written = [n for n in self.wanted if inputs[n]._version != before[n]]
            if not written:
                raise Unfit(
                    "`reference(**kwargs)` returned no tensor and wrote to no output; expected "
                    "one of both"
                )
            return {n: inputs[n] for n in self.wanted}
        if self.wanted and not set(found) >= set(self.wanted):
            values = list(found.values())
            if len(values) != len(self.wanted):
                raise Unfit(
                    f"`reference` returned {len(values)} tensors, expected {len(self.wanted)}: "
                    f"{', '.join(self.wanted)}"
                )
            return dict(zip(self.wanted, values, strict=True))
        return {n: found[n] for n in self.wanted} if self.wanted else found


def _named(returned: Any) -> dict[str, Tensor]:
    if isinstance(returned, Mapping):
        return {str(k): v for k, v in returned.items() if isinstance(v, Tensor)}
    leaves = [v for v in pytree.tree_leaves(returned) if isinstance(v, Tensor)]
    return {str(i): v for i, v in enumerate(leaves)}


# Loading ----------------------------------------------------------------------------------------


def load(lab: Lab, n: int) -> Subject:
    """Version n of a lab, compiled and loaded.

    Raises:
        ToolMissing: a compiler is missing. CompileError: it refused the source.
        Unfit: it is not what the lab can call.
    """
    data = lab.data
    device = torch.device(data["device"])
    here = [Path(p) for p in data["folders"]]
    for folder in here:  # what the sources import
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    reference = _module(lab.root / "ref.py") if (lab.root / "ref.py").is_file() else None
    settings = _settings(reference)
    kind = data["subject"]["kind"]
    loaders = {"solve": _solve, "python": _python, "project": _project, "op": _op}
    subject = loaders[kind](lab, n, device, reference, here)
    subject.settings = {**subject.settings, **settings}
    subject.inout = tuple(subject.settings.get("INOUT", ()))
    unknown = sorted(set(subject.inout) - set(subject.outputs))
    if unknown:
        raise Unfit(f"`INOUT` names `{unknown[0]}`, which is no output of `{subject.name}`")
    work = getattr(reference, "work", None)
    if callable(work):
        subject.work = lambda inputs: {k: float(v) for k, v in _called(work, inputs).items()}
    return subject


def _settings(module: ModuleType | None) -> dict[str, Any]:
    names = ("RTOL", "SPECIAL", "DETERMINISTIC", "INOUT", "SCRATCH", "SIZES", "EXACT_SIZES")
    return {n: getattr(module, n) for n in names if hasattr(module, n)}


def _module(path: Path) -> ModuleType:
    """A Python file as a module of its own: two versions have the same name."""
    name = f"hfpatch_lab_{path.parent.name}_{path.stem}_{abs(hash(str(path.resolve())))}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise Unfit(f"`{path.name}` cannot be imported; expected a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Triton looks its sources up there
    try:
        spec.loader.exec_module(module)
    except Exception as e:
        raise Unfit(f"`{path.name}` cannot be imported: {type(e).__name__}: {e}") from e
    return module


def _refer(module: ModuleType | None) -> Reference | None:
    if module is None:
        return None
    function = getattr(module, "reference", None)
    if not callable(function):
        raise Unfit("`ref.py` has no `reference(**kwargs)`")
    return Reference(function)


def _called(function: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    return function(**_taken(function, given))


def _taken(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the arguments that it takes."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return dict(given)
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(given)
    return {p.name: given[p.name] for p in parameters if p.name in given}


def _setup(
    function: Callable[..., Any], seed: int, sizes: Sizes, device: torch.device
) -> tuple[Inputs, tuple[str, ...]]:
    """What a `setup(**kwargs)` made: the inputs by name, and which of them are outputs."""
    torch.manual_seed(seed)
    made = _called(function, {**sizes, "seed": seed, "device": str(device)})
    if not isinstance(made, Mapping):
        raise Unfit(f"`setup` returned a {type(made).__name__}; expected a dict of the arguments")
    outputs: tuple[str, ...] = ()
    inputs: Mapping[str, Any] = made
    if isinstance(made.get("inputs"), Mapping):
        inputs, outputs = made["inputs"], tuple(made.get("outputs") or ())
    missing = [name for name in outputs if not isinstance(inputs.get(name), Tensor)]
    if missing:
        raise Unfit(f"`setup` names the output `{missing[0]}`, which is no tensor of its `inputs`")
    moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in inputs.items()}
    return moved, outputs


def tensor_bytes(inputs: Inputs) -> dict[str, float]:
    """Every tensor that a call takes, read or written once: where `ref.py` has no `work`."""
    tensors = [t for t in inputs.values() if isinstance(t, Tensor)]
    return {"bytes": float(sum(t.numel() * t.element_size() for t in tensors))}


def _solve(
    lab: Lab, n: int, device: torch.device, ref: ModuleType | None, here: list[Path]
) -> Subject:
    source = lab.kernel(n)
    try:
        parameters = parse_solve(source.read_text(encoding="utf-8", errors="replace"))
    except ValueError as e:
        raise Unfit(f"`{source.name}`: {e}") from e
    path = library(source, lab.folder(n) / "build", lab.data["flags"], here)
    function = ctypes.CDLL(str(path)).solve
    function.restype = None
    function.argtypes = [p.ctype for p in parameters]
    outputs = tuple(p.name for p in parameters if p.kind == "output")
    if not outputs:
        raise Unfit("every pointer of `solve` is to const; expected one that it writes to")
    setup = getattr(ref, "setup", None)

    def make(seed: int, sizes: Sizes) -> Inputs:
        if callable(setup):
            made, _ = _setup(setup, seed, sizes, device)
        else:
            made = _drawn(parameters, seed, sizes, device)
        for p in parameters:
            if p.kind == "stream":
                continue
            if p.name not in made:
                if p.name not in sizes:
                    raise Unfit(f"`setup` made no `{p.name}`, which `solve` takes")
                made[p.name] = sizes[p.name]
            value = made[p.name]
            if p.dtype is not None and not (
                isinstance(value, Tensor) and value.dtype == p.dtype and value.is_contiguous()
            ):
                got = value.dtype if isinstance(value, Tensor) else type(value).__name__
                raise Unfit(f"`{p.name}` must be a contiguous tensor of {p.dtype}, got {got}")
        return made

    def run(inputs: Inputs) -> None:
        given: list[Any] = []
        for p in parameters:
            if p.kind == "stream":
                stream = torch.cuda.current_stream() if device.type == "cuda" else None
                given.append(stream.cuda_stream if stream is not None else None)
            elif p.dtype is not None:
                given.append(inputs[p.name].data_ptr())
            else:
                value = inputs[p.name]
                given.append(int(value) if p.whole else float(value))
        function(*given)

    streams = any(p.kind == "stream" for p in parameters)
    return Subject(
        source.name, device, outputs, (), make, run, _refer(ref), tensor_bytes, {},
        capturable=streams,
    )  # fmt: skip


def _drawn(parameters: list[Parameter], seed: int, sizes: Sizes, device: torch.device) -> Inputs:
    """Inputs without a `setup`: each tensor has as many elements as the sizes multiply to."""
    missing = [p.name for p in parameters if p.kind == "scalar" and p.name not in sizes]
    if missing:
        raise Unfit(
            f"`solve` takes `{missing[0]}`: give it by `--size {missing[0]}=…`, or write a "
            "`setup(**kwargs)` in `ref.py` that returns all arguments"
        )
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(int(sizes[p.name]) for p in parameters if p.whole)
    found: Inputs = {}
    for p in parameters:
        if p.kind == "scalar":
            found[p.name] = int(sizes[p.name]) if p.whole else float(sizes[p.name])
        elif p.dtype is not None and p.dtype.is_floating_point:
            drawn = torch.randn(count, generator=generator).to(p.dtype)
            found[p.name] = drawn.to(device)
        elif p.dtype is not None:
            top = 2 if p.dtype == torch.bool else 100
            drawn = torch.randint(0, top, (count,), generator=generator).to(p.dtype)
            found[p.name] = drawn.to(device)
    return found


def _python(
    lab: Lab, n: int, device: torch.device, ref: ModuleType | None, here: list[Path]
) -> Subject:
    name = lab.kernel(n).name
    module = _module(lab.kernel(n))
    for wanted in ("setup", "run_kernel"):
        if not callable(getattr(module, wanted, None)):
            raise Unfit(f"`{name}` has no `{wanted}(**kwargs)`")

    def make(seed: int, sizes: Sizes) -> Inputs:
        made, subject.outputs = _setup(module.setup, seed, sizes, device)
        return made

    refer = _refer(ref)
    if refer is None and callable(getattr(module, "reference", None)):
        refer = _refer(module)
    subject = Subject(
        name, device, (), (), make, lambda inputs: _called(module.run_kernel, inputs), refer,
        tensor_bytes, _settings(module),
    )  # fmt: skip
    return subject


def _project(
    lab: Lab, n: int, device: torch.device, ref: ModuleType | None, here: list[Path]
) -> Subject:
    from hfpatch.lab.building import built

    package = built(lab, n, device.type)
    name = lab.data["subject"]["function"]
    function = getattr(package, name, None)
    if not callable(function):
        raise Unfit(f"the project's package has no function `{name}`")
    refer = _refer(ref) if ref is not None and hasattr(ref, "reference") else None
    if refer is None:
        own = getattr(getattr(package, "reference", None), name, None)
        if callable(own):
            refer = Reference(own)
    setup = getattr(ref, "setup", None)

    def make(seed: int, sizes: Sizes) -> Inputs:
        if callable(setup):
            return _setup(setup, seed, sizes, device)[0]
        return _for_signature(function, seed, sizes, device)

    return Subject(
        name, device, (), (), make, lambda inputs: _called(function, inputs), refer,
        _returned_too(function), {},
    )  # fmt: skip


def _returned_too(function: Callable[..., Any]) -> Callable[[Inputs], dict[str, float]]:
    """Bytes of what a function takes and returns."""

    def work(inputs: Inputs) -> dict[str, float]:
        found = tensor_bytes(inputs)["bytes"]
        returned = _named(_called(function, inputs))
        return {"bytes": found + sum(t.numel() * t.element_size() for t in returned.values())}

    return work


def _for_signature(
    function: Callable[..., Any], seed: int, sizes: Sizes, device: torch.device
) -> Inputs:
    """[rows, columns] for each parameter without a default; `weight` and `bias` [columns]."""
    rows, columns = int(sizes.get("rows", 256)), int(sizes.get("columns", 1024))
    generator = torch.Generator().manual_seed(seed)
    found: Inputs = {}
    for p in inspect.signature(function).parameters.values():
        if p.default is not p.empty or p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL):
            continue
        shape = (columns,) if p.name in ("weight", "bias") else (rows, columns)
        found[p.name] = torch.randn(shape, generator=generator).to(device)
    if not found:
        raise Unfit("the function takes no tensor; write a `setup(**kwargs)` in `ref.py`")
    return found


def _op(
    lab: Lab, n: int, device: torch.device, ref: ModuleType | None, here: list[Path]
) -> Subject:
    from hfpatch.lab import ops

    case = ops.case_of(lab.data["subject"]["op"], device.type)
    if lab.data["subject"].get("project"):
        from hfpatch.lab.building import built_kernels

        package = built_kernels(lab, n, device.type)
        module = None
    else:
        package, module = None, _module(lab.kernel(n))
    dtype = getattr(torch, lab.data["dtype"])
    default = ops.sizes_of(case, device.type)

    def make(seed: int, sizes: Sizes) -> Inputs:
        if module is not None and callable(getattr(module, "setup", None)):
            kwargs = {**sizes, "dtype": dtype}
            torch.manual_seed(seed)
            return _setup(lambda **k: module.setup(**{**k, **kwargs}), seed, sizes, device)[0]
        return ops.inputs_of(case, {**default, **sizes}, dtype, device, seed)

    def run(inputs: Inputs) -> Any:
        if module is not None:
            return _called(module.run_kernel, inputs)
        return ops.called(case, package, inputs)

    refer = _refer(ref)
    if refer is None:
        refer = Reference(lambda **inputs: ops.eager(case, inputs))
    return Subject(
        case.name, device, (), (), make, run, refer,
        lambda inputs: ops.work(case, inputs), {"SIZES": [dict(default)]},
    )  # fmt: skip
