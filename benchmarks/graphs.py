"""CUDA graphs of transformers models: right first, then in turns with eager and `apply`.

python benchmarks/graphs.py --output graphs.json

Of each model (random weights, bf16) the outputs of eager and of every way are compared for two
inputs, for a mask of ones, for padding, and for a cache that is given; then the attention calls of
a recording with those outside of one; then all ways are timed in turns. `--small --device cpu` goes
through the same steps with small models, without graphs.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers as tr

import hfpatch
from hfpatch.bench import results
from hfpatch.graphs import recording as graphs

Inputs = dict[str, Any]
#: Ways to run a model: the arguments of `apply`; None: not patched.
WAYS: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "apply": {},
    "graphs": {"cuda_graphs": True},
    "auto": {"cuda_graphs": "auto"},
    "timed": {"gain": "time"},
    "timed+auto": {"gain": "time", "cuda_graphs": "auto"},
}
#: Root mean square distances from eager's outputs, relative: of another order of rounding in bf16;
#: of a replay from the same kernels outside of a graph.
FROM_EAGER, FROM_APPLY = 5e-2, 1e-2


@dataclass
class Subject:
    """A model, its inputs by a seed, and other kinds of calls whose outputs are compared."""

    name: str
    make: Callable[[], torch.nn.Module]
    inputs: Callable[[int], Inputs]
    others: dict[str, Callable[[int], Inputs]] = field(default_factory=dict)


class Setup:
    """Sizes and device of all subjects."""

    def __init__(self, device: str, small: bool) -> None:
        self.device, self.small = device, small
        self.dtype = torch.float32 if small else torch.bfloat16

    def _draw(self, seed: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed)

    def ids(self, batch: int, length: int, vocabulary: int) -> Callable[[int], torch.Tensor]:
        length = min(length, 24) if self.small else length
        return lambda seed: torch.randint(
            1, vocabulary, (batch, length), generator=self._draw(seed), device=self.device
        )

    def noise(self, *size: int) -> Callable[[int], torch.Tensor]:
        return lambda seed: torch.randn(
            size, generator=self._draw(seed), device=self.device, dtype=self.dtype
        )

    def model(self, cls: Any, config: Any) -> torch.nn.Module:
        torch.manual_seed(0)
        with torch.device("meta"):
            model = cls(config)
        model = model.to_empty(device=self.device).to(self.dtype)
        model.apply(model._init_weights)
        for module in model.modules():  # buffers that are made of the configuration
            for name, buffer in module._buffers.items():
                if buffer is not None and name == "position_ids":
                    buffer.copy_(torch.arange(buffer.shape[-1], device=self.device).view(1, -1))
                elif buffer is not None and name == "token_type_ids":
                    buffer.zero_()
            if hasattr(module, "inv_freq"):
                fresh = type(module)(module.config)
                module.inv_freq = fresh.inv_freq.to(self.device)
                module.original_inv_freq = module.inv_freq
        for p in model.parameters():
            if p.dim() > 1:
                p.data.normal_(0, 0.02)
        return model.eval().requires_grad_(False)

    def decoder(self, name: str, cls: Any, config: Any, length: int) -> Subject:
        ids = self.ids(1, length, config.vocab_size)

        def padded(seed: int) -> Inputs:
            given = ids(seed)
            mask = torch.ones_like(given)
            mask[:, : 1 + seed % 5] = 0
            return {"input_ids": given, "attention_mask": mask, "use_cache": False}

        def ones(seed: int) -> Inputs:
            given = ids(seed)
            return {"input_ids": given, "attention_mask": torch.ones_like(given)}

        return Subject(
            name,
            lambda: self.model(cls, config),
            lambda seed: {"input_ids": ids(seed), "use_cache": False},
            {
                "cache made": lambda seed: {"input_ids": ids(seed)},
                "cache given": lambda seed: {
                    "input_ids": ids(seed),
                    "past_key_values": tr.DynamicCache(config=config),
                },
                "mask of ones": ones,
                "padded": padded,
            },
        )

    def encoder(self, name: str, cls: Any, config: Any, batch: int, length: int) -> Subject:
        ids = self.ids(batch, length, config.vocab_size)

        def masked(seed: int, padding: int) -> Inputs:
            given = ids(seed)
            mask = torch.ones_like(given)
            if padding:
                mask[:, -padding:] = 0
            return {"input_ids": given, "attention_mask": mask}

        return Subject(
            name,
            lambda: self.model(cls, config),
            lambda seed: masked(seed, 0),
            {
                "no mask": lambda seed: {"input_ids": ids(seed)},
                "padded": lambda seed: masked(seed, 1 + seed % 5),
            },
        )

    def size(self, **sizes: int) -> dict[str, int]:
        if not self.small:
            return sizes
        small = {"num_hidden_layers": 2, "encoder_layers": 2, "vocab_size": 99}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "encoder_attention_heads": 4}
        widths = {"hidden_size": 64, "intermediate_size": 96, "d_model": 64, "encoder_ffn_dim": 96}
        few = small | heads | widths | {"head_dim": 16}
        return {k: min(v, few.get(k, v)) for k, v in sizes.items()}

    def subjects(self) -> Iterator[Subject]:
        size = self.size
        image = self.noise(*((2, 3, 32, 32) if self.small else (16, 3, 224, 224)))
        vit = tr.ViTConfig(
            image_size=32 if self.small else 224,
            **size(hidden_size=1024, intermediate_size=4096, num_hidden_layers=24,
                   num_attention_heads=16),
        )  # fmt: skip
        yield Subject(
            "ViT-L 16x224",
            lambda: self.model(tr.ViTModel, vit),
            lambda s: {"pixel_values": image(s)},
        )
        yield self.decoder(
            "Mistral-7B, 16 layers, 2048",
            tr.MistralForCausalLM,
            tr.MistralConfig(
                **size(hidden_size=4096, intermediate_size=14336, num_hidden_layers=16,
                       num_attention_heads=32, num_key_value_heads=8, vocab_size=32000)
            ),
            2048,
        )  # fmt: skip
        yield self.decoder(
            "Phi-3-mini, 16 layers, 2048",
            tr.Phi3ForCausalLM,
            tr.Phi3Config(
                **size(hidden_size=3072, intermediate_size=8192, num_hidden_layers=16,
                       num_attention_heads=32, num_key_value_heads=32, vocab_size=32064),
                pad_token_id=0,
            ),
            2048,
        )  # fmt: skip
        bert = tr.BertConfig(
            **size(hidden_size=768, intermediate_size=3072, num_hidden_layers=12,
                   num_attention_heads=12, vocab_size=30522)
        )  # fmt: skip
        yield self.encoder("BERT-base 8x512", tr.BertModel, bert, 8, 512)
        yield self.encoder("BERT-base 1x128", tr.BertModel, bert, 1, 128)
        clip = tr.CLIPTextConfig(
            **size(hidden_size=768, intermediate_size=3072, num_hidden_layers=12,
                   num_attention_heads=12, vocab_size=49408)
        )  # fmt: skip
        yield self.encoder("CLIP text 8x77", tr.CLIPTextModel, clip, 8, 77)
        whisper = tr.WhisperConfig(
            num_mel_bins=80, decoder_layers=1,
            **size(d_model=1280, encoder_layers=32, encoder_attention_heads=20,
                   encoder_ffn_dim=5120),
        )  # fmt: skip
        sound = self.noise(1, 80, 3000)

        def whisper_encoder() -> torch.nn.Module:
            from transformers.models.whisper.modeling_whisper import WhisperEncoder

            return self.model(WhisperEncoder, whisper)

        yield Subject(
            "Whisper-large encoder", whisper_encoder, lambda s: {"input_features": sound(s)}
        )
        yield self.decoder(
            "Qwen3-0.6B 2048",
            tr.Qwen3ForCausalLM,
            tr.Qwen3Config(
                **size(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
                       num_attention_heads=16, num_key_value_heads=8, vocab_size=151936,
                       head_dim=128),
                tie_word_embeddings=True,
            ),
            2048,
        )  # fmt: skip


# -------------------------------------------------------------------------------------------------


def tensors(output: Any) -> list[torch.Tensor]:
    """Of an output: its tensors, and those of its cache."""
    found = [t for t in torch.utils._pytree.tree_leaves(dict(output)) if torch.is_tensor(t)]
    cache = getattr(output, "past_key_values", None)
    layers = cache.layers if cache is not None else ()
    return [*found, *(t for layer in layers for t in (layer.keys, layer.values))]


def distance(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest relative root mean square distance of a pair of tensors."""
    assert len(found) == len(expected), (len(found), len(expected))
    return max(
        ((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-20)).item()
        for a, b in zip(found, expected, strict=True)
    )


@contextmanager
def way(model: torch.nn.Module, name: str) -> Iterator[None]:
    arguments = WAYS[name]
    if arguments is not None:
        hfpatch.apply(model, decoding=False, **arguments)
    try:
        yield
    finally:
        hfpatch.restore(model)


def settle(model: torch.nn.Module, call: Callable[[], Any], name: str) -> int:
    """Call until what is recorded is, and what is timed is; how often that was."""
    for calls in range(1, 41):
        call()
        if calls >= 3 and all(t.kept != "being timed" for t in hfpatch.status(model).plan.times):
            recorded = "graphs" not in name and "auto" not in name
            if recorded or calls >= 3 + 10 * ("auto" in name):
                return calls
    return 40


def check(subject: Subject, model: torch.nn.Module, with_graphs: bool) -> dict[str, Any]:
    """Distances of `apply` and of its recordings, by kind of call."""
    found: dict[str, Any] = {}
    for kind, make in {"": subject.inputs, **subject.others}.items():
        row: dict[str, Any] = {}
        eager = [tensors(model(**make(seed))) for seed in (1, 2)]
        with way(model, "apply"):
            patched = [tensors(model(**make(seed))) for seed in (1, 2)]
        row["apply from eager"] = max(map(distance, patched, eager))
        row["ok"] = row["apply from eager"] <= FROM_EAGER
        if with_graphs:
            with way(model, "graphs"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                order = (1, 1, 2, 1, 2)
                got = [tensors(model(**make(seed))) for seed in order]
                held = graphs._graphs[model]
                row["recorded"] = len(held.recorded)
                row["not used"] = list(held.reasons)
            row["graph from apply"] = max(
                distance(g, patched[seed - 1]) for g, seed in zip(got, order, strict=True)
            )
            row["ok"] &= row["recorded"] == 1 and row["graph from apply"] <= FROM_APPLY
        found[kind or "as timed"] = row
    return found


def attention_calls(subject: Subject, model: torch.nn.Module) -> dict[str, Any]:
    """What PyTorch's attention is asked for outside of a recording, and in one."""
    own = F.scaled_dot_product_attention
    seen: Counter[str] = Counter()

    def spy(
        q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0,
        is_causal: bool = False, **kwargs: Any,
    ) -> Any:  # fmt: skip
        grouped = q.shape[1] != k.shape[1]
        chosen = torch._fused_sdp_choice(q, k, v, attn_mask, 0.0, is_causal, enable_gqa=grouped)
        capturing = torch.cuda.is_current_stream_capturing()
        name = torch.nn.attention.SDPBackend(chosen).name if chosen >= 0 else str(chosen)
        what = f"{name} {tuple(q.shape)} {q.dtype} mask={attn_mask is not None} causal={is_causal}"
        (inside if capturing else seen)[what] += 1
        return own(q, k, v, attn_mask, dropout_p, is_causal, **kwargs)

    inside: Counter[str] = Counter()
    F.scaled_dot_product_attention = spy
    try:
        with way(model, "apply"):
            for _ in range(2):  # at the first, blocks are captured
                seen.clear()
                model(**subject.inputs(1))
        outside = dict(seen)
        with way(model, "graphs"):
            for _ in range(2):
                model(**subject.inputs(1))
    finally:
        F.scaled_dot_product_attention = own
    return {"outside": outside, "inside": dict(inside), "ok": outside == dict(inside)}


def kernels(call: Callable[[], Any]) -> list[list[Any]]:
    """The kernels that take most of a call: name, times, microseconds."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    rows = [[e.key[:90], e.count, round(e.self_device_time_total)] for e in profile.key_averages()]
    return sorted(rows, key=lambda r: -r[2])[:12]


def timed(call: Callable[[], Any], sync: Callable[[], None], seconds: float) -> dict[str, float]:
    """Milliseconds of a call that is waited for (median), and of one among queued ones."""
    sync()
    waited = []
    end = time.perf_counter() + seconds
    while len(waited) < 5 or (time.perf_counter() < end and len(waited) < 60):
        start = time.perf_counter()
        call()
        sync()
        waited.append(1e3 * (time.perf_counter() - start))
    count = max(3, min(30, int(seconds * 1e3 / min(waited))))
    start = time.perf_counter()
    for _ in range(count):
        call()
    sync()
    return {
        "waited": statistics.median(waited),
        "queued": 1e3 * (time.perf_counter() - start) / count,
    }


def measure(subject: Subject, args: Any, sync: Callable[[], None]) -> dict[str, Any]:
    with_graphs = args.device == "cuda"
    model = subject.make()
    found: dict[str, Any] = {"model": subject.name, "checks": check(subject, model, with_graphs)}
    names = [n for n in WAYS if with_graphs or ("graph" not in n and "auto" not in n)]
    inputs = subject.inputs(1)

    def call() -> Any:
        return model(**inputs)

    found["ms"] = {name: {"waited": [], "queued": []} for name in names}
    found["calls until settled"] = {}
    for turn in range(args.rounds):
        for name in names:
            with way(model, name):
                calls = settle(model, call, name)
                for key, value in timed(call, sync, args.seconds).items():
                    found["ms"][name][key].append(value)
                if turn == 0:
                    report = hfpatch.status(model)
                    found["calls until settled"][name] = calls
                    found.setdefault("times", {})[name] = report.to_dict()["times"]
                    found.setdefault("notes", {})[name] = list(report.notes)
    if with_graphs:
        found["attention"] = attention_calls(subject, model)
    return found


def profiled(subject: Subject) -> dict[str, Any]:
    """The kernels of a call outside of a recording, and in one."""
    model, inputs, found = subject.make(), subject.inputs(1), {}
    for name in ("apply", "graphs"):
        with way(model, name):
            for _ in range(3):
                model(**inputs)
            found[name] = kernels(lambda: model(**inputs))
    return found


def line(found: dict[str, Any]) -> str:
    times = "  ".join(
        f"{name} {statistics.median(t['waited']):.2f}/{statistics.median(t['queued']):.2f}"
        for name, t in found["ms"].items()
    )
    bad = [kind for kind, row in found["checks"].items() if not row["ok"]]
    if not found.get("attention", {"ok": True})["ok"]:
        bad.append("attention differs in the recording")
    return f"{found['model']:28} {times}  {'ok' if not bad else 'WRONG: ' + '; '.join(bad)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--commit", help="where there is no git")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", help="names that contain this")
    parser.add_argument("--profile", nargs="*", default=["ViT", "Phi-3"], help="parts of names")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.15, help="of a turn")
    parser.add_argument("--limit", type=float, default=150, help="seconds; no model begins later")
    args = parser.parse_args()
    cuda = args.device == "cuda"
    sync: Callable[[], None] = torch.cuda.synchronize if cuda else lambda: None
    begun = time.perf_counter()
    card = torch.cuda.get_device_name() if cuda else "CPU"
    whole = results.head("graphs", torch.device(args.device), args.commit) | {"rows": []}
    print(card, torch.__version__, "ms waited for / queued", flush=True)
    with torch.no_grad():
        for subject in Setup(args.device, args.small).subjects():
            if args.only and args.only not in subject.name:
                continue
            if time.perf_counter() - begun > args.limit:
                print(f"{subject.name:28} not begun: out of time", flush=True)
                continue
            start = time.perf_counter()
            try:
                found = measure(subject, args, sync)
                print(line(found), flush=True)
            except Exception as e:  # the other models are worth having
                found = {"model": subject.name, "failed": f"{type(e).__name__}: {e}"}
                print(f"{subject.name:28} FAILED {found['failed'][:300]}", flush=True)
            found["seconds"] = time.perf_counter() - start
            whole["rows"].append(found)
            results.write(whole, args.output)
            tidy(cuda)
        # Last: once the profiler was attached, every launch in this process takes longer.
        for subject in Setup(args.device, args.small).subjects() if cuda else ():
            named = any(name in subject.name for name in args.profile)
            if named and time.perf_counter() - begun < args.limit:
                whole.setdefault("kernels", {})[subject.name] = profiled(subject)
                results.write(whole, args.output)
                tidy(cuda)


def tidy(cuda: bool) -> None:
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
