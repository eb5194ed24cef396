// Written by `python bindings/generate` from kernel_src/hfpatch.h; do not edit.
//! The choices of integer arguments.

pub const ACT_GELU_ERF: i64 = 0;
pub const ACT_GELU_SIGMOID: i64 = 2;
pub const ACT_GELU_TANH: i64 = 1;
pub const ACT_RELU: i64 = 4;
pub const ACT_SILU: i64 = 3;
pub const CAST_INPUT: i64 = 1;
pub const CAST_NONE: i64 = 0;
pub const CAST_WEIGHT: i64 = 2;
pub const GATE_SIGMOID: i64 = 1;
pub const GATE_SILU: i64 = 0;
pub const GRAD_NORM_INF: i64 = 1;
pub const GRAD_NORM_L2: i64 = 0;
pub const MAX_OUTER_DIMS: i64 = 3;
pub const MAX_TOPK: i64 = 2048;
pub const NEED_BIAS: i64 = 2;
pub const NEED_WEIGHT: i64 = 1;
pub const NORM_CHUNK: i64 = 16384;
pub const NORM_LAYER: i64 = 1;
pub const NORM_RMS: i64 = 0;
