"""The Rust crates: `hfpatch-sys` as a whole, and the functions of `hfpatch`."""

from __future__ import annotations

from header import Function, Header, Parameter

_NOTE = "// Written by `python bindings/generate` from kernel_src/hfpatch.h; do not edit.\n"
_SYS_TYPES = {
    "output": "*mut DLTensor",
    "tensor": "*const DLTensor",
    "list": "*const HfpTensorList",
    "float": "f64",
    "int": "i64",
    "stream": "*mut c_void",
}
_RESULTS = {"status": "i32", "int": "i64", "text": "*const c_char"}
_SYS_START = """\
//! The C interface of libhfpatch: `kernel_src/hfpatch.h`. The crate `hfpatch` is the safe one.
//!
//! `build.rs` says where the library comes from.
#![no_std]
#![allow(non_camel_case_types, non_upper_case_globals)]

use core::ffi::{c_char, c_void};

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DLDevice {
    pub device_type: i32,
    pub device_id: i32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DLDataType {
    pub code: u8,
    pub bits: u8,
    pub lanes: u16,
}

/// <https://dmlc.github.io/dlpack/latest/c_api.html>
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DLTensor {
    pub data: *mut c_void,
    pub device: DLDevice,
    pub ndim: i32,
    pub dtype: DLDataType,
    pub shape: *mut i64,
    pub strides: *mut i64,
    pub byte_offset: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct HfpTensorList {
    pub tensors: *const *mut DLTensor,
    pub count: i64,
}

"""


def sys(header: Header) -> str:
    parts = [_NOTE, _SYS_START]
    statuses = {"HFP_OK", "HFP_NOT_AVAILABLE", "HFP_INVALID_ARGUMENT", "HFP_LAUNCH_FAILED",
                "HFP_OUT_OF_MEMORY", "HFP_ABI_VERSION"}  # fmt: skip
    for name, value in sorted(header.constants.items()):
        kind = "i32" if name in statuses else "u8" if name.startswith("kDL") else "i64"
        kind = "i32" if name in ("kDLCPU", "kDLCUDA") else kind
        parts.append(f"pub const {name}: {kind} = {value};\n")
    parts.append('\nunsafe extern "C" {\n')
    for function in header.functions:
        inside = "".join(f"        {p.name}: {_SYS_TYPES[p.kind]},\n" for p in function.parameters)
        inside = f"(\n{inside}    )" if inside else "()"
        parts.append(f"    pub fn {function.name}{inside} -> {_RESULTS[function.returns]};\n")
    return "".join([*parts, "}\n"])


def ops(header: Header) -> str:
    parts = [
        _NOTE,
        "//! A function for each of the C interface, which docs/c-api.md describes.\n",
        "#![allow(clippy::too_many_arguments)]\n\n"
        "use crate::error::{check, size, Result};\n"
        "use crate::stream::Stream;\n"
        "use crate::tensor::{List, Raw, TensorView, TensorViewMut};\n"
        "use hfpatch_sys as sys;\n",
    ]
    parts += [_op(function) for function in (*header.ops, *header.sizes)]
    return "".join(parts)


def constants(header: Header) -> str:
    """The header's choices, without their prefix: `CAST_INPUT`."""
    lines = [_NOTE, "//! The choices of integer arguments.\n\n"]
    for name, value in sorted(header.constants.items()):
        if name.startswith("HFP_") and not name.endswith("_COUNT") and value >= 0:
            if name in ("HFP_OK", "HFP_ABI_VERSION"):
                continue
            lines.append(f"pub const {name.removeprefix('HFP_')}: i64 = {value};\n")
    return "".join(lines)


def _maybe(function: Function, i: int, p: Parameter) -> bool:
    """Whether a tensor may be left out: an optional input, or a result that may be unwanted."""
    if p.kind == "tensor" or p.optional:
        return p.optional
    rule = function.results.split(",")[i].strip()
    return rule in ("dweight", "dbias", "partials") or "&" in rule or rule.startswith("sums=")


def _unsafe(function: Function) -> bool:
    """Whether it goes by addresses, which a view's borrow says nothing of."""
    return bool(function.op) and not function.operator


def _type(function: Function, i: int, p: Parameter) -> str:
    if p.kind == "list":
        return "&mut [TensorViewMut]" if p.written else "&[TensorView]"
    if p.kind in ("output", "tensor"):
        kind = "&mut TensorViewMut" if p.kind == "output" else "&TensorView"
        return f"Option<{kind}>" if _maybe(function, i, p) else kind
    return {"float": "f64", "int": "i64", "stream": "Stream"}[p.kind]


def _op(function: Function) -> str:
    head, before, inside = [], [], []
    for i, p in enumerate(function.parameters):
        head.append(f"    {p.name}: {_type(function, i, p)},\n")
        value = p.name
        if p.kind in ("output", "tensor"):
            if _maybe(function, i, p):
                before.append(f"    let mut {p.name} = Raw::of({p.name}.map(|t| t.raw()));\n")
            else:
                before.append(f"    let mut {p.name} = {p.name}.raw();\n")
            value = f"{p.name}.pointer()"
        elif p.kind == "list":
            before.append(f"    let {p.name} = List::of{'_mut' if p.written else ''}({p.name});\n")
            value = f"&{p.name}.raw()"
        elif p.kind == "stream":
            value = f"{p.name}.0"
        inside.append(f"            {value},\n")
    returns, wrap = ("i64", "size") if function.returns == "int" else ("()", "check")
    doc, safety = f"\n/// `{function.name}`\n", ""
    if _unsafe(function):
        safety = "unsafe "
        doc += (
            "///\n/// # Safety\n/// The addresses that its tensors hold must lead to the memory "
            "that docs/c-api.md asks for.\n"
        )
    return (
        f"{doc}pub {safety}fn {function.short}(\n{''.join(head)}) -> Result<{returns}> "
        f"{{\n{''.join(before)}    {wrap}(unsafe {{\n        sys::{function.name}(\n"
        f"{''.join(inside)}        )\n    }})\n}}\n"
    )


def dispatch(header: Header) -> str:
    """For the test of vectors: a function by its name."""
    parts = [
        _NOTE,
        "use super::Call;\nuse hfpatch::*;\n\n"
        "pub fn call(name: &str, c: &Call) -> Result<()> {\n"
        "    let stream = Stream::default();\n"
        "    match name {\n",
    ]
    for function in header.ops:
        inside = []
        for i, p in enumerate(function.parameters):
            maybe = p.kind in ("output", "tensor") and _maybe(function, i, p)
            method = {
                "output": "result_or_none" if maybe else "result",
                "tensor": "tensor_or_none" if maybe else "tensor",
                "list": "list_mut" if p.written else "list",
                "float": "float",
                "int": "int",
            }.get(p.kind)
            value = "stream" if method is None else f"c.{method}({i})"
            borrow = {"output": "&mut ", "tensor": "&"}.get(p.kind, "")
            if p.kind == "list":
                borrow = "&mut " if p.written else "&"
            if maybe:
                value += ".as_mut()" if p.kind == "output" else ".as_ref()"
                borrow = ""
            inside.append(f"            {borrow}{value},\n")
        made = f"{function.short}(\n{''.join(inside)}        )"
        made = f"unsafe {{ {made} }}" if _unsafe(function) else made
        parts.append(f'        "{function.name}" => {made},\n')
    return "".join([*parts, '        _ => panic!("no function {name}"),\n    }\n}\n'])
