"""What is wrong is said in a line that names it, what was expected, and what to do; with a status.

A table for the command line and one for Python. Each row: what somebody did; what the message must
name; and what it must say besides, so that the next try can be right. Nothing here needs a network.
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import hfpatch
from hfpatch import cli
from hfpatch.errors import HfpatchError
from hfpatch.hub import HubOptions

HEX = "0" * 64


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that people point at: some are models, most are not."""
    top = tmp_path_factory.mktemp("place")
    model = zoo.ENTRIES["llama"].build()
    config = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    files: dict[str, str] = {
        "llama/config.json": json.dumps(config, default=str),
        "cut/config.json": '{"architectures":',
        "list/config.json": "[1]",
        "unknown/config.json": '{"architectures": ["NoSuchModel"]}',
        "none/config.json": "{}",
        "newer/config.json": '{"architectures": ["FrobModel"], "model_type": "frobnicate"}',
        "typed/config.json": '{"model_type": "bert"}',
        "own/config.json": json.dumps(
            {"architectures": ["Own"], "auto_map": {"AutoModel": "modeling_own.Own"}}
        ),
        "leaves/config.json": json.dumps(
            {"architectures": ["Own"], "auto_map": {"AutoModel": "modeling_leaves.Own"}}
        ),
        "leaves/modeling_leaves.py": "raise SystemExit(0)\n",
        "lablist/lab.json": "[]",
        "odd/config.json": json.dumps({"architectures": 5, "auto_map": {"AutoModel": 5}}),
        "zero/config.json": json.dumps(
            {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 0}
        ),
        "vae/config.json": '{"_class_name": "NoSuchVae"}',
        "pipe/model_index.json": json.dumps(
            {
                "_class_name": "LTXPipeline",
                "transformer": ["diffusers", "LTXVideoTransformer3DModel"],
            }
        ),
        "up/model_index.json": json.dumps({"../llama": ["transformers", "LlamaForCausalLM"]}),
        "deep/config.json": "[" * 100_000,
        "file.txt": "x",
        "makes.py": "import torch\n\n\ndef number():\n    return 3\n\n\ndef raises():\n"
        "    raise OSError('no luck')\n\n\ndef bare():\n    return torch.nn.Linear(2, 2)\n\n\n"
        "def three():\n    return bare(), {}, 3\n\n\nclass Fails(torch.nn.Linear):\n"
        "    def forward(self, x):\n        return {}[x]\n\n\n"
        "def fails():\n    return Fails(2, 2), {'x': 3}\n",
        "a.whl": "no wheel",
        "full/x": "",
        "bad.lock": "{",
        "broken/build.toml": "x = [",
        "lacking/build.toml": '[general]\nname = "a"\n',
        "empty/.keep": "",
    }
    for name, text in files.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(text)
    return top


@pytest.fixture(autouse=True)
def _alone(place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    monkeypatch.chdir(place)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HFPATCH_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("HFPATCH_CONFIG", "")
    monkeypatch.delenv("HFPATCH_KERNELS", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


#: Words of the command, exit status, what is named, what is expected or to be done.
COMMANDS: list[tuple[str, int, str, str]] = [
    # the program itself
    ("", 2, "required: command", "usage: hfpatch"),
    ("nonsense", 2, "invalid choice: 'nonsense'", "apply-check"),
    ("Plan llama", 2, "invalid choice: 'Plan'", "plan"),
    ("--verbose plan llama", 2, "unrecognized arguments: --verbose", "usage: hfpatch"),
    # plan: the model
    ("plan", 2, "required: model", "usage: hfpatch plan"),
    ("plan llama extra", 2, "unrecognized arguments: extra", "usage: hfpatch"),
    ("plan ''", 2, "the model's name is empty", "expected a Hub id, a folder or a config.json"),
    ("plan ./nothing", 2, "`./nothing`", "no such file or folder"),
    ("plan ~/nothing/there", 2, "`~/nothing/there`", "no such file or folder"),
    ("plan nothing.json", 2, "`nothing.json`", "no such file or folder"),
    ("plan a/b/c/d", 2, "`a/b/c/d`", "no such file or folder"),
    ("plan empty", 2, "`empty`", "neither a config.json nor a model_index.json"),
    ("plan file.txt", 2, "`file.txt`", "neither a config.json nor a model_index.json"),
    ("plan 'two words'", 2, "`two words` is no file or folder here", "Repo id must use"),
    ("plan org/name", 2, "`org/name` is no file or folder here", "the Hub could not be asked"),
    ("plan cut", 2, "cut/config.json`", "is not JSON"),
    ("plan list", 2, "list/config.json`", "expected a JSON object, got a list"),
    ("plan unknown", 2, "['NoSuchModel']", "no class of this transformers version"),
    ("plan none", 2, "`architectures` []", "no class of this transformers version"),
    ("plan own", 2, "`own` is of a class that is in no library", "add --trust-remote-code"),
    ("plan own --trust-remote-code", 2, "`own` could not be built", "modeling_own.py"),
    ("plan leaves --trust-remote-code", 2, "could not be built", "SystemExit"),
    ("lab check --out lablist", 3, "`lablist/lab.json`", "holds a list, expected an object"),
    ("plan odd --trust-remote-code", 2, "`architectures` 5", "no class of this transformers"),
    ("plan zero", 2, "`zero` could not be built", "ZeroDivisionError"),
    ("plan vae", 2, "`NoSuchVae`", "is not a diffusers model"),
    ("plan pipe", 2, "`pipe` is a pipeline", "without a model that could be built"),
    (
        "plan pipe --subfolder transfomer",
        2,
        "--subfolder transfomer",
        "did you mean `transformer`?",
    ),
    ("plan llama --subfolder text", 2, "--subfolder text", "`llama` has no model of that name"),
    ("plan llama/config.json --subfolder x", 2, "--subfolder x", "a part is taken of a pipeline's"),
    ("plan up", 2, "names a part '../llama'", "expected the name of a folder"),
    ("plan deep", 2, "deep/config.json`", "nested too deeply"),
    ("plan llama --explain ''", 2, "`--explain` is empty", "expected the path of a block"),
    ("plan llama --explain layers.0", 2, "no block of `layers.0`", "mean `model.layers.0`?"),
    ("plan llama --explain nothing.7", 2, "no module of that path", "may: model.layers.0, model"),
    ("plan llama --explain model.norm", 2, "it is a `LlamaRMSNorm`", "may: model.layers.0, model"),
    ("plan llama --explain model", 2, "it is a `LlamaModel`", "those that may: model.layers.0"),
    ("plan newer --explain layers.0", 2, "model_type `frobnicate`", "a later transformers may"),
    ("plan newer", 2, "`architectures` ['FrobModel'] names no class", "--trust-remote-code"),
    ("plan typed", 2, "`architectures` [] names no class", "write its class into the config.json"),
    ("plan llama --explain model.layers.0 --mode training", 2, "for inference", "training` away"),
    ("plan llama --explain model.layers.0 --kernels no", 2, "the kernels that", "leave `--kernels"),
    (
        "plan llama --explain model.layers.0 --exclude a",
        2,
        "what a block is",
        "leave `--exclude a`",
    ),
    ("plan llama --explain x --svg full", 2, "`full` is a folder", "expected a file's name"),
    # plan: options
    ("plan llama --dtype float64", 2, "invalid choice: 'float64'", "'bfloat16'"),
    ("plan llama --dtype", 2, "argument --dtype", "expected one argument"),
    ("plan llama --dtype bf16", 2, "invalid choice: 'bf16'", "'bfloat16'"),
    ("plan llama --mode fast", 2, "invalid choice: 'fast'", "'training'"),
    ("plan llama --device tpu", 2, "got 'tpu'", "such as 'cuda:9.0'"),
    ("plan llama --device cuda:0", 2, "got 'cuda:0'", "a GPU by its compute capability"),
    ("plan llama --device sm_90", 2, "got 'sm_90'", "such as 'cuda:9.0'"),
    ("plan llama --device xpu", 2, "got 'xpu'", "'cpu', 'cuda' or"),
    (
        "plan llama --kernels nowhere",
        2,
        "unknown kernel source 'nowhere'",
        "'hub', 'local', 'torch'",
    ),
    ("plan llama --kernels ''", 2, "got ''", "expected sources separated by `,`"),
    ("plan llama --kernels ,,", 2, "got ',,'", "expected sources separated by `,`"),
    ("plan llama --kernels rms_nrm=local", 2, "unknown op `rms_nrm`", "Did you mean `rms_norm`?"),
    ("plan llama --kernels rms_norm=", 2, "got ''", "expected sources separated by `,`"),
    ("plan llama --kernels 'rms_norm=local;silu'", 2, "'silu'", "expected `op=source`"),
    ("plan llama --kernels 'silu=torch; silu=local'", 2, "`silu`", "stands there twice"),
    ("plan llama --kernels org/name", 2, "`org/name` is not a pinned", "write `org/name@v1`"),
    (
        "plan llama --kernels org/name@main",
        2,
        "`org/name@main` is not a pinned",
        "--allow-branches",
    ),
    ("plan llama --kernels a/b/c@v1", 2, "`a/b/c@v1` is not a Hub kernel", "`org/name@v1`"),
    ("plan llama --include nothing.*", 2, "'nothing.*' in `include`/`exclude`", "the nearest are"),
    ("plan llama --exclude Nothing", 2, "'Nothing' in `include`/`exclude`", "the nearest are"),
    ("plan llama --include llamarmsnorm", 2, "'llamarmsnorm'", "the nearest are `LlamaRMSNorm`"),
    ("plan llama --trust-kernel nonsense", 2, "lists `nonsense`", "expected `org/name`"),
    ("plan llama --trust-kernel org/name@v1", 2, "lists `org/name@v1`", "40-digit commit"),
    ("plan llama --time", 2, "unrecognized arguments: --time", "usage: hfpatch"),
    ("plan llama --random-weights", 2, "unrecognized arguments: --random-weights", "usage:"),
    # apply-check
    ("apply-check", 2, "required: model", "usage: hfpatch apply-check"),
    ("apply-check llama", 2, "`llama` could not be built", "with random ones: --random-weights"),
    ("apply-check file.txt", 2, "`file.txt` has no weights", "or add --random-weights"),
    ("apply-check ./nothing", 2, "`./nothing`", "no such file or folder"),
    ("apply-check empty --random-weights", 2, "`empty`", "neither a config.json nor"),
    ("apply-check cut --random-weights", 2, "cut/config.json`", "is not JSON"),
    ("apply-check vae", 2, "`vae` could not be built", "NoSuchVae"),
    ("apply-check pipe --subfolder vea", 2, "--subfolder vea", "it has transformer"),
    ("apply-check llama --subfolder x", 2, "--subfolder x", "no model of that name"),
    ("apply-check llama --device cuda", 2, "sees no CUDA device", "check on cpu instead"),
    ("apply-check llama --device cuda:9.0", 2, "invalid choice: 'cuda:9.0'", "'cpu', 'cuda'"),
    ("apply-check llama --random-weights --kernels nowhere", 2, "'nowhere'", "'org/name@v1'"),
    ("apply-check llama --random-weights --include no", 2, "pattern 'no'", "the nearest are"),
    ("apply-check org/name", 2, "`org/name` is no file or folder here", "could not be asked"),
    # env, bench
    ("env extra", 2, "unrecognized arguments: extra", "usage: hfpatch"),
    ("env --jsn", 2, "unrecognized arguments: --jsn", "usage: hfpatch"),
    ("bench nothing", 2, "suite `nothing`", "expected one of ops, host"),
    ("bench ops --op nothing", 2, "--op nothing: no such op", "rms_norm"),
    ("bench --threads 0", 2, "--threads 0", "expected at least 1"),
    ("bench --threads two", 2, "argument --threads", "invalid int value: 'two'"),
    ("bench --jobs -1", 2, "--jobs -1", "expected at least 1"),
    ("bench --dtype int8", 2, "invalid choice: 'int8'", "'float32'"),
    ("bench --device tpu", 2, "invalid choice: 'tpu'", "'cuda'"),
    ("bench --device cuda", 2, "--device cuda", "sees no CUDA device"),
    ("bench --shape 4x", 2, "--shape 4x", "such as 4x1024x2048"),
    ("bench --shape 0x4 --list", 2, "--shape 0x4", "such as 4x1024x2048"),
    ("bench --check", 2, "--check belongs to --page", "write `hfpatch bench --page --check`"),
    ("bench --peer nobody", 2, "--peer nobody", "expected one of eager, torch"),
    ("bench host --op silu", 2, "--op is a filter of the suite `ops`", "run it by itself"),
    ("bench model", 2, "required: model", "usage: hfpatch bench model"),
    ("bench model ''", 2, "the model's name is empty", "expected a Hub id"),
    ("bench model ./nothing", 2, "`./nothing`", "no such file or folder"),
    ("bench model llama", 2, "`llama` could not be built", "random ones: --random-weights"),
    ("bench model llama --ways fast", 2, "`fast` is none", "expected eager, patched, graphs"),
    ("bench model llama --ways ''", 2, "--ways", "expected eager, patched, graphs"),
    ("bench model llama --iterations 0", 2, "--iterations 0", "expected at least 1"),
    ("bench model llama --warmup -1", 2, "--warmup -1", "expected at least 0"),
    ("bench model llama --seq-len 0", 2, "--seq-len 0", "expected at least 1"),
    ("bench model llama --min-speedup -2", 2, "--min-speedup -2", "a ratio above 0"),
    ("bench model llama --min-speedup nan", 2, "--min-speedup nan", "a ratio above 0"),
    ("bench model llama --max-launches 3 --ways eager", 2, "--max-launches is a gate", "add it"),
    ("bench model llama --max-launches 3 --new-tokens 2", 2, "--max-launches 3", "leave out --new"),
    ("bench model llama --device cuda", 2, "sees no CUDA device", "measure on cpu instead"),
    ("bench model llama --plot a.txt", 2, "--plot a.txt", "ends in .png, .svg or .pdf"),
    ("bench model llama --op silu", 2, "unrecognized arguments: --op", "usage: hfpatch"),
    ("bench model llama --random-weights --height 64", 2, "--height", "no such size; leave it out"),
    ("bench model llama --random-weights --steps 4", 2, "--steps", "no pipeline; leave it out"),
    ("bench model no.py:make", 2, "no such file `no.py`", "expected FILE.py:function"),
    ("bench model makes.py:nothing", 2, "`makes.py` has no function", "`nothing`"),
    ("bench model makes.py:number", 2, "returned a int", "expected a `torch.nn.Module`"),
    ("bench model makes.py:raises", 2, "`makes.py:raises` could not be built", "no luck"),
    ("bench model makes.py:three", 2, "returned a tuple of 3", "expected a model, or `(model, inp"),
    ("bench model makes.py:bare", 2, "has no `config`", "returns `(model, inputs)`"),
    ("profile", 2, "required: model, --out", "usage: hfpatch profile"),
    ("profile llama --out p", 2, "`llama` could not be built", "random ones: --random-weights"),
    ("profile makes.py:fails --out p", 2, "the model did not run", "KeyError: 3"),
    ("profile llama --out file.txt", 2, "--out file.txt", "cannot be made"),
    ("profile llama --out p --max-syncs -1", 2, "--max-syncs -1", "expected at least 0"),
    ("profile llama --out p --seq-len 0", 2, "--seq-len 0", "expected at least 1"),
    ("profile llama --out p --device cuda", 2, "sees no CUDA device", "measure on cpu instead"),
    ("bench --output file.txt", 2, "--output file.txt", "expected a folder for two suites"),
    # the Hub
    ("inspect", 2, "required: kernel", "usage: hfpatch inspect"),
    ("inspect nothing", 2, "`nothing` is not a Hub kernel", "expected `org/name@v1`"),
    ("inspect 'a b@v1'", 2, "`a b@v1` is not a Hub kernel", "expected `org/name@v1`"),
    ("inspect org/name", 1, "`org/name@v1` was never downloaded", "hfpatch download org/name@v1"),
    ("download", 2, "name a kernel", "`hfpatch download org/name@v1`"),
    ("download x@v1", 2, "`x@v1` is not a Hub kernel", "expected `org/name@v1`"),
    ("download org/name", 2, "`org/name` is not a pinned", "write `org/name@v1`"),
    ("download org/name@main", 2, "`org/name@main` is not a pinned", "--allow-branches"),
    ("download org/name@v1", 1, "`org/name@v1` was never downloaded", "While online"),
    ("download org/name@main --allow-branches", 1, "was never downloaded", "While online"),
    ("download --lockfile missing.lock", 2, "no lock file `missing.lock`", "name a kernel"),
    ("download --lockfile bad.lock", 1, "`bad.lock` cannot be read", "hfpatch lock org/name@v1"),
    ("lock", 2, "no lock file `hfpatch.lock`", "`hfpatch lock org/name@v1`"),
    ("lock org/name", 2, "`org/name` is not a pinned", "write `org/name@v1`"),
    ("lock org/name@v1", 1, "`org/name@v1` was never downloaded", "While online"),
    ("lock --require-signed", 2, "unrecognized arguments: --require-signed", "usage: hfpatch"),
    # kernels of one's own
    ("kernel", 2, "required: action", "usage: hfpatch kernel"),
    ("kernel make", 2, "invalid choice: 'make'", "'new', 'build'"),
    ("kernel new", 2, "required: name", "usage: hfpatch kernel new"),
    ("kernel new Bad_Name", 2, "`Bad_Name` is not a kernel's name", "e.g. `my-kernel`"),
    (f"kernel new {'a' * 300}", 2, "has 300 characters", "has at most 96"),
    ("lab list --most -1", 2, "argument --most", "expected at least 1"),
    ("lab check --timeout nan", 2, "argument --timeout", "expected seconds above 0, got nan"),
    ("lab report --timeout 0", 2, "argument --timeout", "expected seconds above 0, got 0"),
    ("lab init makes.py --iterations 1 --threads 0", 2, "--threads", "expected at least 1, got 0"),
    ("kernel new a", 2, "`a` is not a kernel's name", "at least two characters"),
    ("kernel new ../up", 2, "`../up` is not a kernel's name", "e.g. `my-kernel`"),
    ("kernel new full", 2, "`full` exists already", "take another name, or remove it"),
    ("kernel new fine --repo-id no", 2, "`no` is not a repository", "expected `org/name`"),
    ("kernel new fine --template rust", 2, "no template `rust`", "`elementwise`, `row`, `triton`"),
    ("kernel build nothing", 2, "`nothing` is not a folder", "a kernel's `build.toml`"),
    ("kernel build empty", 2, "is not a kernel project", "`hfpatch kernel new NAME` makes one"),
    ("kernel build broken", 2, "broken/build.toml` cannot be read", "Invalid value"),
    ("kernel build lacking", 2, "lacking/build.toml` lacks", "`torch.src`"),
    ("kernel build broken --backend rocm", 2, "invalid choice: 'rocm'", "'cuda'"),
    ("kernel check file.txt", 2, "`file.txt` is not a folder", "a kernel's `build.toml`"),
    ("kernel check empty", 2, "is not a kernel project", "`hfpatch kernel new NAME` makes one"),
    ("kernel publish empty", 2, "is not a kernel project", "`hfpatch kernel new NAME` makes one"),
    ("kernel publish broken", 2, "broken/build.toml` cannot be read", "Invalid value"),
    # the C library, compiled kernels
    ("clib", 2, "required: DIR", "usage: hfpatch clib"),
    ("clib x --stub --cpu", 2, "argument --cpu", "not allowed with argument --stub"),
    ("clib x --stub --archs 9.0", 2, "`--archs`: expected with `--cuda`", "got it with `--stub`"),
    ("clib file.txt --stub --quiet", 2, "`file.txt` cannot be written", "name another folder"),
    ("setup extra", 2, "unrecognized arguments: extra", "usage: hfpatch"),
    ("setup --download --build", 2, "argument --build", "not allowed with argument --download"),
    ("setup --from a.whl --build", 2, "argument --build", "not allowed with argument --from"),
    ("setup --digest ab", 2, "--digest", "belongs to --from"),
    ("setup --from a.whl --digest xyz", 2, "--digest xyz", "expected 64 hexadecimal digits"),
    ("setup --from nothing", 1, "`nothing`", "no such file or folder"),
    ("setup --from empty", 1, "`empty` has none of the wheels", "this installation pins"),
    ("setup --from a.whl", 1, "`a.whl`: this installation pins no such", "with --digest"),
    (f"setup --from a.whl --digest {HEX}", 1, f"expected the SHA-256 {HEX}", "was not opened"),
    ("setup --download", 1, "is not a release", "pins no build to download"),
    ("setup --download --archs 9.0", 2, "--archs belongs to a build", "leave out --download"),
    ("setup --build --archs hopper", 2, "--archs hopper", "such as 8.0;9.0+PTX"),
]


@pytest.mark.parametrize(
    ("words", "status", "named", "hint"), COMMANDS, ids=[row[0] or "nothing" for row in COMMANDS]
)
def test_commands(
    words: str, status: int, named: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import shlex

    if "cuda" in words and "sees no CUDA" in named + hint and torch.cuda.is_available():
        pytest.skip("a GPU is there")
    argv = shlex.split(words)
    try:
        got = cli.main(argv)
    except SystemExit as e:  # argparse
        got = int(e.code or 0)
    said = capsys.readouterr().err
    assert got == status, said
    flat = " ".join(said.split())
    assert named in flat and hint in flat, said
    assert "Traceback" not in said
    lines = [line for line in said.splitlines() if line.startswith("hfpatch")]
    assert len(lines) == 1, "one line says what is wrong"


# ------------------------------------------------------------------------------ Python

P, A, R = hfpatch.plan, hfpatch.apply, hfpatch.register


def model() -> nn.Module:
    return nn.Sequential(LlamaRMSNorm(32), nn.LayerNorm(32)).requires_grad_(False)


def silu(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.silu(x)


OP: dict[str, Any] = {"op": "silu", "kernel": silu, "name": "mine"}

#: The function, its arguments, the error, what is named, what is expected.
CALLS: list[tuple[Any, dict[str, Any], type[Exception], str, str]] = [
    (A, {"model": None}, TypeError, "got NoneType", "torch.nn.Module, a diffusers pipeline"),
    (A, {"model": "gpt2"}, TypeError, "got str", "a transformers pipeline"),
    (A, {"model": nn.LayerNorm}, TypeError, "got type", "must be a torch.nn.Module"),
    (A, {"model": [nn.LayerNorm(4)]}, TypeError, "got list", "must be a torch.nn.Module"),
    (hfpatch.restore, {"model": 3}, TypeError, "got int", "must be a torch.nn.Module"),
    (hfpatch.status, {"model": {}}, TypeError, "got dict", "must be a torch.nn.Module"),
    (A, {"mode": "fast"}, ValueError, "got 'fast'", "'inference', 'training'"),
    (A, {"mode": None}, ValueError, "got None", "'inference', 'training'"),
    (A, {"mode": "Training"}, ValueError, "got 'Training'", "'training'"),
    (A, {"kernels": 3}, TypeError, "`kernels`", "got int"),
    (A, {"kernels": True}, TypeError, "`kernels`", "got bool"),
    (A, {"kernels": silu}, TypeError, "`kernels`", "got function"),
    (A, {"kernels": b"local"}, TypeError, "source name", "got bytes"),
    (A, {"kernels": []}, ValueError, "empty list", "None switches the op off"),
    (A, {"kernels": {"silu": []}}, ValueError, "`kernels['silu']`", "None switches the op off"),
    (A, {"kernels": {"silu": 3}}, TypeError, "`kernels['silu']`", "got int"),
    (A, {"kernels": {"silu": ["local", 3]}}, TypeError, "`kernels['silu']`", "got int"),
    (
        A,
        {"kernels": {"rmsnorm": "local"}},
        ValueError,
        "unknown op `rmsnorm`",
        "Did you mean `rms_norm`?",
    ),
    (A, {"kernels": {1: "local"}}, ValueError, "unknown op `1`", "The ops are"),
    (A, {"kernels": "nowhere"}, ValueError, "'nowhere'", "'hub', 'local', 'torch'"),
    (A, {"kernels": {"silu": "mine"}}, ValueError, "'mine'", "or a registered name"),
    (A, {"kernels": "org/kernels"}, ValueError, "`org/kernels`", "write `org/name@v1`"),
    (A, {"kernels": "org/kernels@main"}, ValueError, "`org/kernels@main`", "40-digit commit"),
    (A, {"include": 5}, TypeError, "`include`", "got 5"),
    (A, {"include": LlamaRMSNorm}, TypeError, "a class", "write its name, 'LlamaRMSNorm'"),
    (A, {"include": {"a": 1}}, TypeError, "`include`", "a glob or a sequence of globs"),
    (A, {"include": "nothing"}, ValueError, "'nothing'", "the nearest are"),
    (A, {"exclude": ["0", 3]}, TypeError, "`exclude`", "got 3"),
    (A, {"exclude": b"0"}, TypeError, "`exclude`", "got b'0'"),
    (A, {"exclude": "[0"}, ValueError, "'[0'", "the nearest are"),
    (A, {"verify": "no"}, TypeError, "`verify`", "got 'no'"),
    (A, {"strict": 1}, TypeError, "`strict`", "must be a bool, got 1"),
    (A, {"cuda_graphs": "yes"}, TypeError, "`cuda_graphs`", "a bool or the most graphs"),
    (A, {"cuda_graphs": -1}, ValueError, "`cuda_graphs`", "at least 0, got -1"),
    (
        A,
        {"cuda_graphs": True, "mode": "training"},
        ValueError,
        "`cuda_graphs`",
        "records no gradient",
    ),
    (A, {"hub": 3}, TypeError, "`hub`", "got int"),
    (A, {"hub": {"trust": True}}, ValueError, "'trust'", "trust_remote_code"),
    (A, {"hub": {"repos": "org/name@v1"}}, TypeError, "`hub['repos']`", "a sequence"),
    (A, {"hub": {"repos": ["org/name"]}}, ValueError, "`org/name`", "write `org/name@v1`"),
    (A, {"hub": {"require_signed": 1}}, TypeError, "`hub['require_signed']`", "True or False"),
    (A, {"hub": {"trust_remote_code": "me/x"}}, TypeError, "trust_remote_code", "True, False or"),
    (A, {"hub": {"trust_remote_code": ["x"]}}, ValueError, "lists `x`", "expected `org/name`"),
    (A, {"hub": {"lockfile": 3}}, TypeError, "`hub['lockfile']`", "must be a path, got int"),
    (P, {"device": "gpu"}, ValueError, "got 'gpu'", "such as 'cuda:9.0'"),
    (P, {"device": 9.0}, TypeError, "`device`", "got float"),
    (R, {}, ValueError, "`class_name`", "or `op=` and `kernel=`"),
    (R, {"class_name": "X", "family": "norm", "differentiable": "no"}, TypeError, "'no'", "a bool"),
    (R, {"class_name": "("}, ValueError, "'('", "not a regular expression"),
    (R, {"class_name": 5, "family": "norm"}, TypeError, "got 5", "a regular expression, a str"),
    (R, {"class_name": re.compile(b"x"), "family": "norm"}, TypeError, "b'x'", "a str"),
    (R, {"class_name": "X", "family": ["norm"]}, TypeError, "`family`", "must be a str"),
    (R, {**OP, "op": ["silu"]}, ValueError, "unknown op `['silu']`", "The ops are"),
    (A, {"hub": {1: 2, "x": 3}}, ValueError, "no option 1", "trust_remote_code"),
    (R, {"class_name": "X"}, ValueError, "got None", "'norm'"),
    (R, {"class_name": "X", "family": "norms"}, ValueError, "got 'norms'", "'norm'"),
    (R, {"class_name": "X", "forward": silu}, TypeError, "`sample`", "must both be callable"),
    (
        R,
        {"class_name": "X", "family": "norm", "sample": silu},
        ValueError,
        "`sample=`",
        "`forward=`",
    ),
    (
        R,
        {"class_name": "X", "family": "norm", "forward": silu, "sample": silu},
        ValueError,
        "`family=` or `forward=`",
        "not both",
    ),
    (R, {"class_name": "X", "family": "norm", "name": "a"}, ValueError, "`name=`", "give `op=`"),
    (R, {"op": "silu"}, ValueError, "`op=`, `kernel=` and `name=`", "together"),
    (R, {**OP, "op": "nope"}, ValueError, "unknown op `nope`", "Did you mean `rope`?"),
    (R, {**OP, "kernel": 5}, TypeError, "`kernel` for op `silu`", "callable, got int"),
    (R, {**OP, "name": "local"}, ValueError, "'local' is reserved", "pick one without '/'"),
    (R, {**OP, "name": "a/b"}, ValueError, "'a/b' is reserved", "pick one without '/'"),
    (R, {**OP, "name": "none"}, ValueError, "'none' is reserved", "pick one without '/'"),
    (R, {**OP, "name": " "}, ValueError, "' ' is reserved", "that is not empty"),
    (R, {**OP, "name": 5}, TypeError, "`name`", "must be a str, got 5"),
    (R, {**OP, "devices": "cuda:0"}, ValueError, "got 'cuda:0'", "'cpu', 'cuda'"),
    (R, {**OP, "devices": []}, ValueError, "`devices` is empty", "None stands for any device"),
    (R, {**OP, "devices": [0]}, TypeError, "`devices`", "device types such as 'cuda', got 0"),
    (hfpatch.set_verbosity, {"level": "loud"}, ValueError, "got 'loud'", "debug, info"),
    (hfpatch.set_verbosity, {"level": None}, TypeError, "got NoneType", "a str or an int"),
    (HubOptions, {"allow_branches": "no"}, TypeError, "`hub['allow_branches']`", "True or False"),
]


@pytest.mark.parametrize(
    ("function", "arguments", "error", "named", "expected"),
    CALLS,
    ids=[f"{f.__name__} {', '.join(a) or 'nothing'} {i}" for i, (f, a, *_) in enumerate(CALLS)],
)
def test_calls(
    function: Any, arguments: dict[str, Any], error: type[Exception], named: str, expected: str
) -> None:
    patched = model()
    before = [dict(m.__dict__) for m in patched.modules()]
    level = logging.getLogger("hfpatch").level
    given = dict(arguments)
    positional = [given.pop("model", patched)] if "model" in given or function in (A, P) else []
    with pytest.raises(error) as raised:
        function(*positional, **given)
    said = str(raised.value)
    assert named in said and expected in said, said
    assert type(raised.value) is error and not isinstance(raised.value, HfpatchError)
    assert [dict(m.__dict__) for m in patched.modules()] == before, "the model is as it was"
    assert logging.getLogger("hfpatch").level == level


def test_the_table_is_as_long_as_it_says() -> None:
    assert len(COMMANDS) + len(CALLS) >= 120
    assert len({row[0] for row in COMMANDS}) == len(COMMANDS)
