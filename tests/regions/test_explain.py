"""What a captured block became, said and drawn."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch
from regions.families import build

import hfpatch
from hfpatch import cli
from hfpatch.coverage.small_transformers import own_shrunk
from hfpatch.regions.explain import KINDS, Explanation, Step, explain

_SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there: these tests are about them."""


def boxes(svg: str) -> list[ET.Element]:
    return [r for r in ET.fromstring(svg).iter(f"{_SVG}rect") if r.get("class") == "step"]


@pytest.mark.parametrize(
    ("name", "path", "ops"),
    [
        ("gemma2", "layers.1", {"rope_qk", "attention", "add_rms_norm", "gated"}),
        ("bert", "encoder.layer.0", {"attention", "add_layer_norm"}),
    ],
)
def test_a_block_is_explained(name: str, path: str, ops: set[str]) -> None:
    model, inputs = build(name)
    call = inputs(2, 9)
    with torch.no_grad():
        before = model(**call)[0]
    held = {n: dict(m.__dict__) for n, m in model.named_modules()}
    found = explain(model, path, call)
    assert found.path == path and not found.reason
    assert found.after < found.before and 0 < found.error < 1e-5 and found.wide < 1e-12
    assert {s.kind for s in found.steps} <= set(KINDS)
    assert ops <= {s.title.partition("(")[0] for s in found.steps if s.kind == "op"}
    for s in found.steps:
        assert (s.region == 0) is (s.kind in ("wall", "cache"))
        assert bool(s.why) is (s.kind != "op")
        assert s.error is None or s.error < 1e-6
        assert all(-1 <= u < found.steps.index(s) for u in s.uses)
        assert s.uses, f"`{s.title}` reads nothing"
        assert s.shape.startswith("[2, ") or s.kind == "cache", s
    measured = [s for s in found.steps if s.title.partition("(")[0] in ops]
    assert all(s.error is not None for s in measured)
    layers = [s for s in found.steps if s.kind == "wall"]
    assert layers and all("Linear" in s.title and s.why == "a layer" for s in layers)
    with torch.no_grad():
        assert torch.equal(model(**call)[0], before)
    assert all(m.__dict__.keys() == held[n].keys() for n, m in model.named_modules())


def test_an_activation_of_many_operators_is_one_step() -> None:
    model, inputs = build("gpt2")
    titles = {s.title.partition("(")[0] for s in explain(model, "h.0", inputs(2, 9)).steps}
    assert "gelu" in titles and not titles & {"tanh", "pow"}


def test_the_drawing() -> None:
    model, inputs = build("gemma2")
    found = explain(model, "layers.0", inputs(2, 9))
    svg = found.to_svg()
    root = ET.fromstring(svg)
    assert len(boxes(svg)) == len(found.steps) + 1  # and the arguments
    regions = [r for r in root.iter(f"{_SVG}rect") if r.get("class") == "region"]
    assert len(regions) == max(s.region for s in found.steps)
    lines = list(root.iter(f"{_SVG}path"))
    assert len(lines) == sum(len(s.uses) for s in found.steps)
    high, wide = float(root.get("height", 0)), float(root.get("width", 0))
    for box in boxes(svg):
        assert float(box.get("y", -1)) + 28 < high and float(box.get("width", -1)) < wide
    said = "".join(root.itertext())
    assert "attention(causal=False, softcap=2, a mask)" in said and "<" not in said
    assert found._repr_svg_() == svg
    titles = [s.title for s in found.steps if len(s.title) <= 58]
    texts = {t.text for t in root.iter(f"{_SVG}text")}
    assert titles and all(t in texts for t in titles), "a short title was cut"


def test_text_of_others_is_escaped_in_the_drawing() -> None:
    step = Step("wall", 0, '<script>"&', "[1]", (-1,), None, "</svg>\x1b[2J")
    svg = Explanation("a<b", "C", steps=(step,)).to_svg()
    said = "".join(ET.fromstring(svg).itertext())
    assert '<script>"&' in said and "</svg>" in said and "\x1b" not in svg


def test_a_block_that_is_left_says_why() -> None:
    from transformers import StaticCache

    model, inputs = build("llama")
    cache = StaticCache(model.config, max_cache_len=16)
    found = explain(model, "layers.0", {**inputs(2, 9), "past_key_values": cache})
    assert not found.steps and "`StaticCache`" in found.reason
    assert f"left to its parts: {found.reason}" in str(found)
    assert "StaticCache" in "".join(ET.fromstring(found.to_svg()).itertext())


def test_a_patched_model_stays_patched() -> None:
    model, inputs = build("llama")
    hfpatch.apply(model, blocks=True, decoding=False)
    swaps = hfpatch.status(model).swaps
    assert explain(model, "layers.2", inputs(2, 9)).steps
    assert hfpatch.status(model).swaps == swaps
    hfpatch.restore(model)
    hfpatch.apply(model, blocks=False, decoding=False)
    with pytest.raises(ValueError, match="patched with `blocks=False`"):
        explain(model, "layers.2", inputs(2, 9))


def test_no_such_block() -> None:
    model, inputs = build("llama")
    with pytest.raises(ValueError, match=r"no block of `layers\.7` .* layers\.0, layers\.1, "):
        explain(model, "layers.7", inputs(2, 9))


def saved(config: Any, folder: Path, name: str) -> str:
    config.architectures = [name]
    config.save_pretrained(folder)
    return str(folder)


def test_a_token_that_the_class_has_no_field_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As published T5 configurations have it."""
    from transformers import T5Config

    small = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_heads": 4, "vocab_size": 32128}
    config = T5Config(**small, num_layers=3, decoder_start_token_id=0, forced_eos_token_id=32000)
    folder = saved(config, tmp_path, "T5ForConditionalGeneration")
    assert cli.main(["plan", folder, "--explain", "encoder.block.1"]) == 0
    assert "T5Block `encoder.block.1`: 17 operators" in capsys.readouterr().out


def test_what_the_small_copy_has_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import BertConfig, XLNetConfig

    folder = saved(BertConfig(num_hidden_layers=4), tmp_path / "bert", "BertModel")
    assert cli.main(["plan", folder, "--explain", "encoder.layer.3"]) == 2
    said = capsys.readouterr().err
    assert "has fewer layers than the model" in said
    assert "explain `encoder.layer.0` or `encoder.layer.1`" in said
    folder = saved(XLNetConfig(), tmp_path / "xlnet", "XLNetModel")
    assert cli.main(["plan", folder, "--explain", "layer.0"]) == 2
    said = capsys.readouterr().err
    assert "`XLNetConfig` does not go with small numbers: " in said and len(said.splitlines()) == 1
    assert "hfpatch.regions.explain.explain(model, path, inputs)" in said


_TYPES = ("bert", "dinov2", "gemma3", "gemma4", "llama", "qwen2_vl", "t5", "swin", "whisper")
#: What files say beside what a class has fields for.
_MORE: tuple[dict[str, Any], ...] = (
    {},
    {
        "decoder_start_token_id": 0, "forced_bos_token_id": 250001, "sep_token_id": 102,
        "eos_token_id": [1, 128009], "image_token_index": 32000,
    },
    {"q_lora_rank": None, "rotary_dim": None, "projection_dim": None, "n_inner": None},
)  # fmt: skip


@pytest.mark.parametrize("kind", [*_TYPES, pytest.param("", marks=pytest.mark.exhaustive)])
def test_any_configuration_is_made_small_or_refused(kind: str) -> None:
    from transformers import CONFIG_MAPPING

    tried, refused = 0, []
    for name in [kind] if kind else sorted(CONFIG_MAPPING):
        for more in _MORE:
            try:
                config = CONFIG_MAPPING[name](**more)
            except Exception:  # a class that takes no such setting
                continue
            before, tried = config.to_dict(), tried + 1
            try:
                small = own_shrunk(config)
            except ValueError as e:
                refused.append(str(e))
                continue
            assert config.to_dict() == before
            assert small.to_dict().keys() >= before.keys()
    assert all("does not go with small numbers: " in why for why in refused)
    assert tried and len(refused) < 0.05 * tried, refused


def test_blocks_that_are_fused_by_code_of_their_own() -> None:
    import zoo

    entry = zoo.ENTRIES["cogvideox"]
    model = entry.build()
    with pytest.raises(ValueError, match=r"code that was written for its class \(docs/families"):
        explain(model, "transformer_blocks.0", entry.inputs(model))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import MistralConfig

    MistralConfig(
        architectures=["MistralForCausalLM"], hidden_act="gelu", sliding_window=8
    ).save_pretrained(tmp_path)
    drawing = tmp_path / "block.svg"
    command: list[Any] = ["plan", str(tmp_path), "--explain", "model.layers.0"]
    assert cli.main([*command, "--svg", str(drawing)]) == 0
    said = capsys.readouterr().out
    assert "MistralDecoderLayer `model.layers.0`: " in said and "region 3" in said
    assert "gated(activation=gelu)" in said  # the configuration's own
    assert "in a small copy of its MistralForCausalLM" in said
    assert boxes(drawing.read_text(encoding="utf-8"))
    assert cli.main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["class_name"] == "MistralDecoderLayer"
    assert cli.main(["plan", str(tmp_path), "--svg", "x.svg"]) == 2
    assert "`--svg` is of `--explain PATH`" in capsys.readouterr().err
