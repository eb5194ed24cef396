"""The small models and data sets of TRL's tests, made here in place of the Hub's.

    python tests/upstream/trl_hub.py CHECKOUT FOLDER

TRL's tests load `trl-internal-testing/tiny-*`, and data as `trl-internal-testing/zen`. The scripts
that made these are in its repository: they are run as they are, with a tokenizer that is trained
here on the texts of `zen`, TRL's own chat templates, and random weights. FOLDER gets `hub/`, a
cache as huggingface_hub's (which HF_HUB_CACHE must name), and `data/`, a folder for each
configuration of the data (see trl_plugin.py). Models whose script needs more of the Hub are named
in `left-out.json`, with why: their tests fail with and without hfpatch.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers
import trl
from datasets import DatasetDict, load_from_disk
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

ORGANIZATION = "trl-internal-testing"
REVISION = "0" * 40
SCRIPTS = "scripts.generate_tiny_models"
#: Beginning of a released model's name: its chat template among TRL's, its type, its token at the
#: end of a turn, and one for padding or none.
RELEASES: dict[str, tuple[str, str, str, str | None]] = {
    "Qwen/Qwen2.5": ("qwen2_5", "qwen2", "<|im_end|>", "<|endoftext|>"),
    "Qwen/Qwen3-4B-Instruct-2507": ("qwen3_instruct_2507", "qwen3", "<|im_end|>", "<|endoftext|>"),
    "Qwen/Qwen3": ("qwen3", "qwen3", "<|im_end|>", "<|endoftext|>"),
    "meta-llama/Llama-3.2": ("llama3_2", "llama", "<|eot_id|>", None),
    "meta-llama/Meta-Llama-3.1": ("llama3_1", "llama", "<|eot_id|>", None),
    "meta-llama/Meta-Llama-3": ("llama3", "llama", "<|eot_id|>", None),
    "openai/gpt-oss": ("gptoss", "gpt_oss", "<|return|>", "<|endoftext|>"),
    "google/gemma": ("gemma", "gemma", "<end_of_turn>", "<pad>"),
    "google/flan-t5": ("qwen2_5", "t5", "</s>", "<pad>"),
    "microsoft/Phi-3.5": ("phi3_5", "phi3", "<|end|>", "<|endoftext|>"),
    "microsoft/Phi-3": ("phi3", "phi3", "<|end|>", "<|endoftext|>"),
    "EleutherAI": ("qwen2_5", "gpt_neox", "<|endoftext|>", None),
    "": ("qwen2_5", "", "</s>", "<pad>"),
}
SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<pad>", "<bos>", "<eos>",
    "<start_of_turn>", "<end_of_turn>", "<|begin_of_text|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eot_id|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>",
    "<|return|>", "<|call|>", "<|user|>", "<|assistant|>", "<|system|>", "[INST]", "[/INST]",
)  # fmt: skip


def release_of(name: str) -> tuple[str, str, str, str | None]:
    return next(found for prefix, found in RELEASES.items() if name.startswith(prefix))


def data(checkout: Path, folder: Path) -> None:
    """Each configuration of them saved where it would be pushed to the Hub."""

    def saved(data: DatasetDict, repo_id: str, config_name: str = "default", **_: Any) -> None:
        data.save_to_disk(str(folder / repo_id.partition("/")[2] / config_name))

    DatasetDict.push_to_hub = saved
    for name in ("zen", "toolcall", "harmony"):
        script = runpy.run_path(str(checkout / "scripts" / f"generate_{name}_dataset.py"))
        script["main"](0.1, True, f"{ORGANIZATION}/{name}")


def texts(folder: Path) -> list[str]:
    """All of `zen`, and the chat templates."""
    found = [json.dumps(row) for path in folder.glob("zen/*/*") if path.is_dir()
             for row in load_from_disk(str(path))]  # fmt: skip
    own = Path(trl.__file__).parent / "chat_templates"
    return found + [path.read_text("utf-8") for path in sorted(own.glob("*.jinja"))]


def trained(corpus: list[str]) -> Tokenizer:
    """Of bytes, so that it has every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def make(checkout: Path, folder: Path) -> dict[str, str]:
    """All models whose scripts run here; why others' do not, by script."""
    data(checkout, folder / "data")
    tokens = trained(texts(folder / "data")).to_str()
    templates = Path(trl.__file__).parent / "chat_templates"

    def tokenizer_of(name: str, *args: Any, **kwargs: Any) -> Any:
        template, _, end, pad = release_of(name)
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(tokens), eos_token=end, pad_token=pad
        )
        tokenizer.chat_template = (templates / f"{template}.jinja").read_text("utf-8")
        return tokenizer

    def config_of(name: str, *args: Any, **kwargs: Any) -> Any:
        kind = release_of(name)[1]
        known = {"vocab_size": len(tokenizer_of(name)), "pad_token_id": None}
        if kind == "t5":
            known |= {"pad_token_id": 0, "decoder_start_token_id": 0}
        return transformers.AutoConfig.for_model(kind, **(known | kwargs))

    def generation_of(name: str, *args: Any, **kwargs: Any) -> Any:
        tokenizer = tokenizer_of(name)
        return transformers.GenerationConfig(
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
        )

    def pushed(
        model: Any, tokenizer: Any, generation: Any, prefix: str = "", suffix: str = "", **_: Any
    ) -> None:
        name = "-".join(n for n in (prefix, type(model).__name__, suffix) if n)
        home = folder / "hub" / f"models--{ORGANIZATION}--{name}"
        for what in (model, tokenizer, generation):
            if what is not None:
                what.save_pretrained(home / "snapshots" / REVISION)
        (home / "refs").mkdir(exist_ok=True)
        (home / "refs" / "main").write_text(REVISION)

    sys.path.insert(0, str(checkout))
    common: Any = __import__(f"{SCRIPTS}._common", fromlist=["_common"])
    common.push_to_hub = pushed
    common.check_transformers_version = lambda *args: None  # the floor: here it is the newest
    common.check_dtype_pattern = common.print_config_diff = lambda *args: None  # ask the Hub
    for found, what in (
        (transformers.AutoTokenizer, tokenizer_of),
        (transformers.AutoConfig, config_of),
        (transformers.GenerationConfig, generation_of),
    ):
        _replace(found, what)
    left_out = {}
    paths = sorted((checkout / SCRIPTS.replace(".", "/")).glob("for_*/*.py"))
    # those of PEFT load models that others make
    for path in sorted(paths, key=lambda path: path.stem.startswith("peft_")):
        if path.stem == "__init__":
            continue
        transformers.set_seed(0)
        try:
            runpy.run_module(f"{SCRIPTS}.{path.parent.name}.{path.stem}", run_name="__main__")
        except Exception as e:  # whatever it wants of the Hub, or of another transformers
            left_out[path.stem] = f"{type(e).__name__}: {str(e).strip().splitlines()[0][:200]}"
    return left_out


def _replace(cls: Any, function: Callable[..., Any]) -> None:
    """A class's `from_pretrained`, for names of releases; folders are loaded as ever."""
    original = cls.from_pretrained

    def from_pretrained(name: Any, *args: Any, **kwargs: Any) -> Any:
        if Path(name).is_dir():
            return original(name, *args, **kwargs)
        return function(name, *args, **kwargs)

    cls.from_pretrained = from_pretrained


if __name__ == "__main__":
    where = Path(sys.argv[2])
    reasons = make(Path(sys.argv[1]).resolve(), where)
    (where / "left-out.json").write_text(json.dumps(reasons, indent=1))
    for name, why in reasons.items():
        print(f"{name}: {why}")
