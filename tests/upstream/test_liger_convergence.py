"""The runner of Liger's convergence tests, on a small file of the same form as Liger's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
pytestmark = pytest.mark.exhaustive  # with the tests that it runs

#: As Liger's test/convergence/*/test_mini_models.py is built, without Liger and its text.
SMALL = """
import os
from dataclasses import dataclass

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def apply_liger_kernel_to_llama(**kwargs):
    raise AssertionError("Liger's function was called")


def revert(**kwargs):
    pass


@dataclass
class Setup:
    liger_kernel_patch_func: object
    model_class: object


class Bare(torch.nn.Module):
    "Nothing in it can be served."

    def __init__(self, config):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))


class Broken(LlamaForCausalLM):
    def forward(self, **kwargs):
        raise RuntimeError("it cannot be run here")


class Drifts(LlamaForCausalLM):
    "Its losses are others where it is patched."

    def forward(self, **kwargs):
        result = super().forward(**kwargs)
        if "forward" in self.lm_head.__dict__:
            result.loss = result.loss * 1.001
        return result


SLOW = pytest.mark.skipif("SLOW" not in os.environ, reason="it takes hours")
MINI_MODEL_SETUPS = {
    name: Setup(apply_liger_kernel_to_llama, model)
    for name, model in {
        "mini_llama3": LlamaForCausalLM, "mini_gemma": LlamaForCausalLM,
        "mini_bare": Bare, "mini_broken": Broken,
        "mini_drifts": Drifts,
    }.items()
}


def create_model(model_name):
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, pad_token_id=0,
    )
    return MINI_MODEL_SETUPS[model_name].model_class(config)


def run_mini_model(model_name, num_steps, dtype, lr, with_liger=False):
    torch.manual_seed(42)
    if with_liger is True:
        apply_liger_kernel_to_llama()
        MINI_MODEL_SETUPS[model_name].liger_kernel_patch_func(rope=True)
    model = create_model(model_name).to(dtype).to("cpu")
    if model_name == "mini_bare":
        return {"loss": [1.0] * num_steps, "model": model}
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for step in range(num_steps):
        ids = torch.arange(step, step + 24).reshape(2, 12) % 64
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"loss": losses, "model": model}


@pytest.mark.parametrize("model_name, num_steps", [
    ("mini_llama3", 3),
    ("mini_bare", 3),
    ("mini_broken", 3),
    ("mini_drifts", 3),
    pytest.param("mini_gemma", 10**9, marks=SLOW),
    pytest.param("mini_absent", 3, marks=pytest.mark.skip(reason="no such model")),
])
def test_mini_model(model_name, num_steps):
    kwargs = dict(model_name=model_name, num_steps=num_steps, dtype=torch.float32, lr=1e-4)
    expected = run_mini_model(**kwargs)
    actual = run_mini_model(**kwargs, with_liger=True)
    torch.testing.assert_close(actual["loss"], expected["loss"], rtol=1e-5, atol=1e-8)
"""


def outcome(tmp_path: Path, *more: str) -> tuple[int, dict[str, Any]]:
    folder = tmp_path / "liger" / "test" / "convergence" / "fp32"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "test_mini_models.py").write_text(SMALL)
    (tmp_path / "liger" / "pyproject.toml").write_text('[project]\nversion = "0.0.1"\n')
    (tmp_path / "liger" / "CHECKOUT.txt").write_text("a made\none")
    found = tmp_path / "found.json"
    arguments = ["--checkout", str(tmp_path / "liger"), "--json", str(found), "--dtypes", "fp32"]
    done = subprocess.run(
        [
            sys.executable, str(HERE / "liger_convergence.py"), *arguments,
            "--files", "plain", "--commit", "abc", *more,
        ],
        env={**os.environ, "PYTHONPATH": str(HERE.parent.parent)},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert found.exists(), done.stdout + done.stderr
    return done.returncode, json.loads(found.read_text())


def test_what_is_patched_and_what_came_of_it(tmp_path: Path, kernels_dir: Path) -> None:
    status, result = outcome(tmp_path)
    rows = {r["model"]: r for r in result["rows"]}
    assert {name: r["outcome"] for name, r in rows.items()} == {
        "mini_llama3": "passed",
        "mini_bare": "failed",
        "mini_broken": "fails unpatched",
        "mini_drifts": "failed",
        "mini_absent": "skipped",
        "mini_gemma": "skipped",
    }
    served = rows["mini_llama3"]
    assert served["swaps"]["layer"] == 2 and served["layer_calls"] == 2 * 3
    assert served["swaps"]["linear_cross_entropy"] == 1 and served["loss"] < 1e-5
    assert "hfpatch swapped nothing" in rows["mini_bare"]["why"]
    assert "it cannot be run here" in rows["mini_broken"]["why"]
    assert rows["mini_drifts"]["loss"] == pytest.approx(1e-3, rel=0.1)
    assert rows["mini_absent"]["why"] == "no such model"
    assert result["versions"]["tests of liger-kernel"] == "0.0.1 (a made one)"
    assert result["commit"] == "abc" and result["complete"] and status == 1


def test_chosen_models_unpatched(tmp_path: Path, kernels_dir: Path) -> None:
    status, result = outcome(tmp_path, "--models", "mini_drifts", "--control")
    (row,) = result["rows"]
    assert row["model"] == "mini_drifts" and row["outcome"] == "passed" and status == 0
    assert row["swaps"] == {} and row["layer_calls"] == 0 and row["loss"] == 0.0


def test_a_run_that_takes_too_long(
    tmp_path: Path, kernels_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLOW", "1")
    status, result = outcome(tmp_path, "--models", "mini_gemma", "--budget", "40")
    assert not result["complete"] and status == 1
    assert all(r["outcome"] != "passed" for r in result["rows"])


def test_files_of_another_form_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "test" / "convergence" / "bf16"
    folder.mkdir(parents=True)
    (folder / "test_mini_models.py").write_text("def test_mini_model():\n    pass\n")
    (tmp_path / "pyproject.toml").write_text("")
    command = [sys.executable, str(HERE / "liger_convergence.py"), "--checkout", str(tmp_path)]
    command += ["--files", "plain", "--dtypes"]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent.parent)}

    def said(dtype: str) -> tuple[int, str]:
        done = subprocess.run(
            [*command, dtype], env=environment, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout + done.stderr

    code, text = said("bf16")
    assert code != 0 and "is no convergence test as this plugin knows them" in text
    code, text = said("fp32")
    assert code == 2 and "has no `test/convergence/fp32/test_mini_models.py`" in text
