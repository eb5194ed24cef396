"""Shared libraries for Linux: what they need, take and give. Read by pyelftools."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Library:
    """A shared library's dynamic section.

    Attributes:
        machine: ELF's number of the architecture.
        needed: libraries that it is linked against.
        paths: RPATH and RUNPATH.
        undefined: symbols that it takes, with their version ("GLIBC_2.14") or "".
        exported: symbols that it gives, with their binding ("STB_GLOBAL").
    """

    path: Path
    machine: int
    needed: tuple[str, ...]
    paths: tuple[str, ...]
    undefined: tuple[tuple[str, str], ...]
    exported: tuple[tuple[str, str], ...]


def read_library(path: Path) -> Library:
    """Read a library.

    Raises:
        ValueError: it is not an ELF file of 64 bits, little-endian, with dynamic symbols.
        ImportError: pyelftools is not installed.
    """
    from elftools.common.exceptions import ELFError
    from elftools.elf.elffile import ELFFile

    with path.open("rb") as file:
        try:
            elf = ELFFile(file)
            dynamic = elf.get_section_by_name(".dynamic")
            symbols = elf.get_section_by_name(".dynsym")
            if elf.elfclass != 64 or not elf.little_endian or dynamic is None or symbols is None:
                raise ValueError("not a shared library of 64 bits, little-endian")
            tags = list(dynamic.iter_tags())
            versions = _needed_versions(elf)
            of_symbol = elf.get_section_by_name(".gnu.version")
            undefined, exported = [], []
            for index, symbol in enumerate(symbols.iter_symbols()):
                if not symbol.name:
                    continue
                if symbol["st_shndx"] == "SHN_UNDEF":
                    number = of_symbol.get_symbol(index)["ndx"] if of_symbol is not None else 0
                    undefined.append((symbol.name, versions.get(number, "")))
                elif symbol["st_info"]["bind"] != "STB_LOCAL":
                    exported.append((symbol.name, str(symbol["st_info"]["bind"])))
            return Library(
                path,
                int(
                    elf.header["e_machine"]
                    if isinstance(elf.header["e_machine"], int)
                    else _machine(path)
                ),
                tuple(t.needed for t in tags if t.entry.d_tag == "DT_NEEDED"),
                tuple(t.rpath for t in tags if t.entry.d_tag == "DT_RPATH")
                + tuple(t.runpath for t in tags if t.entry.d_tag == "DT_RUNPATH"),
                tuple(undefined),
                tuple(exported),
            )
        except ELFError as e:
            raise ValueError(f"not an ELF file: {e}") from e


def _machine(path: Path) -> int:
    with path.open("rb") as file:
        return int(struct.unpack_from("<H", file.read(20), 18)[0])


def _needed_versions(elf: Any) -> dict[Any, str]:
    """The versions that `.gnu.version_r` numbers."""
    section = elf.get_section_by_name(".gnu.version_r")
    if section is None:
        return {}
    return {
        auxiliary["vna_other"]: auxiliary.name
        for _, group in section.iter_versions()
        for auxiliary in group
    }


def symbol_file(library: Library) -> bytes:
    """An object file with the symbols that a library takes, named as a linker names them.

    kernel-abi-check reads the symbol table for debuggers (`.symtab`), which a stripped library does
    not have, and so finds nothing wrong with any stripped library. This has the dynamic symbols in
    one.
    """
    names = bytearray(b"\0")
    symbols = bytearray(24)  # the first one is null
    for name, version in library.undefined:
        symbols += struct.pack("<IBBHQQ", len(names), 0x10, 0, 0, 0, 0)
        names += (f"{name}@{version}" if version else name).encode() + b"\0"
    titles = b"\0.symtab\0.strtab\0.shstrtab\0"
    start = 64
    offsets = [start, start + len(symbols), start + len(symbols) + len(names)]
    sections = bytes(64)
    for title, kind, offset, size, link, info, entry in (
        (1, 2, offsets[0], len(symbols), 2, 1, 24),  # SHT_SYMTAB, with its strings in section 2
        (9, 3, offsets[1], len(names), 0, 0, 0),  # SHT_STRTAB
        (17, 3, offsets[2], len(titles), 0, 0, 0),
    ):
        sections += struct.pack(
            "<IIQQQQIIQQ", title, kind, 0, 0, offset, size, link, info, 8 if entry else 1, entry
        )
    header = struct.pack(
        "<4sBBBBB7xHHIQQQIHHHHHH",
        b"\x7fELF", 2, 1, 1, 0, 0,  # 64 bits, little-endian
        1, library.machine, 1, 0, 0, offsets[2] + len(titles), 0, 64, 0, 0, 64, 4, 3,
    )  # fmt: skip
    return header + bytes(symbols) + bytes(names) + titles + sections
