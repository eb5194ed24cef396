"""From a loaded package to the kernel of one op."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from types import ModuleType
from typing import Any

from hfpatch.errors import KernelLoadError
from hfpatch.hub.adapters import Adapter, Row, adapter_for, params_of, repos_for, same_signature
from hfpatch.hub.explain import reason
from hfpatch.hub.load import HubPackage, load
from hfpatch.hub.options import HubOptions
from hfpatch.hub.spec import HubSpec
from hfpatch.ops import OPS
from hfpatch.sources import LOCAL_BUILD, Kernel, KernelPackage

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
    return load(HubSpec.parse(text, options.allow_branches), options)


def kernel_of(package: HubPackage, op: str) -> Kernel:
    """The kernel for `op` that a package has.

    Raises:
        KernelLoadError: it serves no such op.
    """
    try:
        return _kernel_of(package, op)
    except KernelLoadError:
        raise
    except Exception as e:  # of the package's own attributes, which may be anything
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
        return KernelPackage(
            package.module,
            str(spec),
            package.version,
            devices,
            package.archs,
            own=_is_ours(package),
        ).kernel(op)
    adapter = adapter_for(package.name)
    rows = [row for row in adapter.rows if row.op == op] if adapter is not None else []
    if adapter is not None and rows:
        return _adapted(package, adapter, rows[0])
    if same_signature(op, params_of(package.module, op)):
        return _kernel(package, op, getattr(package.module, op))
    raise KernelLoadError(f"Hub kernel `{spec}` {_why_not(package, adapter, op)}")


def _is_ours(package: HubPackage) -> bool:
    """Whether a package called as ours is the very one that is installed: a name is no passport."""
    try:
        ours = LOCAL_BUILD / "build" / package.path.name / "metadata.json"
        found, expected = (
            json.loads(path.read_text())["digest"] for path in (package.path / ours.name, ours)
        )
    except (OSError, KeyError, ValueError, TypeError):
        return False
    return bool(found == expected and expected.get("files"))


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
