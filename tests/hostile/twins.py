"""A model that decodes through the engine, and its unpatched twin, called alike."""

from __future__ import annotations

import copy
from functools import partial

import torch
from decoding.families import make
from transformers import DynamicCache

import hfpatch
from hfpatch.decoding import kept


def outcome(f):
    try:
        return f()
    except Exception as e:
        return e


def same(a, b, tol=0.0002):
    if isinstance(b, Exception) or isinstance(a, Exception):
        return isinstance(a, type(b)) or f"{a!r:.200} for {b!r:.200}"
    if type(a) is not type(b):
        return f"type {type(a)} for {type(b)}"
    if isinstance(b, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{a.shape}{a.dtype} for {b.shape}{b.dtype}"
        if (a.isnan().any() or b.isnan().any()) and not torch.equal(a.isnan(), b.isnan()):
            return "nan elsewhere"
        a2, b2 = (a.double().nan_to_num(), b.double().nan_to_num())
        e = (a2 - b2).abs().max().item() if a.numel() else 0
        s = b2.abs().max().item() if a.numel() else 0
        return True if e <= tol * max(s, 1e-09) else f"differs {e:.2e} of {s:.2e}"
    if isinstance(b, (tuple, list)):
        if len(a) != len(b):
            return "len"
        for x, y in zip(a, b, strict=False):
            r = same(x, y, tol)
            if r is not True:
                return r
        return True
    if isinstance(b, dict):
        if list(a) != list(b):
            return f"keys {list(a)} for {list(b)}"
        return same(list(a.values()), list(b.values()), tol)
    if isinstance(b, DynamicCache):
        return same(
            [(layer.keys, layer.values, layer.get_seq_length()) for layer in a.layers],
            [(layer.keys, layer.values, layer.get_seq_length()) for layer in b.layers],
            tol,
        )
    return a == b or f"{a!r:.100} for {b!r:.100}"


def out_of(o):
    if isinstance(o, Exception):
        return o
    if isinstance(o, (torch.Tensor, tuple)):
        return o
    return dict(o.items())


class Run:
    """A model and its unpatched twin, and a cache of each."""

    def __init__(self, family="llama", rows=1, before=None, tol=2e-4, **more):
        self.model = make(family, **more)
        if before:
            before(self.model)
        self.twin = copy.deepcopy(self.model)
        self.report = hfpatch.apply(self.model)
        self.rows, self.tol = rows, tol
        self.served = any(s.op == "decoding" for s in self.report.swaps)
        self.fresh()

    def fresh(self):
        self.caches = [DynamicCache(config=m.config) for m in (self.model, self.twin)]
        self.g = torch.Generator().manual_seed(3)
        self.n = 0

    def each(self, f):
        for m in (self.model, self.twin):
            f(m)

    def call(
        self, tokens=1, ids=None, rows=None, mask="none", context=torch.no_grad, fresh=False, **kw
    ):
        if fresh:
            self.fresh()
        ids = (
            torch.randint(3, 300, (rows or self.rows, tokens), generator=self.g)
            if ids is None
            else ids
        )
        outs = []
        for m, c in zip((self.model, self.twin), self.caches, strict=False):
            k = {
                a: v(m, c) if callable(v) and (not isinstance(v, torch.Tensor)) else v
                for a, v in kw.items()
            }
            with context():
                o = outcome(partial(m, input_ids=ids.clone(), past_key_values=c, **k))
            outs.append(out_of(o))
        r = same(*outs, self.tol)
        if r is True:
            r = same(*self.caches, self.tol)
            if r is not True:
                r = "cache: " + str(r)
        return r

    def steps(self):
        h = kept.decoders.get(self.model)
        return 0 if h is None else h.steps


def chk(r, what=""):
    assert r is True, f"{what} {r}"


def warm(run, **kw):
    chk(run.call(7, fresh=True, **kw), "prompt")
    for i in range(3):
        chk(run.call(1, **kw), f"step {i}")
