"""The platform tag of a wheel with compiled kernels: that which `auditwheel` gives it, torch's own
libraries left out, which the torch that is there brings."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable
from pathlib import Path

#: The newest versions of symbols that a policy allows, from auditwheel's table of them.
_POLICIES = (
    ((2, 17), {"GLIBC": "2.17", "GLIBCXX": "3.4.19", "CXXABI": "1.3.7", "GCC": "4.8.0"}),
    ((2, 24), {"GLIBC": "2.24", "GLIBCXX": "3.4.22", "CXXABI": "1.3.10", "GCC": "4.8.0"}),
    ((2, 26), {"GLIBC": "2.26", "GLIBCXX": "3.4.22", "CXXABI": "1.3.10", "GCC": "4.8.0"}),
    ((2, 27), {"GLIBC": "2.27", "GLIBCXX": "3.4.24", "CXXABI": "1.3.11", "GCC": "7.0.0"}),
    ((2, 28), {"GLIBC": "2.28", "GLIBCXX": "3.4.24", "CXXABI": "1.3.11", "GCC": "7.0.0"}),
    ((2, 31), {"GLIBC": "2.31", "GLIBCXX": "3.4.28", "CXXABI": "1.3.12", "GCC": "7.0.0"}),
    ((2, 34), {"GLIBC": "2.34", "GLIBCXX": "3.4.29", "CXXABI": "1.3.13", "GCC": "7.0.0"}),
)
_VERSION = re.compile(rb"(?<=\0)(GLIBC|GLIBCXX|CXXABI|GCC)_(\d+(?:\.\d+)+)(?=\0)")
#: Runtimes that no policy allows, and torch does not bring under this name.
_OTHERS = re.compile(rb"(?<=\0)lib(?:gomp|omp|c\+\+)\.so[.\d]*(?=\0)")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in version.split("."))


def manylinux(libraries: Iterable[Path]) -> tuple[int, int] | None:
    """The least policy whose systems load all of these, or None: they ask for more than any has."""
    newest: dict[str, tuple[int, ...]] = {}
    for library in libraries:
        data = library.read_bytes()
        if _OTHERS.search(data):
            return None
        for name, version in _VERSION.findall(data):
            found = _numbers(version.decode())
            newest[name.decode()] = max(newest.get(name.decode(), ()), found)
    for policy, most in _POLICIES:
        if all(version <= _numbers(most[name]) for name, version in newest.items()):
            return policy
    return None


def platform_tag(libraries: Iterable[Path], default: str) -> str:
    """ "manylinux_2_27_x86_64" where the libraries keep to it, else `default`."""
    if platform.system() != "Linux":
        return default
    policy = manylinux(libraries)
    return default if policy is None else f"manylinux_{policy[0]}_{policy[1]}_{platform.machine()}"
