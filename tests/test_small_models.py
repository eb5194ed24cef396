"""Small models of types whose sizes must go together, and inputs by the names of the arguments."""

from __future__ import annotations

import pytest
import torch

import hfpatch
from hfpatch.coverage.small_settings import SETTINGS
from hfpatch.coverage.small_transformers import MOST, transformers_model
from hfpatch.inputs import sample_inputs

#: Type and class, and the shapes of what makes the call the model's own kind.
CALLS = {
    ("qwen2_vl", "Qwen2VLModel"): {"pixel_values": (32, 384), "image_grid_thw": (2, 3)},
    ("chameleon", "ChameleonModel"): {"pixel_values": (2, 3, 64, 64)},
    ("blip-2", "Blip2Model"): {"pixel_values": (2, 3, 32, 32)},
    ("instructblip", "InstructBlipModel"): {"qformer_input_ids": (2, 12)},
    ("idefics", "IdeficsModel"): {"pixel_values": (2, 1, 3, 32, 32), "input_ids": (2, 12)},
    ("vilt", "ViltModel"): {"pixel_values": (2, 3, 32, 32), "input_ids": (2, 12)},
    ("udop", "UdopModel"): {"bbox": (2, 12, 4)},
    ("tvp", "TvpModel"): {"pixel_values": (1, 4, 3, 64, 64)},  # no more than one
    ("detr", "DetrModel"): {"pixel_values": (2, 3, 64, 64)},
    ("clap", "ClapModel"): {"input_features": (2, 1, 1024, 64)},
    ("dia", "DiaModel"): {"decoder_input_ids": (2, 7, 3)},
    ("musicgen", "MusicgenModel"): {"input_ids": (8, 12)},  # of four codebooks
    ("mimi_decoder", "MimiDecoderModel"): {"latents": (2, 64, 64)},
    ("informer", "InformerModel"): {"past_values": (2, 15, 1), "past_time_features": (2, 15, 0)},
    ("decision_transformer", "DecisionTransformerModel"): {"actions": (2, 5, 4)},
    ("blip_2_qformer", "Blip2QFormerModel"): {"encoder_hidden_states": (2, 5, 64)},
    ("gemma4_vision", "Gemma4VisionModel"): {"pixel_position_ids": (2, 36, 2)},
}


@pytest.mark.parametrize(("kind", "name"), CALLS)
def test_inputs_of_its_own_kind(kind: str, name: str) -> None:
    model = transformers_model(kind, name).eval()
    assert sum(p.numel() for p in model.parameters()) <= MOST
    inputs = sample_inputs(model)
    shapes = {key: tuple(inputs[key].shape) for key in CALLS[kind, name]}
    assert shapes == CALLS[kind, name]


def test_image_tokens_are_as_many_as_the_images_rows() -> None:
    model = transformers_model("qwen2_vl", "Qwen2VLModel").eval()
    ids = sample_inputs(model)["input_ids"]
    assert int((ids == model.config.image_token_id).sum()) == 2 * 4  # 4 x 4 patches, by 2 x 2


def test_settings_are_of_types_that_there_are() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    assert set(SETTINGS) <= set(CONFIG_MAPPING_NAMES)


def test_a_child_that_needs_values_may_return_a_pair(kernels_module: object) -> None:
    """Its attention splits by lengths that are values: it is called as it stands, and what it
    returns is known by what its forward says."""
    torch.manual_seed(0)
    model = transformers_model("hunyuan_vl_vision", "HunYuanVLVisionTransformer").eval()
    inputs = sample_inputs(model)
    with torch.no_grad():
        before = model(**inputs).last_hidden_state
        hfpatch.apply(model, blocks=True)
        try:
            for _ in range(2):
                after = model(**inputs).last_hidden_state
            states = {c.state for c in hfpatch.status(model).plan.candidates}
        finally:
            hfpatch.restore(model)
        assert states == {"fused"}
        torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
        assert torch.equal(model(**inputs).last_hidden_state, before)
