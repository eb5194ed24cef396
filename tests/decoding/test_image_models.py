"""Models of images and text: the engine runs their steps, and not the prompts with images."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from decoding.families import here
from torch import nn

import hfpatch
from hfpatch.decoding import kept

_TEXT = {
    "vocab_size": 300,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_VISION = {"hidden_size": 32, "intermediate_size": 64}
_TOWER = {**_VISION, "num_hidden_layers": 2, "num_attention_heads": 2}
_SQUARES = {"image_size": 28, "patch_size": 14}
IMAGE = 5  # the token in an image's place
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
_GRID = {"vision_start_token_id": 7, "vision_end_token_id": 8, "video_token_id": 6}


def _llava() -> Any:
    return transformers.LlavaConfig(
        text_config={"model_type": "llama", **_TEXT},
        vision_config={"model_type": "clip_vision_model", **_TOWER, **_SQUARES},
        image_token_index=IMAGE,
        vision_feature_layer=-1,
    )


def _gemma3() -> Any:
    own = {"head_dim": 32, "sliding_window": 12, "num_hidden_layers": 7}
    return transformers.Gemma3Config(
        text_config={**_TEXT, **own},
        vision_config={"model_type": "siglip_vision_model", **_TOWER, **_SQUARES},
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
    )


def _internvl() -> Any:
    return transformers.InternVLConfig(
        text_config={"model_type": "qwen2", **_TEXT},
        vision_config={**_TOWER, "image_size": [28, 28], "patch_size": [7, 7]},
        image_token_id=IMAGE,
        image_seq_length=4,
    )


def _qwen2_5_vl() -> Any:
    tower = {"depth": 2, "num_heads": 2, "out_hidden_size": 128, "fullatt_block_indexes": [1]}
    return transformers.Qwen2_5_VLConfig(
        text_config={**_TEXT, "rope_parameters": _MROPE},
        vision_config={**_VISION, **tower},
        image_token_id=IMAGE,
        **_GRID,
    )


def _qwen2_vl() -> Any:
    """Heads of another size than a replica's, as every published model has them: its sections of
    RoPE are others than the replica's."""
    sections = {**_MROPE, "mrope_section": [8, 12, 12]}
    return transformers.Qwen2VLConfig(
        text_config={
            **{**_TEXT, "num_attention_heads": 2, "num_key_value_heads": 1},
            "rope_parameters": sections,
        },
        vision_config={"depth": 2, "num_heads": 2, "embed_dim": 32, "hidden_size": 128},
        image_token_id=IMAGE,
        **_GRID,
    )


def _pixels(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(ids.shape[0], 3, 28, 28)}


def _typed(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {**_pixels(ids), "token_type_ids": (ids == IMAGE).long()}


def _patches(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    rows = ids.shape[0]
    return {
        "pixel_values": torch.randn(16 * rows, 3 * 2 * 14 * 14),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * rows),
        "mm_token_type_ids": (ids == IMAGE).long(),
    }


MODELS: dict[str, tuple[str, Callable[[], Any], Callable[..., dict[str, torch.Tensor]]]] = {
    "llava": ("LlavaForConditionalGeneration", _llava, _pixels),
    "gemma3": ("Gemma3ForConditionalGeneration", _gemma3, _typed),
    "internvl": ("InternVLForConditionalGeneration", _internvl, _pixels),
    "qwen2-vl": ("Qwen2VLForConditionalGeneration", _qwen2_vl, _patches),
    "qwen2.5-vl": ("Qwen2_5_VLForConditionalGeneration", _qwen2_5_vl, _patches),
}


def make(name: str) -> Any:
    cls, config, _ = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, cls)(config()).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn(parameter.shape)
        else:
            parameter.data.normal_(0, 1.5 / parameter.shape[-1] ** 0.5)
    return here(model)


def asked(name: str, rows: int, image: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(10, 290, (rows, 12), generator=generator)
    inputs: dict[str, torch.Tensor] = {}
    if image:
        ids[:, 2], ids[:, 3:7], ids[:, 7] = 7, IMAGE, 8
        torch.manual_seed(2)
        inputs = MODELS[name][2](ids)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **inputs}
    return {name: here(t) for name, t in inputs.items()}


def steps_of(model: nn.Module) -> int:
    held = kept.decoders.get(model)
    return 0 if held is None else held.steps


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_texts_about_an_image_are_what_they_were(name: str) -> None:
    plain = make(name)
    patched = copy.deepcopy(plain)
    report = hfpatch.apply(patched)
    assert report.swaps[0].op == "decoding", report
    more: dict[str, Any] = {"max_new_tokens": 10, "eos_token_id": None, "pad_token_id": 0}
    modes: list[dict[str, Any]] = [{"do_sample": False}, {"num_beams": 3, "do_sample": False}]
    modes += [{"do_sample": True, "top_k": 20}]
    for image, rows in ((True, 1), (False, 2), (True, 2)):
        inputs = asked(name, rows, image)
        for mode in modes:
            before = steps_of(patched)
            texts = []
            for model in (plain, patched):
                torch.manual_seed(3)
                texts.append(model.generate(**inputs, **more, **mode))
            assert torch.equal(*texts), (image, rows, mode)
            assert steps_of(patched) - before >= 8, (image, rows, mode)
    hfpatch.restore(patched)
    assert "forward" not in vars(patched)


def test_positions_of_several_axes() -> None:
    """A step is the engine's where they agree; else, and without positions, the original's."""
    plain = make("qwen2.5-vl")
    patched = copy.deepcopy(plain)
    hfpatch.apply(patched, include=type(patched).__name__)
    inputs = asked("qwen2.5-vl", 1, True)
    more = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    caches = [m.generate(**inputs, **more).past_key_values for m in (plain, patched)]
    token = here(torch.tensor([[9]]))
    apart = here(torch.tensor([12, 12, 13, 14]).reshape(4, 1, 1))
    given: list[dict[str, Any]] = [{"position_ids": apart}, {}]
    # a prompt with an image may cost one more proof: the second counts
    given += [{"position_ids": here(torch.full((4, 1, 1), at))} for at in (14, 15)]
    for arguments, served in zip(given, (False, False, None, True), strict=True):
        before = steps_of(patched)
        with torch.no_grad():
            wanted, got = (
                m(token, past_key_values=c, **arguments).logits
                for m, c in zip((plain, patched), caches, strict=True)
            )
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)
        assert served is None or (steps_of(patched) > before) == served


def test_sections_of_rope_that_a_layer_has_alone() -> None:
    """Those of the model's own config are taken, others are not what was proven."""
    model = make("qwen2-vl")
    attention = model.model.language_model.layers[1].self_attn
    attention.rope_parameters = {**attention.rope_parameters, "mrope_section": [12, 12, 8]}
    report = hfpatch.plan(model)
    assert not any(s.op == "decoding" for s in report.swaps)
    (skip,) = (s for s in report.skips if not s.path)
    assert "`rope_parameters` is" in skip.reason and "[8, 12, 12]" in skip.reason


def test_what_lies_beside_the_text_model_is_not_looked_into() -> None:
    """An adapter on the images' half changes nothing of a step; one on the text model does."""
    model = make("llava")

    class Doubled(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> Any:
            return 2 * self.inner(x)

    tower, text = copy.deepcopy(model), copy.deepcopy(model)
    projector = tower.model.multi_modal_projector
    projector.linear_1 = Doubled(projector.linear_1)
    attention = text.model.language_model.layers[0].self_attn
    attention.o_proj = Doubled(attention.o_proj)
    assert hfpatch.apply(tower).swaps[0].op == "decoding"
    assert not any(s.op == "decoding" for s in hfpatch.apply(text).swaps)
