"""A loaded libhfpatch."""

from __future__ import annotations

import ctypes
import json
import operator
import os
from pathlib import Path
from typing import Any

from .signatures import ABI_VERSION, CONSTANTS, SIGNATURES
from .tensors import DLTensor, HfpTensorList, View, tensor_list, view

_INT64 = 2**63


class HfpatchError(RuntimeError):
    """A call that failed.

    Attributes:
        status: below 0, such as `HFP_INVALID_ARGUMENT`.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


_TYPES: dict[str, Any] = {
    "list written": ctypes.POINTER(HfpTensorList),
    "output": ctypes.POINTER(DLTensor),
    "tensor": ctypes.POINTER(DLTensor),
    "list": ctypes.POINTER(HfpTensorList),
    "float": ctypes.c_double,
    "int": ctypes.c_int64,
    "stream": ctypes.c_void_p,
}
_RESULTS: dict[str, Any] = {
    "status": ctypes.c_int32,
    "int": ctypes.c_int64,
    "text": ctypes.c_char_p,
}


class Caller:
    """Calls the functions of a library by name.

    Args:
        path: the library; default: that of `HFPATCH_LIBRARY`, else the one that the system finds.

    Raises:
        OSError: it cannot be loaded.
        HfpatchError: its interface is of another version.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        found = path or os.environ.get("HFPATCH_LIBRARY") or f"libhfpatch.so.{ABI_VERSION}"
        self.path = Path(found)
        try:
            self.dll = ctypes.CDLL(str(found))
        except OSError as e:
            raise OSError(
                f"libhfpatch could not be loaded: {e}; build it with `hfpatch clib DIR` and name "
                "the library, or set `HFPATCH_LIBRARY`"
            ) from e
        version = self.dll.hfp_abi_version()
        if version != ABI_VERSION:
            raise HfpatchError(
                CONSTANTS["HFP_NOT_AVAILABLE"],
                f"`{found}` must have the interface's version {ABI_VERSION}, got {version}; "
                "install the library and hfpatch of one release",
            )
        self._functions: dict[str, Any] = {}
        for name, (returns, parameters) in SIGNATURES.items():
            function = getattr(self.dll, name, None)
            if function is None:  # an older library of the same version
                continue
            function.restype = _RESULTS[returns]
            function.argtypes = [_TYPES[kind] for kind, _ in parameters]
            self._functions[name] = function

    def function(self, name: str) -> Any:
        """The ctypes function `hfp_…`.

        Raises:
            HfpatchError: the library is older than the function.
        """
        try:
            return self._functions[name]
        except KeyError as e:
            raise HfpatchError(
                CONSTANTS["HFP_NOT_AVAILABLE"],
                f"{name}: `{self.path}` lacks this function; install a newer libhfpatch",
            ) from e

    def last_error(self) -> str:
        """The message of this thread's last failed call."""
        return str(self.function("hfp_last_error")().decode())

    def build_info(self) -> dict[str, Any]:
        """What the library was built for, and by what."""
        found: dict[str, Any] = json.loads(self.function("hfp_build_info")())
        return found

    def status(self, name: str, *arguments: Any) -> int:
        """The status of `hfp_…` with the arguments of the C function.

        Tensors are what `tensors.view` takes, or None for NULL; a list is a list of them.

        Raises:
            TypeError, ValueError: an argument that C cannot be given.
        """
        function = self.function(name)
        _, parameters = SIGNATURES[name]
        if len(arguments) != len(parameters):
            raise TypeError(f"{name}: expected {len(parameters)} arguments, got {len(arguments)}")
        keep: list[Any] = []
        passed: list[Any] = []
        for (kind, parameter), value in zip(parameters, arguments, strict=True):
            passed.append(_passed(kind, parameter, value, keep))
        return int(function(*passed))

    def call(self, name: str, *arguments: Any) -> None:
        """
        Raises:
            HfpatchError: the function failed, and why.
        """
        status = self.status(name, *arguments)
        if status != CONSTANTS["HFP_OK"]:
            raise HfpatchError(status, self.last_error())

    def size(self, name: str, *arguments: Any) -> int:
        """The answer of a function that says how large a buffer must be.

        Raises:
            HfpatchError: it has none, as that of the stub.
        """
        found = self.status(name, *arguments)
        if found < 0:
            raise HfpatchError(found, self.last_error())
        return found


def _passed(kind: str, name: str, value: Any, keep: list[Any]) -> Any:
    if kind == "stream":
        return value
    if kind == "float":
        return float(value)
    if kind == "int":
        number = operator.index(value)
        if not -_INT64 <= number < _INT64:
            raise ValueError(f"`{name}` must fit 64 bits, got {number}")
        return number
    if value is None:
        return None
    if isinstance(value, HfpTensorList):
        return ctypes.byref(value)
    if kind.startswith("list"):
        found, kept = tensor_list(name, value, written=kind == "list written")
        keep += (found, kept)
        return ctypes.byref(found)
    one: View = view(name, value, written=kind == "output")
    keep.append(one)
    return ctypes.byref(one.tensor)
