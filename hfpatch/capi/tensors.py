"""DLTensors that point to the memory of any framework's tensors."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable
from typing import Any

CPU, CUDA, CUDA_HOST = 1, 2, 3
INT, UINT, FLOAT, BFLOAT = 0, 1, 2, 4


class DLDevice(ctypes.Structure):
    _fields_ = (("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


class DLDataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class DLTensor(ctypes.Structure):
    """https://dmlc.github.io/dlpack/latest/c_api.html"""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class HfpTensorList(ctypes.Structure):
    _fields_ = (
        ("tensors", ctypes.POINTER(ctypes.POINTER(DLTensor))),
        ("count", ctypes.c_int64),
    )


_int64_p = ctypes.POINTER(ctypes.c_int64)
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = [ctypes.py_object, ctypes.c_char_p]


def dltensor(
    data: int,
    shape: Iterable[int],
    dtype: tuple[int, int],
    strides: Iterable[int] | None = None,
    device: tuple[int, int] = (CPU, 0),
) -> DLTensor:
    """A DLTensor of memory at the address `data`, which must outlive it.

    Args:
        data: address in bytes.
        shape: elements by dimension.
        dtype: type code and bits, such as (FLOAT, 32) or (BFLOAT, 16).
        strides: in elements; None: contiguous.
        device: CPU or CUDA, and its number.
    """
    sizes = tuple(shape)
    steps = None if strides is None else _int64s(strides)
    return DLTensor(
        data=data or None,
        device=DLDevice(*device),
        ndim=len(sizes),
        dtype=DLDataType(dtype[0], dtype[1], 1),
        shape=_int64s(sizes),
        strides=steps,
        byte_offset=0,
    )


def _int64s(values: Iterable[int]) -> Any:
    kept = tuple(values)
    return ctypes.cast((ctypes.c_int64 * max(len(kept), 1))(*kept), _int64_p)


class View:
    """What is passed for one argument, and what must live as long."""

    __slots__ = ("keep", "tensor")

    def __init__(self, tensor: DLTensor, keep: Any) -> None:
        self.tensor = tensor
        self.keep = keep


def view(name: str, value: Any, written: bool) -> View:
    """The DLTensor of `value`, without a copy.

    Args:
        name: of the argument, for errors.
        value: a `DLTensor`; a NumPy array (also of ml_dtypes' bfloat16); what has `__dlpack__`,
            as the tensors of torch, JAX, CuPy and others; or what has `__cuda_array_interface__`.
        written: whether the call changes it.

    Raises:
        TypeError: `value` is none of these, or cannot be shared.
        ValueError: it is written to and is read-only.
    """
    if isinstance(value, DLTensor):
        return View(value, value)
    interface = getattr(value, "__array_interface__", None)
    if interface is not None:
        return _of_interface(name, value, interface, written, (CPU, 0))
    if hasattr(value, "__dlpack__"):
        return _of_capsule(name, value)
    interface = getattr(value, "__cuda_array_interface__", None)
    if interface is not None:
        device = getattr(value, "device", 0)
        number = getattr(device, "id", device if isinstance(device, int) else 0)
        return _of_interface(name, value, interface, written, (CUDA, number))
    raise TypeError(
        f"`{name}` must be a NumPy array, a tensor with `__dlpack__` or a `DLTensor`, got "
        f"{type(value).__name__}"
    )


def _of_interface(
    name: str, value: Any, interface: dict[str, Any], written: bool, device: tuple[int, int]
) -> View:
    address, read_only = interface["data"]
    if written and read_only:
        raise ValueError(f"`{name}` must be writable, got a read-only array; copy it")
    text = interface["typestr"]
    kind, size = text[1], int(text[2:])
    codes = {"f": FLOAT, "i": INT, "u": UINT}
    if getattr(getattr(value, "dtype", None), "name", "") == "bfloat16":
        code = BFLOAT
    elif kind in codes and (text[0] in ("|", "<" if sys.byteorder == "little" else ">")):
        code = codes[kind]
    else:
        raise TypeError(f"`{name}` must hold numbers of this machine's byte order, got `{text}`")
    strides = interface.get("strides")
    if strides is not None:
        if any(step % size for step in strides):
            raise ValueError(f"`{name}` must have strides of whole elements, got {strides} bytes")
        strides = [step // size for step in strides]
    tensor = dltensor(address, interface["shape"], (code, 8 * size), strides, device)
    return View(tensor, value)


def _of_capsule(name: str, value: Any) -> View:
    device_type, _ = value.__dlpack_device__()
    try:
        # -1: no synchronization; the stream is the caller's matter.
        capsule = value.__dlpack__(stream=-1) if device_type == CUDA else value.__dlpack__()
    except (BufferError, RuntimeError, ValueError) as e:
        raise TypeError(f"`{name}` cannot be shared by `__dlpack__`: {e}") from e
    address = _pointer_of(capsule, b"dltensor")
    tensor = DLTensor.from_address(address)
    if tensor.device.device_type == CUDA_HOST:  # memory of the host, whatever else reads it
        tensor.device.device_type = CPU
    return View(tensor, capsule)


def tensor_list(name: str, values: Iterable[Any], written: bool) -> tuple[HfpTensorList, Any]:
    """A list of tensors (or None), and what must live as long."""
    views = [None if v is None else view(f"{name}[{i}]", v, written) for i, v in enumerate(values)]
    pointer = ctypes.POINTER(DLTensor)
    pointers = (pointer * len(views))(
        *(pointer() if v is None else ctypes.pointer(v.tensor) for v in views)
    )
    found = HfpTensorList(ctypes.cast(pointers, ctypes.POINTER(pointer)), len(views))
    return found, (views, pointers)
