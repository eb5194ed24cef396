// Written by `python bindings/generate` from kernel_src/hfpatch.h; do not edit.
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

pub const HFP_ABI_VERSION: i32 = 4;
pub const HFP_ACT_COUNT: i64 = 5;
pub const HFP_ACT_GELU_ERF: i64 = 0;
pub const HFP_ACT_GELU_SIGMOID: i64 = 2;
pub const HFP_ACT_GELU_TANH: i64 = 1;
pub const HFP_ACT_RELU: i64 = 4;
pub const HFP_ACT_SILU: i64 = 3;
pub const HFP_CAST_COUNT: i64 = 3;
pub const HFP_CAST_INPUT: i64 = 1;
pub const HFP_CAST_NONE: i64 = 0;
pub const HFP_CAST_WEIGHT: i64 = 2;
pub const HFP_DECODE_NORM_LAYER: i64 = 2;
pub const HFP_DECODE_NORM_RMS: i64 = 1;
pub const HFP_DECODE_NORM_ROUNDED: i64 = 4;
pub const HFP_DECODE_NUMBERS: i64 = 16;
pub const HFP_DECODE_PLAN: i64 = 15;
pub const HFP_DECODE_RELU_SQUARED: i64 = 16;
pub const HFP_DECODE_ROWS: i64 = 16;
pub const HFP_DECODE_SLOTS: i64 = 4;
pub const HFP_DECODE_TENSORS: i64 = 27;
pub const HFP_GATE_COUNT: i64 = 2;
pub const HFP_GATE_SIGMOID: i64 = 1;
pub const HFP_GATE_SILU: i64 = 0;
pub const HFP_GEMM_BLAS: i64 = 5;
pub const HFP_GEMM_BLIS: i64 = 4;
pub const HFP_GEMM_CUBLASLT: i64 = 6;
pub const HFP_GEMM_MKL: i64 = 3;
pub const HFP_GEMM_NONE: i64 = 0;
pub const HFP_GEMM_OPENBLAS: i64 = 2;
pub const HFP_GEMM_OWN: i64 = 1;
pub const HFP_GRAD_NORM_COUNT: i64 = 2;
pub const HFP_GRAD_NORM_INF: i64 = 1;
pub const HFP_GRAD_NORM_L2: i64 = 0;
pub const HFP_INVALID_ARGUMENT: i32 = -2;
pub const HFP_LAUNCH_FAILED: i32 = -3;
pub const HFP_MAX_EXPERTS: i64 = 1024;
pub const HFP_MAX_HEAD_DIM: i64 = 256;
pub const HFP_MAX_OUTER_DIMS: i64 = 3;
pub const HFP_MAX_TOPK: i64 = 2048;
pub const HFP_NEED_BIAS: i64 = 2;
pub const HFP_NEED_COUNT: i64 = 4;
pub const HFP_NEED_WEIGHT: i64 = 1;
pub const HFP_NORM_CHUNK: i64 = 16384;
pub const HFP_NORM_COUNT: i64 = 2;
pub const HFP_NORM_LAYER: i64 = 1;
pub const HFP_NORM_RMS: i64 = 0;
pub const HFP_NOT_AVAILABLE: i32 = -1;
pub const HFP_OK: i32 = 0;
pub const HFP_OUT_OF_MEMORY: i32 = -4;
pub const kDLBfloat: u8 = 4;
pub const kDLCPU: i32 = 1;
pub const kDLCUDA: i32 = 2;
pub const kDLFloat: u8 = 2;
pub const kDLInt: u8 = 0;
pub const kDLUInt: u8 = 1;

unsafe extern "C" {
    pub fn hfp_last_error() -> *const c_char;
    pub fn hfp_abi_version() -> i32;
    pub fn hfp_build_info() -> *const c_char;
    pub fn hfp_rms_norm(
        out: *mut DLTensor,
        x: *const DLTensor,
        weight: *const DLTensor,
        bias: *const DLTensor,
        eps: f64,
        weight_offset: f64,
        cast: i64,
        stream: *mut c_void,
    ) -> i32;
    pub fn hfp_layer_norm(
        out: *mut DLTensor,
        x: *const DLTensor,
        weight: *const DLTensor,
        bias: *const DLTensor,
        eps: f64,
        stream: *mut c_void,
    ) -> i32;
    pub fn hfp_gelu(
        out: *mut DLTensor,
        x: *const DLTensor,
        approximate: i64,
        stream: *mut c_void,
    ) -> i32;
    pub fn hfp_silu(
        out: *mut DLTensor,
        x: *const DLTensor,
        stream: *mut c_void,
    ) -> i32;
    pub fn hfp_gated(
        out: *mut DLTensor,
        gate: *const DLTensor,
        up: *const DLTensor,
        activation: i64,
        stream: *mut c_void,
    ) -> i32;
    pub fn hfp_gated_packed(
        out: *mut DLTensor,
        x: *const DLTensor,
        activation: i64,
        gate_first: i64,
        stream: *mut c_void,
    ) -> i32;
    pub fn hfp_gated_clamped(
        out: *mut DLTensor,
        gate: *const DLTensor,
        up: *const DLTensor,
        activation: i64,
        alpha: f64,
        gate_min: f64,
        gate_max: f64,
        up_min: f64,
        up_max: f64,
        up_offset: f64,
        clamp_activated: i64,
        stream: *mut c_void,
    ) -> i32;
    pub fn hfp_norm_modulate(
        out: *mut DLTensor,
        x: *const DLTensor,
        scale: *const DLTensor,
        shift: *const DLTensor,
        weight: *const DLTensor,
        bias: *const DLTensor,
        eps: f64,
        norm_type: i64,
        cast: i64,
        stream: *mut c_void,
    ) -> i32;
    pub fn hfp_gate_residual(
        out: *mut DLTensor,
        residual: *const DLTensor,
        gate: *const DLTensor,
        x: *const DLTensor,
        cast: i64,
        stream: *mut c_void,
    ) -> i32;
    pub fn hfp_gate_residual_norm_modulate(
        sum: *mut DLTensor,
        out: *mut DLTensor,
        residual: *const DLTensor,
        gate: *const DLTensor,
        x: *const DLTensor,
        scale: *const DLTensor,
        shift: *const DLTensor,
        weight: *const DLTensor,
        bias: *const DLTensor,
        eps: f64,
        norm_type: i64,
        cast: i64,
        stream: *mut c_void,
    ) -> i32;
    pub fn hfp_add_rms_norm(
        out: *mut DLTensor,
        sum: *mut DLTensor,
        x: *const DLTensor,
        residual: *const DLTensor,
        weight: *const DLTensor,
        bias: *const DLTensor,
        eps: f64,
        weight_offset: f64,
        cast: i64,
        stream: *mut c_void,
    ) -> i32;
    pub fn hfp_add_layer_norm(
        out: *mut DLTensor,
        sum: *mut DLTensor,
        x: *const DLTensor,
        residual: *const DLTensor,
        weight: *const DLTensor,
        bias: *const DLTensor,
        eps: f64,
        stream: *mut c_void,
    ) -> i32;
    pub fn hfp_rope(
        out: *mut DLTensor,
        x: *const DLTensor,
        cos: *const DLTensor,
        sin: *const DLTensor,
        seq_dim: i64,
        interleaved: i64,
        rotary_dim: i64,
        round_products: i64,
        stream: *mut c_void,
    ) -> i32;
    pub fn hfp_rope_qk(
        q_out: *mut DLTensor,
        k_out: *mut DLTensor,
        q: *const DLTensor,
        k: *const DLTensor,
        cos: *const DLTensor,
        sin: *const DLTensor,
        seq_dim: i64,
        interleaved: i64,
        rotary_dim: i64,
        round_products: i64,
        stream: *mut c_void,
    ) -> i32;
    pub fn hfp_qk_norm_rope(
        q_out: *mut DLTensor,
        k_out: *mut DLTensor,
        q: *const DLTensor,
        k: *const DLTensor,
        q_weight: *const DLTensor,
        k_weight: *const DLTensor,
        cos: *const DLTensor,
        sin: *const DLTensor,
        eps: f64,
        weight_offset: f64,
        cast: i64,
        norm_across_heads: i64,
        seq_dim: i64,
        interleaved: i64,
        rotary_dim: i64,
        round_products: i64,
        stream: *mut c_void,
    ) -> i32;
    pub fn hfp_gated_rms_norm(
        out: *mut DLTensor,
        x: *const DLTensor,
        gate: *const DLTensor,
        weight: *const DLTensor,
        eps: f64,
        group_size: i64,
        norm_before_gate: i64,
        cast: i64,
        gate_activation: i64,
        stream: *mut c_void,
    ) -> i32;
    pub fn hfp_rms_norm_silu(
        out: *mut DLTensor,
        x: *const DLTensor,
        addend: *const DLTensor,
        weight: *const DLTensor,
        scale: *const DLTensor,
        shift: *const DLTensor,
        eps: f64,
        stream: *mut c_void,
    ) -> i32;
    pub fn hfp_add_bias(
        out: *mut DLTensor,
        x: *const DLTensor,
        bias: *const DLTensor,
        residual: *const DLTensor,
        stream: *mut c_void,
    ) -> i32;
    pub fn hfp_group_parts(
        channels: i64,
        positions: i64,
        groups: i64,
        channels_last: i64,
    ) -> i64;
    pub fn hfp_group_norm(
        out: *mut DLTensor,
        stats: *mut DLTensor,
        x: *const DLTensor,
        weight: *const DLTensor,
        bias: *const DLTensor,
        groups: i64,
        eps: f64,
        silu: i64,
        channels_last: i64,
        stream: *mut c_void,
    ) -> i32;
    pub fn hfp_partial_rows(
        rows: i64,
        cols: i64,
    ) -> i64;
    pub fn hfp_rms_norm_backward(
        dx: *mut DLTensor,
        dweight: *mut DLTensor,
        dbias: *mut DLTensor,
        partials: *mut DLTensor,
        grad: *const DLTensor,
        x: *const DLTensor,
        weight: *const DLTensor,
        bias: *const DLTensor,
        eps: f64,
        weight_offset: f64,
        cast: i64,
        needs: i64,
        stream: *mut c_void,
    ) -> i32;
    pub fn hfp_layer_norm_backward(
        dx: *mut DLTensor,
        dweight: *mut DLTensor,
        dbias: *mut DLTensor,
        partials: *mut DLTensor,
        grad: *const DLTensor,
        x: *const DLTensor,
        weight: *const DLTensor,
        bias: *const DLTensor,
        eps: f64,
        needs: i64,
        stream: *mut c_void,
    ) -> i32;
    pub fn hfp_gelu_backward(
        dx: *mut DLTensor,
        grad: *const DLTensor,
        x: *const DLTensor,
        approximate: i64,
        stream: *mut c_void,
    ) -> i32;
    pub fn hfp_silu_backward(
        dx: *mut DLTensor,
        grad: *const DLTensor,
        x: *const DLTensor,
        stream: *mut c_void,
    ) -> i32;
    pub fn hfp_gated_backward(
        dgate: *mut DLTensor,
        dup: *mut DLTensor,
        grad: *const DLTensor,
        gate: *const DLTensor,
        up: *const DLTensor,
        activation: i64,
        stream: *mut c_void,
    ) -> i32;
    pub fn hfp_gated_packed_backward(
        dx: *mut DLTensor,
        grad: *const DLTensor,
        x: *const DLTensor,
        activation: i64,
        gate_first: i64,
        stream: *mut c_void,
    ) -> i32;
    pub fn hfp_cross_entropy(
        loss: *mut DLTensor,
        lse: *mut DLTensor,
        logits: *const DLTensor,
        target: *const DLTensor,
        ignore_index: i64,
        label_smoothing: f64,
        softcap: f64,
        stream: *mut c_void,
    ) -> i32;
    pub fn hfp_cross_entropy_backward(
        dlogits: *mut DLTensor,
        grad: *const DLTensor,
        logits: *const DLTensor,
        target: *const DLTensor,
        lse: *const DLTensor,
        ignore_index: i64,
        label_smoothing: f64,
        softcap: f64,
        stream: *mut c_void,
    ) -> i32;
    pub fn hfp_cross_entropy_with_gradient(
        total: *mut DLTensor,
        loss: *mut DLTensor,
        lse: *mut DLTensor,
        dlogits: *mut DLTensor,
        logits: *const DLTensor,
        target: *const DLTensor,
        divisor_tensor: *const DLTensor,
        divisor: f64,
        ignore_index: i64,
        label_smoothing: f64,
        softcap: f64,
        stream: *mut c_void,
    ) -> i32;
    pub fn hfp_adamw_step(
        params: *const HfpTensorList,
        grads: *const HfpTensorList,
        exp_avgs: *const HfpTensorList,
        exp_avg_sqs: *const HfpTensorList,
        max_exp_avg_sqs: *const HfpTensorList,
        masters: *const HfpTensorList,
        steps: *const HfpTensorList,
        lr_tensor: *const DLTensor,
        clip_coef: *const DLTensor,
        grad_scale: *const DLTensor,
        found_inf: *const DLTensor,
        lr: f64,
        beta1: f64,
        beta2: f64,
        eps: f64,
        weight_decay: f64,
        maximize: i64,
        stream: *mut c_void,
    ) -> i32;
    pub fn hfp_norm_partials(
        tensors: *const HfpTensorList,
    ) -> i64;
    pub fn hfp_grad_norm(
        norm: *mut DLTensor,
        partials: *mut DLTensor,
        tensors: *const HfpTensorList,
        norm_type: i64,
        stream: *mut c_void,
    ) -> i32;
    pub fn hfp_clip_grads(
        grads: *const HfpTensorList,
        total_norm: *const DLTensor,
        max_norm: f64,
        stream: *mut c_void,
    ) -> i32;
    pub fn hfp_scale_grads(
        grads: *const HfpTensorList,
        factor: *const DLTensor,
        stream: *mut c_void,
    ) -> i32;
    pub fn hfp_row_workspace(
        rows: i64,
        cols: i64,
    ) -> i64;
    pub fn hfp_softmax(
        out: *mut DLTensor,
        workspace: *mut DLTensor,
        x: *const DLTensor,
        mask: *const DLTensor,
        scale: f64,
        stream: *mut c_void,
    ) -> i32;
    pub fn hfp_softmax_backward(
        dx: *mut DLTensor,
        workspace: *mut DLTensor,
        grad: *const DLTensor,
        y: *const DLTensor,
        scale: f64,
        stream: *mut c_void,
    ) -> i32;
    pub fn hfp_argmax(
        out: *mut DLTensor,
        workspace: *mut DLTensor,
        x: *const DLTensor,
        stream: *mut c_void,
    ) -> i32;
    pub fn hfp_topk(
        values: *mut DLTensor,
        indices: *mut DLTensor,
        x: *const DLTensor,
        k: i64,
        stream: *mut c_void,
    ) -> i32;
    pub fn hfp_sample(
        out: *mut DLTensor,
        logits: *const DLTensor,
        seeds: *const DLTensor,
        positions: *const DLTensor,
        temperatures: *const DLTensor,
        top_ks: *const DLTensor,
        top_ps: *const DLTensor,
        min_ps: *const DLTensor,
        temperature: f64,
        top_k: i64,
        top_p: f64,
        min_p: f64,
        stream: *mut c_void,
    ) -> i32;
    pub fn hfp_add_gelu(
        out: *mut DLTensor,
        x: *const DLTensor,
        bias: *const DLTensor,
        approximate: i64,
        stream: *mut c_void,
    ) -> i32;
    pub fn hfp_add_silu(
        out: *mut DLTensor,
        x: *const DLTensor,
        bias: *const DLTensor,
        stream: *mut c_void,
    ) -> i32;
    pub fn hfp_mul_add(
        out: *mut DLTensor,
        a: *const DLTensor,
        b: *const DLTensor,
        c: *const DLTensor,
        cast: i64,
        stream: *mut c_void,
    ) -> i32;
    pub fn hfp_add_gelu_backward(
        dx: *mut DLTensor,
        dbias: *mut DLTensor,
        partials: *mut DLTensor,
        grad: *const DLTensor,
        x: *const DLTensor,
        bias: *const DLTensor,
        approximate: i64,
        needs: i64,
        stream: *mut c_void,
    ) -> i32;
    pub fn hfp_add_silu_backward(
        dx: *mut DLTensor,
        dbias: *mut DLTensor,
        partials: *mut DLTensor,
        grad: *const DLTensor,
        x: *const DLTensor,
        bias: *const DLTensor,
        needs: i64,
        stream: *mut c_void,
    ) -> i32;
    pub fn hfp_mul_add_backward(
        da: *mut DLTensor,
        db: *mut DLTensor,
        dc: *mut DLTensor,
        partials: *mut DLTensor,
        grad: *const DLTensor,
        a: *const DLTensor,
        b: *const DLTensor,
        cast: i64,
        needs: i64,
        stream: *mut c_void,
    ) -> i32;
    pub fn hfp_sum_partial_rows(
        rows: i64,
        cols: i64,
        sums: i64,
    ) -> i64;
    pub fn hfp_add(
        out: *mut DLTensor,
        a: *const DLTensor,
        b: *const DLTensor,
        alpha: f64,
        stream: *mut c_void,
    ) -> i32;
    pub fn hfp_mul(
        out: *mut DLTensor,
        a: *const DLTensor,
        b: *const DLTensor,
        stream: *mut c_void,
    ) -> i32;
    pub fn hfp_scale(
        out: *mut DLTensor,
        x: *const DLTensor,
        factor: f64,
        stream: *mut c_void,
    ) -> i32;
    pub fn hfp_gemm_backend(
        device_type: i64,
    ) -> i64;
    pub fn hfp_gemm_workspace(
        batch: i64,
        m: i64,
        n: i64,
        k: i64,
        device_type: i64,
    ) -> i64;
    pub fn hfp_gemm(
        out: *mut DLTensor,
        workspace: *mut DLTensor,
        a: *const DLTensor,
        b: *const DLTensor,
        c: *const DLTensor,
        alpha: f64,
        beta: f64,
        transpose_a: i64,
        transpose_b: i64,
        stream: *mut c_void,
    ) -> i32;
    pub fn hfp_gemm_batched(
        out: *mut DLTensor,
        workspace: *mut DLTensor,
        a: *const DLTensor,
        b: *const DLTensor,
        c: *const DLTensor,
        alpha: f64,
        beta: f64,
        transpose_a: i64,
        transpose_b: i64,
        stream: *mut c_void,
    ) -> i32;
    pub fn hfp_attention(
        out: *mut DLTensor,
        lse: *mut DLTensor,
        q: *const DLTensor,
        k: *const DLTensor,
        v: *const DLTensor,
        mask: *const DLTensor,
        q_starts: *const DLTensor,
        k_starts: *const DLTensor,
        k_lengths: *const DLTensor,
        scale: f64,
        causal: i64,
        most_queries: i64,
        window: i64,
        softcap: f64,
        stream: *mut c_void,
    ) -> i32;
    pub fn hfp_cross_entropy_log_probs(
        loss: *mut DLTensor,
        lse: *mut DLTensor,
        log_probs: *mut DLTensor,
        logits: *const DLTensor,
        target: *const DLTensor,
        ignore_index: i64,
        label_smoothing: f64,
        softcap: f64,
        stream: *mut c_void,
    ) -> i32;
    pub fn hfp_balance_parts(
        tokens: i64,
    ) -> i64;
    pub fn hfp_load_balancing_loss(
        loss: *mut DLTensor,
        stats: *mut DLTensor,
        partials: *mut DLTensor,
        logits: *const DLTensor,
        mask: *const DLTensor,
        k: i64,
        stream: *mut c_void,
    ) -> i32;
    pub fn hfp_load_balancing_loss_backward(
        dlogits: *mut DLTensor,
        grad: *const DLTensor,
        logits: *const DLTensor,
        stats: *const DLTensor,
        mask: *const DLTensor,
        stream: *mut c_void,
    ) -> i32;
    pub fn hfp_decode_workspace(
        model: *const HfpTensorList,
        rows: i64,
        tokens: i64,
        threads: i64,
    ) -> i64;
    pub fn hfp_decode_step(
        logits: *mut DLTensor,
        hidden: *mut DLTensor,
        workspace: *mut DLTensor,
        model: *const HfpTensorList,
        cache: *const DLTensor,
        ids: *const DLTensor,
        embeds: *const DLTensor,
        positions: *const DLTensor,
        mask: *const DLTensor,
        most_keys: i64,
        threads: i64,
        stream: *mut c_void,
    ) -> i32;
    pub fn hfp_decode_choose(
        ids: *mut DLTensor,
        counters: *mut DLTensor,
        text: *mut DLTensor,
        workspace: *mut DLTensor,
        logits: *const DLTensor,
        ends: *const DLTensor,
        pad: i64,
        stream: *mut c_void,
    ) -> i32;
}
