"""From a loaded package to the kernel of one op."""

from __future__ import annotations

import base64
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from hfpatch.errors import FAILURES, KernelLoadError
from hfpatch.hub.adapters import Adapter, Row, adapter_for, params_of, repos_for, same_signature
from hfpatch.hub.explain import reason
from hfpatch.hub.fetch import METADATA, SIGNATURE
from hfpatch.hub.load import HubPackage, load
from hfpatch.hub.options import HubOptions
from hfpatch.hub.spec import HubSpec
from hfpatch.kernels.sources import LOCAL_BUILD, Kernel, KernelPackage
from hfpatch.ops import OPS

#: The package that this project builds: its functions are the ops.
OWN = "hfpatch-kernels"


def hub_kernel(op: str, text: str, options: HubOptions) -> Kernel:
    """The kernel for `op` from a Hub repository, "org/name@v1".

    Raises:
        ValueError: the repository is not pinned.
        KernelLoadError: it cannot be had, or serves no such op.
    """
    return kernel_of(hub_package(text, options), op)


def hub_package(text: str, options: HubOptions) -> HubPackage:
    """A Hub repository, "org/name@v1", imported; see `hub_kernel`."""
    package = load(HubSpec.parse(text, options.allow_branches), options)
    if package.name != OWN or _is_ours(package.files):
        return package
    note = (
        f"`{package.spec}` has the name of hfpatch's own kernels, but is not the build that this "
        "installation has: it is compared with the modules' forwards like any other, and fused "
        "blocks do not use it"
    )
    return replace(package, notes=(*package.notes, note))


def kernel_of(package: HubPackage, op: str) -> Kernel:
    """The kernel for `op` that a package has.

    Raises:
        KernelLoadError: it serves no such op.
    """
    try:
        return _kernel_of(package, op)
    except KernelLoadError:
        raise
    except FAILURES as e:  # of the package's own attributes, which may be anything
        raise KernelLoadError(f"Hub kernel `{package.spec}` cannot be used: {reason(e)}") from e


def _kernel_of(package: HubPackage, op: str) -> Kernel:
    spec = package.spec
    if package.name == OWN:
        found = params_of(package.module, op)
        if found is not None and not same_signature(op, found):
            raise KernelLoadError(
                f"Hub kernel `{spec}` is built from another version of hfpatch: it "
                f"{_other_signature(op, found)}; take another version of either"
            )
        devices = package.devices | {"cpu"}  # its CUDA build serves the CPU too
        kernel = KernelPackage(
            package.module,
            str(spec),
            package.version,
            devices,
            package.archs,
            own=_is_ours(package.files),
        ).kernel(op)
        return kernel if _is_ours(package.files) else _as_any_other(kernel)
    adapter = adapter_for(package.name)
    rows = [row for row in adapter.rows if row.op == op] if adapter is not None else []
    if adapter is not None and rows:
        return _adapted(package, adapter, rows[0])
    if same_signature(op, params_of(package.module, op)):
        return _kernel(package, op, getattr(package.module, op))
    raise KernelLoadError(f"Hub kernel `{spec}` {_why_not(package, adapter, op)}")


def _is_ours(files: Mapping[str, str]) -> bool:
    """Whether these files are a build of this installation. A name in metadata anybody can write;
    the digest of what was built here nobody else's files have."""
    code = {p: h for p, h in files.items() if p not in (METADATA, SIGNATURE)}
    return any(code == known for known in _own_builds(LOCAL_BUILD))


@cache
def _own_builds(root: Path) -> list[dict[str, str]]:
    """The sha256 of each file, by its path, of every variant that was built here."""
    found = []
    for path in sorted(root.glob(f"build/*/{METADATA}")):
        try:
            digest = json.loads(path.read_text(encoding="utf-8"))["digest"]
            if digest["algorithm"] == "sha256":
                files = digest["files"].items()
                found.append({p: base64.b64decode(h).hex() for p, h in files})
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # the local build says itself that it is damaged
    return found


def _as_any_other(kernel: Kernel) -> Kernel:
    """A kernel of our name that is not our build: verified always, called as functions are."""
    return replace(
        kernel, raw=None, raw_into=None, calls=None, adapted=True, accepts=lambda params: None
    )


def served_by_the_hub(op: str, options: HubOptions) -> tuple[str, ...]:
    """What the source "hub" tries for an op, in order."""
    return options.repos or repos_for(op)


def _adapted(package: HubPackage, adapter: Adapter, row: Row) -> Kernel:
    why = row.unmet(lambda name: params_of(package.module, name))
    if why is not None:
        other = "" if str(package.spec) == adapter.spec else f"take `{adapter.spec}`, or "
        raise KernelLoadError(
            f"Hub kernel `{package.spec}` {why}: hfpatch's adapter for `{row.op}` was written for "
            f"`{adapter.spec}` as it was; {other}register a function of your own "
            "(`hfpatch.register`)"
        )
    return _kernel(package, row.op, row.make(package.module), row)


def _kernel(package: HubPackage, op: str, fn: Callable[..., Any], row: Row | None = None) -> Kernel:
    return Kernel(
        op,
        fn,
        str(package.spec),
        package.version,
        devices=package.devices,
        archs=package.archs,
        differentiable=row is not None and row.differentiable,
        adapted=True,
        accepts=row.accepts if row is not None else None,
        min_capability=row.min_capability if row is not None else None,
    )


def _why_not(package: HubPackage, adapter: Adapter | None, op: str) -> str:
    if adapter is not None and adapter.route:
        return f"serves no op of hfpatch; it is used by {adapter.route}"
    if adapter is not None:
        served = ", ".join(f"`{row.op}`" for row in adapter.rows)
        return f"serves no `{op}`; it serves {served}"
    found = params_of(package.module, op)
    if found is None:
        return (
            f"exports no `{op}`; it has: {', '.join(_functions(package.module)) or 'none'}. "
            f"`hfpatch inspect {package.spec}` says what it could serve"
        )
    return (
        f"{_other_signature(op, found)}: wrap it and register the wrapper with "
        "`hfpatch.register(op=..., kernel=..., name=...)`"
    )


def _other_signature(op: str, found: tuple[str, ...]) -> str:
    expected = ", ".join(inspect.signature(OPS[op].reference).parameters)
    return f"has `{op}({', '.join(found)})`, expected `{op}({expected})`"


def _functions(module: ModuleType) -> list[str]:
    named = getattr(module, "__all__", None) or [n for n in vars(module) if not n.startswith("_")]
    return sorted(str(n) for n in named if callable(getattr(module, str(n), None)))[:12]
