"""What a shared library for Linux would do to the process that loads it, read from its headers.

Loading a library runs code and follows its wishes before anything of it is called: where other
libraries are looked for, which memory may be executed, what is run first. `hfpatch kernel check`
says the same of a build before it is published.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

MAGIC = b"\x7fELF"

_LOAD, _DYNAMIC, _STACK = 1, 2, 0x6474E551  # types of segments
_EXECUTE, _WRITE = 1, 2  # a segment's flags
_NEEDED, _STRTAB, _SYMTAB, _RELA, _RELASZ, _STRSZ = 1, 5, 6, 7, 8, 10
_REL, _PLTRELSZ, _PLTREL, _JMPREL, _RELR, _FLAGS_1 = 17, 2, 20, 23, 36, 0x6FFFFFFB
_WIDE = 0x2 | 0x400  # of FLAGS_1: symbols for all others, and before all others
_RPATH, _TEXTREL, _RUNPATH, _FLAGS = 15, 22, 29, 30
_INIT, _FINI, _PREINIT_ARRAY = 12, 13, 32
_ARRAYS = {25: 27, 26: 28}  # constructors and destructors: the tag of the array to its size's
_LOADERS = {0x6FFFFEFC: "AUDIT", 0x6FFFFEFB: "DEPAUDIT",
            0x7FFFFFFD: "AUXILIARY", 0x7FFFFFFF: "FILTER"}  # fmt: skip
_RELATIVE = {62: 8, 183: 1027}  # a machine's number of "an address in this library"
_ABSOLUTE = {62: 1, 183: 257}  # and of "the address of a symbol, and so much more"
_RESOLVED = {62: 37, 183: 1032}  # and of "what a function gives that is called for it"
_COPY = {62: 5, 183: 1024}  # and of "what another library holds, of any length": of programs alone
_LOCAL, _HIDDEN, _PROTECTED = 0, 2, 3  # of a symbol: its binding, its visibility
_PAGE = 4096
_LARGEST = 64 << 20  # bytes of a table


#: The address that is written, the kind, the symbol and what is added to it.
_Relocation = tuple[int, int, int, int]


@dataclass(frozen=True)
class _Segment:
    type: int
    flags: int
    offset: int
    address: int
    size: int  # in the file
    memory: int

    def holds(self, address: int) -> bool:
        return self.address <= address < self.address + self.memory


@dataclass(frozen=True)
class Loading:
    """What loading a library does.

    Attributes:
        problems: what no kernel needs, and a hostile one may use.
        constructors: how many functions are run as it is loaded. torch's registration of operators
            is one, so there are some in any kernel.
    """

    problems: tuple[str, ...]
    constructors: int


def examine(file: BinaryIO) -> Loading:
    """Read a library's headers; its code is not looked at.

    Raises:
        ValueError: it is no shared library of 64 bits, little-endian, or is damaged.
    """
    try:
        return _examine(file)
    except (struct.error, OverflowError, OSError) as e:
        raise ValueError(f"its headers are damaged ({e})") from e


def _examine(file: BinaryIO) -> Loading:
    header = _at(file, 0, 64)
    if header[:4] != MAGIC or header[4:6] != b"\x02\x01":
        raise ValueError("it is no ELF file of 64 bits, little-endian")
    kind, machine = struct.unpack_from("<HH", header, 16)
    start, size, count = (
        *struct.unpack_from("<Q", header, 32), *struct.unpack_from("<HH", header, 54)
    )  # fmt: skip
    if kind != 3 or size != 56:
        raise ValueError("it is no shared library")
    table = _at(file, start, size * count)
    segments = []
    for i in range(count):
        type_, flags, offset, address, _, length, memory, _ = struct.unpack_from(
            "<IIQQQQQQ", table, i * size
        )
        segments.append(_Segment(type_, flags, offset, address, length, memory))
    problems = []
    stack = [s for s in segments if s.type == _STACK]
    if not stack or any(s.flags & _EXECUTE for s in stack):
        problems.append("asks for a stack that can be executed")
    if any(s.type == _LOAD and s.flags & _EXECUTE and s.flags & _WRITE for s in segments):
        problems.append("has memory that can be written and executed")
    if _overlap([s for s in segments if s.type == _LOAD]):
        raise ValueError("its headers are damaged (one segment is mapped over another)")
    dynamic = [s for s in segments if s.type == _DYNAMIC]
    if len(dynamic) != 1:
        raise ValueError("it has no dynamic section")
    found, constructors = _dynamic(file, machine, dynamic[0], segments)
    return Loading((*problems, *found), constructors)


def _overlap(loaded: list[_Segment]) -> bool:
    """Whether two segments have a page in common: of what is read here the loader would see one."""
    pages = sorted((s.address // _PAGE, -(-(s.address + s.memory) // _PAGE)) for s in loaded)
    return any(end > start for (_, end), (start, _) in itertools.pairwise(pages))


def _dynamic(
    file: BinaryIO, machine: int, section: _Segment, segments: list[_Segment]
) -> tuple[list[str], int]:
    # the loader takes it from where it is in memory, and to its end there
    if section.size != section.memory:
        raise ValueError("its headers are damaged (the dynamic section has two sizes)")
    data = _read(file, segments, section.address, section.size)
    if data != _at(file, section.offset, section.size):
        raise ValueError("its headers are damaged (the dynamic section is at two places)")
    tags: list[tuple[int, int]] = []
    for at in range(0, len(data) - 15, 16):
        tag, value = struct.unpack_from("<QQ", data, at)
        if tag == 0:
            break
        tags.append((tag, value))
    else:  # the loader reads on, to the next zero
        raise ValueError("its headers are damaged (the dynamic section has no end)")
    known = dict(tags)
    strings = _read(file, segments, known.get(_STRTAB, 0), known.get(_STRSZ, 0))

    def text(offset: int) -> str:
        end = strings.find(b"\0", offset)
        if offset >= len(strings) or end < 0:  # the loader reads on behind the table
            raise ValueError("its headers are damaged (a name is outside of its table)")
        return strings[offset:end].decode("utf-8", "replace")

    problems = []
    for tag, value in tags:
        if tag in (_RPATH, _RUNPATH):
            name = "RPATH" if tag == _RPATH else "RUNPATH"
            problems.append(f"has libraries looked for in `{text(value)[:200]}` ({name})")
        elif tag == _NEEDED and any(c in text(value) for c in "/$"):
            # the loader puts folders in the place of `$LIB` and the like
            problems.append(f"loads the file `{text(value)[:200]}`")
        elif tag in _LOADERS:
            problems.append(f"has the loader take `{text(value)[:200]}` ({_LOADERS[tag]})")
        elif tag == _FLAGS_1 and value & _WIDE:
            problems.append("puts its functions in the place of other libraries' (FLAGS_1)")
        elif tag == _TEXTREL or (tag == _FLAGS and value & 4):
            problems.append("has its code written to as it is loaded (TEXTREL)")
        elif tag == _PREINIT_ARRAY:
            problems.append("has functions that are run before the process' own (PREINIT_ARRAY)")
    code = [s for s in segments if s.type == _LOAD and s.flags & _EXECUTE]
    inside = [known[tag] for tag in (_INIT, _FINI) if tag in known]
    relocations = functools.partial(_relocations, file, machine, known, segments)
    inside += [to for _, kind, _, to in relocations() if kind == _RESOLVED.get(machine)]
    problems += [
        f"has code outside of itself run at {address:#x}"
        for address in inside
        if not any(s.holds(address) for s in code)
    ]
    count = int(_INIT in known)
    for array, size in _ARRAYS.items():
        if array in known:
            entries = known.get(size, 0) // 8
            count += entries if array == 25 else 0
            own = functools.partial(_own_symbol, file, known, segments, text)
            targets = _targets(machine, relocations(), own, known[array], entries)
            written = _read(file, segments, known[array], 8 * entries)
            problems += _outside(written, targets, code)
    return list(dict.fromkeys(problems)), count


def _relocations(
    file: BinaryIO, machine: int, known: dict[int, int], segments: list[_Segment]
) -> Iterator[_Relocation]:
    """All that have a row of their own. A list of relative addresses (RELR) is written where the
    words themselves are: what is there counts."""
    if _REL in known or known.get(_PLTREL, _RELA) != _RELA:
        raise ValueError("its headers are damaged (relocations of another machine's kind)")
    for where, length in ((_RELA, _RELASZ), (_JMPREL, _PLTRELSZ)):
        if where not in known:
            continue
        table = _read(file, segments, known[where], known.get(length, 0))
        for place, info, addend in struct.iter_unpack("<QQq", table[: len(table) // 24 * 24]):
            kind = info & 0xFFFFFFFF
            if kind == _COPY.get(machine):
                raise ValueError("its headers are damaged (a relocation of a program's kind)")
            yield place, kind, info >> 32, addend


def _targets(
    machine: int,
    relocations: Iterable[_Relocation],
    own: Callable[[int], int | None],
    array: int,
    entries: int,
) -> dict[int, int | None]:
    """What relocations write to the words of an array, by their numbers: addresses in the library,
    None for others."""
    targets: dict[int, int | None] = {}
    for place, kind, symbol, addend in relocations:
        if not array - 8 < place < array + 8 * entries:
            continue
        if (place - array) % 8:
            raise ValueError("its headers are damaged (a relocation of half a constructor)")
        target: int | None = None
        if kind == _RELATIVE.get(machine):
            target = addend
        elif kind == _ABSOLUTE.get(machine) and (address := own(symbol)) is not None:
            target = address + addend
        targets[(place - array) // 8] = target
    return targets


def _outside(written: bytes, targets: dict[int, int | None], code: list[_Segment]) -> Iterator[str]:
    """Constructors that are not functions of the library itself."""
    for i, (value,) in enumerate(struct.iter_unpack("<Q", written)):
        target = targets.get(i, value)
        if target in (0, 2**64 - 1):  # no function: the array's own marks
            continue
        if target is None or not any(s.holds(target) for s in code):
            yield "runs a function that is not its own as it is loaded"


def _own_symbol(
    file: BinaryIO,
    known: dict[int, int],
    segments: list[_Segment],
    text: Callable[[int], str],
    index: int,
) -> int | None:
    """The address of a symbol that the library defines; None for another's."""
    if _SYMTAB not in known or index == 0:
        return None
    symbol = _read(file, segments, known[_SYMTAB] + 24 * index, 24)
    info, other = symbol[4], symbol[5]
    section, address = struct.unpack_from("<HQ", symbol, 6)
    if not section:
        return None
    if info >> 4 != _LOCAL and other & 3 not in (_HIDDEN, _PROTECTED):
        (name,) = struct.unpack_from("<I", symbol)
        if _in_the_process(text(name)):  # the loader takes that one
            return None
    return int(address)


def _in_the_process(name: str) -> bool:
    """Whether the program, or a library that all others see, has a symbol of that name."""
    try:
        ctypes.CDLL(None)[name]
    except (AttributeError, ValueError):
        return False
    return True


def _at(file: BinaryIO, offset: int, size: int) -> bytes:
    if size > _LARGEST:
        raise ValueError("its headers are damaged (a table is too large)")
    file.seek(offset)
    data = file.read(size)
    if len(data) != size:
        raise ValueError("its headers are damaged (it ends before they do)")
    return data


def _read(file: BinaryIO, segments: list[_Segment], address: int, size: int) -> bytes:
    """What stands at an address, as far as the file has it."""
    if not size:
        return b""
    for s in segments:
        if s.type == _LOAD and s.address <= address and address + size <= s.address + s.size:
            return _at(file, s.offset + address - s.address, size)
    raise ValueError("its headers are damaged (a table is in no segment)")
