"""`hfpatch apply-check` on models of every modality, and what it says where it cannot compare."""

from __future__ import annotations

import itertools
import json
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import check_cases
import pytest
import torch
import zoo
from torch.utils import _pytree as pytree

import hfpatch
from hfpatch import check, cli
from hfpatch.bench import ways
from hfpatch.decoding.engine import Engine
from hfpatch.decoding.step import Decoder
from hfpatch.inputs import NoInputs, cast, sample_inputs
from hfpatch.regions import offer
from hfpatch.regions.capture import Uncapturable
from hfpatch.regions.kind import Kind

MOST = [name for name in check_cases.NAMES if name not in check_cases.FEW]


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there: these tests are about them."""


class Checked:
    """A run on `--random-weights`: its status and rows."""

    def __init__(self, capsys: pytest.CaptureFixture[str], folder: Path, *options: str) -> None:
        command = ["apply-check", str(folder), "--random-weights", "--json", *options]
        self.status = cli.main(command)
        said = capsys.readouterr()
        assert self.status in (0, 1, 3), said.err
        self.rows: list[dict[str, Any]] = json.loads(said.out)


def assert_passed(found: Checked) -> None:
    assert [row["status"] for row in found.rows] == ["passed"] * len(found.rows), found.rows
    assert found.status == 0


def test_there_are_sixty_types_of_configurations() -> None:
    assert len(set(check_cases.NAMES)) >= 60
    assert set(check_cases.FEW) < set(check_cases.NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("name", check_cases.FEW)
def test_a_model_of_each_modality(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Checked(capsys, check_cases.write(name, tmp_path))
    assert_passed(found)
    (row,) = found.rows
    assert row["swapped"] > 0
    assert row["against"] == "fp64"
    assert 0 < row["error of outputs"]["patched"] < 1e-5
    assert row["bit-equal after restore"] and row["state_dict untouched"] and row["restored"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [(), ("--dtype", "bfloat16"), ("--mode", "training")], ids=str)
@pytest.mark.parametrize("name", MOST)
def test_every_type(
    name: str, options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Checked(capsys, check_cases.write(name, tmp_path), *options)
    if name == "vae-tiny" and "bfloat16" in options:  # which diffusers' class does not run in
        assert found.status == 3
        assert "should be the same" in found.rows[0]["reason"]
    else:
        assert_passed(found)


def test_a_pipeline_and_its_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = Checked(capsys, check_cases.write("zoo-ltx-pipeline", tmp_path))
    assert_passed(found)
    assert [row["part"] for row in found.rows] == ["transformer", "vae", "LTXPipeline"]
    whole = found.rows[-1]
    assert whole["swapped"] == sum(row["swapped"] for row in found.rows[:-1]) > 0
    assert 0 < whole["relative difference"] < 1e-3  # a step ran, with kernels


@pytest.mark.parametrize(
    ("name", "parts", "fused"),
    [
        ("flux-pipeline", ["transformer", "vae", "FluxPipeline"], 3),
        pytest.param(
            "sd-pipeline",
            ["unet", "vae", "StableDiffusionPipeline"],
            5,
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_captured_blocks_of_a_pipeline(
    name: str, parts: list[str], fused: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A call makes no use of the VAE's encoder, whose block its own row has compared."""
    found = Checked(capsys, check_cases.write(name, tmp_path), "--blocks")
    assert_passed(found)
    assert sorted(row["part"] for row in found.rows) == sorted(parts)
    whole = found.rows[-1]
    assert whole["swapped"] == sum(row["swapped"] for row in found.rows[:-1]) > 0
    assert whole["blocks"] == {"fused": fused, "left": 0, "not run": 0, "not called": 1}
    vae = next(row for row in found.rows if row["part"] == "vae")
    assert vae["blocks"] == {"fused": 2, "left": 0, "not run": 0, "not called": 0}
    assert 0 < whole["relative difference"] < 1e-3


def test_gradients_and_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = check_cases.write("dinov2", tmp_path)
    found = Checked(capsys, folder, "--mode", "training", "--time")
    assert_passed(found)
    (row,) = found.rows
    assert 0 < row["error of gradients"]["patched"] < 1e-5
    assert row["error of gradients"]["patched"] != row["error of gradients"]["original"]
    timed = row["time"]
    for which in ("original", "patched"):
        low, high = timed[f"{which} quartiles ms"]
        assert 0 < timed[f"{which} least ms"] <= low <= timed[f"{which} ms"] <= high
    ratio = timed["original ms"] / timed["patched ms"]
    assert timed["speed-up"] == pytest.approx(ratio)
    overlap = (
        timed["original quartiles ms"][0] <= timed["patched quartiles ms"][1]
        and timed["patched quartiles ms"][0] <= timed["original quartiles ms"][1]
    )
    assert timed["within noise"] is overlap


def test_half_types_are_held_to_their_own_rounding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Checked(capsys, check_cases.write("bart", tmp_path), "--dtype", "bfloat16")
    assert_passed(found)
    assert 1e-4 < found.rows[0]["error of outputs"]["original"] < 0.1


# What is wrong is found -------------------------------------------------------------------------


def break_after_apply(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """`apply` leaves a hook behind that changes the model's result; `restore` takes it away."""
    apply, restore, hooks = hfpatch.apply, hfpatch.restore, []

    def broken(model: Any, **arguments: Any) -> Any:
        report = apply(model, **arguments)
        hooks.append(model.register_forward_hook(lambda module, inputs, output: change(output)))
        return report

    def repaired(model: Any) -> int:
        hooks.pop().remove()
        return restore(model)

    monkeypatch.setattr(hfpatch, "apply", broken)
    monkeypatch.setattr(hfpatch, "restore", repaired)


@pytest.mark.parametrize(
    ("factor", "reason"),
    [(1 + 1e-5, "outputs are "), (float("nan"), "NaN or infinity")],
)
def test_a_wrong_result_fails(
    factor: float,
    reason: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def change(output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state * factor
        return output

    break_after_apply(monkeypatch, change)
    found = Checked(capsys, check_cases.write("dinov2", tmp_path))
    assert found.status == 1
    assert found.rows[0]["status"] == "failed"
    assert reason in found.rows[0]["reason"]


def test_a_wrong_gradient_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(output: Any) -> Any:
        hidden = output.last_hidden_state
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient * (1 + 1e-4))
        return output

    break_after_apply(monkeypatch, change)
    found = Checked(capsys, check_cases.write("dinov2", tmp_path), "--mode", "training")
    assert found.status == 1
    assert "gradients are " in found.rows[0]["reason"]


# What cannot be compared is not passed ----------------------------------------------------------


def test_unknown_inputs_are_a_status_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"architectures": ["GlmImageVQVAE"], "embed_dim": 16, "latent_channels": 16,
              "num_embeddings": 8}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = Checked(capsys, tmp_path)
    assert found.status == 3
    (row,) = found.rows
    assert row["status"] == "not compared"
    assert row["reason"] == "`GlmImageVQVAE`: its input `none` is of no known kind"
    assert row["restored"] and row["state_dict untouched"]


def test_swapped_modules_that_nothing_called(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.ENTRIES["llama"].build()
    monkeypatch.setattr(check, "_modules_run", lambda model, inputs: {"model.norm"})
    result, _ = check.check_model("", model, check.How())  # decoding steps are called apart
    assert result["status"] == "not compared"
    assert result["reason"].startswith("6 of 8 swapped modules were not called by the inputs")


def test_a_class_without_a_parameter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What all models of a family derive from, and nobody calls."""
    config = {**zoo.ENTRIES["llama"].build().config.to_dict(), "dtype": "float32"}
    config["architectures"] = ["LlamaPreTrainedModel"]
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    found = Checked(capsys, tmp_path)
    assert found.status == 3 and found.rows[0]["status"] == "not compared"


def test_outputs_that_are_all_nan() -> None:
    model = zoo.ENTRIES["llama"].build()
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    result, _ = check.check_model("", model, check.How())
    assert result["status"] == "not compared" and "NaN or infinite" in result["reason"]


@pytest.mark.parametrize(
    ("gradients", "said"),
    [
        ([1.0, 2.0], None),
        ([1.0, 3.0], "gradients are not those of the original"),
        ([1.0], "1 gradients in place of 2"),
    ],
)
def test_gradients_are_compared_where_there_is_no_truth(
    gradients: list[float], said: str | None
) -> None:
    """A model that does not run in fp64."""

    def run(values: list[float]) -> Any:
        return SimpleNamespace(
            outputs=[torch.ones(3)], steps=[], gradients=[torch.full((3,), v) for v in values]
        )

    result: dict[str, Any] = {}
    check._compare(result, run([1.0, 2.0]), run(gradients), None, torch.nn.Linear(3, 3))
    assert result.get("reason") == said


def test_decoding_steps_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.ENTRIES["llama"].build()
    result, report = check.check_model("", model, check.How())
    assert result["status"] == "passed" and "decoding" in {s.op for s in report.swaps}
    assert 0 < result["error of decoding steps"]["patched"] < 1e-5
    step = Engine.step

    def wrong(self: Any, ids: Any, positions: Any, cache: Any, logits: Any, **more: Any) -> None:
        step(self, ids, positions, cache, logits, **more)
        logits *= 1.01

    with monkeypatch.context() as patch:  # its own first comparison finds it too
        patch.setattr(Engine, "step", wrong)
        patch.setattr(Decoder, "_difference", lambda *_: None)
        result, _ = check.check_model("", model, check.How())
        assert result["status"] == "failed" and "decoding steps are" in result["reason"]
    with monkeypatch.context() as patch:  # no step is served: nothing was compared
        patch.setattr(Engine, "step", wrong)
        with pytest.warns(RuntimeWarning, match="decodes as it did"):
            result, _ = check.check_model("", model, check.How())
        assert result["status"] == "not compared" and "1 of 8" in result["reason"]


def plant_a_fault_behind_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block that is captured is proven right, and runs wrong from then on."""
    prove = Kind._prove

    def planted(*arguments: Any, **more: Any) -> Any:
        variant = prove(*arguments, **more)

        def run(*given: Any) -> Any:  # a norm behind it would take a factor away
            return pytree.tree_map(lambda t: t + 0.01 * t.flip(-1), variant.run(*given))

        return replace(variant, run=run)

    offer.forget()
    monkeypatch.setattr(Kind, "_prove", planted)


@pytest.fixture
def one_layer(tmp_path: Path) -> Iterator[Path]:
    config = {"architectures": ["ViTModel"], **check_cases.IMAGE, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    offer.forget()
    yield tmp_path
    offer.forget()


def test_a_captured_block_is_compared_when_it_runs_fused(
    one_layer: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call of a kind has the original's result: of one layer it is the only block."""
    found = Checked(capsys, one_layer, "--blocks")
    assert_passed(found)
    (row,) = found.rows
    assert (
        row["blocks"] == {"fused": 1, "left": 0, "not run": 0, "not called": 0}
        and row["hfpatch computed"]
    )
    assert 0 < row["error of outputs"]["patched"] < 1e-5
    plant_a_fault_behind_the_proof(monkeypatch)
    found = Checked(capsys, one_layer, "--blocks")
    assert found.status == 1 and "outputs are " in found.rows[0]["reason"]


def test_a_captured_block_that_did_not_run_is_not_compared(
    one_layer: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kind is decided, but its guard sends each call to the original."""
    prove = Kind._prove

    def refused(*arguments: Any, **more: Any) -> Any:
        return replace(prove(*arguments, **more), given=lambda tensors: False)

    monkeypatch.setattr(Kind, "_prove", refused)
    found = Checked(capsys, one_layer, "--blocks")
    assert found.status == 3
    assert found.rows[0]["blocks"] == {"fused": 0, "left": 0, "not run": 1, "not called": 0}
    assert found.rows[0]["reason"] == (
        "1 of 1 captured blocks did not run fused, `layers.0` among them: the call or the block is "
        "not as it was when a call of its kind was proven"
    )


def test_blocks_behind_a_fused_block_meet_another_kind_of_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whisper's encoder: what the first block gives lies otherwise in memory when it is fused."""
    offer.forget()
    found = Checked(capsys, check_cases.write("whisper", tmp_path), "--blocks")
    assert_passed(found)
    assert found.rows[0]["blocks"] == {"fused": 4, "left": 0, "not run": 0, "not called": 0}


def test_calls_that_are_of_another_kind_each_time(
    one_layer: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not waited for for ever."""
    decided = itertools.count()
    monkeypatch.setattr(Kind, "_find", lambda self, *_: None)
    monkeypatch.setattr(Kind, "_remember", lambda self, key, variant: variant)
    monkeypatch.setattr(Kind, "decisions", property(lambda self: next(decided)))
    found = Checked(capsys, one_layer, "--blocks")
    assert found.status == 3
    reason = "each of 5 calls in turn was of a kind that none before it was"
    assert found.rows[0]["reason"].endswith(f"`layers.0` among them: {reason}")
    assert next(decided) < 20


def test_a_block_that_is_left_to_its_parts_is_counted(
    one_layer: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise Uncapturable("of this test")

    monkeypatch.setattr(Kind, "_prove", fails)
    arguments = ["apply-check", str(one_layer), "--random-weights", "--blocks"]
    assert cli.main(arguments) == 0
    assert "blocks: fused 0, left 1, not run 0, not called 0" in capsys.readouterr().out


def test_nothing_of_ours_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    folder = check_cases.write("dinov2", tmp_path)
    options = ("--exclude", "*")
    found = Checked(capsys, folder, *options)
    assert_passed(found)
    (row,) = found.rows
    assert row["swapped"] == 0 and row["hfpatch computed"] is False
    said = "nothing of hfpatch was compared: no module was swapped and no block ran fused"
    assert row["note"] == said
    assert cli.main(["apply-check", str(folder), "--random-weights", *options]) == 0
    assert f"note: {said}" in capsys.readouterr().out


def test_a_command_shows_no_line_of_ours_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    def check(args: Any) -> int:
        for text in ("hfpatch: nothing was swapped", "of others"):
            shown.append(warnings.formatwarning(text, RuntimeWarning, "check.py", 92, "code"))
        return 0

    monkeypatch.setattr(cli, "_apply_check", check)
    before = warnings.formatwarning
    assert cli.main(["apply-check", "some-model"]) == 0
    assert shown[0] == "hfpatch: nothing was swapped\n" and "check.py:92" in shown[1]
    assert warnings.formatwarning is before


def test_a_pipelines_denoiser_may_be_a_prior(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not every pipeline has a `transformer` or a `unet`."""

    class Pipeline:
        def __init__(self) -> None:
            self.prior = torch.nn.Sequential(torch.nn.LayerNorm(8)).requires_grad_(False)
            self.components = {"prior": self.prior}

        def set_progress_bar_config(self, **_: Any) -> None:
            pass

        def __call__(self, generator: torch.Generator) -> torch.Tensor:
            return self.prior(torch.randn(2, 8, generator=generator))

    monkeypatch.setattr(check, "pipeline_inputs", lambda pipeline: {})
    result, _ = check.check_pipeline(Pipeline(), check.How())
    assert result["status"] == "passed" and result["swapped"] == 1


def test_times_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that slows down for good after a while slows both down."""
    model = zoo.ENTRIES["vit"].build()
    turns: list[str] = []

    def turn(subject: Any, row: Any, warmup: int) -> None:
        turns.append(row.name)
        assert bool(hfpatch.status(model).swaps) is (row.name == "patched")
        row.wall_ms.append(2.0 if len(turns) > 4 else 1.0)

    monkeypatch.setattr(ways, "_turn", turn)
    result, _ = check.check_model("", model, check.How(timed=True))
    assert turns == ["original", "patched"] * 7
    timed = result["time"]
    assert timed["turns"] == 7 and timed["within noise"] is True and timed["speed-up"] == 1
    assert timed["original least ms"] == 1.0 and timed["original ms"] == 2.0


def test_inputs_are_of_the_model_and_repeat() -> None:
    model = zoo.ENTRIES["flux"].build(torch.bfloat16)
    some, again = sample_inputs(model), sample_inputs(model)
    other = sample_inputs(model, batch=3, seed=1)
    assert some["hidden_states"].dtype == torch.bfloat16
    assert torch.equal(some["hidden_states"], again["hidden_states"])
    assert other["hidden_states"].shape[0] == 3 and some["hidden_states"].shape[0] == 2
    wide = cast(some, torch.bfloat16, torch.float64)
    assert wide["hidden_states"].dtype == torch.float64
    with pytest.raises(NoInputs, match="`Linear` has no `config` to make inputs from"):
        sample_inputs(torch.nn.Linear(2, 2))


# Bad usage --------------------------------------------------------------------------------------


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    return check_cases.write("zoo-ltx-pipeline", tmp_path)


def test_a_mistyped_subfolder_is_named(pipeline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["plan"], ["apply-check"], ["apply-check", "--random-weights"]):
        arguments = [command[0], str(pipeline), *command[1:]]
        assert cli.main([*arguments, "--subfolder", "transfromer"]) == 2
        error = capsys.readouterr().err
        assert "--subfolder transfromer: " in error
        assert "has no model of that name; did you mean `transformer`?" in error
        assert cli.main([*arguments, "--subfolder", "zzz"]) == 2
        assert "; it has transformer, vae, scheduler" in capsys.readouterr().err.replace(
            "scheduler, transformer, vae", "transformer, vae, scheduler"
        )


def test_a_subfolder_of_a_model_that_has_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", str(tmp_path), "--subfolder", "vae"]) == 2
    assert capsys.readouterr().err.endswith("has no model of that name\n")


def test_missing_weights_name_the_way_without(
    pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = check_cases.write("dinov2", tmp_path)
    for arguments in ([str(one)], [str(pipeline)], [str(pipeline), "--subfolder", "transformer"]):
        assert cli.main(["apply-check", *arguments]) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.endswith("without its weights, with random ones: --random-weights"), error


def test_trust_reaches_pipelines(pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import diffusers

    seen: list[Any] = []

    def load(*_: Any, **arguments: Any) -> Any:
        seen.append(arguments["trust_remote_code"])
        raise OSError("far enough")

    monkeypatch.setattr(diffusers.DiffusionPipeline, "from_pretrained", load)
    for options in ([], ["--trust-remote-code"]):
        assert cli.main(["apply-check", str(pipeline), *options]) == 2
    assert seen == [False, True]
    shutil.rmtree(pipeline)


def test_a_gradient_that_is_nothing_but_roundings() -> None:
    """It tells neither way of computing from the other; a wrong value in its place does."""
    exact = [torch.ones(4, dtype=torch.float64), torch.full((4,), 1e-17, dtype=torch.float64)]
    near = [e + 1e-7 for e in exact]
    noisier = [exact[0] + 1e-7, exact[1] + 1e-6]  # a tenth of a millionth of the largest, or one
    assert check.distance(near, exact) < 2e-7
    assert check.distance(noisier, exact) < 2e-6
    assert check.distance([exact[0] + 1e-7, exact[1] + 1e-2], exact) > 5e-3


def test_a_model_that_fails_by_itself_is_not_compared() -> None:
    """FlexAttention has no gradients on a CPU, say."""
    model = zoo.ENTRIES["llama"].build()

    def no_gradients(*_: Any) -> None:
        if torch.is_grad_enabled():
            raise NotImplementedError("no backward on a CPU\nand more")

    model.register_forward_pre_hook(no_gradients)
    result, report = check.check_model("", model, check.How({"mode": "training"}))
    assert result["status"] == check.NOT_COMPARED and report.swaps and result["restored"]
    assert result["reason"] == "the model itself fails: NotImplementedError: no backward on a CPU"
    assert check.check_model("", model, check.How())[0]["status"] == check.PASSED
