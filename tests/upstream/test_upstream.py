"""Upstream's own model test classes with hfpatch on every model, and the runner itself.

With HFPATCH_UPSTREAM (see run.py) each family takes one to five minutes; without it only the
runner is tested, on a checkout of one small file.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).resolve().parent


def _runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("upstream_run", HERE / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


run = _runner()


@pytest.mark.skipif(
    not os.environ.get("HFPATCH_UPSTREAM"),
    reason="HFPATCH_UPSTREAM names no folder with checkouts of transformers, diffusers and TRL",
)
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", list(run.FAMILIES))
def test_upstream(family: str, kernels_dir: Path) -> None:
    result = run.compare(family)
    assert not result.regressions and not result.stale


def test_the_page_is_what_the_results_say() -> None:
    assert run.PAGE.read_text("utf-8") == run.page()
    assert {path.stem for path in run.RESULTS.glob("*.json")} <= set(run.FAMILIES)


SMALL = """
import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForSequenceClassification

SMALL = dict(vocab_size=9, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
             num_attention_heads=2, num_key_value_heads=2)


def replaced(model):
    return [m for m in model.modules() if "forward" in m.__dict__]


def build():
    model = LlamaForSequenceClassification(LlamaConfig(**SMALL, pad_token_id=0))
    assert model.training
    return model.eval()


def test_runs():
    assert build()(torch.tensor([[1, 2]])).logits.shape == (1, 2)


def test_nothing_is_replaced():
    assert not replaced(build())


def test_nothing_is_replaced_after_loading(tmp_path):
    build().save_pretrained(tmp_path)
    assert not replaced(LlamaForSequenceClassification.from_pretrained(tmp_path))


def test_fails_either_way():
    assert False
"""


@pytest.mark.exhaustive  # with the tests that it runs
def test_the_runner_finds_what_patching_breaks(
    tmp_path: Path, kernels_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests = tmp_path / "transformers" / "tests"
    tests.mkdir(parents=True)
    (tests / "test_small.py").write_text(SMALL)
    monkeypatch.setenv("HFPATCH_UPSTREAM", str(tmp_path))
    monkeypatch.setattr(run, "FAMILIES", {"small": ("transformers", ("tests/test_small.py",))})
    monkeypatch.setattr(run, "RECORDS", tmp_path / "records")
    monkeypatch.setattr(run, "RERUNS", 1)
    known = {"test_nothing_is_replaced_after_loading": "it is the point", "test_gone": "old"}
    monkeypatch.setattr(run, "reasons", lambda family: known)
    result = run.compare("small")
    assert result.plain == {"passed": 3, "failed": 1}
    assert result.patched == {"passed": 1, "failed": 3}
    assert [n.rpartition("::")[2] for n in result.regressions] == ["test_nothing_is_replaced"]
    assert list(result.expected.values()) == ["it is the point"]
    assert result.stale == ["test_gone"]
    # two norms, one MLP and the last norm, in training mode and again in eval mode
    assert result.details["swaps"]["rms_norm"] % 3 == 0 and result.details["calls"] > 0
