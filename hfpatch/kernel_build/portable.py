"""What lets a library that was linked here load on every system of manylinux_2_28."""

from __future__ import annotations

import platform
from pathlib import Path

from .commands import run, write

# glibc 2.29 gave these new versions, which differ in errno alone; asking for the old ones lets the
# library load wherever manylinux_2_28 does.
PORTABLE_H = """\
#if defined(__linux__) && defined(__GNUC__) && !defined(__CUDA_ARCH__)
#if defined(__x86_64__)
__asm__(".symver exp,exp@GLIBC_2.2.5");
__asm__(".symver exp2,exp2@GLIBC_2.2.5");
__asm__(".symver log,log@GLIBC_2.2.5");
__asm__(".symver log2,log2@GLIBC_2.2.5");
__asm__(".symver pow,pow@GLIBC_2.2.5");
#elif defined(__aarch64__)
__asm__(".symver exp,exp@GLIBC_2.17");
__asm__(".symver exp2,exp2@GLIBC_2.17");
__asm__(".symver log,log@GLIBC_2.17");
__asm__(".symver log2,log2@GLIBC_2.17");
__asm__(".symver pow,pow@GLIBC_2.17");
#endif
#endif
"""

# What torch's headers use of libraries newer than manylinux_2_28's: constructors that libstdc++
# exports from GLIBCXX_3.4.26 on, and a hint of glibc 2.32 that lets `shared_ptr` skip its atomics.
# An own copy, kept inside by the version script.
PORTABLE_CPP = """\
#include <sstream>
#if defined(__GLIBCXX__)
template std::basic_stringstream<char>::basic_stringstream();
template std::basic_ostringstream<char>::basic_ostringstream();
template std::basic_istringstream<char>::basic_istringstream();
#endif
extern "C" {
extern char __libc_single_threaded;
char __libc_single_threaded = 0;
}
"""
EXPORTS = (
    "{ local: _ZS*; _ZNS*; _ZNKS*; _ZZNS*; _ZZNKS*; _ZGVNS*; _ZGVZNS*; _ZTIS*; _ZTSS*; _ZTVS*;\n"
    "  __libc_single_threaded; };\n"
)

# What the static CUDA runtime and the search for a BLAS take of glibc, by the library that had it
# before glibc 2.34 moved them all into libc under a new version. Linking against stubs of those
# libraries keeps the old versions, which every glibc still has, so that the result loads on
# manylinux_2_28 too.
_PTHREAD = """
    atfork attr_destroy attr_getdetachstate attr_init attr_setdetachstate attr_setstacksize cancel
    condattr_destroy condattr_init condattr_setclock condattr_setpshared create detach getspecific
    join key_create key_delete kill mutex_timedlock mutex_trylock mutexattr_destroy mutexattr_init
    mutexattr_setpshared mutexattr_settype once rwlock_destroy rwlock_init rwlock_rdlock
    rwlock_timedrdlock rwlock_timedwrlock rwlock_tryrdlock rwlock_trywrlock rwlock_unlock
    rwlock_wrlock rwlockattr_destroy rwlockattr_init rwlockattr_setpshared setname_np setspecific
    spin_destroy spin_init spin_lock spin_trylock spin_unlock
"""
_SEM = "sem_destroy sem_init sem_open sem_close sem_post sem_timedwait sem_trywait sem_wait"
_OLD_GLIBC = {
    "libpthread.so.0": [f"pthread_{name}" for name in _PTHREAD.split()] + _SEM.split(),
    "libdl.so.2": ["dlclose", "dlerror", "dlopen", "dlsym", "dlvsym", "dladdr", "dlmopen"],
    "librt.so.1": ["shm_open", "shm_unlink"],
}
# Version of all of them, by machine, and of those that came later.
_OLD_VERSION = {"x86_64": "GLIBC_2.2.5", "aarch64": "GLIBC_2.17"}
_LATER = {
    "x86_64": {
        "dlmopen": "GLIBC_2.3.4",
        "pthread_condattr_setclock": "GLIBC_2.3.3",
        "pthread_setname_np": "GLIBC_2.12",
    }
}


def old_glibc(cxx: str, folder: Path) -> list[str]:
    """What stands for `-ldl -lrt -lpthread`: stubs, written to `folder`, with the versions that old
    systems have."""
    machine = platform.machine()
    if platform.system() == "Darwin":
        return []  # all in its libSystem
    if platform.system() != "Linux" or machine not in _OLD_VERSION:
        return ["-ldl", "-lrt", "-lpthread"]
    libraries = []
    for soname, names in _OLD_GLIBC.items():
        versions: dict[str, list[str]] = {}
        for name in names:
            version = _LATER.get(machine, {}).get(name, _OLD_VERSION[machine])
            versions.setdefault(version, []).append(name)
        source = folder / f"{soname}.c"
        script = source.with_suffix(".map")
        write(source, "".join(f"void {name}(void) {{}}\n" for name in names))
        write(
            script,
            "".join(f"{v} {{ global: {'; '.join(n)}; }};\n" for v, n in versions.items()),
        )
        library = source.with_suffix("")
        command = [cxx, "-x", "c", "-w", "-fno-builtin", "-shared", "-fPIC", "-nostdlib"]
        command += [str(source), f"-Wl,-soname,{soname}", f"-Wl,--version-script={script}"]
        run([*command, "-o", str(library)])
        libraries.append(str(library))
    return libraries
