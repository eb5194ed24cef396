"""The platform tag of a wheel with compiled kernels: that which `auditwheel` gives it, torch's own
libraries left out, which the torch that is there brings."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Iterator
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
_VERSION = re.compile(rb"\d+(?:\.\d+)+(?=\0)")
#: Runtimes that no policy allows, and torch does not bring under this name.
_OTHERS = (b"libgomp.so", b"libomp.so", b"libc++.so")
_OTHERS_END = re.compile(rb"[.\d]*\0")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in version.split("."))


def _ends(data: bytes, word: bytes) -> Iterator[int]:
    """Where `word` ends that begins a text. A regular expression would take seconds: kernels are
    100 MB and more, most of it zeros, which texts begin behind."""
    at = data.find(word)
    while at >= 0:
        if data[at - 1] == 0:
            yield at + len(word)
        at = data.find(word, at + 1)


def manylinux(libraries: Iterable[Path]) -> tuple[int, int] | None:
    """The least policy whose systems load all of these, or None: they ask for more than any has."""
    newest: dict[str, tuple[int, ...]] = {}
    for library in libraries:
        data = library.read_bytes()
        if any(_OTHERS_END.match(data, at) for word in _OTHERS for at in _ends(data, word)):
            return None
        for name in _POLICIES[0][1]:
            for at in _ends(data, f"{name}_".encode()):
                if (version := _VERSION.match(data, at)) is not None:
                    newest[name] = max(newest.get(name, ()), _numbers(version[0].decode()))
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
