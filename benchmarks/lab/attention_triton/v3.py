"""Attention without a mask: a program has a block of queries and passes over the keys once."""

import torch
import triton
import triton.language as tl


@triton.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, length, scale,
    WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * length * WIDTH
    rows = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    columns = tl.arange(0, WIDTH)
    places = rows[:, None] * WIDTH + columns[None, :]
    q = tl.load(q_ptr + head + places, mask=rows[:, None] < length, other=0.0)
    top = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    sums = tl.zeros((QUERIES, WIDTH), tl.float32)
    for first in range(0, length, KEYS):
        keys = first + tl.arange(0, KEYS)
        at = keys[:, None] * WIDTH + columns[None, :]
        k = tl.load(k_ptr + head + at, mask=keys[:, None] < length, other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale
        scores = tl.where(keys[None, :] < length, scores, float("-inf"))
        greater = tl.maximum(top, tl.max(scores, 1))
        power = tl.exp2(scores - greater[:, None])
        shrink = tl.exp2(top - greater)
        total = total * shrink + tl.sum(power, 1)
        v = tl.load(v_ptr + head + at, mask=keys[:, None] < length, other=0.0)
        sums = sums * shrink[:, None] + tl.dot(power.to(v.dtype), v)
        top = greater
    out = sums / total[:, None]
    tl.store(o_ptr + head + places, out.to(o_ptr.dtype.element_ty), mask=rows[:, None] < length)


def setup(batch=4, heads=16, length=2048, seed=0, device="cuda"):
    generator = torch.Generator(device).manual_seed(seed)

    def draw():
        shape = (batch, heads, length, 64)
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float16)

    q, k, v = draw(), draw(), draw()
    return {"inputs": {"q": q, "k": k, "v": v, "o": torch.empty_like(q)}, "outputs": ["o"]}


def run_kernel(q, k, v, o):
    batch, heads, length, width = q.shape
    grid = (triton.cdiv(length, 64), batch * heads)
    attention_kernel[grid](
        q,
        k,
        v,
        o,
        length,
        width**-0.5 * 1.4426950408889634,
        WIDTH=width,
        QUERIES=64,
        KEYS=64,
        num_stages=3,
    )
