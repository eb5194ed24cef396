"""Defaults of `kernels=` and `hub=`: the environment, then a config file.

The file is `hfpatch.toml`, or the table `[tool.hfpatch]` of `pyproject.toml`, in the working
directory or the nearest one above it; `HFPATCH_CONFIG` names another (empty: none is read).

    kernels = ["hub", "local", "torch"]       # or a table of op to source, with "*" for the rest

    [hub]                                     # of a file that HFPATCH_CONFIG names
    repos = ["org/name@v1"]                   # what "hub" stands for
    lockfile = "hfpatch.lock"                 # relative to this file
    require-signed = true
    allow-branches = false

A working directory may be anybody's: a folder of a download, a shared one. So a file that is found
rather than named chooses only among what needs no trust: `local`, `torch`, `none` (off), and it may
demand signatures.

Attention has no argument and no key: HFPATCH_ATTENTION holds for the whole process.
"""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hfpatch.files import read_regular, read_start
from hfpatch.hub import HubOptions
from hfpatch.kernels.choices import parse_variable
from hfpatch.text import printable

ATTENTION = "HFPATCH_ATTENTION"
# Read by the kernels as they are loaded, where nothing can be said of another value.
_READ_BY_KERNELS = {
    "HFPATCH_SIMD": ("baseline", "avx2", "avx512"),
    "HFPATCH_PYTHON_CALLS": ("0", "1"),
    "HFPATCH_CHECK_POINTERS": ("0", "1"),
    "HFPATCH_ATTENTION_WGMMA": ("0", "1"),
}
_HUB_KEYS = ("repos", "lockfile", "require-signed", "allow-branches")
#: What a file that was found may choose, besides to switch an op off.
FOUND_MAY_CHOOSE = ("local", "torch")
_LARGEST = 4 << 20  # bytes
_OUR_TABLE = re.compile(r"""^\s*\[\s*tool\s*\.\s*["']?hfpatch["']?\s*[].]""", re.MULTILINE)


@dataclass(frozen=True)
class Defaults:
    """What holds where the arguments of `apply` say nothing.

    Attributes:
        kernels: as the argument; None if neither the environment nor the file says.
        hub: as the argument.
        origin: where `kernels` was read, for messages.
        found: `origin` is a file that was found, rather than named.
        note: what the file or the variable chose of the kernels, for the report; empty: nothing.
        hub_note: what the file says about the Hub; empty: nothing.
    """

    kernels: Any = None
    hub: HubOptions = field(default_factory=HubOptions)
    origin: str = ""
    found: bool = False
    note: str = ""
    hub_note: str = ""


def read_defaults() -> Defaults:
    """From HFPATCH_KERNELS and the config file, read anew at each call.

    Raises:
        ValueError: one of them, or another variable of hfpatch's that holds at run time, is not
            understood; the message names it.
    """
    attention_choice()
    check_kernel_variables()
    path = config_file()
    named = bool(os.environ.get("HFPATCH_CONFIG"))
    found = Defaults() if path is None else _from_file(path, named)
    variable = os.environ.get("HFPATCH_KERNELS", "").strip()
    if not variable:
        return found
    try:
        chosen = parse_variable(variable)
    except ValueError as e:
        raise ValueError(f"HFPATCH_KERNELS: {e}") from e
    note = printable(f"the variable HFPATCH_KERNELS chose the kernels: {variable}", 1000)
    return Defaults(chosen, found.hub, "HFPATCH_KERNELS", note=note, hub_note=found.hub_note)


def attention_choice() -> str | None:
    """HFPATCH_ATTENTION, which holds for the process and is read where attention is computed.

    Returns:
        "torch", where fused blocks use no attention kernel but PyTorch's; None: the fastest one.

    Raises:
        ValueError: it is something else.
    """
    value = os.environ.get(ATTENTION, "").strip()
    if value not in ("", "torch"):
        raise ValueError(f"{ATTENTION} is {value!r}; expected `torch`, or nothing")
    return value or None


def check_kernel_variables() -> None:
    """Raises ValueError if a variable that the kernels read has a value that means nothing."""
    for name, values in _READ_BY_KERNELS.items():
        value = os.environ.get(name, "")
        if value and value not in values:
            expected = ", ".join(f"`{v}`" for v in values)
            raise ValueError(f"{name} is {value!r}; expected {expected}, or nothing")


def config_file() -> Path | None:
    """The file that is read, or None.

    Raises:
        ValueError: HFPATCH_CONFIG names none.
    """
    named = os.environ.get("HFPATCH_CONFIG")
    if named is not None:
        if not named:
            return None
        if not Path(named).is_file():
            raise ValueError(f"HFPATCH_CONFIG is {named!r}, which is no file")
        return Path(named)
    try:
        here = Path.cwd()
    except OSError:  # it was removed: there is no file in it
        return None
    for folder in (here, *here.parents):
        if _is_file(folder / "hfpatch.toml"):
            return folder / "hfpatch.toml"
        project = folder / "pyproject.toml"
        if _is_file(project) and _holds_ours(project):
            return project
    return None


def _is_file(path: Path) -> bool:
    """Whether there is such a file; a folder that may not be looked into has none of ours."""
    try:
        return path.is_file()
    except OSError:
        return False


def _holds_ours(project: Path) -> bool:
    """Whether a pyproject.toml has a table of hfpatch's. One that cannot be read, which is then
    somebody else's to mend, has it if its text names the table."""
    try:
        return _has_table(read_regular(project, _LARGEST))
    except (OSError, ValueError, RecursionError):
        try:
            text = read_start(project, _LARGEST).decode("utf-8", errors="replace")
        except OSError:
            return False
        return _OUR_TABLE.search(text) is not None


def _table(data: dict[str, Any], key: str, path: Path) -> dict[str, Any]:
    value = data.get(key, {})
    if not isinstance(value, dict):
        raise ValueError(f"`{path}`: `{key}` must be a table, got {value!r}")
    return value


def _toml(path: Path) -> dict[str, Any]:
    try:
        return _parsed(read_regular(path, _LARGEST))
    except (OSError, ValueError, RecursionError) as e:
        raise ValueError(f"the config file `{path}` cannot be read: {e}") from e


def _parsed(content: bytes) -> dict[str, Any]:
    from kernels.compat import tomllib

    return dict(tomllib.loads(content.decode("utf-8")))


@functools.lru_cache(maxsize=8)
def _has_table(content: bytes) -> bool:
    """Kept by the content: a project's file is looked at in each `apply`, and rarely changes."""
    tool = _parsed(content).get("tool")
    return isinstance(tool, dict) and "hfpatch" in tool


def _from_file(path: Path, named: bool) -> Defaults:
    data = _toml(path)
    if path.name == "pyproject.toml":
        data = _table(_table(data, "tool", path), "hfpatch", path)
    unknown = sorted(set(data) - {"kernels", "hub"})
    if unknown:
        raise ValueError(f"`{path}` has no key {unknown[0]!r}: expected `kernels` and `hub`")
    table = _table(data, "hub", path)
    if "trust-remote-code" in table or "trust_remote_code" in table:
        raise ValueError(
            f"`{path}`: `trust_remote_code` is taken from the argument `hub=` alone, so that no "
            "file can make foreign code run"
        )
    unknown = sorted(set(table) - set(_HUB_KEYS))
    if unknown:
        raise ValueError(
            f"`{path}`: `hub` has no key {unknown[0]!r}; its keys are {', '.join(_HUB_KEYS)}"
        )
    options = {key.replace("-", "_"): value for key, value in table.items()}
    try:
        if isinstance(options.get("lockfile"), str):
            options["lockfile"] = _within(path.parent, options["lockfile"])
        hub = HubOptions.of(options)
    except (TypeError, ValueError) as e:
        raise ValueError(f"`{path}`: {e}") from e
    if not named and hub != HubOptions(require_signed=hub.require_signed):
        hub = HubOptions(
            refused=f"`{path}` has a table `[hub]`, but nobody named that file: one that is found "
            "in the working directory or above it may not say on what terms kernels are loaded, so "
            "none is. Name it in HFPATCH_CONFIG, or give `hub=HubOptions(...)`"
        )
    return Defaults(
        _switches(data.get("kernels")),
        hub,
        f"`{path}`",
        not named,
        _note(path, data),
        _hub_note(path, table) if not hub.refused else "",
    )


def _within(folder: Path, name: str) -> Path:
    """A file of the project; it will be written to."""
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"`lockfile` is {name!r}, which is outside of `{folder}`")
    return path


def _switches(kernels: Any) -> Any:
    """`none` as what it stands for, which TOML has no value for."""
    if isinstance(kernels, dict):
        return {op: None if choice == "none" else choice for op, choice in kernels.items()}
    return {"*": None} if kernels == "none" else kernels


def _note(path: Path, data: dict[str, Any]) -> str:
    """What a file chose, in one line."""
    kernels = data.get("kernels")
    if kernels is None:
        return ""
    rows = kernels if isinstance(kernels, dict) else {"*": kernels}
    said = "; ".join(
        f"{op}: {', '.join(map(str, c)) if isinstance(c, list) else c}" for op, c in rows.items()
    )
    return printable(f"the config file `{path}` chose the kernels: {said}", 1000)


def _hub_note(path: Path, table: dict[str, Any]) -> str:
    """What a file says about the Hub, in one line."""
    said = "; ".join(
        f"{key} = {', '.join(map(str, v)) if isinstance(v, list) else v}"
        for key, v in table.items()
    )
    return printable(f"the config file `{path}` chose for the Hub: {said}", 1000) if said else ""
