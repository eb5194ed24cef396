"""The command line: `plan`, `apply-check`, `env`; others in `hfpatch.bench`, `hfpatch.hub` and
`hfpatch.kernel_project`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hfpatch.bench import command as bench
from hfpatch.errors import KernelLoadError
from hfpatch.hub.cli import HUB_COMMANDS, add_hub_commands
from hfpatch.kernel_project.cli import add_kernel_commands, run_kernel_command
from hfpatch.text import printable

DTYPES = ("float32", "float16", "bfloat16")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hfpatch", description="Fast fused kernels in HuggingFace models."
    )
    commands = parser.add_subparsers(dest="command", required=True)

    plan = commands.add_parser(
        "plan",
        help="show what `hfpatch.apply` would swap in a model, and why not the rest",
        description="The model is built from its configuration alone: no weights are needed, no "
        "memory is used for them, and a 70B model takes seconds.",
    )
    check = commands.add_parser(
        "apply-check",
        help="apply, compare outputs with the unpatched model, restore, compare again",
    )
    for command in (plan, check):
        command.add_argument(
            "model", help="a Hub id, a local folder, or a config.json / model_index.json"
        )
        command.add_argument("--dtype", choices=DTYPES, default="float32")
        command.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
        command.add_argument("--mode", choices=("inference", "training"), default="inference")
        command.add_argument(
            "--kernels",
            help="sources in order of preference, or by op, as in HFPATCH_KERNELS: "
            "`hub,local,torch`, `rms_norm=org/name@v1;*=local`",
        )
        command.add_argument("--include", action="append", metavar="GLOB")
        command.add_argument("--exclude", action="append", metavar="GLOB")
        command.add_argument("--subfolder", help="a part of a pipeline, e.g. transformer")
        command.add_argument(
            "--trust-remote-code", action="store_true", help="run code of the model's repository"
        )
        command.add_argument(
            "--trust-kernel",
            action="append",
            default=[],
            metavar="ORG/NAME",
            help="load kernels of this repository, whoever its publisher is",
        )
        command.add_argument("--json", action="store_true", help="print JSON instead of a table")
    check.add_argument(
        "--random-weights",
        action="store_true",
        help="build the model from its configuration with random weights",
    )
    env = commands.add_parser("env", help="versions, devices, and the kernel build in use")
    env.add_argument("--json", action="store_true")
    bench.add_parser(commands)
    add_hub_commands(commands)
    add_kernel_commands(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0 done, 1 a check or a download failed, 2 bad usage."""
    args = build_parser().parse_args(argv)
    try:
        if args.command == "env":
            return _env(args)
        if args.command == "bench":
            return bench.run(args)
        if args.command in HUB_COMMANDS:
            return HUB_COMMANDS[args.command](args)
        if args.command == "kernel":
            return run_kernel_command(args)
        return _plan(args, _title(args.model)) if args.command == "plan" else _apply_check(args)
    except (OSError, ValueError, TypeError, RuntimeError) as e:
        command = f"{args.command} {args.action}" if args.command == "kernel" else args.command
        print(printable(f"hfpatch {command}: {e}"), file=sys.stderr)
        return 1 if isinstance(e, KernelLoadError) else 2


def _env(args: argparse.Namespace) -> int:
    from hfpatch.env import describe

    found = describe()
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    for name, version in found["versions"].items():
        print(f"{name:14} {version}")
    for device in found["devices"]:
        extra = device.get("capability") or f"{device.get('threads')} threads"
        print(f"{device['device']:14} {device['name']} ({extra})")
    build = found["local build"]
    if "variant" in build:
        print(f"{'kernels':14} {build['variant']}")
        print(f"{'':14} devices: {', '.join(build['devices'])}; ops: {', '.join(build['ops'])}")
        if build["archs"]:
            print(f"{'':14} CUDA architectures: {', '.join(build['archs'])}")
    if "problem" in build:
        print(f"{'problem':14} {build['problem']}")
    flash = found["FlashAttention-3"]
    said = [flash[key] for key in ("package", "problem") if key in flash]
    print(f"{'attention':14} FlashAttention-3: {'; '.join(said)}")
    return 0


def _plan(args: argparse.Namespace, title: str) -> int:
    from dataclasses import replace

    import torch

    from hfpatch.planner import make_plan
    from hfpatch.report import Report, as_text
    from hfpatch.settings import check_settings

    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: this torch sees no CUDA device; plan for cpu instead")
    args.model = _located(args, weights=False)
    parts = _from_config(args, device="meta")
    settings = check_settings(
        args.mode, _kernels(args), args.include, args.exclude, True, False, _hub(args)
    )
    settings = replace(settings, assume_device=args.device)
    decided, _ = make_plan(parts, title, settings)
    print(Report(decided, applied=False).to_json() if args.json else as_text(decided, False))
    return 0


def _kernels(args: argparse.Namespace) -> Any:
    from hfpatch.choices import parse_variable

    return None if args.kernels is None else parse_variable(args.kernels)


def _hub(args: argparse.Namespace) -> dict[str, Any]:
    """`--trust-remote-code` is about the model's code; each kernel is named by itself."""
    return {"trust_remote_code": tuple(args.trust_kernel)} if args.trust_kernel else {}


def _apply_check(args: argparse.Namespace) -> int:
    import torch

    import hfpatch

    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: this torch sees no CUDA device; check on cpu instead")
    args.model = _located(args, weights=not args.random_weights)
    parts = _from_config(args, args.device) if args.random_weights else _from_weights(args)
    results: list[dict[str, Any]] = []
    failed = False
    for prefix, model in parts:
        model.eval()
        inputs = getattr(model, "dummy_inputs", None)
        inputs = (
            {k: v.to(args.device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
            if isinstance(inputs, dict)
            else None
        )
        before = _run(model, inputs)
        state = {k: v.clone() for k, v in model.state_dict().items()}
        report = hfpatch.apply(
            model,
            mode=args.mode,
            kernels=_kernels(args),
            hub=_hub(args),
            include=args.include,
            exclude=args.exclude,
            strict=True,
        )
        patched = _run(model, inputs)
        same_state = all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
        restored_count = hfpatch.restore(model)
        restored = _run(model, inputs)
        result: dict[str, Any] = {
            "part": prefix or type(model).__name__,
            "swapped": len(report.swaps),
            "state_dict untouched": same_state,
            "restored": restored_count == len(report.swaps),
        }
        if before is not None and patched is not None and restored is not None:
            scale = before.abs().max().clamp_min(1e-30)
            result["relative difference"] = ((patched - before).abs().max() / scale).item()
            # a whole model's roundings; a wrong kernel is orders of magnitude beyond
            result["equal"] = result["relative difference"] < (
                1e-3 if args.dtype == "float32" else 0.1
            )
            result["bit-equal after restore"] = torch.equal(before, restored)
        else:
            result["outputs"] = f"not compared: {type(model).__name__} has no dummy inputs"
        failed |= not (
            same_state
            and result["restored"]
            and result.get("equal", True)
            and result.get("bit-equal after restore", True)
        )
        results.append(result)
        if not args.json:
            print(report)
            print("\n".join(f"{k}: {v}" for k, v in result.items()), end="\n\n")
    if args.json:
        print(json.dumps(results, indent=2))
    return 1 if failed else 0


def _run(model: Any, inputs: dict[str, Any] | None) -> Any:
    """The first floating-point output in fp64 on the CPU, or None when there is no sample input."""
    import torch
    from torch.utils import _pytree as pytree

    if inputs is None:
        return None
    with torch.no_grad():
        output = model(**inputs, return_dict=False)
    floats = [
        t
        for t in pytree.tree_leaves(output)
        if isinstance(t, torch.Tensor) and t.is_floating_point()
    ]
    return floats[0].double().cpu() if floats else None


# ------------------------------------------------------------------------------ loading


def _title(model: str) -> str:
    path = Path(model)
    named = path.name in ("config.json", "model_index.json")
    return path.resolve().parent.name if named else model


def _located(args: argparse.Namespace, weights: bool) -> str:
    """The model as what reads it takes it: the folder of a file where that is what is meant.

    Raises:
        ValueError: a path that leads nowhere, or a file that cannot have what is asked for.
    """
    model, path = str(args.model), Path(args.model)
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
    except ValueError as e:
        raise ValueError(f"`{file}` is not JSON: {e}") from e
    if not isinstance(found, dict):
        raise ValueError(f"`{file}`: expected a JSON object, got a {type(found).__name__}")
    return found


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


def _from_config(args: argparse.Namespace, device: str) -> list[tuple[str, Any]]:
    """(prefix, model) pairs with random weights (or none, on the meta device)."""
    index = None if args.subfolder else _config_file(args.model, None, "model_index.json")
    if index is None:
        config = _config_file(args.model, args.subfolder, "config.json")
        if config is None:
            raise ValueError(f"`{args.model}` has neither a config.json nor a model_index.json")
        return [("", _build(config, args, device))]
    parts = []
    root = Path(args.model).parent if Path(args.model).is_file() else Path(args.model)
    for name, entry in index.items():
        if not (isinstance(entry, list) and len(entry) == 2 and entry[0]):
            continue
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


class _NoModel(ValueError):
    """A configuration of something else."""


@contextmanager
def _explained(model: str) -> Iterator[None]:
    """An error of whatever type that building a model ends with, as one that names it."""
    from hfpatch.hub.explain import reason

    try:
        yield
    except Exception as e:
        raise ValueError(f"`{model}` could not be built: {reason(e)}") from e


def _build(config: dict[str, Any], args: argparse.Namespace, device: str) -> Any:
    import torch
    from torch import nn

    dtype = getattr(torch, args.dtype)
    if "_class_name" in config:
        import diffusers

        cls = getattr(diffusers, str(config["_class_name"]), None)
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise _NoModel(f"`{config['_class_name']}` is not a diffusers model")
        build: Any = cls
        with _explained(args.model), torch.device(device):
            return build.from_config(config).to(dtype)
    import transformers

    names = config.get("architectures") or []
    name = names[0] if isinstance(names, list) and names else None
    cls = getattr(transformers, name, None) if isinstance(name, str) else None
    if cls is None:
        raise _NoModel(f"`architectures` {names} names no class of this transformers version")
    if args.trust_remote_code and "auto_map" in config:
        raise ValueError("--trust-remote-code works with weights only: apply-check MODEL")
    with _explained(args.model), torch.device(device):
        return cls(cls.config_class.from_dict(config)).to(dtype)


def _from_weights(args: argparse.Namespace) -> list[tuple[str, Any]]:
    import torch

    dtype = getattr(torch, args.dtype)
    if args.subfolder is None and _config_file(args.model, None, "model_index.json") is not None:
        from diffusers import DiffusionPipeline

        with _explained(args.model):
            pipe = DiffusionPipeline.from_pretrained(args.model, torch_dtype=dtype).to(args.device)
        return [(k, m) for k, m in pipe.components.items() if isinstance(m, torch.nn.Module)]
    config = _config_file(args.model, args.subfolder, "config.json") or {}
    kwargs = {"subfolder": args.subfolder} if args.subfolder else {}
    if "_class_name" in config:
        import diffusers

        with _explained(args.model):
            cls = getattr(diffusers, str(config["_class_name"]))
            model = cls.from_pretrained(args.model, torch_dtype=dtype, **kwargs)
        return [("", model.to(args.device))]
    import transformers

    names = config.get("architectures") or ["AutoModel"]
    with _explained(args.model):
        cls = getattr(transformers, names[0], transformers.AutoModel)
        model = cls.from_pretrained(
            args.model, dtype=dtype, trust_remote_code=args.trust_remote_code, **kwargs
        )
    return [("", model.to(args.device))]
