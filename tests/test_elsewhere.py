"""Plans for a machine that is not this one: what it would get, marked as not proven there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from torch import nn

import hfpatch
from hfpatch import cli
from hfpatch.kernels import builds, sources
from hfpatch.planning import elsewhere
from hfpatch.planning.elsewhere import Elsewhere, parse_device
from hfpatch.proof.proofs import forget_proofs

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there: plans of this machine are compared with."""


def swaps(plan: Any) -> dict[str, tuple[str, str, str]]:
    return {s.path: (s.op, s.formula, s.source) for s in plan.swaps}


@pytest.mark.parametrize("name", ["llama", "wan", "gemma2"])
def test_a_gpu_gets_what_the_cpu_gets(name: str) -> None:
    model = zoo.ENTRIES[name].build(torch.bfloat16)
    here, there = hfpatch.plan(model), hfpatch.plan(model, device="cuda:9.0")
    # steps of more sequences are a GPU's; all else is the same
    of_gpu = {
        p: (op, f.replace("128 rows", "16 rows"), s) for p, (op, f, s) in swaps(there).items()
    }
    assert of_gpu == swaps(here) != {}
    assert here.planned_for == "" and there.planned_for == "cuda:9.0"
    assert {s.devices for s in there.swaps} == {("cuda",)}
    assert "planned for cuda:9.0, not proven there" in str(there).replace("\n", " ")
    (note,) = [n for n in there.notes if n.startswith("planned for `cuda:9.0`, and not proven")]
    assert "compared with the kernels' CPU code" in note
    data = json.loads(there.to_json())
    assert data["planned_for"] == "cuda:9.0" and data["proven"] is False
    assert json.loads(here.to_json())["proven"] is True


def test_without_a_build_here_it_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A laptop without a compiler plans for a machine that has one."""
    model = zoo.ENTRIES["wan"].build(torch.bfloat16)
    built = swaps(hfpatch.plan(model, device="cuda:8.0"))
    forget_proofs()
    monkeypatch.setattr(sources, "LOCAL_BUILD", tmp_path)
    monkeypatch.setattr(builds, "beside", list)
    plan = hfpatch.plan(model, device="cuda:8.0")
    assert swaps(plan) == built and {s[2] for s in built.values()} >= {"local"}
    assert "Formulas were identified on the CPU here" in plan.notes[-1]


def test_an_assumed_proof_serves_no_real_plan() -> None:
    model = nn.Sequential(nn.LayerNorm(64)).requires_grad_(False)
    forget_proofs()
    (assumed,) = hfpatch.plan(model, device="cuda").swaps
    (real,) = hfpatch.apply(model).swaps
    assert assumed.version == "for cuda" and real.version.startswith("torch-stable-abi")
    assert (assumed.devices, real.devices) == (("cuda",), ("cpu",))
    hfpatch.restore(model)


def test_weights_wherever_they_are() -> None:
    model = nn.Sequential(nn.LayerNorm(64)).requires_grad_(False)
    on_meta = nn.Sequential(nn.LayerNorm(64, device="meta"))
    assert not hfpatch.plan(on_meta).swaps
    for planned in ("cpu", "cuda", "cuda:12.0"):
        assert swaps(hfpatch.plan(on_meta, device=planned)) == swaps(hfpatch.plan(model))
    assert hfpatch.plan(on_meta, device=torch.device("cuda")).planned_for == "cuda"
    assert next(on_meta.parameters()).is_meta, "the model is as it was"


def test_a_gpu_that_is_too_old() -> None:
    plan = hfpatch.plan(zoo.ENTRIES["llama"].build(), device="cuda:6.1")
    assert "local" not in {s.source for s in plan.swaps}
    assert plan.notes[0].startswith("the kernels are built for compute capability 7.5 and up")


def test_graphs_are_planned_for_a_machine_that_has_them() -> None:
    model = zoo.ENTRIES["wan"].build()
    assert "cuda_graphs" in {
        s.op for s in hfpatch.plan(model, device="cuda:9.0", cuda_graphs=True).swaps
    }


def test_kernels_that_only_that_machine_can_choose_or_run() -> None:
    model = nn.Sequential(nn.LayerNorm(64)).requires_grad_(False)
    plan = hfpatch.plan(model, device="cuda", kernels=["org/name@v1", "local"])
    assert "a plan for `cuda` leaves it out. Trying `local` instead." in plan.notes[0]
    assert swaps(plan) == swaps(hfpatch.plan(model))
    handle = hfpatch.register(
        op="layer_norm", kernel=lambda *a, **k: 1 / 0, name="fast", devices="cuda"
    )
    try:
        (skip,) = hfpatch.plan(model, device="cuda", kernels={"layer_norm": "fast"}).skips
    finally:
        handle.remove()
    assert skip.kind == "unavailable"
    assert skip.reason == "kernel `fast` can be proven on cuda only, which is not here"


@pytest.mark.parametrize(
    "bad",
    ["cuda:0", "cuda:9", "cpu:9.0", "gpu", "", "cuda:9.0+PTX", "mps", "CUDA", "cuda:９.0"],
    ids=repr,
)
def test_devices_that_mean_nothing(bad: str) -> None:
    with pytest.raises(ValueError, match=r"`device` must be 'cpu', 'cuda' or a GPU by its compute"):
        hfpatch.plan(nn.LayerNorm(8), device=bad)


def test_a_device_of_another_type() -> None:
    with pytest.raises(TypeError, match=r"`device` must be a str such as 'cuda:9.0', got float"):
        hfpatch.plan(nn.LayerNorm(8), device=9.0)  # type: ignore[arg-type]


def test_a_gpu_that_is_here_is_proven_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *a: (9, 0))
    for here in ("cpu", "cuda", "cuda:9.0"):
        found = parse_device(here)
        assert found is not None and elsewhere.is_here(found)
    assert not elsewhere.is_here(Elsewhere("cuda", (8, 0)))
    monkeypatch.setattr(torch.version, "hip", "7.0")  # which calls itself cuda
    assert not elsewhere.is_here(Elsewhere("cuda"))


def test_decoding_and_blocks_are_planned_without_the_machine() -> None:
    """What `apply` captures by default on a GPU, and decoding steps, wherever the weights are."""
    for name, op in (("llama", "decoding"), ("vit", "layer_norm")):
        model = zoo.ENTRIES[name].build(torch.bfloat16)
        for held in (model, zoo.ENTRIES[name].build(torch.bfloat16).to("meta")):
            plan = hfpatch.plan(held, device="cuda:9.0")
            assert op in {s.op for s in plan.swaps}
            assert [c.state for c in plan.candidates] == ["at its first call"] * 2
            told = [n for n in plan.notes if n.startswith("decoding steps are planned by what")]
            assert len(told) == (name == "llama")
        here = hfpatch.plan(model, blocks=True)
        assert len(hfpatch.plan(model, device="cuda:9.0", blocks=True).candidates) == 2
        assert len(here.candidates) == 2 and not hfpatch.plan(model, device="cpu").candidates
        assert not hfpatch.plan(model, device="cuda:9.0", blocks=False).candidates


def test_weights_of_8_bits_are_for_a_cpu() -> None:
    model = zoo.ENTRIES["llama"].build()
    skips = hfpatch.plan(model, device="cuda:9.0", decoding="int8").skips
    assert "decoding: weights of 8 bits are for a CPU, the model lies on cuda" in {
        s.reason for s in skips
    }


@pytest.mark.parametrize("device", ["cpu", "cuda:9.0"])
def test_a_configuration_is_planned_as_its_model(
    device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = zoo.ENTRIES["llama"].build()
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(tmp_path)
    assert cli.main(["plan", str(tmp_path), "--device", device, "--blocks", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    plan = hfpatch.plan(model, device=device, blocks=True)
    assert [s["path"] for s in found["swaps"]] == [s.path for s in plan.swaps]
    assert [c["path"] for c in found["candidates"]] == [c.path for c in plan.candidates]
    assert len(found["swaps"]) == 8 and len(found["candidates"]) == 2


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    zoo.ENTRIES["llama"].build().config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = ["LlamaForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ["plan", str(tmp_path), "--dtype", "bfloat16", "--device"]
    assert cli.main([*arguments, "cuda:9.0"]) == 0
    assert "8 to swap" in (out := capsys.readouterr().out)
    assert "planned for cuda:9.0, not proven there" in out.replace("\n", " ")
    assert "decoding steps of up to 128 rows" in out and "LlamaDecoderLayer   at its first" in out
    assert cli.main([*arguments, "cuda", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["planned_for"] == "cuda"
    assert cli.main([*arguments, "cpu", "--mode", "training", "--json"]) == 0
    ops = [s["op"] for s in json.loads(capsys.readouterr().out)["swaps"]]
    assert ops.count("layer") == 2 and "decoding" not in ops
    assert cli.main([*arguments, "cuda:0"]) == 2
    assert "hfpatch plan: `device` must be 'cpu', 'cuda' or" in capsys.readouterr().err
