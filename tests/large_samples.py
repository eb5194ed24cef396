"""Calls that take kernels of their own on a GPU, which the table of samples, in the shapes of its
tests, does not reach: rows that several CTAs hold, GPUs that are full, other arguments. Aligned.
"""

from __future__ import annotations

import torch
from op_samples import BF16, DTYPES, F32, Sample, X, rows, sample, shared

#: Six and eight rows for each SM of 132, nearly: also of 114 and 148 the last wave is nearly full.
FLOW = [(BF16, 8192, 792), (BF16, 8192, 1056), (F32, 4096, 792)]
D, W, TABLE = rows("D"), shared("D"), rows(3, "D/2")
SEEDS, JUST = rows(dtype=torch.int64, high=99, dense=True), {"min_p": 0.0, "temperature": 0.7}
ACROSS = {"eps": 1e-6, "norm_across_heads": True, "interleaved": True, "seq_dim": 1}
HEADS = {"q": rows(3, 4, "D"), "k": rows(3, 4, "D")}
FEW_K = {"q": rows(3, 4, "D"), "k": rows(3, 1, "D")}
PAIRS = {"dtype": F32, "pairs": True}
TWICE = {"cos": shared(3, "D", **PAIRS), "sin": shared(3, "D", **PAIRS), "seq_dim": 1}
TWICE_EACH = {n: shared(1, 3, 4, "D", **PAIRS) for n in ("cos", "sin")}
PACKED = {"cos": TABLE, "sin": TABLE, "seq_dim": 1, "round_products": True}
GRADS = {"grad": D, "x": D}


def images(label: str, positions: int, groups: int) -> Sample:
    x = rows("D", positions, dense=True)
    return sample("group_norm", label, x=x, weight=W, groups=groups, eps=1e-5, silu=True)


_CALLS = [
    (sample("topk", "flow", x=D, k=50), FLOW),
    (sample("topk", "large", x=D, k=200), [(BF16, 4096, 3), (BF16, 4096, 40)]),
    (sample("sample", "flow", logits=D, seeds=SEEDS, top_k=50, top_p=0.9, **JUST), FLOW),
    (
        sample("sample", "all", logits=D, seeds=SEEDS, top_k=0, top_p=1.0, **JUST),
        [(BF16, 20000, 3), (BF16, 4096, 40)],
    ),
    (
        sample("sample", "top p", logits=D, seeds=SEEDS, top_k=0, top_p=0.9, **JUST),
        [(BF16, 20000, 3), (BF16, 4096, 40), (BF16, 4096, 270)],
    ),
    (
        sample(
            "sample", "greedy", logits=D, seeds=SEEDS, top_k=0, top_p=1.0, min_p=0.0,
            temperature=0.0,
        ),
        [(BF16, 20000, 3), *FLOW],
    ),
    (sample("softmax", "wide", x=D), [(BF16, 16392, 260), (F32, 8200, 260)]),
    (sample("softmax", "scaled", x=D, scale=0.5), [(BF16, 16392, 260), (BF16, 40000, 3)]),
    (sample("softmax", "masked", x=D, mask=W), [(BF16, 16392, 260)]),
    (sample("softmax_backward", "wide", grad=D, y=D, scale=0.5), [(F32, 8200, 260)]),
    (
        sample("rms_norm", "pairs", x=D, weight=W, eps=1e-6, cast="input"),
        [(BF16, 16384, 264), (BF16, 16384, 1040)],
    ),
    (
        sample("layer_norm", "full", x=D, weight=W, bias=W, eps=1e-5),
        [(BF16, 2048, 1080), (BF16, 4096, 540), (BF16, 16384, 264), (BF16, 16384, 1040)],
    ),
    (
        sample("add_layer_norm", "full", x=D, residual=D, weight=W, bias=W, eps=1e-5),
        [(BF16, 4096, 540), (BF16, 16384, 264)],
    ),
    (
        sample("rms_norm_backward", "clusters", **GRADS, weight=W, eps=1e-6, weight_offset=0.0,
               cast=1, needs=1),
        [(BF16, 8192, 1024), (BF16, 16384, 1024)],
    ),
    (
        sample("layer_norm_backward", "clusters", **GRADS, weight=W, bias=W, eps=1e-5, needs=3),
        [(BF16, c, n) for c, n in ((1024, 720), (4096, 540), (8192, 1024), (16384, 1024))],
    ),
    (
        sample("mul_add_backward", "clusters", grad=D, a=D, b=W, cast=1, needs=3),
        [(BF16, 4096, 512), (BF16, 1536, 2048), (BF16, 64, 3000)],
    ),
    (
        sample("add_silu_backward", "clusters", **GRADS, bias=W, needs=2),
        [(BF16, 4096, 1024), (BF16, 1024, 300)],
    ),
    (
        sample("add_gelu_backward", "clusters", **GRADS, bias=W, approximate=0, needs=2),
        [(BF16, 4096, 1024)],
    ),
    (
        sample("mul_add", "mixed", a=X, b=rows(1, "D", dtype=F32), c=shared("D", dtype=F32),
               cast="none"),
        [(BF16, 34, 3), (BF16, 1024, 3)],
    ),
    (images("alone", 64, 4), [(d, 32, 2) for d in DTYPES]),
    (images("cluster", 4096, 2), [(d, 32, 2) for d in DTYPES]),
    (images("spread", 16384, 2), [(BF16, 32, 1)]),
    (images("overlap", 16008, 2), [(BF16, 32, 1), (F32, 32, 1)]),
    (images("wide overlap", 131200, 1), [(BF16, 16, 1)]),
    (images("parts", 300000, 1), [(BF16, 16, 1)]),
    (sample("rope_qk", "packed", **FEW_K, **PACKED),
     [(BF16, 64, 3), (BF16, 128, 720), (BF16, 128, 2880)]),
    (
        sample("rope_qk", "twice", **HEADS, **TWICE, interleaved=True),
        [(BF16, 64, 3)],
    ),
    (
        sample("rope", "twice", x=rows(3, 4, "D"), **TWICE, interleaved=True),
        [(BF16, 64, 3)],
    ),
    (
        sample("qk_norm_rope", "twice", **HEADS, q_weight=shared("4D"), k_weight=shared("4D"),
               **TWICE_EACH, **ACROSS),
        [(BF16, 64, 2), (BF16, 64, 3)],
    ),
]  # fmt: skip

#: By its id: a sample, and (dtype, columns, batch) of each call.
LARGE = {s.id: (s, shapes) for s, shapes in _CALLS}
assert len(LARGE) == len(_CALLS)
