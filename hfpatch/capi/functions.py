"""The functions of hfpatch.h as methods.

Written by `python bindings/generate` from kernel_src/hfpatch.h; do not edit.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .library import Caller


class Library(Caller):
    """libhfpatch: a method for each function `hfp_NAME`, its arguments in C's order.

    Tensors are any framework's, by `__dlpack__` or NumPy's array interface; results are
    written to the first ones. `stream` is the address of a CUDA stream; ignored on the
    CPU. A call that fails raises `HfpatchError`.
    """

    def rms_norm(
        self,
        out: Any,
        x: Any,
        weight: Any,
        bias: Any,
        eps: float,
        weight_offset: float,
        cast: int,
        stream: int | None = None,
    ) -> None:
        """`hfp_rms_norm` of docs/c-api.md.

        May be None: `weight`, `bias`.
        """
        self.call(
            "hfp_rms_norm",
            out,
            x,
            weight,
            bias,
            eps,
            weight_offset,
            cast,
            stream,
        )

    def layer_norm(
        self,
        out: Any,
        x: Any,
        weight: Any,
        bias: Any,
        eps: float,
        stream: int | None = None,
    ) -> None:
        """`hfp_layer_norm` of docs/c-api.md.

        May be None: `weight`, `bias`.
        """
        self.call(
            "hfp_layer_norm",
            out,
            x,
            weight,
            bias,
            eps,
            stream,
        )

    def gelu(
        self,
        out: Any,
        x: Any,
        approximate: int,
        stream: int | None = None,
    ) -> None:
        """`hfp_gelu` of docs/c-api.md."""
        self.call(
            "hfp_gelu",
            out,
            x,
            approximate,
            stream,
        )

    def silu(
        self,
        out: Any,
        x: Any,
        stream: int | None = None,
    ) -> None:
        """`hfp_silu` of docs/c-api.md."""
        self.call(
            "hfp_silu",
            out,
            x,
            stream,
        )

    def gated(
        self,
        out: Any,
        gate: Any,
        up: Any,
        activation: int,
        stream: int | None = None,
    ) -> None:
        """`hfp_gated` of docs/c-api.md."""
        self.call(
            "hfp_gated",
            out,
            gate,
            up,
            activation,
            stream,
        )

    def gated_packed(
        self,
        out: Any,
        x: Any,
        activation: int,
        gate_first: int,
        stream: int | None = None,
    ) -> None:
        """`hfp_gated_packed` of docs/c-api.md."""
        self.call(
            "hfp_gated_packed",
            out,
            x,
            activation,
            gate_first,
            stream,
        )

    def gated_clamped(
        self,
        out: Any,
        gate: Any,
        up: Any,
        activation: int,
        alpha: float,
        gate_min: float,
        gate_max: float,
        up_min: float,
        up_max: float,
        up_offset: float,
        clamp_activated: int,
        stream: int | None = None,
    ) -> None:
        """`hfp_gated_clamped` of docs/c-api.md."""
        self.call(
            "hfp_gated_clamped",
            out,
            gate,
            up,
            activation,
            alpha,
            gate_min,
            gate_max,
            up_min,
            up_max,
            up_offset,
            clamp_activated,
            stream,
        )

    def norm_modulate(
        self,
        out: Any,
        x: Any,
        scale: Any,
        shift: Any,
        weight: Any,
        bias: Any,
        eps: float,
        norm_type: int,
        cast: int,
        stream: int | None = None,
    ) -> None:
        """`hfp_norm_modulate` of docs/c-api.md.

        May be None: `weight`, `bias`.
        """
        self.call(
            "hfp_norm_modulate",
            out,
            x,
            scale,
            shift,
            weight,
            bias,
            eps,
            norm_type,
            cast,
            stream,
        )

    def gate_residual(
        self,
        out: Any,
        residual: Any,
        gate: Any,
        x: Any,
        cast: int,
        stream: int | None = None,
    ) -> None:
        """`hfp_gate_residual` of docs/c-api.md."""
        self.call(
            "hfp_gate_residual",
            out,
            residual,
            gate,
            x,
            cast,
            stream,
        )

    def gate_residual_norm_modulate(
        self,
        sum: Any,
        out: Any,
        residual: Any,
        gate: Any,
        x: Any,
        scale: Any,
        shift: Any,
        weight: Any,
        bias: Any,
        eps: float,
        norm_type: int,
        cast: int,
        stream: int | None = None,
    ) -> None:
        """`hfp_gate_residual_norm_modulate` of docs/c-api.md.

        May be None: `weight`, `bias`.
        """
        self.call(
            "hfp_gate_residual_norm_modulate",
            sum,
            out,
            residual,
            gate,
            x,
            scale,
            shift,
            weight,
            bias,
            eps,
            norm_type,
            cast,
            stream,
        )

    def add_rms_norm(
        self,
        out: Any,
        sum: Any,
        x: Any,
        residual: Any,
        weight: Any,
        bias: Any,
        eps: float,
        weight_offset: float,
        cast: int,
        stream: int | None = None,
    ) -> None:
        """`hfp_add_rms_norm` of docs/c-api.md.

        May be None: `weight`, `bias`.
        """
        self.call(
            "hfp_add_rms_norm",
            out,
            sum,
            x,
            residual,
            weight,
            bias,
            eps,
            weight_offset,
            cast,
            stream,
        )

    def add_layer_norm(
        self,
        out: Any,
        sum: Any,
        x: Any,
        residual: Any,
        weight: Any,
        bias: Any,
        eps: float,
        stream: int | None = None,
    ) -> None:
        """`hfp_add_layer_norm` of docs/c-api.md.

        May be None: `weight`, `bias`.
        """
        self.call(
            "hfp_add_layer_norm",
            out,
            sum,
            x,
            residual,
            weight,
            bias,
            eps,
            stream,
        )

    def rope(
        self,
        out: Any,
        x: Any,
        cos: Any,
        sin: Any,
        seq_dim: int,
        interleaved: int,
        rotary_dim: int,
        round_products: int,
        stream: int | None = None,
    ) -> None:
        """`hfp_rope` of docs/c-api.md.

        May be None: `sin`.
        """
        self.call(
            "hfp_rope",
            out,
            x,
            cos,
            sin,
            seq_dim,
            interleaved,
            rotary_dim,
            round_products,
            stream,
        )

    def rope_qk(
        self,
        q_out: Any,
        k_out: Any,
        q: Any,
        k: Any,
        cos: Any,
        sin: Any,
        seq_dim: int,
        interleaved: int,
        rotary_dim: int,
        round_products: int,
        stream: int | None = None,
    ) -> None:
        """`hfp_rope_qk` of docs/c-api.md.

        May be None: `sin`.
        """
        self.call(
            "hfp_rope_qk",
            q_out,
            k_out,
            q,
            k,
            cos,
            sin,
            seq_dim,
            interleaved,
            rotary_dim,
            round_products,
            stream,
        )

    def qk_norm_rope(
        self,
        q_out: Any,
        k_out: Any,
        q: Any,
        k: Any,
        q_weight: Any,
        k_weight: Any,
        cos: Any,
        sin: Any,
        eps: float,
        weight_offset: float,
        cast: int,
        norm_across_heads: int,
        seq_dim: int,
        interleaved: int,
        rotary_dim: int,
        round_products: int,
        stream: int | None = None,
    ) -> None:
        """`hfp_qk_norm_rope` of docs/c-api.md.

        May be None: `q_weight`, `k_weight`, `cos`, `sin`.
        """
        self.call(
            "hfp_qk_norm_rope",
            q_out,
            k_out,
            q,
            k,
            q_weight,
            k_weight,
            cos,
            sin,
            eps,
            weight_offset,
            cast,
            norm_across_heads,
            seq_dim,
            interleaved,
            rotary_dim,
            round_products,
            stream,
        )

    def gated_rms_norm(
        self,
        out: Any,
        x: Any,
        gate: Any,
        weight: Any,
        eps: float,
        group_size: int,
        norm_before_gate: int,
        cast: int,
        gate_activation: int,
        stream: int | None = None,
    ) -> None:
        """`hfp_gated_rms_norm` of docs/c-api.md.

        May be None: `gate`, `weight`.
        """
        self.call(
            "hfp_gated_rms_norm",
            out,
            x,
            gate,
            weight,
            eps,
            group_size,
            norm_before_gate,
            cast,
            gate_activation,
            stream,
        )

    def rms_norm_silu(
        self,
        out: Any,
        x: Any,
        addend: Any,
        weight: Any,
        scale: Any,
        shift: Any,
        eps: float,
        stream: int | None = None,
    ) -> None:
        """`hfp_rms_norm_silu` of docs/c-api.md.

        May be None: `addend`, `weight`, `scale`, `shift`.
        """
        self.call(
            "hfp_rms_norm_silu",
            out,
            x,
            addend,
            weight,
            scale,
            shift,
            eps,
            stream,
        )

    def add_bias(
        self,
        out: Any,
        x: Any,
        bias: Any,
        residual: Any,
        stream: int | None = None,
    ) -> None:
        """`hfp_add_bias` of docs/c-api.md.

        May be None: `residual`.
        """
        self.call(
            "hfp_add_bias",
            out,
            x,
            bias,
            residual,
            stream,
        )

    def group_norm(
        self,
        out: Any,
        stats: Any,
        x: Any,
        weight: Any,
        bias: Any,
        groups: int,
        eps: float,
        silu: int,
        channels_last: int,
        stream: int | None = None,
    ) -> None:
        """`hfp_group_norm` of docs/c-api.md.

        May be None: `weight`, `bias`.
        """
        self.call(
            "hfp_group_norm",
            out,
            stats,
            x,
            weight,
            bias,
            groups,
            eps,
            silu,
            channels_last,
            stream,
        )

    def rms_norm_backward(
        self,
        dx: Any,
        dweight: Any,
        dbias: Any,
        partials: Any,
        grad: Any,
        x: Any,
        weight: Any,
        bias: Any,
        eps: float,
        weight_offset: float,
        cast: int,
        needs: int,
        stream: int | None = None,
    ) -> None:
        """`hfp_rms_norm_backward` of docs/c-api.md.

        May be None: `weight`, `bias`.
        """
        self.call(
            "hfp_rms_norm_backward",
            dx,
            dweight,
            dbias,
            partials,
            grad,
            x,
            weight,
            bias,
            eps,
            weight_offset,
            cast,
            needs,
            stream,
        )

    def layer_norm_backward(
        self,
        dx: Any,
        dweight: Any,
        dbias: Any,
        partials: Any,
        grad: Any,
        x: Any,
        weight: Any,
        bias: Any,
        eps: float,
        needs: int,
        stream: int | None = None,
    ) -> None:
        """`hfp_layer_norm_backward` of docs/c-api.md.

        May be None: `weight`, `bias`.
        """
        self.call(
            "hfp_layer_norm_backward",
            dx,
            dweight,
            dbias,
            partials,
            grad,
            x,
            weight,
            bias,
            eps,
            needs,
            stream,
        )

    def gelu_backward(
        self,
        dx: Any,
        grad: Any,
        x: Any,
        approximate: int,
        stream: int | None = None,
    ) -> None:
        """`hfp_gelu_backward` of docs/c-api.md."""
        self.call(
            "hfp_gelu_backward",
            dx,
            grad,
            x,
            approximate,
            stream,
        )

    def silu_backward(
        self,
        dx: Any,
        grad: Any,
        x: Any,
        stream: int | None = None,
    ) -> None:
        """`hfp_silu_backward` of docs/c-api.md."""
        self.call(
            "hfp_silu_backward",
            dx,
            grad,
            x,
            stream,
        )

    def gated_backward(
        self,
        dgate: Any,
        dup: Any,
        grad: Any,
        gate: Any,
        up: Any,
        activation: int,
        stream: int | None = None,
    ) -> None:
        """`hfp_gated_backward` of docs/c-api.md."""
        self.call(
            "hfp_gated_backward",
            dgate,
            dup,
            grad,
            gate,
            up,
            activation,
            stream,
        )

    def gated_packed_backward(
        self,
        dx: Any,
        grad: Any,
        x: Any,
        activation: int,
        gate_first: int,
        stream: int | None = None,
    ) -> None:
        """`hfp_gated_packed_backward` of docs/c-api.md."""
        self.call(
            "hfp_gated_packed_backward",
            dx,
            grad,
            x,
            activation,
            gate_first,
            stream,
        )

    def cross_entropy(
        self,
        loss: Any,
        lse: Any,
        logits: Any,
        target: Any,
        ignore_index: int,
        label_smoothing: float,
        softcap: float,
        stream: int | None = None,
    ) -> None:
        """`hfp_cross_entropy` of docs/c-api.md."""
        self.call(
            "hfp_cross_entropy",
            loss,
            lse,
            logits,
            target,
            ignore_index,
            label_smoothing,
            softcap,
            stream,
        )

    def cross_entropy_backward(
        self,
        dlogits: Any,
        grad: Any,
        logits: Any,
        target: Any,
        lse: Any,
        ignore_index: int,
        label_smoothing: float,
        softcap: float,
        stream: int | None = None,
    ) -> None:
        """`hfp_cross_entropy_backward` of docs/c-api.md."""
        self.call(
            "hfp_cross_entropy_backward",
            dlogits,
            grad,
            logits,
            target,
            lse,
            ignore_index,
            label_smoothing,
            softcap,
            stream,
        )

    def cross_entropy_with_gradient(
        self,
        total: Any,
        loss: Any,
        lse: Any,
        dlogits: Any,
        logits: Any,
        target: Any,
        divisor_tensor: Any,
        divisor: float,
        ignore_index: int,
        label_smoothing: float,
        softcap: float,
        stream: int | None = None,
    ) -> None:
        """`hfp_cross_entropy_with_gradient` of docs/c-api.md.

        May be None: `divisor_tensor`.
        """
        self.call(
            "hfp_cross_entropy_with_gradient",
            total,
            loss,
            lse,
            dlogits,
            logits,
            target,
            divisor_tensor,
            divisor,
            ignore_index,
            label_smoothing,
            softcap,
            stream,
        )

    def adamw_step(
        self,
        params: Iterable[Any] | None,
        grads: Iterable[Any] | None,
        exp_avgs: Iterable[Any] | None,
        exp_avg_sqs: Iterable[Any] | None,
        max_exp_avg_sqs: Iterable[Any] | None,
        masters: Iterable[Any] | None,
        steps: Iterable[Any] | None,
        lr_tensor: Any,
        clip_coef: Any,
        grad_scale: Any,
        found_inf: Any,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        maximize: int,
        stream: int | None = None,
    ) -> None:
        """`hfp_adamw_step` of docs/c-api.md.

        May be None: `lr_tensor`, `clip_coef`, `grad_scale`, `found_inf`.
        """
        self.call(
            "hfp_adamw_step",
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            max_exp_avg_sqs,
            masters,
            steps,
            lr_tensor,
            clip_coef,
            grad_scale,
            found_inf,
            lr,
            beta1,
            beta2,
            eps,
            weight_decay,
            maximize,
            stream,
        )

    def grad_norm(
        self,
        norm: Any,
        partials: Any,
        tensors: Iterable[Any] | None,
        norm_type: int,
        stream: int | None = None,
    ) -> None:
        """`hfp_grad_norm` of docs/c-api.md."""
        self.call(
            "hfp_grad_norm",
            norm,
            partials,
            tensors,
            norm_type,
            stream,
        )

    def clip_grads(
        self,
        grads: Iterable[Any] | None,
        total_norm: Any,
        max_norm: float,
        stream: int | None = None,
    ) -> None:
        """`hfp_clip_grads` of docs/c-api.md."""
        self.call(
            "hfp_clip_grads",
            grads,
            total_norm,
            max_norm,
            stream,
        )

    def scale_grads(
        self,
        grads: Iterable[Any] | None,
        factor: Any,
        stream: int | None = None,
    ) -> None:
        """`hfp_scale_grads` of docs/c-api.md."""
        self.call(
            "hfp_scale_grads",
            grads,
            factor,
            stream,
        )

    def softmax(
        self,
        out: Any,
        workspace: Any,
        x: Any,
        mask: Any,
        scale: float,
        stream: int | None = None,
    ) -> None:
        """`hfp_softmax` of docs/c-api.md.

        May be None: `mask`.
        """
        self.call(
            "hfp_softmax",
            out,
            workspace,
            x,
            mask,
            scale,
            stream,
        )

    def softmax_backward(
        self,
        dx: Any,
        workspace: Any,
        grad: Any,
        y: Any,
        scale: float,
        stream: int | None = None,
    ) -> None:
        """`hfp_softmax_backward` of docs/c-api.md."""
        self.call(
            "hfp_softmax_backward",
            dx,
            workspace,
            grad,
            y,
            scale,
            stream,
        )

    def argmax(
        self,
        out: Any,
        workspace: Any,
        x: Any,
        stream: int | None = None,
    ) -> None:
        """`hfp_argmax` of docs/c-api.md."""
        self.call(
            "hfp_argmax",
            out,
            workspace,
            x,
            stream,
        )

    def topk(
        self,
        values: Any,
        indices: Any,
        x: Any,
        k: int,
        stream: int | None = None,
    ) -> None:
        """`hfp_topk` of docs/c-api.md."""
        self.call(
            "hfp_topk",
            values,
            indices,
            x,
            k,
            stream,
        )

    def sample(
        self,
        out: Any,
        logits: Any,
        seeds: Any,
        positions: Any,
        temperatures: Any,
        top_ks: Any,
        top_ps: Any,
        min_ps: Any,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        stream: int | None = None,
    ) -> None:
        """`hfp_sample` of docs/c-api.md.

        May be None: `positions`, `temperatures`, `top_ks`, `top_ps`, `min_ps`.
        """
        self.call(
            "hfp_sample",
            out,
            logits,
            seeds,
            positions,
            temperatures,
            top_ks,
            top_ps,
            min_ps,
            temperature,
            top_k,
            top_p,
            min_p,
            stream,
        )

    def add_gelu(
        self,
        out: Any,
        x: Any,
        bias: Any,
        approximate: int,
        stream: int | None = None,
    ) -> None:
        """`hfp_add_gelu` of docs/c-api.md."""
        self.call(
            "hfp_add_gelu",
            out,
            x,
            bias,
            approximate,
            stream,
        )

    def add_silu(
        self,
        out: Any,
        x: Any,
        bias: Any,
        stream: int | None = None,
    ) -> None:
        """`hfp_add_silu` of docs/c-api.md."""
        self.call(
            "hfp_add_silu",
            out,
            x,
            bias,
            stream,
        )

    def mul_add(
        self,
        out: Any,
        a: Any,
        b: Any,
        c: Any,
        cast: int,
        stream: int | None = None,
    ) -> None:
        """`hfp_mul_add` of docs/c-api.md."""
        self.call(
            "hfp_mul_add",
            out,
            a,
            b,
            c,
            cast,
            stream,
        )

    def add_gelu_backward(
        self,
        dx: Any,
        dbias: Any,
        partials: Any,
        grad: Any,
        x: Any,
        bias: Any,
        approximate: int,
        needs: int,
        stream: int | None = None,
    ) -> None:
        """`hfp_add_gelu_backward` of docs/c-api.md."""
        self.call(
            "hfp_add_gelu_backward",
            dx,
            dbias,
            partials,
            grad,
            x,
            bias,
            approximate,
            needs,
            stream,
        )

    def add_silu_backward(
        self,
        dx: Any,
        dbias: Any,
        partials: Any,
        grad: Any,
        x: Any,
        bias: Any,
        needs: int,
        stream: int | None = None,
    ) -> None:
        """`hfp_add_silu_backward` of docs/c-api.md."""
        self.call(
            "hfp_add_silu_backward",
            dx,
            dbias,
            partials,
            grad,
            x,
            bias,
            needs,
            stream,
        )

    def mul_add_backward(
        self,
        da: Any,
        db: Any,
        dc: Any,
        partials: Any,
        grad: Any,
        a: Any,
        b: Any,
        cast: int,
        needs: int,
        stream: int | None = None,
    ) -> None:
        """`hfp_mul_add_backward` of docs/c-api.md."""
        self.call(
            "hfp_mul_add_backward",
            da,
            db,
            dc,
            partials,
            grad,
            a,
            b,
            cast,
            needs,
            stream,
        )

    def add(
        self,
        out: Any,
        a: Any,
        b: Any,
        alpha: float,
        stream: int | None = None,
    ) -> None:
        """`hfp_add` of docs/c-api.md."""
        self.call(
            "hfp_add",
            out,
            a,
            b,
            alpha,
            stream,
        )

    def mul(
        self,
        out: Any,
        a: Any,
        b: Any,
        stream: int | None = None,
    ) -> None:
        """`hfp_mul` of docs/c-api.md."""
        self.call(
            "hfp_mul",
            out,
            a,
            b,
            stream,
        )

    def scale(
        self,
        out: Any,
        x: Any,
        factor: float,
        stream: int | None = None,
    ) -> None:
        """`hfp_scale` of docs/c-api.md."""
        self.call(
            "hfp_scale",
            out,
            x,
            factor,
            stream,
        )

    def gemm(
        self,
        out: Any,
        workspace: Any,
        a: Any,
        b: Any,
        c: Any,
        alpha: float,
        beta: float,
        transpose_a: int,
        transpose_b: int,
        stream: int | None = None,
    ) -> None:
        """`hfp_gemm` of docs/c-api.md.

        May be None: `c`.
        """
        self.call(
            "hfp_gemm",
            out,
            workspace,
            a,
            b,
            c,
            alpha,
            beta,
            transpose_a,
            transpose_b,
            stream,
        )

    def gemm_batched(
        self,
        out: Any,
        workspace: Any,
        a: Any,
        b: Any,
        c: Any,
        alpha: float,
        beta: float,
        transpose_a: int,
        transpose_b: int,
        stream: int | None = None,
    ) -> None:
        """`hfp_gemm_batched` of docs/c-api.md.

        May be None: `c`.
        """
        self.call(
            "hfp_gemm_batched",
            out,
            workspace,
            a,
            b,
            c,
            alpha,
            beta,
            transpose_a,
            transpose_b,
            stream,
        )

    def attention(
        self,
        out: Any,
        lse: Any,
        q: Any,
        k: Any,
        v: Any,
        mask: Any,
        q_starts: Any,
        k_starts: Any,
        k_lengths: Any,
        scale: float,
        causal: int,
        most_queries: int,
        window: int,
        softcap: float,
        stream: int | None = None,
    ) -> None:
        """`hfp_attention` of docs/c-api.md.

        May be None: `mask`, `q_starts`, `k_starts`, `k_lengths`.
        """
        self.call(
            "hfp_attention",
            out,
            lse,
            q,
            k,
            v,
            mask,
            q_starts,
            k_starts,
            k_lengths,
            scale,
            causal,
            most_queries,
            window,
            softcap,
            stream,
        )

    def cross_entropy_log_probs(
        self,
        loss: Any,
        lse: Any,
        log_probs: Any,
        logits: Any,
        target: Any,
        ignore_index: int,
        label_smoothing: float,
        softcap: float,
        stream: int | None = None,
    ) -> None:
        """`hfp_cross_entropy_log_probs` of docs/c-api.md."""
        self.call(
            "hfp_cross_entropy_log_probs",
            loss,
            lse,
            log_probs,
            logits,
            target,
            ignore_index,
            label_smoothing,
            softcap,
            stream,
        )

    def load_balancing_loss(
        self,
        loss: Any,
        stats: Any,
        partials: Any,
        logits: Any,
        mask: Any,
        k: int,
        stream: int | None = None,
    ) -> None:
        """`hfp_load_balancing_loss` of docs/c-api.md.

        May be None: `mask`.
        """
        self.call(
            "hfp_load_balancing_loss",
            loss,
            stats,
            partials,
            logits,
            mask,
            k,
            stream,
        )

    def load_balancing_loss_backward(
        self,
        dlogits: Any,
        grad: Any,
        logits: Any,
        stats: Any,
        mask: Any,
        stream: int | None = None,
    ) -> None:
        """`hfp_load_balancing_loss_backward` of docs/c-api.md.

        May be None: `mask`.
        """
        self.call(
            "hfp_load_balancing_loss_backward",
            dlogits,
            grad,
            logits,
            stats,
            mask,
            stream,
        )

    def decode_step(
        self,
        logits: Any,
        hidden: Any,
        workspace: Any,
        model: Iterable[Any] | None,
        cache: Any,
        ids: Any,
        embeds: Any,
        positions: Any,
        mask: Any,
        most_keys: int,
        threads: int,
        stream: int | None = None,
    ) -> None:
        """`hfp_decode_step` of docs/c-api.md.

        May be None: `logits`, `hidden`, `ids`, `embeds`, `mask`.
        """
        self.call(
            "hfp_decode_step",
            logits,
            hidden,
            workspace,
            model,
            cache,
            ids,
            embeds,
            positions,
            mask,
            most_keys,
            threads,
            stream,
        )

    def decode_choose(
        self,
        ids: Any,
        counters: Any,
        text: Any,
        workspace: Any,
        logits: Any,
        ends: Any,
        pad: int,
        stream: int | None = None,
    ) -> None:
        """`hfp_decode_choose` of docs/c-api.md.

        May be None: `counters`, `ends`.
        """
        self.call(
            "hfp_decode_choose",
            ids,
            counters,
            text,
            workspace,
            logits,
            ends,
            pad,
            stream,
        )

    def group_parts(
        self,
        channels: int,
        positions: int,
        groups: int,
        channels_last: int,
    ) -> int:
        """`hfp_group_parts` of docs/c-api.md."""
        return self.size(
            "hfp_group_parts",
            channels,
            positions,
            groups,
            channels_last,
        )

    def partial_rows(
        self,
        rows: int,
        cols: int,
    ) -> int:
        """`hfp_partial_rows` of docs/c-api.md."""
        return self.size(
            "hfp_partial_rows",
            rows,
            cols,
        )

    def norm_partials(
        self,
        tensors: Iterable[Any] | None,
    ) -> int:
        """`hfp_norm_partials` of docs/c-api.md."""
        return self.size(
            "hfp_norm_partials",
            tensors,
        )

    def row_workspace(
        self,
        rows: int,
        cols: int,
    ) -> int:
        """`hfp_row_workspace` of docs/c-api.md."""
        return self.size(
            "hfp_row_workspace",
            rows,
            cols,
        )

    def sum_partial_rows(
        self,
        rows: int,
        cols: int,
        sums: int,
    ) -> int:
        """`hfp_sum_partial_rows` of docs/c-api.md."""
        return self.size(
            "hfp_sum_partial_rows",
            rows,
            cols,
            sums,
        )

    def gemm_backend(
        self,
        device_type: int,
    ) -> int:
        """`hfp_gemm_backend` of docs/c-api.md."""
        return self.size(
            "hfp_gemm_backend",
            device_type,
        )

    def gemm_workspace(
        self,
        batch: int,
        m: int,
        n: int,
        k: int,
        device_type: int,
    ) -> int:
        """`hfp_gemm_workspace` of docs/c-api.md."""
        return self.size(
            "hfp_gemm_workspace",
            batch,
            m,
            n,
            k,
            device_type,
        )

    def balance_parts(
        self,
        tokens: int,
    ) -> int:
        """`hfp_balance_parts` of docs/c-api.md."""
        return self.size(
            "hfp_balance_parts",
            tokens,
        )

    def decode_workspace(
        self,
        model: Iterable[Any] | None,
        rows: int,
        tokens: int,
        threads: int,
    ) -> int:
        """`hfp_decode_workspace` of docs/c-api.md."""
        return self.size(
            "hfp_decode_workspace",
            model,
            rows,
            tokens,
            threads,
        )
