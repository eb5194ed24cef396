// Written by `python bindings/generate` from kernel_src/hfpatch.h; do not edit.
//! A function for each of the C interface, which docs/c-api.md describes.
#![allow(clippy::too_many_arguments)]

use crate::error::{check, size, Result};
use crate::stream::Stream;
use crate::tensor::{List, Raw, TensorView, TensorViewMut};
use hfpatch_sys as sys;

/// `hfp_rms_norm`
pub fn rms_norm(
    out: &mut TensorViewMut,
    x: &TensorView,
    weight: Option<&TensorView>,
    bias: Option<&TensorView>,
    eps: f64,
    weight_offset: f64,
    cast: i64,
    stream: Stream,
) -> Result<()> {
    let mut out = out.raw();
    let mut x = x.raw();
    let mut weight = Raw::of(weight.map(|t| t.raw()));
    let mut bias = Raw::of(bias.map(|t| t.raw()));
    check(unsafe {
        sys::hfp_rms_norm(
            out.pointer(),
            x.pointer(),
            weight.pointer(),
            bias.pointer(),
            eps,
            weight_offset,
            cast,
            stream.0,
        )
    })
}

/// `hfp_layer_norm`
pub fn layer_norm(
    out: &mut TensorViewMut,
    x: &TensorView,
    weight: Option<&TensorView>,
    bias: Option<&TensorView>,
    eps: f64,
    stream: Stream,
) -> Result<()> {
    let mut out = out.raw();
    let mut x = x.raw();
    let mut weight = Raw::of(weight.map(|t| t.raw()));
    let mut bias = Raw::of(bias.map(|t| t.raw()));
    check(unsafe {
        sys::hfp_layer_norm(
            out.pointer(),
            x.pointer(),
            weight.pointer(),
            bias.pointer(),
            eps,
            stream.0,
        )
    })
}

/// `hfp_gelu`
pub fn gelu(
    out: &mut TensorViewMut,
    x: &TensorView,
    approximate: i64,
    stream: Stream,
) -> Result<()> {
    let mut out = out.raw();
    let mut x = x.raw();
    check(unsafe {
        sys::hfp_gelu(
            out.pointer(),
            x.pointer(),
            approximate,
            stream.0,
        )
    })
}

/// `hfp_silu`
pub fn silu(
    out: &mut TensorViewMut,
    x: &TensorView,
    stream: Stream,
) -> Result<()> {
    let mut out = out.raw();
    let mut x = x.raw();
    check(unsafe {
        sys::hfp_silu(
            out.pointer(),
            x.pointer(),
            stream.0,
        )
    })
}

/// `hfp_gated`
pub fn gated(
    out: &mut TensorViewMut,
    gate: &TensorView,
    up: &TensorView,
    activation: i64,
    stream: Stream,
) -> Result<()> {
    let mut out = out.raw();
    let mut gate = gate.raw();
    let mut up = up.raw();
    check(unsafe {
        sys::hfp_gated(
            out.pointer(),
            gate.pointer(),
            up.pointer(),
            activation,
            stream.0,
        )
    })
}

/// `hfp_gated_packed`
pub fn gated_packed(
    out: &mut TensorViewMut,
    x: &TensorView,
    activation: i64,
    gate_first: i64,
    stream: Stream,
) -> Result<()> {
    let mut out = out.raw();
    let mut x = x.raw();
    check(unsafe {
        sys::hfp_gated_packed(
            out.pointer(),
            x.pointer(),
            activation,
            gate_first,
            stream.0,
        )
    })
}

/// `hfp_gated_clamped`
pub fn gated_clamped(
    out: &mut TensorViewMut,
    gate: &TensorView,
    up: &TensorView,
    activation: i64,
    alpha: f64,
    gate_min: f64,
    gate_max: f64,
    up_min: f64,
    up_max: f64,
    up_offset: f64,
    clamp_activated: i64,
    stream: Stream,
) -> Result<()> {
    let mut out = out.raw();
    let mut gate = gate.raw();
    let mut up = up.raw();
    check(unsafe {
        sys::hfp_gated_clamped(
            out.pointer(),
            gate.pointer(),
            up.pointer(),
            activation,
            alpha,
            gate_min,
            gate_max,
            up_min,
            up_max,
            up_offset,
            clamp_activated,
            stream.0,
        )
    })
}

/// `hfp_norm_modulate`
pub fn norm_modulate(
    out: &mut TensorViewMut,
    x: &TensorView,
    scale: &TensorView,
    shift: &TensorView,
    weight: Option<&TensorView>,
    bias: Option<&TensorView>,
    eps: f64,
    norm_type: i64,
    cast: i64,
    stream: Stream,
) -> Result<()> {
    let mut out = out.raw();
    let mut x = x.raw();
    let mut scale = scale.raw();
    let mut shift = shift.raw();
    let mut weight = Raw::of(weight.map(|t| t.raw()));
    let mut bias = Raw::of(bias.map(|t| t.raw()));
    check(unsafe {
        sys::hfp_norm_modulate(
            out.pointer(),
            x.pointer(),
            scale.pointer(),
            shift.pointer(),
            weight.pointer(),
            bias.pointer(),
            eps,
            norm_type,
            cast,
            stream.0,
        )
    })
}

/// `hfp_gate_residual`
pub fn gate_residual(
    out: &mut TensorViewMut,
    residual: &TensorView,
    gate: &TensorView,
    x: &TensorView,
    cast: i64,
    stream: Stream,
) -> Result<()> {
    let mut out = out.raw();
    let mut residual = residual.raw();
    let mut gate = gate.raw();
    let mut x = x.raw();
    check(unsafe {
        sys::hfp_gate_residual(
            out.pointer(),
            residual.pointer(),
            gate.pointer(),
            x.pointer(),
            cast,
            stream.0,
        )
    })
}

/// `hfp_gate_residual_norm_modulate`
pub fn gate_residual_norm_modulate(
    sum: &mut TensorViewMut,
    out: &mut TensorViewMut,
    residual: &TensorView,
    gate: &TensorView,
    x: &TensorView,
    scale: &TensorView,
    shift: &TensorView,
    weight: Option<&TensorView>,
    bias: Option<&TensorView>,
    eps: f64,
    norm_type: i64,
    cast: i64,
    stream: Stream,
) -> Result<()> {
    let mut sum = sum.raw();
    let mut out = out.raw();
    let mut residual = residual.raw();
    let mut gate = gate.raw();
    let mut x = x.raw();
    let mut scale = scale.raw();
    let mut shift = shift.raw();
    let mut weight = Raw::of(weight.map(|t| t.raw()));
    let mut bias = Raw::of(bias.map(|t| t.raw()));
    check(unsafe {
        sys::hfp_gate_residual_norm_modulate(
            sum.pointer(),
            out.pointer(),
            residual.pointer(),
            gate.pointer(),
            x.pointer(),
            scale.pointer(),
            shift.pointer(),
            weight.pointer(),
            bias.pointer(),
            eps,
            norm_type,
            cast,
            stream.0,
        )
    })
}

/// `hfp_add_rms_norm`
pub fn add_rms_norm(
    out: &mut TensorViewMut,
    sum: &mut TensorViewMut,
    x: &TensorView,
    residual: &TensorView,
    weight: Option<&TensorView>,
    bias: Option<&TensorView>,
    eps: f64,
    weight_offset: f64,
    cast: i64,
    stream: Stream,
) -> Result<()> {
    let mut out = out.raw();
    let mut sum = sum.raw();
    let mut x = x.raw();
    let mut residual = residual.raw();
    let mut weight = Raw::of(weight.map(|t| t.raw()));
    let mut bias = Raw::of(bias.map(|t| t.raw()));
    check(unsafe {
        sys::hfp_add_rms_norm(
            out.pointer(),
            sum.pointer(),
            x.pointer(),
            residual.pointer(),
            weight.pointer(),
            bias.pointer(),
            eps,
            weight_offset,
            cast,
            stream.0,
        )
    })
}

/// `hfp_add_layer_norm`
pub fn add_layer_norm(
    out: &mut TensorViewMut,
    sum: &mut TensorViewMut,
    x: &TensorView,
    residual: &TensorView,
    weight: Option<&TensorView>,
    bias: Option<&TensorView>,
    eps: f64,
    stream: Stream,
) -> Result<()> {
    let mut out = out.raw();
    let mut sum = sum.raw();
    let mut x = x.raw();
    let mut residual = residual.raw();
    let mut weight = Raw::of(weight.map(|t| t.raw()));
    let mut bias = Raw::of(bias.map(|t| t.raw()));
    check(unsafe {
        sys::hfp_add_layer_norm(
            out.pointer(),
            sum.pointer(),
            x.pointer(),
            residual.pointer(),
            weight.pointer(),
            bias.pointer(),
            eps,
            stream.0,
        )
    })
}

/// `hfp_rope`
pub fn rope(
    out: &mut TensorViewMut,
    x: &TensorView,
    cos: &TensorView,
    sin: Option<&TensorView>,
    seq_dim: i64,
    interleaved: i64,
    rotary_dim: i64,
    round_products: i64,
    stream: Stream,
) -> Result<()> {
    let mut out = out.raw();
    let mut x = x.raw();
    let mut cos = cos.raw();
    let mut sin = Raw::of(sin.map(|t| t.raw()));
    check(unsafe {
        sys::hfp_rope(
            out.pointer(),
            x.pointer(),
            cos.pointer(),
            sin.pointer(),
            seq_dim,
            interleaved,
            rotary_dim,
            round_products,
            stream.0,
        )
    })
}

/// `hfp_rope_qk`
pub fn rope_qk(
    q_out: &mut TensorViewMut,
    k_out: &mut TensorViewMut,
    q: &TensorView,
    k: &TensorView,
    cos: &TensorView,
    sin: Option<&TensorView>,
    seq_dim: i64,
    interleaved: i64,
    rotary_dim: i64,
    round_products: i64,
    stream: Stream,
) -> Result<()> {
    let mut q_out = q_out.raw();
    let mut k_out = k_out.raw();
    let mut q = q.raw();
    let mut k = k.raw();
    let mut cos = cos.raw();
    let mut sin = Raw::of(sin.map(|t| t.raw()));
    check(unsafe {
        sys::hfp_rope_qk(
            q_out.pointer(),
            k_out.pointer(),
            q.pointer(),
            k.pointer(),
            cos.pointer(),
            sin.pointer(),
            seq_dim,
            interleaved,
            rotary_dim,
            round_products,
            stream.0,
        )
    })
}

/// `hfp_qk_norm_rope`
pub fn qk_norm_rope(
    q_out: &mut TensorViewMut,
    k_out: &mut TensorViewMut,
    q: &TensorView,
    k: &TensorView,
    q_weight: Option<&TensorView>,
    k_weight: Option<&TensorView>,
    cos: Option<&TensorView>,
    sin: Option<&TensorView>,
    eps: f64,
    weight_offset: f64,
    cast: i64,
    norm_across_heads: i64,
    seq_dim: i64,
    interleaved: i64,
    rotary_dim: i64,
    round_products: i64,
    stream: Stream,
) -> Result<()> {
    let mut q_out = q_out.raw();
    let mut k_out = k_out.raw();
    let mut q = q.raw();
    let mut k = k.raw();
    let mut q_weight = Raw::of(q_weight.map(|t| t.raw()));
    let mut k_weight = Raw::of(k_weight.map(|t| t.raw()));
    let mut cos = Raw::of(cos.map(|t| t.raw()));
    let mut sin = Raw::of(sin.map(|t| t.raw()));
    check(unsafe {
        sys::hfp_qk_norm_rope(
            q_out.pointer(),
            k_out.pointer(),
            q.pointer(),
            k.pointer(),
            q_weight.pointer(),
            k_weight.pointer(),
            cos.pointer(),
            sin.pointer(),
            eps,
            weight_offset,
            cast,
            norm_across_heads,
            seq_dim,
            interleaved,
            rotary_dim,
            round_products,
            stream.0,
        )
    })
}

/// `hfp_gated_rms_norm`
pub fn gated_rms_norm(
    out: &mut TensorViewMut,
    x: &TensorView,
    gate: Option<&TensorView>,
    weight: Option<&TensorView>,
    eps: f64,
    group_size: i64,
    norm_before_gate: i64,
    cast: i64,
    gate_activation: i64,
    stream: Stream,
) -> Result<()> {
    let mut out = out.raw();
    let mut x = x.raw();
    let mut gate = Raw::of(gate.map(|t| t.raw()));
    let mut weight = Raw::of(weight.map(|t| t.raw()));
    check(unsafe {
        sys::hfp_gated_rms_norm(
            out.pointer(),
            x.pointer(),
            gate.pointer(),
            weight.pointer(),
            eps,
            group_size,
            norm_before_gate,
            cast,
            gate_activation,
            stream.0,
        )
    })
}

/// `hfp_rms_norm_silu`
pub fn rms_norm_silu(
    out: &mut TensorViewMut,
    x: &TensorView,
    addend: Option<&TensorView>,
    weight: Option<&TensorView>,
    scale: Option<&TensorView>,
    shift: Option<&TensorView>,
    eps: f64,
    stream: Stream,
) -> Result<()> {
    let mut out = out.raw();
    let mut x = x.raw();
    let mut addend = Raw::of(addend.map(|t| t.raw()));
    let mut weight = Raw::of(weight.map(|t| t.raw()));
    let mut scale = Raw::of(scale.map(|t| t.raw()));
    let mut shift = Raw::of(shift.map(|t| t.raw()));
    check(unsafe {
        sys::hfp_rms_norm_silu(
            out.pointer(),
            x.pointer(),
            addend.pointer(),
            weight.pointer(),
            scale.pointer(),
            shift.pointer(),
            eps,
            stream.0,
        )
    })
}

/// `hfp_add_bias`
pub fn add_bias(
    out: &mut TensorViewMut,
    x: &TensorView,
    bias: &TensorView,
    residual: Option<&TensorView>,
    stream: Stream,
) -> Result<()> {
    let mut out = out.raw();
    let mut x = x.raw();
    let mut bias = bias.raw();
    let mut residual = Raw::of(residual.map(|t| t.raw()));
    check(unsafe {
        sys::hfp_add_bias(
            out.pointer(),
            x.pointer(),
            bias.pointer(),
            residual.pointer(),
            stream.0,
        )
    })
}

/// `hfp_group_norm`
pub fn group_norm(
    out: &mut TensorViewMut,
    stats: &mut TensorViewMut,
    x: &TensorView,
    weight: Option<&TensorView>,
    bias: Option<&TensorView>,
    groups: i64,
    eps: f64,
    silu: i64,
    channels_last: i64,
    stream: Stream,
) -> Result<()> {
    let mut out = out.raw();
    let mut stats = stats.raw();
    let mut x = x.raw();
    let mut weight = Raw::of(weight.map(|t| t.raw()));
    let mut bias = Raw::of(bias.map(|t| t.raw()));
    check(unsafe {
        sys::hfp_group_norm(
            out.pointer(),
            stats.pointer(),
            x.pointer(),
            weight.pointer(),
            bias.pointer(),
            groups,
            eps,
            silu,
            channels_last,
            stream.0,
        )
    })
}

/// `hfp_rms_norm_backward`
pub fn rms_norm_backward(
    dx: &mut TensorViewMut,
    dweight: Option<&mut TensorViewMut>,
    dbias: Option<&mut TensorViewMut>,
    partials: Option<&mut TensorViewMut>,
    grad: &TensorView,
    x: &TensorView,
    weight: Option<&TensorView>,
    bias: Option<&TensorView>,
    eps: f64,
    weight_offset: f64,
    cast: i64,
    needs: i64,
    stream: Stream,
) -> Result<()> {
    let mut dx = dx.raw();
    let mut dweight = Raw::of(dweight.map(|t| t.raw()));
    let mut dbias = Raw::of(dbias.map(|t| t.raw()));
    let mut partials = Raw::of(partials.map(|t| t.raw()));
    let mut grad = grad.raw();
    let mut x = x.raw();
    let mut weight = Raw::of(weight.map(|t| t.raw()));
    let mut bias = Raw::of(bias.map(|t| t.raw()));
    check(unsafe {
        sys::hfp_rms_norm_backward(
            dx.pointer(),
            dweight.pointer(),
            dbias.pointer(),
            partials.pointer(),
            grad.pointer(),
            x.pointer(),
            weight.pointer(),
            bias.pointer(),
            eps,
            weight_offset,
            cast,
            needs,
            stream.0,
        )
    })
}

/// `hfp_layer_norm_backward`
pub fn layer_norm_backward(
    dx: &mut TensorViewMut,
    dweight: Option<&mut TensorViewMut>,
    dbias: Option<&mut TensorViewMut>,
    partials: Option<&mut TensorViewMut>,
    grad: &TensorView,
    x: &TensorView,
    weight: Option<&TensorView>,
    bias: Option<&TensorView>,
    eps: f64,
    needs: i64,
    stream: Stream,
) -> Result<()> {
    let mut dx = dx.raw();
    let mut dweight = Raw::of(dweight.map(|t| t.raw()));
    let mut dbias = Raw::of(dbias.map(|t| t.raw()));
    let mut partials = Raw::of(partials.map(|t| t.raw()));
    let mut grad = grad.raw();
    let mut x = x.raw();
    let mut weight = Raw::of(weight.map(|t| t.raw()));
    let mut bias = Raw::of(bias.map(|t| t.raw()));
    check(unsafe {
        sys::hfp_layer_norm_backward(
            dx.pointer(),
            dweight.pointer(),
            dbias.pointer(),
            partials.pointer(),
            grad.pointer(),
            x.pointer(),
            weight.pointer(),
            bias.pointer(),
            eps,
            needs,
            stream.0,
        )
    })
}

/// `hfp_gelu_backward`
pub fn gelu_backward(
    dx: &mut TensorViewMut,
    grad: &TensorView,
    x: &TensorView,
    approximate: i64,
    stream: Stream,
) -> Result<()> {
    let mut dx = dx.raw();
    let mut grad = grad.raw();
    let mut x = x.raw();
    check(unsafe {
        sys::hfp_gelu_backward(
            dx.pointer(),
            grad.pointer(),
            x.pointer(),
            approximate,
            stream.0,
        )
    })
}

/// `hfp_silu_backward`
pub fn silu_backward(
    dx: &mut TensorViewMut,
    grad: &TensorView,
    x: &TensorView,
    stream: Stream,
) -> Result<()> {
    let mut dx = dx.raw();
    let mut grad = grad.raw();
    let mut x = x.raw();
    check(unsafe {
        sys::hfp_silu_backward(
            dx.pointer(),
            grad.pointer(),
            x.pointer(),
            stream.0,
        )
    })
}

/// `hfp_gated_backward`
pub fn gated_backward(
    dgate: &mut TensorViewMut,
    dup: &mut TensorViewMut,
    grad: &TensorView,
    gate: &TensorView,
    up: &TensorView,
    activation: i64,
    stream: Stream,
) -> Result<()> {
    let mut dgate = dgate.raw();
    let mut dup = dup.raw();
    let mut grad = grad.raw();
    let mut gate = gate.raw();
    let mut up = up.raw();
    check(unsafe {
        sys::hfp_gated_backward(
            dgate.pointer(),
            dup.pointer(),
            grad.pointer(),
            gate.pointer(),
            up.pointer(),
            activation,
            stream.0,
        )
    })
}

/// `hfp_gated_packed_backward`
pub fn gated_packed_backward(
    dx: &mut TensorViewMut,
    grad: &TensorView,
    x: &TensorView,
    activation: i64,
    gate_first: i64,
    stream: Stream,
) -> Result<()> {
    let mut dx = dx.raw();
    let mut grad = grad.raw();
    let mut x = x.raw();
    check(unsafe {
        sys::hfp_gated_packed_backward(
            dx.pointer(),
            grad.pointer(),
            x.pointer(),
            activation,
            gate_first,
            stream.0,
        )
    })
}

/// `hfp_cross_entropy`
pub fn cross_entropy(
    loss: &mut TensorViewMut,
    lse: &mut TensorViewMut,
    logits: &TensorView,
    target: &TensorView,
    ignore_index: i64,
    label_smoothing: f64,
    softcap: f64,
    stream: Stream,
) -> Result<()> {
    let mut loss = loss.raw();
    let mut lse = lse.raw();
    let mut logits = logits.raw();
    let mut target = target.raw();
    check(unsafe {
        sys::hfp_cross_entropy(
            loss.pointer(),
            lse.pointer(),
            logits.pointer(),
            target.pointer(),
            ignore_index,
            label_smoothing,
            softcap,
            stream.0,
        )
    })
}

/// `hfp_cross_entropy_backward`
pub fn cross_entropy_backward(
    dlogits: &mut TensorViewMut,
    grad: &TensorView,
    logits: &TensorView,
    target: &TensorView,
    lse: &TensorView,
    ignore_index: i64,
    label_smoothing: f64,
    softcap: f64,
    stream: Stream,
) -> Result<()> {
    let mut dlogits = dlogits.raw();
    let mut grad = grad.raw();
    let mut logits = logits.raw();
    let mut target = target.raw();
    let mut lse = lse.raw();
    check(unsafe {
        sys::hfp_cross_entropy_backward(
            dlogits.pointer(),
            grad.pointer(),
            logits.pointer(),
            target.pointer(),
            lse.pointer(),
            ignore_index,
            label_smoothing,
            softcap,
            stream.0,
        )
    })
}

/// `hfp_cross_entropy_with_gradient`
pub fn cross_entropy_with_gradient(
    total: &mut TensorViewMut,
    loss: &mut TensorViewMut,
    lse: &mut TensorViewMut,
    dlogits: &mut TensorViewMut,
    logits: &TensorView,
    target: &TensorView,
    divisor_tensor: Option<&TensorView>,
    divisor: f64,
    ignore_index: i64,
    label_smoothing: f64,
    softcap: f64,
    stream: Stream,
) -> Result<()> {
    let mut total = total.raw();
    let mut loss = loss.raw();
    let mut lse = lse.raw();
    let mut dlogits = dlogits.raw();
    let mut logits = logits.raw();
    let mut target = target.raw();
    let mut divisor_tensor = Raw::of(divisor_tensor.map(|t| t.raw()));
    check(unsafe {
        sys::hfp_cross_entropy_with_gradient(
            total.pointer(),
            loss.pointer(),
            lse.pointer(),
            dlogits.pointer(),
            logits.pointer(),
            target.pointer(),
            divisor_tensor.pointer(),
            divisor,
            ignore_index,
            label_smoothing,
            softcap,
            stream.0,
        )
    })
}

/// `hfp_adamw_step`
pub fn adamw_step(
    params: &mut [TensorViewMut],
    grads: &[TensorView],
    exp_avgs: &mut [TensorViewMut],
    exp_avg_sqs: &mut [TensorViewMut],
    max_exp_avg_sqs: &mut [TensorViewMut],
    masters: &mut [TensorViewMut],
    steps: &[TensorView],
    lr_tensor: Option<&TensorView>,
    clip_coef: Option<&TensorView>,
    grad_scale: Option<&TensorView>,
    found_inf: Option<&TensorView>,
    lr: f64,
    beta1: f64,
    beta2: f64,
    eps: f64,
    weight_decay: f64,
    maximize: i64,
    stream: Stream,
) -> Result<()> {
    let params = List::of_mut(params);
    let grads = List::of(grads);
    let exp_avgs = List::of_mut(exp_avgs);
    let exp_avg_sqs = List::of_mut(exp_avg_sqs);
    let max_exp_avg_sqs = List::of_mut(max_exp_avg_sqs);
    let masters = List::of_mut(masters);
    let steps = List::of(steps);
    let mut lr_tensor = Raw::of(lr_tensor.map(|t| t.raw()));
    let mut clip_coef = Raw::of(clip_coef.map(|t| t.raw()));
    let mut grad_scale = Raw::of(grad_scale.map(|t| t.raw()));
    let mut found_inf = Raw::of(found_inf.map(|t| t.raw()));
    check(unsafe {
        sys::hfp_adamw_step(
            &params.raw(),
            &grads.raw(),
            &exp_avgs.raw(),
            &exp_avg_sqs.raw(),
            &max_exp_avg_sqs.raw(),
            &masters.raw(),
            &steps.raw(),
            lr_tensor.pointer(),
            clip_coef.pointer(),
            grad_scale.pointer(),
            found_inf.pointer(),
            lr,
            beta1,
            beta2,
            eps,
            weight_decay,
            maximize,
            stream.0,
        )
    })
}

/// `hfp_grad_norm`
pub fn grad_norm(
    norm: &mut TensorViewMut,
    partials: &mut TensorViewMut,
    tensors: &[TensorView],
    norm_type: i64,
    stream: Stream,
) -> Result<()> {
    let mut norm = norm.raw();
    let mut partials = partials.raw();
    let tensors = List::of(tensors);
    check(unsafe {
        sys::hfp_grad_norm(
            norm.pointer(),
            partials.pointer(),
            &tensors.raw(),
            norm_type,
            stream.0,
        )
    })
}

/// `hfp_clip_grads`
pub fn clip_grads(
    grads: &mut [TensorViewMut],
    total_norm: &TensorView,
    max_norm: f64,
    stream: Stream,
) -> Result<()> {
    let grads = List::of_mut(grads);
    let mut total_norm = total_norm.raw();
    check(unsafe {
        sys::hfp_clip_grads(
            &grads.raw(),
            total_norm.pointer(),
            max_norm,
            stream.0,
        )
    })
}

/// `hfp_scale_grads`
pub fn scale_grads(
    grads: &mut [TensorViewMut],
    factor: &TensorView,
    stream: Stream,
) -> Result<()> {
    let grads = List::of_mut(grads);
    let mut factor = factor.raw();
    check(unsafe {
        sys::hfp_scale_grads(
            &grads.raw(),
            factor.pointer(),
            stream.0,
        )
    })
}

/// `hfp_softmax`
pub fn softmax(
    out: &mut TensorViewMut,
    workspace: &mut TensorViewMut,
    x: &TensorView,
    mask: Option<&TensorView>,
    scale: f64,
    stream: Stream,
) -> Result<()> {
    let mut out = out.raw();
    let mut workspace = workspace.raw();
    let mut x = x.raw();
    let mut mask = Raw::of(mask.map(|t| t.raw()));
    check(unsafe {
        sys::hfp_softmax(
            out.pointer(),
            workspace.pointer(),
            x.pointer(),
            mask.pointer(),
            scale,
            stream.0,
        )
    })
}

/// `hfp_softmax_backward`
pub fn softmax_backward(
    dx: &mut TensorViewMut,
    workspace: &mut TensorViewMut,
    grad: &TensorView,
    y: &TensorView,
    scale: f64,
    stream: Stream,
) -> Result<()> {
    let mut dx = dx.raw();
    let mut workspace = workspace.raw();
    let mut grad = grad.raw();
    let mut y = y.raw();
    check(unsafe {
        sys::hfp_softmax_backward(
            dx.pointer(),
            workspace.pointer(),
            grad.pointer(),
            y.pointer(),
            scale,
            stream.0,
        )
    })
}

/// `hfp_argmax`
pub fn argmax(
    out: &mut TensorViewMut,
    workspace: &mut TensorViewMut,
    x: &TensorView,
    stream: Stream,
) -> Result<()> {
    let mut out = out.raw();
    let mut workspace = workspace.raw();
    let mut x = x.raw();
    check(unsafe {
        sys::hfp_argmax(
            out.pointer(),
            workspace.pointer(),
            x.pointer(),
            stream.0,
        )
    })
}

/// `hfp_topk`
pub fn topk(
    values: &mut TensorViewMut,
    indices: &mut TensorViewMut,
    x: &TensorView,
    k: i64,
    stream: Stream,
) -> Result<()> {
    let mut values = values.raw();
    let mut indices = indices.raw();
    let mut x = x.raw();
    check(unsafe {
        sys::hfp_topk(
            values.pointer(),
            indices.pointer(),
            x.pointer(),
            k,
            stream.0,
        )
    })
}

/// `hfp_sample`
pub fn sample(
    out: &mut TensorViewMut,
    logits: &TensorView,
    seeds: &TensorView,
    positions: Option<&TensorView>,
    temperatures: Option<&TensorView>,
    top_ks: Option<&TensorView>,
    top_ps: Option<&TensorView>,
    min_ps: Option<&TensorView>,
    temperature: f64,
    top_k: i64,
    top_p: f64,
    min_p: f64,
    stream: Stream,
) -> Result<()> {
    let mut out = out.raw();
    let mut logits = logits.raw();
    let mut seeds = seeds.raw();
    let mut positions = Raw::of(positions.map(|t| t.raw()));
    let mut temperatures = Raw::of(temperatures.map(|t| t.raw()));
    let mut top_ks = Raw::of(top_ks.map(|t| t.raw()));
    let mut top_ps = Raw::of(top_ps.map(|t| t.raw()));
    let mut min_ps = Raw::of(min_ps.map(|t| t.raw()));
    check(unsafe {
        sys::hfp_sample(
            out.pointer(),
            logits.pointer(),
            seeds.pointer(),
            positions.pointer(),
            temperatures.pointer(),
            top_ks.pointer(),
            top_ps.pointer(),
            min_ps.pointer(),
            temperature,
            top_k,
            top_p,
            min_p,
            stream.0,
        )
    })
}

/// `hfp_add_gelu`
pub fn add_gelu(
    out: &mut TensorViewMut,
    x: &TensorView,
    bias: &TensorView,
    approximate: i64,
    stream: Stream,
) -> Result<()> {
    let mut out = out.raw();
    let mut x = x.raw();
    let mut bias = bias.raw();
    check(unsafe {
        sys::hfp_add_gelu(
            out.pointer(),
            x.pointer(),
            bias.pointer(),
            approximate,
            stream.0,
        )
    })
}

/// `hfp_add_silu`
pub fn add_silu(
    out: &mut TensorViewMut,
    x: &TensorView,
    bias: &TensorView,
    stream: Stream,
) -> Result<()> {
    let mut out = out.raw();
    let mut x = x.raw();
    let mut bias = bias.raw();
    check(unsafe {
        sys::hfp_add_silu(
            out.pointer(),
            x.pointer(),
            bias.pointer(),
            stream.0,
        )
    })
}

/// `hfp_mul_add`
pub fn mul_add(
    out: &mut TensorViewMut,
    a: &TensorView,
    b: &TensorView,
    c: &TensorView,
    cast: i64,
    stream: Stream,
) -> Result<()> {
    let mut out = out.raw();
    let mut a = a.raw();
    let mut b = b.raw();
    let mut c = c.raw();
    check(unsafe {
        sys::hfp_mul_add(
            out.pointer(),
            a.pointer(),
            b.pointer(),
            c.pointer(),
            cast,
            stream.0,
        )
    })
}

/// `hfp_add_gelu_backward`
pub fn add_gelu_backward(
    dx: &mut TensorViewMut,
    dbias: Option<&mut TensorViewMut>,
    partials: Option<&mut TensorViewMut>,
    grad: &TensorView,
    x: &TensorView,
    bias: &TensorView,
    approximate: i64,
    needs: i64,
    stream: Stream,
) -> Result<()> {
    let mut dx = dx.raw();
    let mut dbias = Raw::of(dbias.map(|t| t.raw()));
    let mut partials = Raw::of(partials.map(|t| t.raw()));
    let mut grad = grad.raw();
    let mut x = x.raw();
    let mut bias = bias.raw();
    check(unsafe {
        sys::hfp_add_gelu_backward(
            dx.pointer(),
            dbias.pointer(),
            partials.pointer(),
            grad.pointer(),
            x.pointer(),
            bias.pointer(),
            approximate,
            needs,
            stream.0,
        )
    })
}

/// `hfp_add_silu_backward`
pub fn add_silu_backward(
    dx: &mut TensorViewMut,
    dbias: Option<&mut TensorViewMut>,
    partials: Option<&mut TensorViewMut>,
    grad: &TensorView,
    x: &TensorView,
    bias: &TensorView,
    needs: i64,
    stream: Stream,
) -> Result<()> {
    let mut dx = dx.raw();
    let mut dbias = Raw::of(dbias.map(|t| t.raw()));
    let mut partials = Raw::of(partials.map(|t| t.raw()));
    let mut grad = grad.raw();
    let mut x = x.raw();
    let mut bias = bias.raw();
    check(unsafe {
        sys::hfp_add_silu_backward(
            dx.pointer(),
            dbias.pointer(),
            partials.pointer(),
            grad.pointer(),
            x.pointer(),
            bias.pointer(),
            needs,
            stream.0,
        )
    })
}

/// `hfp_mul_add_backward`
pub fn mul_add_backward(
    da: &mut TensorViewMut,
    db: Option<&mut TensorViewMut>,
    dc: Option<&mut TensorViewMut>,
    partials: Option<&mut TensorViewMut>,
    grad: &TensorView,
    a: &TensorView,
    b: &TensorView,
    cast: i64,
    needs: i64,
    stream: Stream,
) -> Result<()> {
    let mut da = da.raw();
    let mut db = Raw::of(db.map(|t| t.raw()));
    let mut dc = Raw::of(dc.map(|t| t.raw()));
    let mut partials = Raw::of(partials.map(|t| t.raw()));
    let mut grad = grad.raw();
    let mut a = a.raw();
    let mut b = b.raw();
    check(unsafe {
        sys::hfp_mul_add_backward(
            da.pointer(),
            db.pointer(),
            dc.pointer(),
            partials.pointer(),
            grad.pointer(),
            a.pointer(),
            b.pointer(),
            cast,
            needs,
            stream.0,
        )
    })
}

/// `hfp_add`
pub fn add(
    out: &mut TensorViewMut,
    a: &TensorView,
    b: &TensorView,
    alpha: f64,
    stream: Stream,
) -> Result<()> {
    let mut out = out.raw();
    let mut a = a.raw();
    let mut b = b.raw();
    check(unsafe {
        sys::hfp_add(
            out.pointer(),
            a.pointer(),
            b.pointer(),
            alpha,
            stream.0,
        )
    })
}

/// `hfp_mul`
pub fn mul(
    out: &mut TensorViewMut,
    a: &TensorView,
    b: &TensorView,
    stream: Stream,
) -> Result<()> {
    let mut out = out.raw();
    let mut a = a.raw();
    let mut b = b.raw();
    check(unsafe {
        sys::hfp_mul(
            out.pointer(),
            a.pointer(),
            b.pointer(),
            stream.0,
        )
    })
}

/// `hfp_scale`
pub fn scale(
    out: &mut TensorViewMut,
    x: &TensorView,
    factor: f64,
    stream: Stream,
) -> Result<()> {
    let mut out = out.raw();
    let mut x = x.raw();
    check(unsafe {
        sys::hfp_scale(
            out.pointer(),
            x.pointer(),
            factor,
            stream.0,
        )
    })
}

/// `hfp_gemm`
pub fn gemm(
    out: &mut TensorViewMut,
    workspace: &mut TensorViewMut,
    a: &TensorView,
    b: &TensorView,
    c: Option<&TensorView>,
    alpha: f64,
    beta: f64,
    transpose_a: i64,
    transpose_b: i64,
    stream: Stream,
) -> Result<()> {
    let mut out = out.raw();
    let mut workspace = workspace.raw();
    let mut a = a.raw();
    let mut b = b.raw();
    let mut c = Raw::of(c.map(|t| t.raw()));
    check(unsafe {
        sys::hfp_gemm(
            out.pointer(),
            workspace.pointer(),
            a.pointer(),
            b.pointer(),
            c.pointer(),
            alpha,
            beta,
            transpose_a,
            transpose_b,
            stream.0,
        )
    })
}

/// `hfp_gemm_batched`
pub fn gemm_batched(
    out: &mut TensorViewMut,
    workspace: &mut TensorViewMut,
    a: &TensorView,
    b: &TensorView,
    c: Option<&TensorView>,
    alpha: f64,
    beta: f64,
    transpose_a: i64,
    transpose_b: i64,
    stream: Stream,
) -> Result<()> {
    let mut out = out.raw();
    let mut workspace = workspace.raw();
    let mut a = a.raw();
    let mut b = b.raw();
    let mut c = Raw::of(c.map(|t| t.raw()));
    check(unsafe {
        sys::hfp_gemm_batched(
            out.pointer(),
            workspace.pointer(),
            a.pointer(),
            b.pointer(),
            c.pointer(),
            alpha,
            beta,
            transpose_a,
            transpose_b,
            stream.0,
        )
    })
}

/// `hfp_attention`
pub fn attention(
    out: &mut TensorViewMut,
    lse: &mut TensorViewMut,
    q: &TensorView,
    k: &TensorView,
    v: &TensorView,
    mask: Option<&TensorView>,
    q_starts: Option<&TensorView>,
    k_starts: Option<&TensorView>,
    k_lengths: Option<&TensorView>,
    scale: f64,
    causal: i64,
    most_queries: i64,
    window: i64,
    softcap: f64,
    stream: Stream,
) -> Result<()> {
    let mut out = out.raw();
    let mut lse = lse.raw();
    let mut q = q.raw();
    let mut k = k.raw();
    let mut v = v.raw();
    let mut mask = Raw::of(mask.map(|t| t.raw()));
    let mut q_starts = Raw::of(q_starts.map(|t| t.raw()));
    let mut k_starts = Raw::of(k_starts.map(|t| t.raw()));
    let mut k_lengths = Raw::of(k_lengths.map(|t| t.raw()));
    check(unsafe {
        sys::hfp_attention(
            out.pointer(),
            lse.pointer(),
            q.pointer(),
            k.pointer(),
            v.pointer(),
            mask.pointer(),
            q_starts.pointer(),
            k_starts.pointer(),
            k_lengths.pointer(),
            scale,
            causal,
            most_queries,
            window,
            softcap,
            stream.0,
        )
    })
}

/// `hfp_cross_entropy_log_probs`
pub fn cross_entropy_log_probs(
    loss: &mut TensorViewMut,
    lse: &mut TensorViewMut,
    log_probs: &mut TensorViewMut,
    logits: &TensorView,
    target: &TensorView,
    ignore_index: i64,
    label_smoothing: f64,
    softcap: f64,
    stream: Stream,
) -> Result<()> {
    let mut loss = loss.raw();
    let mut lse = lse.raw();
    let mut log_probs = log_probs.raw();
    let mut logits = logits.raw();
    let mut target = target.raw();
    check(unsafe {
        sys::hfp_cross_entropy_log_probs(
            loss.pointer(),
            lse.pointer(),
            log_probs.pointer(),
            logits.pointer(),
            target.pointer(),
            ignore_index,
            label_smoothing,
            softcap,
            stream.0,
        )
    })
}

/// `hfp_load_balancing_loss`
pub fn load_balancing_loss(
    loss: &mut TensorViewMut,
    stats: &mut TensorViewMut,
    partials: &mut TensorViewMut,
    logits: &TensorView,
    mask: Option<&TensorView>,
    k: i64,
    stream: Stream,
) -> Result<()> {
    let mut loss = loss.raw();
    let mut stats = stats.raw();
    let mut partials = partials.raw();
    let mut logits = logits.raw();
    let mut mask = Raw::of(mask.map(|t| t.raw()));
    check(unsafe {
        sys::hfp_load_balancing_loss(
            loss.pointer(),
            stats.pointer(),
            partials.pointer(),
            logits.pointer(),
            mask.pointer(),
            k,
            stream.0,
        )
    })
}

/// `hfp_load_balancing_loss_backward`
pub fn load_balancing_loss_backward(
    dlogits: &mut TensorViewMut,
    grad: &TensorView,
    logits: &TensorView,
    stats: &TensorView,
    mask: Option<&TensorView>,
    stream: Stream,
) -> Result<()> {
    let mut dlogits = dlogits.raw();
    let mut grad = grad.raw();
    let mut logits = logits.raw();
    let mut stats = stats.raw();
    let mut mask = Raw::of(mask.map(|t| t.raw()));
    check(unsafe {
        sys::hfp_load_balancing_loss_backward(
            dlogits.pointer(),
            grad.pointer(),
            logits.pointer(),
            stats.pointer(),
            mask.pointer(),
            stream.0,
        )
    })
}

/// `hfp_decode_step`
///
/// # Safety
/// The addresses that its tensors hold must lead to the memory that docs/c-api.md asks for.
pub unsafe fn decode_step(
    logits: Option<&mut TensorViewMut>,
    hidden: Option<&mut TensorViewMut>,
    workspace: &mut TensorViewMut,
    model: &[TensorView],
    cache: &TensorView,
    ids: Option<&TensorView>,
    embeds: Option<&TensorView>,
    positions: &TensorView,
    mask: Option<&TensorView>,
    most_keys: i64,
    threads: i64,
    stream: Stream,
) -> Result<()> {
    let mut logits = Raw::of(logits.map(|t| t.raw()));
    let mut hidden = Raw::of(hidden.map(|t| t.raw()));
    let mut workspace = workspace.raw();
    let model = List::of(model);
    let mut cache = cache.raw();
    let mut ids = Raw::of(ids.map(|t| t.raw()));
    let mut embeds = Raw::of(embeds.map(|t| t.raw()));
    let mut positions = positions.raw();
    let mut mask = Raw::of(mask.map(|t| t.raw()));
    check(unsafe {
        sys::hfp_decode_step(
            logits.pointer(),
            hidden.pointer(),
            workspace.pointer(),
            &model.raw(),
            cache.pointer(),
            ids.pointer(),
            embeds.pointer(),
            positions.pointer(),
            mask.pointer(),
            most_keys,
            threads,
            stream.0,
        )
    })
}

/// `hfp_decode_choose`
///
/// # Safety
/// The addresses that its tensors hold must lead to the memory that docs/c-api.md asks for.
pub unsafe fn decode_choose(
    ids: &mut TensorViewMut,
    counters: Option<&mut TensorViewMut>,
    text: &mut TensorViewMut,
    workspace: &mut TensorViewMut,
    logits: &TensorView,
    ends: Option<&TensorView>,
    pad: i64,
    stream: Stream,
) -> Result<()> {
    let mut ids = ids.raw();
    let mut counters = Raw::of(counters.map(|t| t.raw()));
    let mut text = text.raw();
    let mut workspace = workspace.raw();
    let mut logits = logits.raw();
    let mut ends = Raw::of(ends.map(|t| t.raw()));
    check(unsafe {
        sys::hfp_decode_choose(
            ids.pointer(),
            counters.pointer(),
            text.pointer(),
            workspace.pointer(),
            logits.pointer(),
            ends.pointer(),
            pad,
            stream.0,
        )
    })
}

/// `hfp_group_parts`
pub fn group_parts(
    channels: i64,
    positions: i64,
    groups: i64,
    channels_last: i64,
) -> Result<i64> {
    size(unsafe {
        sys::hfp_group_parts(
            channels,
            positions,
            groups,
            channels_last,
        )
    })
}

/// `hfp_partial_rows`
pub fn partial_rows(
    rows: i64,
    cols: i64,
) -> Result<i64> {
    size(unsafe {
        sys::hfp_partial_rows(
            rows,
            cols,
        )
    })
}

/// `hfp_norm_partials`
pub fn norm_partials(
    tensors: &[TensorView],
) -> Result<i64> {
    let tensors = List::of(tensors);
    size(unsafe {
        sys::hfp_norm_partials(
            &tensors.raw(),
        )
    })
}

/// `hfp_row_workspace`
pub fn row_workspace(
    rows: i64,
    cols: i64,
) -> Result<i64> {
    size(unsafe {
        sys::hfp_row_workspace(
            rows,
            cols,
        )
    })
}

/// `hfp_sum_partial_rows`
pub fn sum_partial_rows(
    rows: i64,
    cols: i64,
    sums: i64,
) -> Result<i64> {
    size(unsafe {
        sys::hfp_sum_partial_rows(
            rows,
            cols,
            sums,
        )
    })
}

/// `hfp_gemm_backend`
pub fn gemm_backend(
    device_type: i64,
) -> Result<i64> {
    size(unsafe {
        sys::hfp_gemm_backend(
            device_type,
        )
    })
}

/// `hfp_gemm_workspace`
pub fn gemm_workspace(
    batch: i64,
    m: i64,
    n: i64,
    k: i64,
    device_type: i64,
) -> Result<i64> {
    size(unsafe {
        sys::hfp_gemm_workspace(
            batch,
            m,
            n,
            k,
            device_type,
        )
    })
}

/// `hfp_balance_parts`
pub fn balance_parts(
    tokens: i64,
) -> Result<i64> {
    size(unsafe {
        sys::hfp_balance_parts(
            tokens,
        )
    })
}

/// `hfp_decode_workspace`
pub fn decode_workspace(
    model: &[TensorView],
    rows: i64,
    tokens: i64,
    threads: i64,
) -> Result<i64> {
    let model = List::of(model);
    size(unsafe {
        sys::hfp_decode_workspace(
            &model.raw(),
            rows,
            tokens,
            threads,
        )
    })
}
