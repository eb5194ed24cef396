"""Numbers in the inputs of a captured block that its kernels take for granted: RoPE tables that
hold each value twice, masks without a row of -inf. Where they are others the original answers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers as tf
from region_cases import FAM, inputs, randomize
from torch import Tensor, nn
from twins import chk, outcome, same

import hfpatch

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 99,
    "pad_token_id": 0,
}
MORE = {
    "cohere": lambda **k: tf.CohereForCausalLM(tf.CohereConfig(**SIZES, **k)),
    "glm": lambda **k: tf.GlmForCausalLM(
        tf.GlmConfig(**SIZES, head_dim=16, num_key_value_heads=2, **k)
    ),
    "neox": lambda **k: tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**SIZES, **k)),
    "modernbert": lambda **k: tf.ModernBertModel(tf.ModernBertConfig(**SIZES, **k)),
    "olmo2": lambda **k: tf.Olmo2ForCausalLM(tf.Olmo2Config(**SIZES, **k)),
    "roberta": lambda **k: tf.RobertaModel(tf.RobertaConfig(**SIZES, **k)),
    "bart": lambda **k: tf.BartModel(
        tf.BartConfig(
            d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, vocab_size=99,
        )
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def build(name: str, **more: Any) -> Any:
    return randomize({**FAM, **MORE}[name](**more))


def first(output: Any) -> Any:
    return output if isinstance(output, Exception) else output[0]


def run(model: Any, call: dict[str, Any]) -> Any:
    with torch.no_grad():
        return first(outcome(lambda: model(**call, **_more(model))))


def _more(model: Any) -> dict[str, Any]:
    return {"use_cache": False} if hasattr(model, "generate") else {}


def fused(model: Any) -> int:
    return sum(b.state == "fused" for b in hfpatch.status(model).plan.candidates)


class Uneven(nn.Module):
    """Tables whose second half is another."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tables = self.inner(*args, **kwargs)
        ramp = torch.linspace(0.5, 1.5, tables[0].shape[-1])
        return tuple(t * ramp for t in tables)


@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "gemma2", "phi", "cohere", "glm", "neox", "modernbert", "olmo2"]
)
def test_tables_whose_halves_differ(name: str) -> None:
    model = build(name)
    twin, late = copy.deepcopy(model), copy.deepcopy(model)
    call = inputs(name)
    hfpatch.apply(model, blocks=True, decoding=False)
    chk(same(run(model, call), run(twin, call)), "as it is")
    assert fused(model) == 2
    for each in (model, twin, late):
        base = each.base_model if hasattr(each, "base_model") else each
        base.rotary_emb = Uneven(base.rotary_emb)
    for _ in range(2):
        chk(same(run(model, call), run(twin, call)), "uneven")
    hfpatch.apply(late, blocks=True, decoding=False)
    for _ in range(2):
        chk(same(run(late, call), run(twin, call)), "uneven before apply")


@pytest.mark.parametrize("inference", [False, True])
def test_tables_of_a_layer_that_is_called_by_itself(inference: bool) -> None:
    model = build("llama")
    twin = copy.deepcopy(model)
    hfpatch.apply(model, blocks=True, decoding=False)
    with torch.inference_mode(inference), torch.no_grad():
        x = torch.randn(2, 7, 64)
        angles = torch.randn(1, 7, 8).repeat(1, 1, 2)
        even = angles.cos(), angles.sin()

        def layers(tables: Any) -> list[Tensor]:
            found = [m.model.layers[0](x, position_embeddings=tables) for m in (model, twin)]
            return [y[0] if isinstance(y, tuple) else y for y in found]

        for _ in range(2):
            chk(same(*layers(even)))
        assert fused(model)
        for place in (0, 1):
            odd = [t.clone() for t in even]
            odd[place][..., 3] += 1.0
            chk(same(*layers(tuple(odd))))
        written = tuple(t.clone() for t in even)
        chk(same(*layers(written)))
        written[1][..., 2] *= 2
        chk(same(*layers(written)))


def _mask(kind: str, heads: int = 1) -> Tensor:
    mask = torch.zeros(2, heads, 7, 7)
    if kind == "row":
        mask[1, :, 3] = -torch.inf
    elif kind == "some":
        mask[1, :, 3, :4] = -torch.inf
    elif kind == "all":
        mask[:] = -torch.inf
    return mask


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "cohere", "bert", "roberta", "modernbert", "phi", "gemma2", "bart"]
)
def test_rows_that_see_nothing(name: str, implementation: str) -> None:
    if (name, implementation) == ("gemma2", "sdpa"):
        pytest.skip("transformers refuses it")
    model = build(name, attn_implementation=implementation)
    twin = copy.deepcopy(model)
    hfpatch.apply(model, blocks=True, decoding=False)
    for kind in ("none", "row", "some", "all", "none"):
        call = {**inputs(name), "attention_mask": _mask(kind)}
        for _ in range(2):
            chk(same(run(model, call), run(twin, call)), kind)


def test_a_loop_over_time_is_captured_a_few_times_alone() -> None:
    """Its code takes more operators at each length: a capture would be made for each."""
    config = tf.JambaConfig(
        **{**SIZES, "num_key_value_heads": 2}, num_experts=1, num_experts_per_tok=1,
        attn_layer_period=2, attn_layer_offset=1, mamba_d_state=4, mamba_d_conv=2,
        mamba_dt_rank=4, use_mamba_kernels=False,
    )  # fmt: skip
    model = randomize(tf.JambaModel(config))
    twin = copy.deepcopy(model)
    hfpatch.apply(model, blocks=True, decoding=False)
    for tokens in range(4, 12):
        call = {"input_ids": torch.arange(3, 3 + tokens)[None], "use_cache": False}
        chk(same(run(model, call), run(twin, call)), f"{tokens} tokens")
    reasons = [c.reason for c in hfpatch.status(model).plan.candidates]
    assert any("another number of operators at each size" in reason for reason in reasons), reasons
