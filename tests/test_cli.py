"""The command line, on local configurations: no network."""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from expect import expected_swaps

from hfpatch import cli, loading


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there: these tests are about them."""


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    model = zoo.ENTRIES["llama"].build(torch.float32)
    model.save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    zoo.PIPELINES["ltx-pipeline"].build(torch.float32).save_pretrained(tmp_path / "ltx")
    return tmp_path / "ltx"


def test_plan_of_a_config_needs_no_weights(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for weights in llama.glob("*.safetensors"):
        weights.unlink()
    assert cli.main(["plan", str(llama / "config.json"), "--dtype", "bfloat16"]) == 0
    out = capsys.readouterr().out
    assert "8 to swap" in out
    assert "LlamaRMSNorm" in out
    assert "gated(activation=silu)" in out


@pytest.mark.parametrize("given", [{"quant_method": "gptq", "bits": 4}, {"bits": 4}])
def test_plan_says_that_a_model_is_quantized(
    llama: Path, given: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    file = llama / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": given}))
    with pytest.warns(RuntimeWarning, match=r"is quantized.*without its quantizer"):
        assert cli.main(["plan", str(llama)]) == 0
    assert "RMSNorm" in capsys.readouterr().out


def test_plan_where_one_is(
    llama: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file without a folder still has a name; trust in kernels needs no weights."""
    monkeypatch.chdir(llama)
    assert cli.main(["plan", "config.json", "--trust-remote-code", "--kernels", "none"]) == 0
    assert capsys.readouterr().out.startswith("llama: 0 to swap, ")
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "m.M"}}))
    assert cli.main(["plan", "config.json", "--kernels", "none"]) == 0  # transformers' own class
    assert cli.main(["plan", "config.json", "--trust-remote-code"]) == 2
    assert "m.py" in capsys.readouterr().err


OWN_CLASS = "modeling_own.OwnModel"
OWN_CODE = """
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel


class OwnConfig(PreTrainedConfig):
    model_type = "own-code"

    def __init__(self, width=64, depth=2, **more):
        super().__init__(**more)
        self.width, self.depth = width, depth


class OwnNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale, self.epsilon = nn.Parameter(torch.ones(width)), 1e-5

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return (h * self.scale.float()).to(x.dtype)


class OwnModel(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(100, config.width)
        self.norms = nn.ModuleList(OwnNorm(config.width) for _ in range(config.depth))
        self.lin = nn.Linear(config.width, config.width)
        self.post_init()

    def forward(self, input_ids, attention_mask=None):
        x = self.embed(input_ids)
        for norm in self.norms:
            x = x + self.lin(norm(x))
        return x
"""


@pytest.fixture
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose class is in no library: its folder has the code."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "modeling_own.py").write_text(OWN_CODE)
    reference = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": OWN_CLASS}
    config = {"model_type": "own-code", "architectures": ["OwnModel"], "auto_map": reference}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("command", ["plan", "apply-check", "bench model"])
def test_a_models_own_code_needs_trust(
    own_code: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*command.split(), str(own_code)]
    assert cli.main([*words, *["--random-weights"][: command != "plan"]]) == 2
    said = capsys.readouterr().err
    assert OWN_CLASS in said and "add --trust-remote-code, which runs it" in said
    if command == "apply-check":  # also where it would be loaded with its weights
        assert cli.main(words) == 2
        assert "add --trust-remote-code, which runs it" in capsys.readouterr().err


def test_a_model_of_its_own_code(own_code: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Planned from its configuration, compared with random weights and with saved ones."""
    assert cli.main(["plan", str(own_code), "--trust-remote-code"]) == 0
    assert "OwnNorm" in capsys.readouterr().out
    check = ["apply-check", str(own_code), "--trust-remote-code", "--json"]
    assert cli.main([*check, "--random-weights"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["status"] == "passed" and row["swapped"] == 2
    assert cli.main(check) == 2
    assert "--random-weights" in capsys.readouterr().err
    args = argparse.Namespace(
        model=str(own_code), subfolder=None, dtype="float32", device="cpu",
        trust_remote_code=True, random_weights=True,
    )  # fmt: skip
    ((_, model),), _ = loading.models(args)
    model.save_pretrained(own_code)
    assert cli.main(check) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["status"] == "passed" and row["swapped"] == 2


def test_plan_of_a_large_model_takes_no_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert cli.main(["plan", str(tmp_path), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert len(data["swaps"]) == 80 * 3 + 2  # the last norm, and decoding
    assert data["applied"] is False


def test_plan_of_a_pipeline_and_of_its_part(
    pipeline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", str(pipeline), "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert {s["path"].split(".")[0] for s in whole["swaps"]} >= {"transformer"}
    assert cli.main(["plan", str(pipeline), "--subfolder", "transformer", "--json"]) == 0
    part = json.loads(capsys.readouterr().out)
    paths = {
        s["path"].removeprefix("transformer").removeprefix(".")
        for s in whole["swaps"]
        if s["path"].startswith("transformer")
    }
    assert {s["path"] for s in part["swaps"]} == paths


def test_apply_check_with_weights_and_without(
    llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for extra in ([], ["--random-weights"]):
        assert cli.main(["apply-check", str(llama), "--json", *extra]) == 0
        (result,) = json.loads(capsys.readouterr().out)
        assert result["swapped"] == len(expected_swaps(zoo.ENTRIES["llama"].build(torch.float32)))
        assert result["state_dict untouched"]
        assert result["bit-equal after restore"]
        assert 0 <= result["relative difference"] < 1e-4


def test_apply_check_of_a_file(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its weights are those beside it; where there are none, that is said."""
    config = llama / "config.json"
    assert cli.main(["apply-check", str(config), "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert result["swapped"] == 8 and result["restored"]  # decoding among them
    config.rename(llama / "mine.json")
    assert cli.main(["apply-check", str(llama / "mine.json"), "--random-weights", "--json"]) == 0
    capsys.readouterr()
    assert cli.main(["apply-check", str(llama / "mine.json")]) == 2
    assert "mine.json` has no weights: name the folder that has them, or add --random-weights" in (
        capsys.readouterr().err
    )


def test_loading_warns_of_nothing(tmp_path: Path, pipeline: Path, llama: Path) -> None:
    """`torch_dtype` is the old name of an argument, of which diffusers warns."""
    from diffusers import DDIMPipeline, DDIMScheduler, UNet2DModel

    unet = UNet2DModel(8, 1, 1, down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",),
                       block_out_channels=(32,), layers_per_block=1)  # fmt: skip
    DDIMPipeline(unet, DDIMScheduler()).save_pretrained(tmp_path / "ddim")
    cases = ((tmp_path / "ddim", None), (pipeline, "transformer"), (llama, None))
    for model, subfolder in cases:
        args = cli.build_parser().parse_args(["apply-check", str(model), "--dtype", "bfloat16"])
        args.subfolder = subfolder
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)
            parts, _ = loading.from_weights(args)
        assert parts and all(p.dtype == torch.bfloat16 for _, m in parts for p in m.parameters())


def test_a_part_of_a_model_index(pipeline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for model in (pipeline, pipeline / "model_index.json"):
        assert cli.main(["plan", str(model), "--subfolder", "transformer", "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out)["swaps"])
    assert found[0] == found[1] != []
    one = str(pipeline / "transformer" / "config.json")
    assert cli.main(["plan", one, "--subfolder", "transformer"]) == 2
    assert "is one model; a part is taken of a pipeline's folder" in capsys.readouterr().err


def test_a_hub_that_cannot_be_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that nothing has here is said as that, whatever the Hub answers."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for command in ("plan", "apply-check"):
        assert cli.main([command, "missing"]) == 2
        error = capsys.readouterr().err
        assert "`missing` is no file or folder here, and the Hub could not be asked: " in error
    assert cli.main(["plan", "my model"]) == 2
    assert "`my model` is no file or folder here, and no model of the Hub" in (
        capsys.readouterr().err
    )


def test_env(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env"]) == 0
    text = capsys.readouterr().out
    assert f"torch          {torch.__version__}" in text
    assert "torch-stable-abi211-" in text
    assert cli.main(["env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["local build"]["ops"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "{}/nothing.json"], "nothing.json`: no such file or folder"),
        (["plan", "{}/missing"], "missing`: no such file or folder"),
        (["plan", "./missing"], "`./missing`: no such file or folder"),
        (["plan", "some/folder/missing"], "`some/folder/missing`: no such file or folder"),
        (["plan", "missing.json"], "`missing.json`: no such file or folder"),
        (["plan", "{}"], "has neither a config.json nor a model_index.json"),
        (["plan", "{}/bad"], "names no class of this transformers version"),
        (["plan", "{}/vae"], "is not a diffusers model"),
        (["plan", "{}/bad", "--kernels", "main"], "names no class"),
        (["plan", "{}/text"], "`architectures` NoList names no class"),
        (["plan", "{}/zero"], "zero` could not be built: ZeroDivisionError: "),
        (["plan", "{}/wrong"], "wrong` could not be built: "),
        (["apply-check", "{}/wrong"], "wrong` could not be built: "),
        (["apply-check", "{}/vae"], "vae` could not be built: "),
        (["plan", "{}/list"], "config.json`: expected a JSON object, got a list"),
        (["plan", "{}/cut"], "config.json` is not JSON: "),
        (["apply-check", "{}/cut"], "config.json` is not JSON: "),
        (["bench", "--threads", "0"], "--threads 0: expected at least 1"),
    ],
)
def test_bad_input_is_said_in_a_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name, config in (
        ("bad", {"architectures": ["NoSuchModel"]}),
        ("vae", {"_class_name": "NoSuchVae"}),
        ("text", {"architectures": "NoList"}),
        ("zero", {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 0}),
        ("wrong", {"architectures": ["LlamaForCausalLM"], "hidden_size": "a"}),
        ("list", [1, 2]),
        ("cut", None),
    ):
        (tmp_path / name).mkdir()
        text = '{"architectures":' if config is None else json.dumps(config)
        (tmp_path / name / "config.json").write_text(text)
    assert cli.main([a.format(tmp_path) for a in arguments]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"hfpatch {arguments[0]}: ")
    assert message in error
    assert "Traceback" not in error


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_a_gpu_that_is_not_there(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["apply-check", str(llama), "--device", "cuda"]) == 2
    assert "--device cuda: this torch sees no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["hfpatch", "hfpatch.cli"])
def test_python_dash_m(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=True
    )
    assert "apply-check" in done.stdout
    done = subprocess.run(
        [sys.executable, "-m", module, "plan"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2


def test_nobody_reads_what_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read, write = os.pipe()
    os.close(read)  # the reader has ended, as behind `| head`
    with os.fdopen(write, "w", encoding="utf-8") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert cli.main(["env"]) == 141
        pipe.flush()  # as Python does when it ends; there is nothing left to fail
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is full")
def test_a_full_disk_is_said_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert cli.main(["env"]) == 2
    assert capsys.readouterr().err == "hfpatch env: [Errno 28] No space left on device\n"


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_an_encoding_without_our_signs(
    errors: str, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = io.BytesIO()
    stream = io.TextIOWrapper(kept, encoding="ascii", errors=errors)
    monkeypatch.setattr(sys, "stdout", stream)
    assert cli.main(["plan", str(llama)]) == 0
    with pytest.raises(SystemExit) as ended:
        cli.main(["kernel", "publish", "--help"])
    assert ended.value.code == 0
    assert stream.errors == errors
    text = kept.getvalue().decode("ascii")
    assert "rms_norm(eps=" in text and "hfpatch 0." in text and "v1, v2, ?;" in text


def test_an_interrupt_is_said_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    shown: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: shown.append(error))
    monkeypatch.setattr(cli, "_env", interrupted)
    with pytest.raises(KeyboardInterrupt) as raised:  # a shell's loop sees the signal
        cli.main(["env"])
    assert capsys.readouterr().err == "hfpatch env: interrupted\n"
    sys.excepthook(KeyboardInterrupt, raised.value, None)
    assert not shown, "no traceback"
    other = KeyboardInterrupt()
    sys.excepthook(KeyboardInterrupt, other, None)
    assert shown == [other]
