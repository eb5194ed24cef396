"""Mutations of real leaves, each of which changes one thing that samples need not see.

A mutated class is the library's own source with a few lines put before or around its forward's,
written to a file and imported: it has a source, a name and a formula, as a stranger's class has.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from diffusers.models.activations import GEGLU, SwiGLU
from diffusers.models.normalization import RMSNorm as DiffusersRMSNorm
from torch import nn
from transformers import LlamaConfig, Phi3Config, T5Config
from transformers.activations import NewGELUActivation, QuickGELUActivation
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.models.t5.modeling_t5 import T5DenseGatedActDense, T5LayerNorm

WIDTH = 48

#: What is put before the first line of a forward; `{x}` is its input. By what it looks at.
BEFORE = {
    "rank": "if {x}.dim() == 2:\n    {x} = {x} * 2",
    "one row": "if {x}.shape[0] == 1:\n    {x} = {x} * 2",
    "many rows": "if {x}.numel() > 4096:\n    {x} = {x} * 2",
    "sequence": "if {x}.dim() > 2 and {x}.size(1) > 30:\n    {x} = {x} * 2",
    "contiguity": "if not {x}.is_contiguous():\n    {x} = {x} * 2",
    "stride": "if {x}.stride(-1) != 1:\n    {x} = {x} * 2",
    "empty": "if {x}.numel() == 0:\n    return {x}.new_ones(3)",
    "far clamp": "{x} = {x}.clamp(-1e5, 1e5)",
    "where": "{x} = torch.where({x} > 1e5, {x} * 2, {x})",
    "small term": "{x} = {x} + 1e-12 * {x}.pow(3)",
    "zeroed infinity": "{x} = torch.nan_to_num({x}, nan=float('nan'))",
    "count": "self.n_calls = getattr(self, 'n_calls', 0) + 1\n"
    "if self.n_calls % 3 == 0:\n    {x} = {x} * 2",
    "list": "COUNT.append(1)\nif len(COUNT) % 3 == 0:\n    {x} = {x} * 2",
    "kept input": "self.last = {x}",
    "training": "if self.training:\n    {x} = {x} * 2",
    "training in bf16": "if self.training and {x}.dtype == torch.bfloat16:\n    {x} = {x} * 2",
    "grad mode": "if torch.is_grad_enabled():\n    {x} = {x} * 2",
    "inference mode": "if torch.is_inference_mode_enabled():\n    {x} = {x} * 2",
    "requires grad": "if {x}.requires_grad:\n    {x} = {x} * 2",
    "environment": "if os.environ.get('HFPATCH_HOSTILE'):\n    {x} = {x} * 2",
    "global dict": "if SWITCH['on']:\n    {x} = {x} * 2",
    "clock": "if time.monotonic() > SWITCH['until']:\n    {x} = {x} * 2",
    "detached": "{x} = {x}.detach()",
    "straight through": "{x} = {x} + ({x} * 0.5 - {x}).detach() * 0",
    "half the gradient": "{x} = 0.5 * {x} + (0.5 * {x}).detach()",
    "no grad": "with torch.no_grad():\n    {x} = {x} * 1",
    "gradient hook": "if {x}.requires_grad:\n    {x} = {x} * 1\n"
    "    {x}.register_hook(lambda g: 2 * g)",
    "values of a tensor": "if {x}.abs().max() > 1e4:\n    {x} = {x} * 2",
    "written input": "{x}.mul_(2)",
    "batch mean": "{x} = {x} - 0 * {x}.mean(0, keepdim=True)",
    "data pointer": "if {x}.storage_offset() > 0:\n    {x} = {x} * 2",
    "loop": "for _ in range({x}.dim() - 2):\n    {x} = {x} * 1.5 / 1.5",
    "exception": "try:\n    {x} = {x} * 1\nexcept RuntimeError:\n    {x} = {x} * 2",
    "lambda": "{x} = (lambda t: t if t.dim() > 2 else 2 * t)({x})",
    "helper": "{x} = _helper({x})",
    "eval": "{x} = eval('{x} * (1 if {x}.dim() > 2 else 2)')",
}

HEADER = """
import os, time
import torch
from torch import nn
import torch.nn.functional as F
import {home} as _home
globals().update({{k: v for k, v in vars(_home).items() if not k.startswith("__")}})
COUNT = []
SWITCH = {{"on": False, "until": float("inf")}}

def _helper(t):
    return t if t.numel() < 4096 else 2 * t

"""


@dataclass(frozen=True)
class Leaf:
    """A class of transformers or diffusers that is swapped, and how an instance is made."""

    cls: type[nn.Module]
    make: Callable[[type[nn.Module]], nn.Module]
    inputs: int = 1

    @property
    def name(self) -> str:
        return f"{self.cls.__module__.split('.')[0]} {self.cls.__name__}"


def _norm(cls: Any) -> nn.Module:
    return cls(WIDTH)


LEAVES = (
    Leaf(LlamaRMSNorm, _norm),
    Leaf(GemmaRMSNorm, _norm),
    Leaf(Olmo2RMSNorm, _norm),
    Leaf(T5LayerNorm, _norm),
    Leaf(CohereLayerNorm, lambda cls: cls(WIDTH)),
    Leaf(DiffusersRMSNorm, lambda cls: cls(WIDTH, 1e-6)),
    Leaf(NewGELUActivation, lambda cls: cls()),
    Leaf(QuickGELUActivation, lambda cls: cls()),
    Leaf(
        LlamaMLP,
        lambda cls: cls(
            LlamaConfig(hidden_size=WIDTH, intermediate_size=64, num_attention_heads=4)
        ),
    ),
    Leaf(Phi3MLP, lambda cls: cls(Phi3Config(hidden_size=WIDTH, intermediate_size=64))),
    Leaf(
        T5DenseGatedActDense,
        lambda cls: cls(
            T5Config(d_model=WIDTH, d_ff=64, feed_forward_proj="gated-gelu", dropout_rate=0.0)
        ),
    ),
    Leaf(GEGLU, lambda cls: cls(WIDTH, 64)),
    Leaf(SwiGLU, lambda cls: cls(WIDTH, 64)),
    Leaf(MambaRMSNormGated, lambda cls: cls(WIDTH, 16), inputs=2),
)


def mutated(leaf: Leaf, mutation: str, folder: Path, which: str = "") -> ModuleType:
    """A module with the leaf's class, changed by a row of `BEFORE`; "" for the class as it is.

    `which` tells two of the same apart, which then share no global.
    """
    source = textwrap.dedent(inspect.getsource(leaf.cls))
    head = re.search(r"    def forward\((?:.|\n)*?\)(?: -> [^:\n]+)?:\n", source)
    assert head is not None
    first = re.search(r"def forward\(\s*self,\s*(\w+)", head.group())
    assert first is not None
    lines = textwrap.indent(BEFORE[mutation].format(x=first.group(1)), " " * 8) if mutation else ""
    text = source[: head.end()] + lines + "\n" + source[head.end() :]
    text = (
        re.sub(r"^@.*\n", "", text[: text.index("class ")], flags=re.M)
        + text[text.index("class ") :]
    )
    name = f"hostile{which}_{leaf.cls.__name__}_{re.sub(r'[^a-z0-9]', '_', mutation)}"
    path = folder / f"{name}.py"
    path.write_text(HEADER.format(home=leaf.cls.__module__) + text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def randomized(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in module.parameters():
            scale = 1.0 if p.dim() == 1 else p.shape[-1] ** -0.5
            p.copy_(scale * (torch.randn(p.shape, generator=generator) + (p.dim() == 1)))
    return module.eval()
