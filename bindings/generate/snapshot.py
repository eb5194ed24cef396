"""`clib/abi.txt`: what programs were compiled against, line by line.

Adding to the interface is compatible; a line that changes or goes needs another HFP_ABI_VERSION.
"""

from __future__ import annotations

from header import Header


def snapshot(header: Header) -> str:
    lines = [f"HFP_ABI_VERSION {header.abi}"]
    lines += sorted(
        f"{name} = {value}"
        for name, value in header.constants.items()
        # The number of choices grows when one is added.
        if name != "HFP_ABI_VERSION" and not name.endswith("_COUNT")
    )
    lines += sorted(function.prototype for function in header.functions)
    return "\n".join(lines) + "\n"


def broken(before: str, header: Header) -> list[str]:
    """The lines of an earlier snapshot of the same version that no longer hold."""
    lines = before.splitlines()
    if not lines or lines[0] != f"HFP_ABI_VERSION {header.abi}":
        return []
    now = set(snapshot(header).splitlines())
    return [line for line in lines if line not in now]
