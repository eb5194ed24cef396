"""Models whose blocks no file was written for: eager, leaves, captured blocks, graphs, peers.

    python benchmarks/captured.py --output benchmarks/results/captured-h100.json
    python benchmarks/captured.py --only bert vit --peers compile liger

Random weights in bf16, real shapes; inputs are random. Each way's outputs are compared with eager's
before anything is timed. Ways run in turns; of each the least of the medians of its turns is
reported, waited for after each call (`ms`), and among queued calls (`queued_ms`). Liger, which
replaces functions of transformers, has a process of its own, with eager beside it.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hfpatch
from hfpatch.bench import results

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16
Made = tuple[nn.Module, dict[str, Any]]


def _build(cls: Any, config: Any) -> nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPE)
    try:
        with torch.device(DEVICE):
            model: nn.Module = cls(config)
    finally:
        torch.set_default_dtype(before)
    return model.to(DTYPE).eval().requires_grad_(False)


def _text(cls: Any, config: Any, batch: int, tokens: int, **more: Any) -> Made:
    model = _build(cls, config)
    vocab = config.get_text_config().vocab_size
    ids = torch.randint(0, vocab, (batch, tokens), device=DEVICE)
    return model, {"input_ids": ids, **more}


def _pixels(cls: Any, config: Any, batch: int, side: int) -> Made:
    pixels = torch.randn(batch, 3, side, side, device=DEVICE, dtype=DTYPE)
    return _build(cls, config), {"pixel_values": pixels}


def llama_8b() -> Made:
    from transformers import LlamaConfig, LlamaModel

    return _text(
        LlamaModel,
        LlamaConfig(
            hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
            num_attention_heads=32, num_key_value_heads=8, vocab_size=128256,
        ), 1, 2048,
    )  # fmt: skip


def mistral() -> Made:
    from transformers import MistralConfig, MistralModel

    return _text(MistralModel, MistralConfig(num_hidden_layers=16), 1, 2048)


def qwen3_06b() -> Made:
    from transformers import Qwen3Config, Qwen3Model

    return _text(
        Qwen3Model,
        Qwen3Config(
            hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
            num_key_value_heads=8, head_dim=128, vocab_size=151936,
        ), 1, 2048,
    )  # fmt: skip


def qwen3_4b() -> Made:
    from transformers import Qwen3Config, Qwen3Model

    return _text(
        Qwen3Model,
        Qwen3Config(
            hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
            num_key_value_heads=8, head_dim=128, vocab_size=151936,
        ), 1, 2048,
    )  # fmt: skip


def phi3_mini() -> Made:
    from transformers import Phi3Config, Phi3Model

    return _text(Phi3Model, Phi3Config(pad_token_id=0), 1, 2048)


def gemma2_2b() -> Made:
    from transformers import Gemma2Config, Gemma2Model

    return _text(Gemma2Model, Gemma2Config(), 1, 2048)


def gemma3_1b() -> Made:
    from transformers import Gemma3TextConfig, Gemma3TextModel

    return _text(
        Gemma3TextModel,
        Gemma3TextConfig(
            hidden_size=1152, intermediate_size=6912, num_hidden_layers=26, num_attention_heads=4,
            num_key_value_heads=1, head_dim=256, vocab_size=262144,
        ), 1, 2048,
    )  # fmt: skip


def olmo2_1b() -> Made:
    from transformers import Olmo2Config, Olmo2Model

    return _text(
        Olmo2Model,
        Olmo2Config(
            hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=16,
            vocab_size=100352,
        ), 1, 2048,
    )  # fmt: skip


def falcon_7b() -> Made:
    from transformers import FalconConfig, FalconModel

    return _text(
        FalconModel,
        FalconConfig(hidden_size=4544, num_hidden_layers=16, num_attention_heads=71,
                     multi_query=True, new_decoder_architecture=False),
        1, 2048,
    )  # fmt: skip


def vit_l() -> Made:
    from transformers import ViTConfig, ViTModel

    return _pixels(
        ViTModel,
        ViTConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16,
                  intermediate_size=4096),
        16, 224,
    )  # fmt: skip


def dinov2_l() -> Made:
    from transformers import Dinov2Config, Dinov2Model

    config = Dinov2Config(
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        image_size=518,
        patch_size=14,
    )
    return _pixels(Dinov2Model, config, 16, 224)


def siglip() -> Made:
    from transformers import SiglipVisionConfig, SiglipVisionModel

    return _pixels(
        SiglipVisionModel,
        SiglipVisionConfig(hidden_size=1152, num_hidden_layers=27, num_attention_heads=16,
                           intermediate_size=4304, image_size=384, patch_size=14),
        16, 384,
    )  # fmt: skip


def bert(batch: int, tokens: int) -> Made:
    from transformers import BertConfig, BertModel

    return _text(BertModel, BertConfig(), batch, tokens)


def modernbert() -> Made:
    from transformers import ModernBertConfig, ModernBertModel

    return _text(ModernBertModel, ModernBertConfig(), 8, 512)


def clip_text() -> Made:
    from transformers import CLIPTextConfig, CLIPTextModel

    return _text(CLIPTextModel, CLIPTextConfig(), 8, 77)


def whisper() -> Made:
    from transformers import WhisperConfig, WhisperModel

    config = WhisperConfig(
        d_model=1280, encoder_layers=32, decoder_layers=1, encoder_attention_heads=20,
        decoder_attention_heads=20, encoder_ffn_dim=5120, decoder_ffn_dim=5120, num_mel_bins=128,
    )  # fmt: skip
    model: Any = _build(WhisperModel, config)
    features = torch.randn(1, 128, 3000, device=DEVICE, dtype=DTYPE)
    return model.encoder, {"input_features": features}


def t5_xxl() -> Made:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64,
        feed_forward_proj="gated-gelu", is_gated_act=True,
    )  # fmt: skip
    return _text(T5EncoderModel, config, 1, 256)


CASES: dict[str, Callable[[], Made]] = {
    "llama-8b prefill 2048": llama_8b,
    "mistral-7b (16 layers) 2048": mistral,
    "qwen3-0.6b 2048": qwen3_06b,
    "qwen3-4b 2048": qwen3_4b,
    "phi-3-mini 2048": phi3_mini,
    "gemma2-2b 2048": gemma2_2b,
    "gemma3-1b 2048": gemma3_1b,
    "olmo2-1b 2048": olmo2_1b,
    "falcon-7b (16 layers) 2048": falcon_7b,
    "vit-l 16x224": vit_l,
    "dinov2-l 16x224": dinov2_l,
    "siglip-so400m 16x384": siglip,
    "bert-base 8x512": lambda: bert(8, 512),
    "bert-base 1x128": lambda: bert(1, 128),
    "modernbert 8x512": modernbert,
    "clip-text 8x77": clip_text,
    "whisper-large encoder": whisper,
    "t5-xxl encoder 256": t5_xxl,
}


def _result(out: Any) -> torch.Tensor:
    return out[0] if isinstance(out, tuple) else next(v for v in out.values() if v is not None)


class _Ways:
    """Ways to call one model; a swap is put on and taken off around each turn."""

    def __init__(self, model: nn.Module, inputs: dict[str, Any], peers: list[str]) -> None:
        self.model, self.inputs = model, inputs
        self.row: dict[str, Any] = {"apply_s": {}, "first_s": {}, "difference": {}}
        self.ways: dict[str, tuple[nn.Module, dict[str, Any] | None]] = {
            "eager": (model, None),
            "leaves": (model, {"blocks": False}),
            "blocks": (model, {}),
            "graphs": (model, {"cuda_graphs": True}),
        }
        if "compile" in peers:
            self.ways["compile"] = (torch.compile(model, dynamic=False), None)  # type: ignore[assignment]

    def run(self, name: str) -> torch.Tensor:
        with torch.no_grad():
            return _result(self.ways[name][0](**self.inputs))

    def enter(self, name: str) -> None:
        options = self.ways[name][1]
        hfpatch.restore(self.model)
        if options is not None:
            started = time.perf_counter()
            hfpatch.apply(self.model, decoding=False, **options)
            self.row["apply_s"].setdefault(name, time.perf_counter() - started)


def _sync() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def _turn(run: Callable[[], Any], seconds: float) -> tuple[float, float]:
    """(median ms of a call that is waited for, ms of one among queued calls)."""
    run()
    _sync()
    waited = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(waited) < 3:
        started = time.perf_counter()
        run()
        _sync()
        waited.append(time.perf_counter() - started)
    count = max(3, int(seconds / 2 / statistics.median(waited)))
    started = time.perf_counter()
    for _ in range(count):
        run()
    _sync()
    return statistics.median(waited) * 1e3, (time.perf_counter() - started) / count * 1e3


def with_liger(name: str, rounds: int, seconds: float) -> dict[str, Any]:
    """Liger's times, and eager's beside them: in this process alone, since it replaces functions of
    transformers for all models. It knows causal models; the inner one is called, as in other ways.
    """
    from liger_kernel.transformers import _apply_liger_kernel_to_instance
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model, inputs = CASES[name]()

    def run() -> None:
        with torch.no_grad():
            model(**inputs)

    def least() -> tuple[float, float]:
        run()
        times = [_turn(run, seconds) for _ in range(rounds)]
        return min(t[0] for t in times), min(t[1] for t in times)

    eager = least()
    holder: Any = model
    try:
        with torch.device("meta"):
            causal = AutoModelForCausalLM.from_config(model.config)
        if type(getattr(causal, "model", None)) is type(model):
            causal.model = model
            holder = causal
    except ValueError:  # no causal model of this type
        pass
    before = [type(m).forward for m in model.modules()], [m.forward for m in model.modules()]
    _apply_liger_kernel_to_instance(model=holder)
    after = [type(m).forward for m in model.modules()], [m.forward for m in model.modules()]
    if before == after:
        raise ValueError(f"it has no kernels for `{model.config.model_type}`")
    liger = least()
    return {"liger": liger, "eager": eager}


def _liger_apart(name: str, rounds: int, seconds: float, row: dict[str, Any]) -> None:
    """Put what `with_liger` finds into a row."""
    command = [sys.executable, __file__, "--liger-alone", name, "--rounds", str(rounds)]
    done = subprocess.run([*command, "--seconds", str(seconds)], capture_output=True, text=True)
    if done.returncode != 0:
        row["liger"] = (done.stderr.strip().splitlines() or ["no message"])[-1][:300]
        return
    found = json.loads(done.stdout.strip().splitlines()[-1])
    row["ms"]["liger"], row["queued_ms"]["liger"] = found["liger"]
    row["eager_beside_liger"] = found["eager"]


def measure(name: str, peers: list[str], rounds: int, seconds: float) -> dict[str, Any]:
    """One case: outputs compared, then timed."""
    torch.manual_seed(0)
    ways = _Ways(*CASES[name](), peers)
    row = ways.row
    truth = ways.run("eager").float()
    scale = truth.norm()
    ways.run("eager")
    failed = {}
    for way in list(ways.ways):
        try:
            ways.enter(way)
            started = time.perf_counter()
            first = ways.run(way)
            _sync()
            row["first_s"][way] = time.perf_counter() - started
            ways.run(way)
            out = ways.run(way)
            off = [float((o.float() - truth).norm() / scale) for o in (first, out)]
            row["difference"][way] = max(off)
            if way in ("blocks", "graphs"):
                row[f"candidates {way}"] = sorted(
                    {
                        (
                            c.class_name,
                            c.state,
                            c.reason[:300],
                            ", ".join(c.found),
                            c.error,
                            c.original,
                        )
                        for c in hfpatch.status(ways.model).plan.candidates
                    }
                )
        except Exception as e:  # a way that fails is a row's figure too
            failed[way] = f"{type(e).__name__}: {e}"[:500]
            del ways.ways[way]
    if failed:
        row["failed"] = failed
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways.ways}
    for _ in range(rounds):
        for way in ways.ways:
            ways.enter(way)
            for _ in range(2):
                ways.run(way)
            times[way].append(_turn(functools.partial(ways.run, way), seconds))
    hfpatch.restore(ways.model)
    row["ms"] = {w: min(t[0] for t in ts) for w, ts in times.items()}
    row["queued_ms"] = {w: min(t[1] for t in ts) for w, ts in times.items()}
    row["median_ms"] = {w: statistics.median(t[0] for t in ts) for w, ts in times.items()}
    if "liger" in peers:
        del truth, out, first
        model = ways.model
        ways.ways.clear()
        del ways, model
        gc.collect()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
        _liger_apart(name, rounds, seconds, row)
    return {"case": name, **row}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", help="cases whose name holds one of these")
    parser.add_argument("--peers", nargs="*", default=[], choices=["compile", "liger"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.15, help="of each turn")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit")
    parser.add_argument("--liger-alone", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.liger_alone:
        print(json.dumps(with_liger(args.liger_alone, args.rounds, args.seconds)))
        return 0
    rows = []
    for name in CASES:
        if args.only and not any(o in name for o in args.only):
            continue
        try:
            row = measure(name, args.peers, args.rounds, args.seconds)
        except Exception as e:
            row = {"case": name, "error": f"{type(e).__name__}: {e}"[:500]}
        rows.append(row)
        print(name, {k: round(v, 2) for k, v in row.get("ms", {}).items()}, row.get("error", ""),
              row.get("failed", ""), flush=True)  # fmt: skip
        gc.collect()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
        torch._dynamo.reset()
        if args.output:
            about = results.head("captured", torch.device(DEVICE), args.commit)
            results.write(about | {"rows": rows}, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
