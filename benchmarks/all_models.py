"""Every model type of transformers and model class of diffusers that can be built small: what is
swapped, and whether anything else changes.

    python benchmarks/all_models.py --out benchmarks/results/all-models.json [--only REGEX]

Each is built from a small configuration with random weights; one that cannot be is counted with
the reason. Of those that can, `plan` must leave all values of the model as they are; outputs and
gradients are compared as `hfpatch apply-check` does, against fp64; after `restore` the model
computes the bits that it did before. Where no inputs can be made, the model is still planned,
patched and restored.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import inspect
import json
import re
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hfpatch
from hfpatch.bench import results
from hfpatch.check import FAILED, NOT_COMPARED, PASSED, How, check_model
from hfpatch.inputs import NoInputs, sample_inputs
from hfpatch.patches.keys import OWNED_BY_WRAPPERS

#: Parameters up to which a model counts as small.
_MOST = 60_000_000
#: Seconds that one model may take, its fp64 twin and gradients included.
_SECONDS = 60

#: What makes a configuration of transformers small, where it has such a number.
_SMALL = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "hidden_dim"), 64),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "n_inner", "encoder_ffn_dim"), 96),
    **dict.fromkeys(("decoder_ffn_dim", "feed_forward_size", "dim_feedforward"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_dim"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk"), 2),
    "vocab_size": 199,
    "max_position_embeddings": 128,
    "image_size": 32,
    "patch_size": 8,
    "projection_dim": 64,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
#: Of numbers that mean a size of the input, tokens that must be in the vocabulary.
_TOKENS = re.compile(r"_token_id$|_token_index$")


class TooLong(BaseException):
    """A model took more than its seconds. What catches any `Exception` does not catch it."""


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TooLong(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def of_transformers() -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    for kind in sorted(CONFIG_MAPPING_NAMES):
        named = MODEL_MAPPING_NAMES.get(kind)
        for name in (named,) if isinstance(named, str) else named or ():
            yield f"transformers {name} ({kind})", lambda k=kind, n=name: transformers_model(k, n)


def transformers_model(kind: str, name: str) -> nn.Module:
    import transformers

    config = shrunk(transformers.CONFIG_MAPPING[kind]())
    cls = getattr(transformers, name)
    model: nn.Module = cls(config)
    return model


def shrunk(config: Any) -> Any:
    """The same configuration with small numbers, its parts too."""
    cls = type(config)
    given = config.to_dict()
    small: dict[str, Any] = {}
    for key, value in given.items():
        if key in _SMALL and isinstance(value, int) and not isinstance(value, bool):
            small[key] = min(value, _SMALL[key])
        elif _TOKENS.search(key) and isinstance(value, int) and value >= 199:
            small[key] = 7
    parts = {
        key: shrunk(part)
        for key in getattr(cls, "sub_configs", {})
        if (part := getattr(config, key, None)) is not None and hasattr(part, "to_dict")
    }
    small |= {k: p.to_dict() for k, p in parts.items()}
    for attempt in (small, {k: v for k, v in small.items() if k in parts or "num" in k}):
        try:
            return cls(**attempt)
        except Exception:  # this one's own rules: sizes that must fit
            continue
    for key, value in small.items():
        if key not in parts:
            setattr(config, key, value)
    return config


def of_diffusers() -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    import diffusers
    from diffusers import ModelMixin

    for name in sorted(diffusers._import_structure.get("models", ())):
        try:
            cls = getattr(diffusers, name)
        except Exception:  # needs a package that is not here
            continue
        if inspect.isclass(cls) and issubclass(cls, ModelMixin) and cls is not ModelMixin:
            yield f"diffusers {name}", lambda c=cls: diffusers_model(c)


#: Of diffusers' constructors.
_DIFFUSERS = {
    **dict.fromkeys(("num_layers", "n_layers", "num_single_layers", "depth", "num_blocks"), 2),
    **dict.fromkeys(("num_attention_heads", "n_heads", "n_kv_heads"), 4),
    **dict.fromkeys(("num_refiner_layers", "n_refiner_layers", "num_double_layers"), 1),
    **dict.fromkeys(("joint_attention_dim", "cross_attention_dim", "caption_channels"), 48),
    **dict.fromkeys(("cap_feat_dim", "text_embed_dim", "text_dim", "encoder_hid_dim"), 48),
    **dict.fromkeys(("pooled_projection_dim", "caption_projection_dim"), 64),
    **dict.fromkeys(("base_dim", "decoder_base_dim", "inner_dim", "dim", "in_visual_dim"), 32),
    "attention_head_dim": 16,
    "vace_layers": [0, 1],
    "inject_layers": [0],
    "sample_size": 16,
    "hidden_size": 64,
    "num_embeds_ada_norm": 100,
}


def diffusers_model(cls: Any) -> nn.Module:
    """As the class's defaults say, but for small numbers; channels of VAEs and UNets too."""
    parameters = inspect.signature(cls.__init__).parameters
    small: dict[str, Any] = {k: v for k, v in _DIFFUSERS.items() if k in parameters}
    for key, parameter in parameters.items():
        default = parameter.default
        if "block_out_channels" in key and isinstance(default, (tuple, list)):
            small[key] = type(default)([32] * len(default))
        elif key.startswith("layers_per_block") and isinstance(default, int):
            small[key] = 1
        elif key.startswith("axes_dim") and isinstance(default, (tuple, list)):
            small[key] = type(default)([4, 6, 6][: len(default)])
    wide = {k: 64 for k in small if _DIFFUSERS.get(k) == 48}
    attempts = [
        small,
        small | wide,
        *({k: v for k, v in small.items() if k != left_out} for left_out in small),
    ]
    attempts += [{k: v for k, v in small.items() if "num" in k or k.startswith("n_")}, {}]
    first: Exception | None = None
    built: nn.Module | None = None
    for attempt in attempts:
        try:
            with torch.device("meta"):
                size = sum(p.numel() for p in cls(**attempt).parameters())
            if size > _MOST:
                raise ValueError(f"has {size / 1e6:.0f} million parameters at its smallest")
            model: nn.Module = cls(**attempt)
        except Exception as e:  # the constructor's own demands
            first = first or e
            continue
        built = built if built is not None else model
        try:
            sample_inputs(model.eval())
            return model
        except NoInputs:  # its sizes may not fit each other
            continue
    if built is None:
        raise first or ValueError("no configuration is known for it")
    return built


@torch.no_grad()
def randomized(model: nn.Module, seed: int = 0) -> nn.Module:
    """Weights none of which is trivial, whatever the constructor left (zeros, ones, no value)."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for name, p in model.named_parameters():
        if not p.is_floating_point():
            continue
        drawn = torch.randn(p.shape, generator=generator)
        if p.ndim >= 2:
            p.copy_(drawn * (0.5 if id(p) in embeddings else max(p[0].numel(), 1) ** -0.5))
        elif name.endswith("weight"):
            p.copy_(1 + 0.2 * drawn)
        else:
            p.copy_(0.1 * drawn)
    return model.eval()


def state_of(model: nn.Module) -> dict[str, Any]:
    """All that a model holds, but for what a patch puts on an instance."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        for key, value in module.__dict__.items():
            if key in OWNED_BY_WRAPPERS or key in ("_modules", "config", "_internal_dict"):
                continue
            found[f"{path}:{key}"] = _frozen(value, 4)
    return found


def _frozen(value: Any, depth: int) -> Any:
    if isinstance(value, Tensor):
        if value.is_meta:
            return ("meta", tuple(value.shape))
        flat = value.detach().contiguous().flatten()
        return (str(value.dtype), tuple(value.shape), flat.view(torch.uint8).numpy().tobytes())
    if isinstance(value, (int, float, str, bool, bytes, type(None), type, torch.dtype)):
        return repr(value)
    if isinstance(value, dict):
        return tuple((repr(k), _frozen(v, depth - 1)) for k, v in value.items())
    if isinstance(value, (list, tuple, set, frozenset)) and depth > 0:
        return tuple(_frozen(v, depth - 1) for v in value)
    return type(value).__name__


def measure(make: Callable[[], nn.Module], only_plan: bool = False) -> dict[str, Any]:
    """One model's row."""
    started = time.perf_counter()
    row: dict[str, Any] = {"built": False}
    torch.manual_seed(0)
    try:
        with torch.device("meta"):  # some are never small
            size = sum(p.numel() for p in make().parameters())
        if size > _MOST:
            raise ValueError(f"has {size / 1e6:.0f} million parameters at its smallest")
    except ValueError as e:
        if "million parameters" in str(e):
            return row | {"why": str(e)}
    except Exception:  # a constructor that computes on the CPU
        pass
    try:
        model = randomized(make())
    except Exception as e:
        return row | {"why": f"{type(e).__name__}: {e}".splitlines()[0][:200]}
    row |= {"built": True, "parameters": sum(p.numel() for p in model.parameters())}
    before = state_of(model)
    decided = hfpatch.plan(model)
    row["plan left the state"] = state_of(model) == before
    row["swaps"] = dict(collections.Counter(s.op for s in decided.swaps))
    row["skips"] = dict(collections.Counter(s.kind for s in decided.skips))
    row["unexplained"] = sorted(
        {f"{s.class_name}: {s.reason}"[:300] for s in decided.skips if s.kind == "unexplained"}
    )
    if only_plan:
        return row
    for mode in ("inference", "training"):
        with at_most(_SECONDS):
            result, _ = check_model("", model, How({"mode": mode}))
            if result["status"] == FAILED:
                judge_again(result, make, How({"mode": mode}))
        row[mode] = {k: v for k, v in result.items() if k != "part"}
    row["state after restore"] = _same_but_counters(before, state_of(model))
    row["seconds"] = round(time.perf_counter() - started, 2)
    return row


def judge_again(result: dict[str, Any], make: Callable[[], nn.Module], how: How) -> None:
    """By the mean square of the errors over four draws of weights, as the tests of whole models do:
    of one draw of two right results one may be several times nearer. Other failures stay."""
    kinds = [k for k in ("error of outputs", "error of gradients") if k in result]
    if not kinds or "from those in fp64" not in result.get("reason", ""):
        return
    results = [result, *(check_model("", randomized(make(), s), how)[0] for s in (1, 2, 3))]
    result["draws"] = [{k: r.get(k) for k in kinds} for r in results]
    if all("from those in fp64" in r.get("reason", "from those in fp64") for r in results) and all(
        sum(r[k]["patched"] ** 2 for r in results)
        <= 4.0 * sum(max(r[k]["original"], torch.finfo(torch.float32).eps) ** 2 for r in results)
        for k in kinds
    ):
        result |= {"status": PASSED, "reason": f"over four draws; of the first {result['reason']}"}


def _same_but_counters(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether the state is the same; what a model's own forward wrote is in both its runs."""
    return all(after.get(k) == v for k, v in before.items() if ":_parameters" in k)


def summary(rows: dict[str, Any]) -> dict[str, Any]:
    """The counts of all rows, by library."""
    counts: dict[str, Any] = {}
    for library in ("transformers", "diffusers"):
        mine = {k: r for k, r in rows.items() if k.startswith(library)}
        built = [r for r in mine.values() if r["built"]]
        swaps: collections.Counter[str] = collections.Counter()
        skips: collections.Counter[str] = collections.Counter()
        for r in built:
            swaps.update(r.get("swaps", {}))
            skips.update(r.get("skips", {}))
        found: dict[str, Any] = {
            "classes": len(mine),
            "built": len(built),
            "raised": sum("error" in r for r in built),
            "with swaps": sum(bool(r.get("swaps")) for r in built),
            "swaps": dict(swaps.most_common()),
            "skips": dict(skips.most_common()),
            "plan changed the state": sum(not r.get("plan left the state", True) for r in built),
            "parameters changed": sum(not r.get("state after restore", True) for r in built),
        }
        for mode in ("inference", "training"):
            results = [r[mode] for r in built if mode in r]
            found[mode] = {
                **collections.Counter(r["status"] for r in results),
                "outputs compared": sum("relative difference" in r for r in results),
                "gradients compared": sum("error of gradients" in r for r in results),
                "bit-equal after restore": sum(
                    r.get("bit-equal after restore") is True for r in results
                ),
            }
        counts[library] = found
    return counts


def as_lines(known: dict[str, Any]) -> str:
    """JSON with a line per model."""
    models = known["rows"]
    rows = ",\n".join(
        f" {json.dumps(name)}: {json.dumps(row, sort_keys=True)}" for name, row in models.items()
    )
    head = json.dumps({k: v for k, v in known.items() if k != "rows"}, indent=1, sort_keys=True)
    return f'{head[:-2]},\n "rows": {{\n{rows}\n }}\n}}\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--resume", action="store_true", help="go on with what --out holds")
    parser.add_argument("--plan", action="store_true", help="what is swapped, and no more")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    for library in ("transformers", "diffusers"):
        importlib.import_module(library).logging.set_verbosity_error()
    head = results.head("all models", torch.device("cpu"), None)
    rows: dict[str, Any] = {}
    if args.resume and args.out.exists():
        rows = json.loads(args.out.read_text())["rows"]
    for name, make in (*of_transformers(), *of_diffusers()):
        if not re.search(args.only, name) or name in rows:
            continue
        try:
            rows[name] = measure(make, args.plan)
        except TooLong as e:
            rows[name] = {"built": False, "why": str(e)}
        except Exception as e:  # what a user would see: the finding
            rows[name] = {
                "built": True,
                "error": f"{type(e).__name__}: {e}"[:500],
                "where": traceback.format_exc()[-600:],
            }
        status = {m: rows[name].get(m, {}).get("status") for m in ("inference", "training")}
        failed = FAILED in status.values() or "error" in rows[name]
        uncompared = NOT_COMPARED in status.values()
        mark = "FAILED" if failed else "-" if not rows[name]["built"] or uncompared else "ok"
        print(f"{mark:6} {name} {rows[name].get('swaps', rows[name].get('why', ''))}", flush=True)
        if args.out is not None:
            known = {**head, "counts": summary(rows), "rows": rows}
            args.out.write_text(as_lines(known))
    json.dump(summary(rows), sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
