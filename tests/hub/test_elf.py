"""Libraries whose headers say one thing to a reader and another to the loader: refused."""

from __future__ import annotations

import io
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from hfpatch.hub.elf import examine

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")

NEEDED, PLTRELSZ, STRTAB, SYMTAB, STRSZ, JMPREL, ARRAY, ARRAYSZ = 1, 2, 5, 6, 10, 23, 25, 27
RELA, RELASZ, INIT = 7, 8, 12
RELATIVE, ABSOLUTE, COPY, RESOLVED = 8, 1, 5, 37
HERE = "/tmp/hostile/evil.so"
RUNS = """
extern void abort(void);
static void own(void) {}
__attribute__((section(".init_array"), used)) static void (*first)(void) = own;
void call(void) { abort(); }
"""
#: A constructor of its own that other libraries may have written over by its name.
OWN = """
void hfpatch_of_this_test(void) {}
__attribute__((section(".init_array"), used)) static void (*f)(void) = hfpatch_of_this_test;
"""


def made(folder: Path, code: str, *flags: str) -> bytearray:
    (folder / "x.c").write_text(code)
    command = ["gcc", "-shared", "-fPIC", "-fno-builtin", "-o", "x.so", "x.c", *flags]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return bytearray((folder / "x.so").read_bytes())


def needing(folder: Path, name: str) -> bytearray:
    """A library that needs another one by this name."""
    made(folder, "int evil(void) { return 1; }\n", f"-Wl,-soname,{name}")
    (folder / "x.so").rename(folder / "libevil.so")
    flags = ("-Wl,--no-as-needed", "-L.", "-levil")
    return made(folder, "int more(void) { return 7; }\n", *flags)


class Headers:
    def __init__(self, data: bytearray) -> None:
        self.data = data
        (start,) = struct.unpack_from("<Q", data, 32)
        size, count = struct.unpack_from("<HH", data, 54)
        self.segments = [
            (start + i * size, *struct.unpack_from("<IIQQQQQQ", data, start + i * size))
            for i in range(count)
        ]
        (self.dynamic,) = (s for s in self.segments if s[1] == 2)

    def rows(self) -> list[tuple[int, int, int]]:
        """Place, tag and value of each entry of the dynamic section."""
        found = []
        for at in range(self.dynamic[3], self.dynamic[3] + self.dynamic[6], 16):
            tag, value = struct.unpack_from("<QQ", self.data, at)
            if tag == 0:
                break
            found.append((at, tag, value))
        return found

    def value(self, tag: int) -> int:
        return next(v for _, t, v in self.rows() if t == tag)

    def place(self, address: int) -> int:
        return next(
            s[3] + address - s[4]
            for s in self.segments
            if s[1] == 1 and s[4] <= address < s[4] + s[6]
        )

    def constructor(self, kind: int) -> int:
        """Where the relocation of this kind stands that writes the last constructor."""
        place = self.value(ARRAY) + self.value(ARRAYSZ) - 8
        start = self.place(self.value(RELA))
        (found,) = (
            at
            for at in range(start, start + self.value(RELASZ), 24)
            if struct.unpack_from("<QI", self.data, at) == (place, kind)
        )
        return found

    def set(self, tag: int, value: int) -> None:
        (at,) = (at for at, t, _ in self.rows() if t == tag)
        struct.pack_into("<Q", self.data, at + 8, value)


def short_table(folder: Path) -> bytearray:
    data = needing(folder, HERE)
    Headers(data).set(STRSZ, 1)
    return data


def two_places(folder: Path) -> bytearray:
    """Without the needed library where the file's offset leads, with it where memory has it."""
    data = needing(folder, HERE)
    h = Headers(data)
    strings = h.place(h.value(STRTAB))
    decoy = [
        (t, v)
        for _, t, v in h.rows()
        if t != NEEDED or not data[strings + v :].startswith(HERE.encode())
    ]
    data += b"\0" * (-len(data) % 16)
    start = len(data)
    for row in [*decoy, *[(0, 0)] * (h.dynamic[6] // 16 - len(decoy))]:
        data += struct.pack("<QQ", *row)
    struct.pack_into("<Q", data, h.dynamic[0] + 8, start)
    return data


def cut_off(folder: Path) -> bytearray:
    data = needing(folder, HERE)
    h = Headers(data)
    struct.pack_into("<Q", data, h.dynamic[0] + 32, 32)
    return data


def no_end(folder: Path) -> bytearray:
    """A dynamic section that ends before its zero, with the needed library behind that end."""
    data = needing(folder, HERE)
    h = Headers(data)
    rows = [(tag, value) for _, tag, value in h.rows()]
    shown = [row for row in rows if row[0] != NEEDED]
    for i, row in enumerate([*shown, *(row for row in rows if row[0] == NEEDED)]):
        struct.pack_into("<QQ", data, h.dynamic[3] + 16 * i, *row)
    struct.pack_into("<QQ", data, h.dynamic[0] + 32, 16 * len(shown), 16 * len(shown))
    return data


def mapped_over(folder: Path) -> bytearray:
    """A second segment over the first one's page, with other names in it."""
    data = needing(folder, HERE)
    h = Headers(data)
    first = next(s for s in h.segments if s[1] == 1)
    page = bytes(data[first[3] : first[3] + 4096])
    data += b"\0" * (-len(data) % 4096)
    start = len(data)
    data += page
    spare = next(s for s in h.segments if s[1] in (4, 0x6474E553, 0x6474E550))
    struct.pack_into("<IIQQQQQQ", data, spare[0], 1, 4, start, first[4], first[4], 4096, 4096, 4096)
    return data


def long_name(folder: Path) -> bytearray:
    return needing(folder, "a" * 250 + "/../evil.so")


def by_the_procedure_table(folder: Path) -> bytearray:
    """`abort` in the place of a constructor, by a relocation of the table for calls."""
    data = made(folder, RUNS, "-Wl,-z,now")
    h = Headers(data)
    place = h.value(ARRAY) + h.value(ARRAYSZ) - 8
    struct.pack_into("<Q", data, h.place(h.value(JMPREL)), place)
    return data


def half_a_constructor(folder: Path) -> bytearray:
    """A relocation that writes over the second half of the last constructor's address."""
    data = made(folder, RUNS, "-Wl,-z,now")
    h = Headers(data)
    place = h.value(ARRAY) + h.value(ARRAYSZ) - 4
    struct.pack_into("<QQ", data, h.place(h.value(JMPREL)), place, RELATIVE)
    return data


def half_before(folder: Path) -> bytearray:
    data = made(folder, RUNS, "-Wl,-z,now")
    h = Headers(data)
    struct.pack_into("<QQ", data, h.place(h.value(JMPREL)), h.value(ARRAY) - 4, RELATIVE)
    return data


def copied_over(folder: Path) -> bytearray:
    """The constructors are written over by what another library holds."""
    data = made(folder, RUNS, "-Wl,-z,now")
    h = Headers(data)
    table = h.place(h.value(JMPREL))
    (info,) = struct.unpack_from("<Q", data, table + 8)
    struct.pack_into("<QQ", data, table, h.value(ARRAY) - 64, info >> 32 << 32 | COPY)
    return data


def resolved_elsewhere(folder: Path) -> bytearray:
    """Another library's function is asked, as this one is loaded, what is to be written."""
    data = made(folder, RUNS, "-Wl,-z,now")
    h = Headers(data)
    place = h.place(h.value(JMPREL))
    struct.pack_into("<Qq", data, place + 8, RESOLVED, 1 << 30)
    return data


def behind_its_own(folder: Path) -> bytearray:
    """A constructor that lies so far behind a function of the library that it is another's."""
    data = made(folder, OWN)
    h = Headers(data)
    struct.pack_into("<q", data, h.constructor(ABSOLUTE) + 16, 1 << 30)
    return data


def replaced(folder: Path) -> bytearray:
    """A constructor of its own whose name the process has too, so that that one runs."""
    own = "__attribute__((weak)) void abort(void) { __builtin_trap(); }\n"
    array = '__attribute__((section(".init_array"), used)) static void (*f)(void) = abort;\n'
    return made(folder, own + array)


def for_all(folder: Path) -> bytearray:
    return made(folder, "int abs(int x) { return 666; }\n", "-Wl,-z,global")


def before_all(folder: Path) -> bytearray:
    return made(folder, "int abs(int x) { return 666; }\n", "-Wl,-z,interpose")


HOSTILE = (
    short_table, two_places, cut_off, no_end, mapped_over, long_name, by_the_procedure_table,
    half_a_constructor, half_before, copied_over, resolved_elsewhere, behind_its_own,
    replaced, for_all, before_all,
)  # fmt: skip


@pytest.mark.parametrize("make", HOSTILE, ids=lambda make: make.__name__)
def test_a_library_with_two_meanings(make: object, tmp_path: Path) -> None:
    assert callable(make)
    data = bytes(make(tmp_path))
    try:
        problems: object = examine(io.BytesIO(data)).problems
    except ValueError as e:
        problems = "damaged" in str(e)
    assert problems


def test_ordinary_ones(tmp_path: Path) -> None:
    for data in (made(tmp_path, RUNS), needing(tmp_path, "libevil.so")):
        assert examine(io.BytesIO(bytes(data))).problems == ()
    public = "__attribute__((constructor)) void hfpatch_of_this_test(void) {}\n"
    found = examine(io.BytesIO(bytes(made(tmp_path, public))))
    assert found.problems == () and found.constructors >= 1
    chosen = "static int one(void) { return 1; }\nstatic void *choose(void) { return one; }\n"
    chosen += 'int answer(void) __attribute__((ifunc("choose")));\n'
    chosen += 'static int local(void) __attribute__((ifunc("choose")));\n'
    chosen += "int ask(void) { return local(); }\n"
    assert examine(io.BytesIO(bytes(made(tmp_path, chosen)))).problems == ()
    found = examine(io.BytesIO(bytes(made(tmp_path, OWN))))
    assert found.problems == () and found.constructors >= 1


@pytest.mark.parametrize("visibility", [2, 3], ids=["hidden", "protected"])
def test_a_function_that_others_cannot_replace_is_the_library_s_own(
    visibility: int, tmp_path: Path
) -> None:
    data = replaced(tmp_path)
    h = Headers(data)
    assert examine(io.BytesIO(bytes(data))).problems
    (index,) = struct.unpack_from("<I", data, h.constructor(ABSOLUTE) + 12)
    data[h.place(h.value(SYMTAB)) + 24 * index + 5] = visibility
    assert examine(io.BytesIO(bytes(data))).problems == ()


def test_what_runs_first_lies_in_code(tmp_path: Path) -> None:
    data = made(tmp_path, RUNS)
    h = Headers(data)
    assert examine(io.BytesIO(bytes(data))).problems == ()
    address = h.value(ARRAY)
    h.set(INIT, address)
    (problem,) = examine(io.BytesIO(bytes(data))).problems
    assert problem == f"has code outside of itself run at {address:#x}"


@pytest.mark.parametrize(("at", "value"), [(16, 2), (54, 57)], ids=["program", "rows"])
def test_what_is_no_shared_library_is_called_so(at: int, value: int, tmp_path: Path) -> None:
    data = made(tmp_path, RUNS)
    struct.pack_into("<H", data, at, value)
    with pytest.raises(ValueError, match="no shared library"):
        examine(io.BytesIO(bytes(data)))


def test_a_dynamic_section_of_two_sizes_is_refused(tmp_path: Path) -> None:
    data = made(tmp_path, RUNS)
    h = Headers(data)
    struct.pack_into("<Q", data, h.dynamic[0] + 40, h.dynamic[6] + 16)
    with pytest.raises(ValueError, match="the dynamic section has two sizes"):
        examine(io.BytesIO(bytes(data)))
