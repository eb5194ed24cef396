"""The models that the command line names: by Hub id, folder or file, with weights or without."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hfpatch.announce import announce
from hfpatch.errors import FAILURES, KernelLoadError

#: What transformers and diffusers say where a model has no file of weights.
_NO_WEIGHTS = (
    "no file named", "does not appear to have a file named", "pytorch_model.bin", ".safetensors",
)  # fmt: skip


def title(model: str) -> str:
    path = Path(model)
    named = path.name in ("config.json", "model_index.json")
    return path.resolve().parent.name if named else model


def located(args: argparse.Namespace, weights: bool) -> str:
    """The model as what reads it takes it: the folder of a file where that is what is meant.

    Raises:
        ValueError: a path that leads nowhere, or a file that cannot have what is asked for.
    """
    model, path = str(args.model), Path(args.model)
    if not model.strip():
        raise ValueError("the model's name is empty: expected a Hub id, a folder or a config.json")
    if path.is_file():
        if args.subfolder and path.name != "model_index.json":
            raise ValueError(
                f"--subfolder {args.subfolder}: `{model}` is one model; a part is taken of a "
                "pipeline's folder, or of its model_index.json"
            )
        if weights and path.name not in ("config.json", "model_index.json"):
            raise ValueError(
                f"`{model}` has no weights: name the folder that has them, or add --random-weights"
            )
        return str(path.parent) if weights or args.subfolder else model
    local = model.startswith((".", "/", "~")) or model.endswith((".json", "/")) or "\\" in model
    if not path.is_dir() and (local or model.count("/") > 1):
        raise ValueError(f"`{model}`: no such file or folder")
    return model


def _config_file(model: str, subfolder: str | None, name: str) -> dict[str, Any] | None:
    """A JSON file of a model by Hub id, folder or its own path; None if the model has none."""
    path = Path(model)
    if path.is_file():
        if path.name.endswith(".json") and (name == "config.json") != (
            path.name == "model_index.json"
        ):
            return _read_json(path)
        return None
    if path.is_dir():
        file = path / (subfolder or "") / name
        return _read_json(file) if file.is_file() else None
    return _hub_file(model, subfolder, name)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except RecursionError as e:
        raise ValueError(f"`{file}` is not read: its JSON is nested too deeply") from e
    except ValueError as e:
        raise ValueError(f"`{file}` is not JSON: {e}") from e
    if not isinstance(found, dict):
        raise ValueError(f"`{file}`: expected a JSON object, got a {type(found).__name__}")
    return {key: _float(value) for key, value in found.items()}


def _float(value: Any) -> Any:
    """transformers writes infinity, which JSON has not, as `{"__float__": "Infinity"}`."""
    if isinstance(value, list):
        return [_float(v) for v in value]
    if isinstance(value, dict) and set(value) == {"__float__"}:
        return float(value["__float__"])
    return value


def _hub_file(model: str, subfolder: str | None, name: str) -> dict[str, Any] | None:
    from huggingface_hub import errors, hf_hub_download, try_to_load_from_cache

    from hfpatch.hub.explain import reason

    try:
        return _read_json(Path(hf_hub_download(model, name, subfolder=subfolder)))
    except errors.LocalEntryNotFoundError as e:  # no answer, and this file was not fetched before
        names = ("config.json", "model_index.json", f"{subfolder}/config.json")
        if any(isinstance(try_to_load_from_cache(model, n), str) for n in names):
            return None
        raise ValueError(
            f"`{model}` is no file or folder here, and the Hub could not be asked: {reason(e)}"
        ) from e
    except errors.EntryNotFoundError:
        return None
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as e:
        raise ValueError(
            f"`{model}` is no file or folder here, and no model of the Hub that can be read: "
            f"{str(e).splitlines()[0]}"
        ) from e


def models(args: argparse.Namespace) -> tuple[list[tuple[str, Any]], Any]:
    """((prefix, model) of each part, the pipeline that they are of or None), in `args.dtype` on
    `args.device`: with weights, or random ones under `--random-weights`."""
    if not args.random_weights:
        return from_weights(args)
    parts = from_config(args, args.device)
    for _, model in parts:
        randomize_(model)
    index = None if args.subfolder else _config_file(args.model, None, "model_index.json")
    return parts, None if index is None else _pipeline(args, index, dict(parts))


def randomize_(model: Any, seed: int = 0) -> None:
    """Values for every parameter, also of those that a class fills with zeros or ones, behind which
    nothing would be seen: matrices N(0, 1 / fan-in), vectors near 1 where they scale, else near 0.
    """
    import zlib

    import torch

    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    with torch.no_grad():
        for name, p in model.named_parameters():
            if not p.is_floating_point():
                continue
            g = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
            drawn = torch.randn(p.shape, generator=g)
            if p.ndim >= 2:
                drawn *= 1.0 if id(p) in embeddings else max(p[0].numel(), 1) ** -0.5
            else:
                drawn = 0.1 * drawn + (1.0 if name.endswith("weight") else 0.0)
            p.copy_(drawn)


def _pipeline(args: argparse.Namespace, index: dict[str, Any], parts: dict[str, Any]) -> Any:
    """Of parts that were built and its scheduler; None if its class wants more than that."""
    import diffusers

    cls: Any = getattr(diffusers, str(index.get("_class_name")), None)
    components: dict[str, Any] = {}
    for name, entry in index.items():
        if not (isinstance(entry, list) and len(entry) == 2):
            continue
        components[name] = parts.get(name)
        scheduler = getattr(diffusers, str(entry[1]), None)
        if name == "scheduler" and scheduler is not None:
            config = _config_file(args.model, name, "scheduler_config.json") or {}
            components[name] = scheduler.from_config(config)
    try:
        return cls(**components)
    except Exception:  # a class of another version, or one that reads its tokenizer at once
        return None


def from_config(args: argparse.Namespace, device: str) -> list[tuple[str, Any]]:
    """(prefix, model) pairs with random weights (or none, on the meta device)."""
    index = None if args.subfolder else _config_file(args.model, None, "model_index.json")
    if index is None:
        config = _config_file(args.model, args.subfolder, "config.json")
        if config is None:
            raise ValueError(
                _no_subfolder(args)
                or f"`{args.model}` has neither a config.json nor a model_index.json"
            )
        return [("", _build(config, args, device))]
    parts = []
    root = Path(args.model).parent if Path(args.model).is_file() else Path(args.model)
    for name, entry in index.items():
        if not (isinstance(entry, list) and len(entry) == 2 and entry[0]):
            continue
        if not name or name in (".", "..") or any(c in name for c in "/\\\0"):
            raise ValueError(
                f"`{args.model}`: its model_index.json names a part {name!r}, expected the name of "
                "a folder beside it"
            )
        source = str(root) if root.is_dir() else args.model
        config = _config_file(source, name, "config.json")
        if config is not None and ("_class_name" in config or "architectures" in config):
            try:
                parts.append((name, _build(config, args, device)))
            except _NoModel:  # a scheduler, a processor: nothing to patch
                continue
    if not parts:
        raise ValueError(f"`{args.model}` is a pipeline without a model that could be built")
    return parts


def _no_subfolder(args: argparse.Namespace) -> str:
    """What is wrong with `--subfolder`, and what it could be; "" if there is none."""
    if not args.subfolder:
        return ""
    index = _config_file(args.model, None, "model_index.json") or {}
    parts = [k for k, v in index.items() if isinstance(v, list) and v and v[0]]
    if not parts and Path(args.model).is_dir():
        parts = sorted(f.parent.name for f in Path(args.model).glob("*/config.json"))
    known = f"; it has {', '.join(parts)}" if parts else ""
    close = difflib.get_close_matches(args.subfolder, parts, 1)
    meant = f"; did you mean `{close[0]}`?" if close else ""
    return f"--subfolder {args.subfolder}: `{args.model}` has no model of that name{meant or known}"


class _Explained(ValueError):
    """An error that says which model it is of."""


class _NoModel(ValueError):
    """A configuration of something else."""


@contextmanager
def explained(model: str) -> Iterator[None]:
    """An error of whatever type that building a model ends with, as one that names it."""
    from hfpatch.hub.explain import reason

    try:
        yield
    except (_Explained, KernelLoadError):
        raise
    except FAILURES as e:  # the model's own code may end in `sys.exit()`
        said = f"`{model}` could not be built: {reason(e)}"
        if any(words in str(e) for words in _NO_WEIGHTS):
            said += "; without its weights, with random ones: --random-weights"
        raise _Explained(said) from e


def _build(config: dict[str, Any], args: argparse.Namespace, device: str) -> Any:
    import torch
    from torch import nn

    dtype = getattr(torch, args.dtype)
    _say_quantized(config, args)
    if "_class_name" in config:
        import diffusers

        cls = getattr(diffusers, str(config["_class_name"]), None)
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise _NoModel(f"`{config['_class_name']}` is not a diffusers model")
        build: Any = cls
        with explained(args.model), torch.device(device):
            return build.from_config(config).to(dtype)
    import transformers

    if (own := _own_code(config, args)) is not None:
        with explained(args.model):
            cls, settings = _own_classes(own[1], config, args)
            with torch.device(device):
                return cls(settings.from_dict(config)).to(dtype)
    names = config.get("architectures") or []
    name = names[0] if isinstance(names, list) and names else None
    cls = getattr(transformers, name, None) if isinstance(name, str) else None
    if cls is None:
        raise _NoModel(_no_class(config, names, transformers.__version__))
    with explained(args.model), torch.device(device):
        return cls(cls.config_class.from_dict(config)).to(dtype)


def _say_quantized(config: dict[str, Any], args: argparse.Namespace) -> None:
    """The quantizer wants weights; without them the model is built as it was before."""
    given = config.get("quantization_config")
    if given:
        method = given.get("quant_method") if isinstance(given, dict) else None
        named = f" (`{method}`)" if isinstance(method, str) else ""
        announce(
            f"`{args.model}` is quantized{named} and is built without its quantizer here: what is "
            "said of layers that it exchanges, and of decoding steps, which read their weights, "
            "is said of the model before. Apply to the loaded model: its report is of that"
        )


def _no_class(config: dict[str, Any], names: Any, version: str) -> str:
    """What to say of a configuration whose model transformers has not."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    said = f"`architectures` {names} names no class of this transformers version ({version})"
    kind = config.get("model_type")
    if isinstance(kind, str) and kind not in CONFIG_MAPPING_NAMES:
        return (
            f"{said}, nor is its model_type `{kind}` known: a later transformers may have it, or "
            "the model's repository has code of its own (`auto_map`, with --trust-remote-code)"
        )
    if names:
        return f"{said}: a later one may have it"
    return f'{said}: write its class into the config.json, as `"architectures": ["BertModel"]`'


def _own_code(config: dict[str, Any], args: argparse.Namespace) -> tuple[str, str] | None:
    """(transformers' auto class, where its class is in the model's own code), of `auto_map`; None:
    the libraries have the model's class, and the model's code was not asked for.

    Raises:
        ValueError: only its own code has the class, and `--trust-remote-code` was not given.
    """
    import transformers

    mapped = config.get("auto_map")
    found = {
        auto: reference
        for auto, reference in (mapped if isinstance(mapped, dict) else {}).items()
        if auto.startswith("AutoModel") and isinstance(reference, str)
    }
    names = config.get("architectures")
    names = [n for n in names if isinstance(n, str)] if isinstance(names, list) else []
    known = any(hasattr(transformers, name) for name in names)
    if not found or (known and not args.trust_remote_code):
        return None
    if not args.trust_remote_code:
        raise ValueError(
            f"`{args.model}` is of a class that is in no library but in its own code "
            f"(`auto_map`: {', '.join(found.values())}); read that code, then add "
            "--trust-remote-code, which runs it"
        )
    named = (auto for auto, reference in found.items() if reference.rpartition(".")[2] in names)
    usual = (auto for auto in ("AutoModelForCausalLM", "AutoModel") if auto in found)
    auto = next(named, None) or next(usual, None) or next(iter(found))
    return auto, found[auto]


def _own_classes(reference: str, config: dict[str, Any], args: argparse.Namespace) -> Any:
    """(class of the model, class of its configuration): the model's own code runs here."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    path = Path(args.model)
    source = str(path.parent if path.is_file() else path / (args.subfolder or ""))
    if not Path(source).is_dir():
        source = args.model  # of the Hub
    cls = get_class_from_dynamic_module(reference, source)
    settings = config["auto_map"].get("AutoConfig")
    own = settings and get_class_from_dynamic_module(settings, source)
    return cls, own or cls.config_class


def from_weights(args: argparse.Namespace) -> tuple[list[tuple[str, Any]], Any]:
    """The same with weights.

    Raises:
        ValueError: there are none, or they cannot be loaded.
    """
    import torch

    dtype = getattr(torch, args.dtype)
    if args.subfolder is None and _config_file(args.model, None, "model_index.json") is not None:
        from diffusers import DiffusionPipeline

        with explained(args.model):
            pipe = DiffusionPipeline.from_pretrained(
                args.model, dtype=dtype, trust_remote_code=args.trust_remote_code
            ).to(args.device)
        modules = pipe.components.items()
        return [(k, m) for k, m in modules if isinstance(m, torch.nn.Module)], pipe
    config = _config_file(args.model, args.subfolder, "config.json")
    if config is None and (wrong := _no_subfolder(args)):
        raise ValueError(wrong)
    config = config or {}
    kwargs = {"subfolder": args.subfolder} if args.subfolder else {}
    if "_class_name" in config:
        import diffusers

        with explained(args.model):
            cls = getattr(diffusers, str(config["_class_name"]))
            model = cls.from_pretrained(args.model, dtype=dtype, **kwargs)
        return [("", model.to(args.device))], None
    import transformers

    names = config.get("architectures") or ["AutoModel"]
    own = _own_code(config, args)
    with explained(args.model):
        cls = getattr(transformers, own[0] if own else names[0], transformers.AutoModel)
        model = cls.from_pretrained(
            args.model, dtype=dtype, trust_remote_code=args.trust_remote_code, **kwargs
        )
    return [("", model.to(args.device))], None
