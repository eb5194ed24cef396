"""A whole decoding step of Llama's and Qwen3's layers in one CUDA graph, through plain `generate`.

python benchmarks/decoding/step.py --output benchmarks/decoding/results/step-h200.json

A prototype: it measures what fused decoding gives, and is no part of the package. It checks a
step's logits and cache against the model in fp64 (small) and fp32 (real shapes), and times the
graph alone and `model.generate` with the instance's forward replaced.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import functools
import json
import pickle
import random
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from products import GATED, NORM, RESIDUAL, SHARED_BYTES, STAGED_BYTES, STORE, Product
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

HERE = Path(__file__).parent
P = ctypes.c_void_p


class Attention(ctypes.Structure):
    _fields_ = [("qkv", P), ("out", P), ("cache", P), ("layer", ctypes.c_int), ("state", P)]
    _fields_ += [
        ("table", P),
        ("mask", P),
        ("mask_stride", ctypes.c_int),
        ("q_norm", P),
        ("k_norm", P),
    ]
    _fields_ += [
        ("eps", ctypes.c_float),
        ("norm_offset", ctypes.c_float),
        ("round_normed", ctypes.c_int),
    ]
    _fields_ += [("scale", ctypes.c_float), ("softcap", ctypes.c_float), ("window", ctypes.c_int)]
    _fields_ += [
        ("key_heads", ctypes.c_int),
        ("parts", ctypes.c_int),
        ("partial", P),
        ("arrived", P),
    ]


class Begin(ctypes.Structure):
    _fields_ = [
        ("ids", P),
        ("positions", P),
        ("embedding", P),
        ("hidden", P),
        ("columns", ctypes.c_int),
    ]
    _fields_ += [("half_dim", ctypes.c_int), ("embedding_scale", ctypes.c_float)]
    _fields_ += [("table_scale", ctypes.c_float), ("frequencies", P), ("table", P), ("state", P)]


def build() -> Path:
    library = Path(tempfile.mkdtemp()) / "step.so"
    command = ["nvcc", "-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a", "-shared"]
    subprocess.run(
        [*command, "-Xcompiler", "-fPIC", str(HERE / "step.cu"), "-o", str(library)], check=True
    )
    return library


class Arena:
    """A cache's memory: [rows, key heads, capacity, dim] of each layer's keys and values."""

    def __init__(self, cache: DynamicCache, capacity: int) -> None:
        first = cache.layers[0].keys
        rows, heads, self.length, dim = first.shape
        self.capacity = capacity
        shape = (len(cache.layers), 2, rows, heads, capacity, dim)
        self.data = torch.empty(shape, dtype=first.dtype, device=first.device)
        for index, layer in enumerate(cache.layers):
            self.data[index, 0, :, :, : self.length] = layer.keys
            self.data[index, 1, :, :, : self.length] = layer.values
        for index, layer in enumerate(cache.layers):
            del layer.keys, layer.values
            layer.__class__ = ArenaLayer
            layer.arena, layer.index = self, index


def _plain_layer(state: dict[str, Any]) -> DynamicLayer:
    layer = DynamicLayer.__new__(DynamicLayer)
    layer.__dict__.update(state)
    return layer


class ArenaLayer(DynamicLayer):
    """A `DynamicLayer` whose keys and values are views of an arena; plain once written to."""

    arena: Arena
    index: int

    def _become_plain(self) -> None:
        keys, values = self.keys, self.values
        del self.arena, self.index
        self.__class__ = DynamicLayer
        self.keys, self.values = keys, values

    def get_seq_length(self) -> int:
        return self.arena.length

    def _state(self, *, own: bool) -> dict[str, Any]:
        """What a plain layer of the same content holds; `own`: memory of its own, no views."""
        state = {k: v for k, v in self.__dict__.items() if k not in ("arena", "index")}
        keys, values = self.keys, self.values
        return state | {
            "keys": keys.clone() if own else keys,
            "values": values.clone() if own else values,
        }

    def __copy__(self) -> DynamicLayer:
        return _plain_layer(self._state(own=False))

    def __deepcopy__(self, memo: dict[int, Any]) -> DynamicLayer:
        return _plain_layer(self._state(own=True))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain_layer, (self._state(own=True),)


def _view(which: int) -> property:
    name = ("keys", "values")[which]

    def get(self: ArenaLayer) -> torch.Tensor:
        return self.arena.data[self.index, which, :, :, : self.arena.length]

    def put(self: ArenaLayer, value: torch.Tensor) -> None:
        self._become_plain()
        setattr(self, name, value)

    return property(get, put)


ArenaLayer.keys, ArenaLayer.values = _view(0), _view(1)  # type: ignore[assignment]


def arena_of(cache: DynamicCache, room: int = 1024) -> Arena:
    """The arena behind all of a cache's layers, with room for a token; else a new one."""
    arenas = {getattr(layer, "arena", None) for layer in cache.layers}
    arena = arenas.pop() if len(arenas) == 1 else None
    if arena is None or arena.length >= arena.capacity:
        for layer in cache.layers:
            if isinstance(layer, ArenaLayer):
                layer._become_plain()
        length = cache.layers[0].keys.shape[-2]
        arena = Arena(cache, -(-(length + 1) // room) * room + room)
    return arena


class Step:
    """One token for each of `rows` sequences; its graph serves every length up to the capacity."""

    def __init__(
        self,
        model: Any,
        library: ctypes.CDLL,
        rows: int,
        *,
        most_stages: int = 8,
        parts: int = 16,
        leave_out: str = "",
    ) -> None:
        self.leave_out = leave_out  # a stage that is not run, to see what it costs
        self.library, self.rows, self.parts = library, rows, parts
        self.most_stages = most_stages
        config, device = model.config, model.device
        self.model, self.layers = model, list(model.model.layers)
        self.heads, self.key_heads = config.num_attention_heads, config.num_key_value_heads
        self.dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        rotary = model.model.rotary_emb

        def half(columns: int) -> torch.Tensor:
            return torch.empty(rows, columns, device=device, dtype=model.dtype)

        self.ids = torch.zeros(rows, 1, device=device, dtype=torch.int64)
        self.positions = torch.zeros(rows, 1, device=device, dtype=torch.int64)
        self.state = torch.zeros(2, device=device, dtype=torch.int32)
        self.pointers = torch.zeros(len(self.layers), 2, device=device, dtype=torch.int64)
        self.hidden, self.middle = half(config.hidden_size), half(config.hidden_size)
        self.normed = half(config.hidden_size)
        self.qkv = half((self.heads + 2 * self.key_heads) * self.dim)
        self.attended = half(self.heads * self.dim)
        self.inner = half(config.intermediate_size)
        self.logits = half(config.vocab_size)
        self.table = torch.empty(rows, self.dim, device=device)
        group = self.heads // self.key_heads
        self.partial = torch.empty(
            rows * self.key_heads * parts * group * (2 + self.dim), device=device
        )
        self.arrived = torch.zeros(rows, self.key_heads, device=device, dtype=torch.int32)
        self.frequencies = rotary.inv_freq.float().contiguous()
        self.table_scale = float(rotary.attention_scaling)
        self.arena: Arena | None = None
        self.expected = -1  # the state's length after the last step
        self.graph: torch.cuda.CUDAGraph | None = None

    # --- kernels -----------------------------------------------------------------------------

    def _call(self, name: str, *arguments: Any) -> None:
        stream = P(torch.cuda.current_stream().cuda_stream)
        if status := getattr(self.library, name)(*arguments, stream):
            raise RuntimeError(f"{name}: {self.library.error_text(status).decode()}")

    def _product(
        self,
        kind: int,
        x: torch.Tensor,
        linears: list[Any],
        out: torch.Tensor,
        norm: Any = None,
        residual: torch.Tensor | None = None,
    ) -> None:
        if self.leave_out == "products":
            return
        rows, columns = x.shape
        p = Product(columns=columns, rows=rows, x=x.data_ptr(), out=out.data_ptr())
        end = 0
        for i in range(3):
            if i < len(linears):
                p.weight[i] = linears[i].weight.data_ptr()
                end += linears[i].weight.shape[0]
                p.bias[i] = linears[i].bias.data_ptr() if linears[i].bias is not None else None
            p.end[i] = end
        p.out_columns, p.round_normed = out.shape[1], 1
        p.residual = residual.data_ptr() if residual is not None else None
        # As deep a ring as fits beside x; without x where that leaves less than four stages.
        staged_bytes = rows * (-(-columns // 64) * 128 + 64)
        staged = norm is not None or staged_bytes <= STAGED_BYTES
        free = SHARED_BYTES - 16 * (rows * 128 + 64)
        depths = [n for n in (12, 8, 4) if n <= self.most_stages]
        fits = [n for n in depths if n << 14 <= free - (staged_bytes if staged else 0)]
        staged, fits = (staged, fits) if fits else (False, depths)
        stages = next(n for n in fits if n << 14 <= free)
        if norm is not None:
            p.norm_weight, p.eps = norm.weight.data_ptr(), norm.variance_epsilon
            if not staged:
                p.out = self.normed.data_ptr()
                self._call("product", ctypes.byref(p), stages, NORM, 0, rows)
                p.x, p.norm_weight, p.out = self.normed.data_ptr(), None, out.data_ptr()
        units = -(-(p.end[0] if kind == GATED else p.end[2]) // 8)
        grid = min(units, self.processors)
        self._call("product", ctypes.byref(p), stages, kind, int(staged), grid)

    def _attention(self, index: int, module: Any) -> None:
        if self.leave_out == "attention":
            return
        a = Attention(qkv=self.qkv.data_ptr(), out=self.attended.data_ptr(), layer=index)
        a.cache, a.state, a.table = (
            self.pointers.data_ptr(),
            self.state.data_ptr(),
            self.table.data_ptr(),
        )
        if hasattr(module, "q_norm"):
            a.q_norm, a.k_norm = module.q_norm.weight.data_ptr(), module.k_norm.weight.data_ptr()
            a.eps, a.round_normed = module.q_norm.variance_epsilon, 1
        a.scale, a.key_heads, a.parts = module.scaling, self.key_heads, self.parts
        a.partial, a.arrived = self.partial.data_ptr(), self.arrived.data_ptr()
        self._call("attention", ctypes.byref(a), self.rows, self.heads // self.key_heads, self.dim)

    def kernels(self) -> None:
        embedding = self.model.model.embed_tokens.weight
        b = Begin(ids=self.ids.data_ptr(), positions=self.positions.data_ptr())
        b.embedding, b.hidden, b.columns = (
            embedding.data_ptr(),
            self.hidden.data_ptr(),
            embedding.shape[1],
        )
        b.half_dim, b.embedding_scale, b.table_scale = self.dim // 2, 1.0, self.table_scale
        b.frequencies, b.table = self.frequencies.data_ptr(), self.table.data_ptr()
        b.state = self.state.data_ptr()
        self._call("begin_step", ctypes.byref(b), self.rows)
        for index, layer in enumerate(self.layers):
            attention, mlp = layer.self_attn, layer.mlp
            parts = [attention.q_proj, attention.k_proj, attention.v_proj]
            self._product(STORE, self.hidden, parts, self.qkv, norm=layer.input_layernorm)
            self._attention(index, attention)
            self._product(
                RESIDUAL, self.attended, [attention.o_proj], self.middle, residual=self.hidden
            )
            gate_up = [mlp.gate_proj, mlp.up_proj]
            self._product(
                GATED, self.middle, gate_up, self.inner, norm=layer.post_attention_layernorm
            )
            self._product(RESIDUAL, self.inner, [mlp.down_proj], self.hidden, residual=self.middle)
        self._product(
            STORE, self.hidden, [self.model.lm_head], self.logits, norm=self.model.model.norm
        )

    # --- one token ---------------------------------------------------------------------------

    def take(self, cache: DynamicCache) -> None:
        """Make `cache` the one that the next step reads and extends."""
        arena = arena_of(cache)
        if arena is not self.arena or self.expected != arena.length:
            size = arena.data[0, 0].numel() * arena.data.element_size()
            base = arena.data.data_ptr()
            addresses = [
                [base + (2 * i + j) * size for j in (0, 1)] for i in range(len(cache.layers))
            ]
            self.pointers.copy_(torch.tensor(addresses))
            self.state.copy_(torch.tensor([arena.length, arena.capacity], dtype=torch.int32))
            self.arena = arena

    def capture(self) -> None:
        """Record the graph; the state and the cache are as before after it."""
        state = self.state.clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.kernels()
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                self.kernels()
        torch.cuda.current_stream().wait_stream(stream)
        self.state.copy_(state)
        self.graph = graph

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, cache: DynamicCache
    ) -> torch.Tensor:
        self.take(cache)
        self.ids.copy_(ids)
        self.positions.copy_(positions)
        if self.graph is None:
            self.capture()
        assert self.graph is not None and self.arena is not None
        self.graph.replay()
        self.arena.length += 1
        self.expected = self.arena.length
        return self.logits


def patch(model: Any, library: ctypes.CDLL) -> None:
    """Set the instance's forward: steps of one token go to the graph, all else to the original."""
    original = model.forward
    steps: dict[int, Step] = {}

    @functools.wraps(original)
    def forward(
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        if (
            input_ids is None
            or input_ids.shape[1] != 1
            or not past_key_values
            or past_key_values.get_seq_length() == 0
        ):
            return original(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                **kwargs,
            )
        rows = input_ids.shape[0]
        if position_ids is None:
            position_ids = torch.full_like(input_ids, past_key_values.get_seq_length())
        if rows not in steps:
            steps[rows] = Step(model, library, rows)
        logits = steps[rows](input_ids, position_ids, past_key_values)
        return CausalLMOutputWithPast(
            logits=logits.unsqueeze(1).clone(), past_key_values=past_key_values
        )

    model.forward = forward


def check_cache(rounds: int = 300) -> None:
    """Random operations on a cache that fused steps extend, beside the same on a plain one."""
    rng, layers, heads, dim = random.Random(0), 2, 2, 4

    def extend(cache: DynamicCache, tokens: list[list[torch.Tensor]]) -> None:
        arena = arena_of(cache, room=3)
        for index, pair in enumerate(tokens):
            for which, new in enumerate(pair):
                arena.data[index, which, :, :, arena.length : arena.length + 1] = new
        arena.length += 1

    for _ in range(rounds):
        rows = rng.randint(1, 3)
        plain = DynamicCache()
        for index in range(layers):
            plain.update(torch.randn(rows, heads, 4, dim), torch.randn(rows, heads, 4, dim), index)
        ours, kept = copy.deepcopy(plain), []
        for _ in range(rng.randint(1, 12)):
            length, rows = plain.get_seq_length(), plain.layers[0].keys.shape[0]
            move = rng.choice(
                ["step"] * 4 + ["update", "crop", "reorder", "repeat", "copy", "pickle", "shallow"]
            )
            tokens = [[torch.randn(rows, heads, 1, dim) for _ in range(2)] for _ in range(layers)]
            if move in ("step", "update"):
                for index, (key, value) in enumerate(tokens):
                    plain.update(key, value, index)
                    if move == "update":
                        ours.update(key, value, index)
                if move == "step":
                    extend(ours, tokens)
            elif move == "crop" and length > 1:
                for cache in (plain, ours):
                    cache.crop(-1)
            elif move == "reorder":
                order = torch.tensor([rng.randrange(rows) for _ in range(rows)])
                plain.reorder_cache(order), ours.reorder_cache(order)
            elif move == "repeat" and rows < 8:
                plain.batch_repeat_interleave(2), ours.batch_repeat_interleave(2)
            elif move == "shallow":
                ours.layers = [copy.copy(layer) for layer in ours.layers]
            elif move == "copy":
                kept.append((ours, [(x.keys.clone(), x.values.clone()) for x in ours.layers]))
                ours = copy.deepcopy(ours)
            elif move == "pickle":
                ours = pickle.loads(pickle.dumps(ours))
            view = ours.layers[0].keys
            kept.append((view, view.clone()))
            assert plain.get_seq_length() == ours.get_seq_length()
            for a, b in zip(plain.layers, ours.layers, strict=True):
                assert torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values), move
        for thing, was in kept:  # what the user holds stays as it was
            if isinstance(thing, torch.Tensor):
                assert torch.equal(thing, was)
            else:
                for layer, (keys, values) in zip(thing.layers, was, strict=True):
                    assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)


# --- checks and times ----------------------------------------------------------------------------


def llama_8b(layers: int = 32) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
    )


def llama_1b() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
    )


def qwen_06b(layers: int = 28) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
    )


def small(kind: str) -> Any:
    common = {
        "vocab_size": 1000,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 3,
    }
    if kind == "llama-9-3":
        return LlamaConfig(
            **common,
            num_attention_heads=9,
            num_key_value_heads=3,
            attention_bias=True,
            mlp_bias=True,
        )
    if kind == "llama-8-8":
        return LlamaConfig(**common, num_attention_heads=8, num_key_value_heads=8, head_dim=128)
    return Qwen3Config(**common, num_attention_heads=16, num_key_value_heads=2, head_dim=64)


def make(config: Any, dtype: Any = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    with torch.device("cuda"):
        torch.set_default_dtype(dtype)
        try:
            model = (Qwen3ForCausalLM if isinstance(config, Qwen3Config) else LlamaForCausalLM)(
                config
            ).eval()
        finally:
            torch.set_default_dtype(torch.float32)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
    return model


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@torch.no_grad()
def check_steps(
    name: str,
    model: Any,
    library: ctypes.CDLL,
    rows: int,
    prompt: int,
    true_dtype: Any,
    steps: int = 4,
) -> dict[str, Any]:
    """Errors of fused and of eager steps against the model in `true_dtype`, teacher forced."""
    true_model = copy.deepcopy(model).to(true_dtype)
    # RoPE's frequencies are fp32 in every model; they come along as they are
    true_model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.clone()
    ids = torch.randint(0, model.config.vocab_size, (rows, prompt + steps), device="cuda")
    caches = {"true": DynamicCache(), "eager": DynamicCache(), "fused": DynamicCache()}
    step = Step(model, library, rows)
    true_model(ids[:, :prompt], past_key_values=caches["true"])
    model(ids[:, :prompt], past_key_values=caches["eager"])
    model(ids[:, :prompt], past_key_values=caches["fused"])
    errors: dict[str, Any] = {
        "name": name,
        "rows": rows,
        "prompt": prompt,
        "eager": [],
        "fused": [],
    }
    for i in range(steps):
        token = ids[:, prompt + i : prompt + i + 1]
        positions = torch.full((rows, 1), prompt + i, device="cuda")
        true = true_model(token, past_key_values=caches["true"], position_ids=positions).logits[
            :, 0
        ]
        eager = model(token, past_key_values=caches["eager"], position_ids=positions).logits[:, 0]
        step.logits.fill_(torch.nan)
        fused = step(token, positions, caches["fused"])
        errors["eager"].append(relative(eager, true))
        errors["fused"].append(relative(fused, true))
    errors["cache"] = [
        max(
            relative(getattr(a, part), getattr(t, part))
            for a, t in zip(caches[which].layers, caches["true"].layers, strict=True)
            for part in ("keys", "values")
        )
        for which in ("eager", "fused")
    ]
    assert caches["fused"].get_seq_length() == prompt + steps
    if rows > 1:  # the last row alone has the same bits
        alone = Step(model, library, 1)
        cache = DynamicCache()
        for layer, plain in enumerate(caches["fused"].layers):
            cut = prompt + steps - 1
            cache.update(
                plain.keys[-1:, :, :cut].clone(), plain.values[-1:, :, :cut].clone(), layer
            )
        errors["same_bits_alone"] = bool(
            torch.equal(alone(token[-1:], positions[-1:], cache)[0], fused[-1])
        )
    print({k: [f"{e:.2e}" for e in v] if isinstance(v, list) else v for k, v in errors.items()})
    return errors


@torch.no_grad()
def time_steps(
    name: str,
    model: Any,
    library: ctypes.CDLL,
    rows: int,
    lengths: list[int],
    leave_out: str = "",
    stages: int = 8,
) -> list[dict[str, Any]]:
    """Median microseconds of the graph, for each length of the cache."""
    found = []
    config = model.config
    weights = sum(p.numel() for n, p in model.named_parameters() if "embed" not in n) * 2
    if config.tie_word_embeddings:
        weights += model.lm_head.weight.numel() * 2
    for length in lengths:
        step = Step(model, library, rows, most_stages=stages, leave_out=leave_out)
        cache = DynamicCache()
        for layer in range(config.num_hidden_layers):
            shape = (rows, config.num_key_value_heads, length, step.dim)
            cache.update(
                *(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)), layer
            )
        ids = torch.randint(0, 1000, (rows, 1), device="cuda")
        positions = torch.full((rows, 1), length, device="cuda")
        start = time.perf_counter()
        step(ids, positions, cache)
        torch.cuda.synchronize()
        first = time.perf_counter() - start
        for _ in range(3):
            step.graph.replay()  # type: ignore[union-attr]
        times = []
        for _ in range(15):
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
            step.graph.replay()  # type: ignore[union-attr]
            events[1].record()
            events[1].synchronize()
            times.append(events[0].elapsed_time(events[1]) * 1e3)
        read = (
            weights
            + 2
            * 2
            * config.num_hidden_layers
            * rows
            * config.num_key_value_heads
            * length
            * step.dim
        )
        row = {
            "model": name,
            "rows": rows,
            "length": length,
            "stages": stages,
            "left_out": leave_out,
            "us": sorted(times)[7],
        }
        row |= {"bytes": read, "tb_per_s": read / sorted(times)[7] / 1e6, "first_call_s": first}
        found.append(row)
        print(
            f"{name} x{rows} length {length} {leave_out and 'without ' + leave_out}: "
            f"{row['us']:.0f} us, "
            f"{row['tb_per_s']:.2f} TB/s, first call {first * 1e3:.0f} ms"
        )
    return found


@torch.no_grad()
def time_generate(
    name: str, model: Any, library: ctypes.CDLL, rows: int, eager: bool = True
) -> dict[str, Any]:
    """ms a token of plain `generate`: the least of each of two lengths, then the difference."""
    prompt = torch.randint(0, 1000, (rows, 128), device="cuda")
    mask = torch.ones_like(prompt)

    def run(tokens: int) -> tuple[float, torch.Tensor]:
        torch.cuda.synchronize()
        start = time.perf_counter()
        out = model.generate(
            prompt,
            attention_mask=mask,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )
        torch.cuda.synchronize()
        return time.perf_counter() - start, out[:, 128:]

    def per_token(few: int, many: int) -> float:
        run(few)
        least = [min(run(n)[0] for _ in range(3)) for n in (few, many)]
        return (least[1] - least[0]) / (many - few) * 1e3

    result: dict[str, Any] = {"model": name, "rows": rows}
    if eager:
        result["eager_ms"] = per_token(8, 40)
        texts = run(64)[1]
    patch(model, library)
    start = time.perf_counter()
    run(2)
    result["first_generate_s"] = time.perf_counter() - start
    result["fused_ms"] = per_token(16, 144)
    if eager:
        same = (run(64)[1] == texts).float().cumprod(1).sum(1)
        result["same_tokens_of_64"] = same.tolist()
    del model.forward
    print(result)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--library", type=Path, help="step.cu compiled; else it is compiled now")
    args = parser.parse_args()
    check_cache()
    library = ctypes.CDLL(str(args.library or build()))
    library.error_text.restype = ctypes.c_char_p
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    result["errors"], result["steps"], result["generate"] = [], [], []
    try:
        for kind in ("llama-9-3", "llama-8-8", "qwen"):
            for rows, prompt in ((1, 5), (2, 63), (3, 700), (9, 130)):
                model = make(small(kind))
                result["errors"].append(
                    check_steps(kind, model, library, rows, prompt, torch.float64)
                )
        for name, config in (("0.6B", qwen_06b()), ("1B", llama_1b()), ("8B", llama_8b())):
            model = make(config)
            result["errors"].append(check_steps(name, model, library, 2, 300, torch.float32, 2))
            for rows in (1, 2, 4, 8, 16):
                lengths = [64, 512, 1000, 8000, 32000] if rows == 1 else [1000]
                result["steps"] += time_steps(name, model, library, rows, lengths)
            for out in ("attention", "products"):
                for rows in (1, 8):
                    result["steps"] += time_steps(name, model, library, rows, [64, 1000], out)
            for rows in (1, 8):
                result["generate"].append(time_generate(name, model, library, rows, rows == 1))
            del model
            torch.cuda.empty_cache()
    finally:
        if args.output:
            args.output.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
