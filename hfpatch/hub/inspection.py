"""What a Hub kernel has and which ops it could serve, read without running any of its code.

The names and parameters are read from the syntax trees of its Python files, so nothing needs to be
trusted, and a package with no build for this system can be looked at too.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfpatch.errors import KernelIntegrityError, KernelLoadError
from hfpatch.files import read_regular, strict_json
from hfpatch.hub import standing
from hfpatch.hub.adapters import adapter_for, same_signature
from hfpatch.hub.adapters.base import Need
from hfpatch.hub.cache import CachedRepo, cache_dir, offline
from hfpatch.hub.evidence import Evidence
from hfpatch.hub.explain import reason
from hfpatch.hub.fetch import LARGEST_METADATA, METADATA, SIGNATURE, fetch, listing
from hfpatch.hub.guard import guarded
from hfpatch.hub.kernel import OWN
from hfpatch.hub.resolver import hub_api, newest_commit
from hfpatch.hub.spec import HubSpec
from hfpatch.hub.standing import Finding
from hfpatch.ops import OPS
from hfpatch.text import printable

if TYPE_CHECKING:
    from kernels.variants import Decision

#: Bytes of a Python file that is read, and of all: a syntax tree takes a hundred times that.
_LARGEST_SOURCE = 512 << 10
_LARGEST_PACKAGE = 4 << 20
_LONGEST_LINE = 2000  # characters
#: Words in a function's name that suggest an op of ours.
_WORDS = {
    "rms_norm": ("rms_norm", "rmsnorm"),
    "layer_norm": ("layer_norm", "layernorm", "ln_fwd"),
    "silu": ("silu", "swish"),
    "gelu": ("gelu",),
    "gated": ("swiglu", "geglu"),
    "gated_packed": ("_and_mul",),
    "rope_qk": ("rotary", "rope"),
}


@dataclass(frozen=True)
class Served:
    """An op that a package serves (`problem` empty), or would if it were as expected."""

    op: str
    by: str
    problem: str = ""


@dataclass(frozen=True)
class Inspection:
    """What `hfpatch inspect` says of a package; `print` shows it, `to_dict` is plain data."""

    source: str
    commit: str
    name: str
    version: int | None
    license: str | None
    variants: tuple[tuple[str, str], ...]  # name; "" or why not here
    functions: dict[str, tuple[str, ...]]
    layers: dict[str, tuple[str, ...]]
    ops: tuple[Served, ...]
    candidates: dict[str, tuple[str, ...]] = field(default_factory=dict)
    route: str = ""
    publisher: Finding = standing.NOT_PUBLISHED
    signature: Finding = standing.NOT_PUBLISHED

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            f"{self.source} ({self.commit[:12] or 'local'}): {self.name} {self.version or ''}, "
            f"{self.license or 'no license given'}"
        ]
        lines += [f"publisher: {self.publisher.words}", f"signature: {self.signature.words}"]
        lines += ["", "variants"]
        lines += [f"  {v}: {why or 'fits this system'}" for v, why in self.variants]
        for title, found in (("functions", self.functions), ("layers", self.layers)):
            if found:
                lines += ["", title]
                lines += [f"  {n}({', '.join(p)})" for n, p in sorted(found.items())]
        lines += ["", "ops"]
        lines += [f"  {s.op}: {s.problem or f'served by {s.by}'}" for s in self.ops]
        if self.route:
            lines.append(f"  none of hfpatch's; used by {self.route}")
        for op, names in sorted(self.candidates.items()):
            parameters = ", ".join(inspect.signature(OPS[op].reference).parameters)
            lines.append(
                f"  {op}: perhaps {', '.join(names)}; wrap it as `{op}({parameters})` and "
                "`hfpatch.register` it"
            )
        if not (self.ops or self.route or self.candidates):
            lines.append("  none that is known")
        return "\n".join(printable(line.replace("\n", " "), _LONGEST_LINE) for line in lines)


def inspect_hub(spec: HubSpec | str) -> Inspection:
    """Inspect a Hub kernel; "org/name" alone stands for its newest version.

    Raises:
        KernelIntegrityError: a file in the cache is not what the Hub listed.
        KernelLoadError: it cannot be had, or has no variant that can be read.
    """
    try:
        with guarded():
            return _inspect_hub(spec)
    except KernelLoadError:
        raise
    except Exception as e:
        raise KernelLoadError(f"`{spec}` could not be inspected: {reason(e)}") from e


def _inspect_hub(spec: HubSpec | str) -> Inspection:
    from kernels.variants import get_variants, resolve_variants

    if offline():
        return _inspect_cached(spec)
    api = hub_api()
    if isinstance(spec, str):
        spec = HubSpec(spec, _newest(spec))
    commit = spec.commit or newest_commit(api, spec)
    _, trace = resolve_variants(get_variants(api, repo_id=spec.repo, revision=commit))
    if not trace:
        raise KernelLoadError(f"`{spec}` has no build variants")
    name = trace[0].variant.variant_str
    files = {
        path: row
        for path, row in listing(api, spec.repo, commit, name).items()
        if path in (METADATA, SIGNATURE) or path.endswith(".py")
    }
    large = [path for path, row in files.items() if row.size > _LARGEST_SOURCE]
    if large:
        raise KernelLoadError(
            f"`{spec}`: `{large[0]}` has more than {_LARGEST_SOURCE} bytes, which is not read"
        )
    if sum(row.size for row in files.values()) > _LARGEST_PACKAGE:
        raise KernelLoadError(
            f"`{spec}`: `{name}` has more than {_LARGEST_PACKAGE} bytes of Python, which is not "
            "read"
        )
    fetch(api, spec.repo, commit, name, files)
    variant = CachedRepo(spec.repo).build(commit) / name
    for path, row in files.items():  # somebody else may have put one there before
        if row.differs(read_regular(variant / path, LARGEST_METADATA)):
            raise _damaged(spec, path)
    return replace(
        _inspect(variant, str(spec), commit, trace),
        publisher=standing.publisher(api, spec),
        signature=standing.signature(variant, files, spec),
    )


def _inspect_cached(spec: HubSpec | str) -> Inspection:
    """Inspect what was downloaded; "org/name" alone is its newest version there."""
    from kernels.variants import get_variants_local, resolve_variants

    repo = CachedRepo(spec if isinstance(spec, str) else spec.repo)
    if isinstance(spec, str):
        refs = {*repo.refs(), *Evidence.read(spec).refs}
        versions = [s for r in refs if (s := HubSpec(spec, r)).version is not None]
        spec = max(versions, key=lambda s: s.version or 0, default=HubSpec(spec, "v1"))
    known = Evidence.read(spec.repo)
    commit = spec.commit or known.refs.get(spec.ref) or repo.commit_of(spec.ref)
    if commit is None:
        raise KernelLoadError(
            f"`{spec}` was never downloaded to the cache `{cache_dir()}` and HF_HUB_OFFLINE is "
            f"set. While online: `hfpatch download {spec}`"
        )
    build = repo.build(commit)
    _, trace = resolve_variants(get_variants_local(build))
    for decision in trace:  # of the others only the metadata may be here
        variant = build / decision.variant.variant_str
        files = known.commit(commit).variants.get(variant.name, {METADATA: ""})
        if repo.complete(commit, variant.name, files):
            for path, known_as in files.items():
                if known_as and (path.endswith(".py") or path in (METADATA, SIGNATURE)):
                    data = read_regular(variant / path, LARGEST_METADATA)
                    if hashlib.sha256(data).hexdigest() != known_as:
                        raise _damaged(spec, path)
            return replace(
                _inspect(variant, str(spec), commit, trace),
                publisher=standing.publisher_as_told(spec),
                signature=standing.signature(variant, files, spec),
            )
    raise KernelLoadError(
        f"`{spec}` is not complete in the cache `{cache_dir()}` and HF_HUB_OFFLINE is set. While "
        f"online: `hfpatch download {spec}`"
    )


def _damaged(spec: HubSpec, path: str) -> KernelIntegrityError:
    return KernelIntegrityError(
        f"`{spec}`: `{path}` in the cache is not what the Hub listed. Delete "
        f"`{CachedRepo(spec.repo).folder}` and try again"
    )


def _newest(repo: str) -> str:
    branches = hub_api().list_repo_refs(repo_id=repo, repo_type="kernel").branches
    found = (HubSpec(repo, b.name).version for b in branches)
    versions = [v for v in found if v is not None]
    if not versions:
        raise KernelLoadError(
            f"`{repo}` has no version branch (v1, v2, …); name a commit: "
            f"`hfpatch inspect {repo}@<40-digit commit>`"
        )
    return f"v{max(versions)}"


def inspect_local(root: Path) -> Inspection:
    """Inspect a local kernel repository: a folder with `build/<variant>/`.

    Raises:
        KernelLoadError: there is no variant in it.
    """
    from kernels.variants import get_variants_local, resolve_variants

    _, trace = resolve_variants(get_variants_local(root / "build"))
    if not trace:
        raise KernelLoadError(f"`{root}` holds no `build/<variant>/` of a kernel")
    try:
        return _inspect(root / "build" / trace[0].variant.variant_str, str(root), "", trace)
    except Exception as e:
        raise KernelLoadError(f"`{root}` could not be inspected: {reason(e)}") from e


def _inspect(variant: Path, source: str, commit: str, trace: list[Decision]) -> Inspection:
    from kernels import Metadata, VariantRejected

    data = read_regular(variant / METADATA, LARGEST_METADATA)
    strict_json(data)
    metadata = Metadata.from_bytes(data)
    name = str(metadata.name)
    everything, functions, layers = exports(variant, metadata.name.python_name)
    signatures = {**everything, **{f"layers.{n}": p for n, p in layers.items()}}
    ops, route = _served(name, signatures)
    known = {s.op for s in ops}
    candidates = {
        op: names
        for op, words in _WORDS.items()
        if op not in known and not route and name != OWN
        if (names := tuple(n for n in sorted(functions) if any(w in n for w in words)))
    }
    return Inspection(
        source,
        commit,
        name,
        metadata.version,
        metadata.license,
        tuple(
            (d.variant.variant_str, d.reason if isinstance(d, VariantRejected) else "")
            for d in trace
        ),
        functions,
        layers,
        ops,
        candidates,
        route,
    )


def _served(name: str, found: dict[str, tuple[str, ...]]) -> tuple[tuple[Served, ...], str]:
    adapter = adapter_for(name)
    if adapter is None:
        own = name == OWN
        return tuple(
            Served(op, f"`{op}`")
            for op in OPS
            if op in found and (own or same_signature(op, found[op]))
        ), ""
    rows = tuple(
        Served(row.op, ", ".join(f"`{n}`" for n in row.needs), row.unmet(found.get) or "")
        for row in adapter.rows
    )
    route = adapter.route
    for text in adapter.route_needs:
        need = Need.parse(text)
        if why := need.unmet(found.get(need.name)):
            route = f"{adapter.route} (written for `{adapter.spec}`; this one {why})"
    return rows, route


# ------------------------------------------------------------------------------ syntax trees

_Names = dict[str, tuple[str, ...]]


def exports(variant: Path, package: str) -> tuple[_Names, _Names, _Names]:
    """A package's functions, those that it exports, and the layers of its `layers`; each with the
    names of its parameters."""
    root = variant if (variant / "__init__.py").is_file() else variant / package
    reader = _Reader({})
    functions, _, names = reader.read(root, "__init__")
    public = names if names is not None else {n for n in functions if not n.startswith("_")}
    _, layers, _ = reader.read(root, "layers")
    return functions, {n: p for n, p in functions.items() if n in public}, layers


@dataclass
class _Module:
    """What one file says: its functions, classes with a `forward`, imports and `__all__`."""

    root: Path
    functions: _Names
    classes: _Names
    imports: dict[str, tuple[str, str]]  # name here: module, name there
    named: set[str] | None


@dataclass
class _Reader:
    """Reads the modules of a package, each once; they may import each other in circles."""

    parsed: dict[Path, _Module]
    size: int = 0  # bytes that were read

    def read(self, root: Path, name: str) -> tuple[_Names, _Names, set[str] | None]:
        """Functions, classes and `__all__` of a module, imports followed."""
        module = self._module(root, name)
        if module is None:
            return {}, {}, None
        functions, classes = dict(module.functions), dict(module.classes)
        for new, (source, original) in module.imports.items():
            found = self._find(module.root, source, original)
            if found is not None:
                (classes if found[0] else functions)[new] = found[1]
        return functions, classes, module.named

    def _find(self, root: Path, name: str, wanted: str) -> tuple[bool, tuple[str, ...]] | None:
        """Whether a name is a class, and its parameters; None if no module defines it."""
        seen: set[tuple[Path, str, str]] = set()
        while (root, name, wanted) not in seen:
            seen.add((root, name, wanted))
            module = self._module(root, name)
            if module is None:
                return None
            for kind, found in enumerate((module.functions, module.classes)):
                if wanted in found:
                    return bool(kind), found[wanted]
            if wanted not in module.imports:
                return None
            root, (name, wanted) = module.root, module.imports[wanted]
        return None

    def _module(self, root: Path, name: str) -> _Module | None:
        *folders, last = name.split(".")
        root = root.joinpath(*folders)
        file = root / f"{last}.py"
        if not file.is_file():
            file, root = root / last / "__init__.py", root / last
        if not file.is_file():
            return None
        if file not in self.parsed:
            data = read_regular(file, _LARGEST_SOURCE)
            self.size += len(data)
            if self.size > _LARGEST_PACKAGE:
                raise OSError(f"it has more than {_LARGEST_PACKAGE} bytes of Python")
            self.parsed[file] = _parse(data, root)
        return self.parsed[file]


def _parse(source: bytes, root: Path) -> _Module:
    module = _Module(root, {}, {}, {}, None)
    for node in ast.parse(source.decode("utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            module.functions[node.name] = _parameters(node)
        elif isinstance(node, ast.ClassDef):
            for f in node.body:
                if isinstance(f, ast.FunctionDef) and f.name == "forward":
                    module.classes[node.name] = _parameters(f)[1:]
        elif isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
            for alias in node.names:
                module.imports[alias.asname or alias.name] = (node.module, alias.name)
        elif isinstance(node, ast.Assign):
            named = _all(node)
            module.named = module.named if named is None else named
    return module


def _all(node: ast.Assign) -> set[str] | None:
    """The strings of `__all__ = [...]`; None for another assignment."""
    target, value = node.targets[0], node.value
    if not (isinstance(target, ast.Name) and target.id == "__all__"):
        return None
    if not isinstance(value, ast.List | ast.Tuple):
        return None
    constants = [e.value for e in value.elts if isinstance(e, ast.Constant)]
    return {c for c in constants if isinstance(c, str)}


def _parameters(function: ast.FunctionDef) -> tuple[str, ...]:
    spec = function.args
    names = [a.arg for a in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)]
    return tuple(names)
