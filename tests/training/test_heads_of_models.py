"""Heads of transformers' classes that do more to their logits than cast them, by their own loss."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from support.nearness import assert_as_near, draw
from support.pieces import small_pieces
from torch import Tensor

import hfpatch
from hfpatch.coverage.small_transformers import shrunk

CLASSES = 97
SEQ2SEQ: dict[str, Any] = {
    "vocab_size": CLASSES,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
}
MORE: dict[str, dict[str, Any]] = {
    "LED": {
        "attention_window": [4],
        "max_encoder_position_embeddings": 64,
        "max_decoder_position_embeddings": 64,
    },
    "BigBirdPegasus": {"attention_type": "original_full"},
    "PegasusX": {"block_size": 4, "num_global_tokens": 2},
}
BIASED = ["Bart", "MBart", "Marian", "Pegasus", "PegasusX", "LED", "Mvp", "PLBart", "Blenderbot"]
BIASED += ["BlenderbotSmall", "BigBirdPegasus"]
TEXT: dict[str, Any] = {
    "vocab_size": CLASSES,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there: these tests are about them."""


def seq2seq(name: str) -> Any:
    config = getattr(transformers, f"{name}Config")(**SEQ2SEQ, **MORE.get(name, {}))
    ending = "MTModel" if name == "Marian" else "ForConditionalGeneration"
    model = getattr(transformers, name + ending)(config)
    if name != "PegasusX":  # which has no such buffer
        model.final_logits_bias.normal_()
    return model


def esm() -> Any:
    config = transformers.EsmConfig(
        vocab_size=CLASSES, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=48, pad_token_id=1, mask_token_id=4, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, position_embedding_type="rotary", token_dropout=False,
    )  # fmt: skip
    model = transformers.EsmForMaskedLM(config)
    torch.nn.init.normal_(model.lm_head.bias)
    return model


def chameleon() -> Any:
    from transformers.models.chameleon import ChameleonConfig, ChameleonVQVAEConfig

    vq = ChameleonVQVAEConfig(
        embed_dim=8, num_embeddings=4, latent_channels=8, resolution=16, base_channels=32,
        channel_multiplier=[1], num_res_blocks=1,
    )  # fmt: skip
    names = {f"word{n}": n for n in range(CLASSES - 5)}
    names |= {f"IMGIMG{letter}Z": CLASSES - 5 + n for n, letter in enumerate("ABCD")}
    config = ChameleonConfig(
        **TEXT, vq_config=vq, vocabulary_map={**names, "<image>": CLASSES - 1}, pad_token_id=1
    )
    return transformers.ChameleonForConditionalGeneration(config)


def with_text(model: Any) -> dict[str, Tensor]:
    ids = torch.randint(5, CLASSES - 8, (2, 12), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :3] = -100
    return {"input_ids": ids, "labels": labels}


def padded(model: Any) -> dict[str, Tensor]:
    """With a mask, by whose rows the loss is taken."""
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[1, :4] = 0
    return {**with_text(model), "attention_mask": mask}


def qwen2_audio() -> Any:
    audio = transformers.Qwen2AudioEncoderConfig(
        d_model=32, encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=48,
        num_mel_bins=8, max_source_positions=16,
    )  # fmt: skip
    text = transformers.Qwen2Config(**TEXT)
    config = transformers.Qwen2AudioConfig(
        audio_config=audio, text_config=text, audio_token_index=96
    )
    return transformers.Qwen2AudioForConditionalGeneration(config)


def granite_speech() -> Any:
    from transformers.models.granite_speech import GraniteSpeechConfig, GraniteSpeechEncoderConfig

    encoder = GraniteSpeechEncoderConfig(
        input_dim=8, num_layers=1, hidden_dim=32, feedforward_mult=2, num_heads=2, dim_head=16,
        output_dim=16, context_size=8, max_pos_emb=16,
    )  # fmt: skip
    text = transformers.GraniteConfig(**TEXT, logits_scaling=1.0)
    projector = transformers.Blip2QFormerConfig(
        vocab_size=8, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=48, encoder_hidden_size=32,
    )  # fmt: skip
    config = GraniteSpeechConfig(
        text_config=text, encoder_config=encoder, projector_config=projector, audio_token_index=96,
        has_lora_adapter=False, downsample_rate=1, window_size=1,
    )  # fmt: skip
    return transformers.GraniteSpeechForConditionalGeneration(config)


def inkling2() -> Any:
    """A softcap, and behind it fewer classes than the head has."""
    config = shrunk(transformers.CONFIG_MAPPING["inkling2_text"]())
    config.unpadded_vocab_size = 150
    return transformers.Inkling2ForCausalLM(config)


def prophetnet(eps: float) -> Any:
    """Streams in the second dimension, and a loss by `log_softmax`, smoothed by `eps`."""
    config = shrunk(transformers.CONFIG_MAPPING["prophetnet"]())
    config.dropout = config.attention_dropout = config.activation_dropout = 0.0
    config.eps = eps
    return transformers.ProphetNetForConditionalGeneration(config)


BUILD: dict[str, tuple[Callable[[], Any], Callable[[Any], dict[str, Tensor]]]] = {
    **{name: (lambda name=name: seq2seq(name), with_text) for name in BIASED},
    "Esm": (esm, with_text),
    "Qwen2Audio": (qwen2_audio, padded),
    "GraniteSpeech": (granite_speech, padded),
    "Inkling2": (inkling2, with_text),
    "ProphetNet": (lambda: prophetnet(0.0), with_text),
    "ProphetNet, smoothed": (lambda: prophetnet(0.1), with_text),
}


def built(name: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return BUILD[name][0]().train()


def step(model: Any, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    model.zero_grad()
    loss = model(**given).loss
    loss.backward()
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return loss.detach(), torch.cat(grads)


def patched(model: Any) -> Any:
    report = hfpatch.apply(model, mode="training", include="Linear")
    assert len([s for s in report.swaps if s.op == "linear_cross_entropy"]) == 1, report
    return model


def whole(model: Any) -> list[str]:
    return [n for n in hfpatch.status(model).notes if "made whole" in n]


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many logits existed at a time."""
    return small_pieces(monkeypatch, 2048)


@pytest.mark.parametrize("name", BUILD)
def test_as_its_twin_without_logits(name: str, pieces: list[int]) -> None:
    twin = built(name)
    model = patched(copy.deepcopy(twin))
    pieces.clear()
    given = BUILD[name][1](model)
    for ours, theirs in zip(step(model, given), step(twin, given), strict=True):
        assert (ours - theirs).abs().max() <= 2e-5 * theirs.abs().max()
    assert pieces and max(pieces) < 22 * CLASSES and not whole(model), whole(model)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", ["Bart", "Esm", "Qwen2Audio"])
def test_half_types_are_as_near(name: str, autocast: bool, pieces: list[int]) -> None:
    """A bias is fp32 under autocast, and added to logits of a half type."""
    losses, gradients = [], []
    for seed in range(6):
        wide = built(name, seed).double()
        twin = copy.deepcopy(wide).to(torch.float32 if autocast else torch.bfloat16)
        model = patched(copy.deepcopy(twin))
        given = BUILD[name][1](model)
        found = []
        for m in (model, twin, wide):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast and m is not wide):
                found.append(step(m, given))
        losses.append(draw(*(loss for loss, _ in found)))
        gradients.append(draw(*(gradient for _, gradient in found)))
        assert not whole(model)
    assert pieces
    assert_as_near(gradients, torch.bfloat16, name)
    assert_as_near(losses, torch.bfloat16, name, like=8)


def test_logits_that_are_written_to_are_whole_and_status_says_why() -> None:
    """Chameleon sets those of image tokens to the least number."""
    torch.manual_seed(0)
    twin = chameleon().train()
    model = patched(copy.deepcopy(twin))
    assert not whole(model)
    given = with_text(model)
    for ours, theirs in zip(step(model, given), step(twin, given), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    (said,) = whole(model)
    assert said == "`lm_head`: its logits were made whole: `__setitem__` reads them"


def writing(report: Any) -> list[str]:
    return [n for n in report.notes if "writes to its logits" in n]


def test_the_report_says_whose_forward_writes_to_its_logits() -> None:
    model = chameleon().train()
    report = hfpatch.apply(model, mode="training")
    (note,) = writing(report)
    assert note.startswith("`lm_head`: the forward of `ChameleonForConditionalGeneration` writes")
    assert writing(hfpatch.status(model)) == [note] == writing(hfpatch.plan(model, mode="training"))
    assert not writing(hfpatch.apply(model, mode="training", exclude="lm_head"))
    hfpatch.restore(model)
    assert not writing(hfpatch.status(model))
    for name in ("Bart", "Esm", "Inkling2"):
        assert not writing(hfpatch.plan(built(name).train(), mode="training"))


class _Writes(transformers.LlamaForCausalLM):
    def forward(self, input_ids: Tensor, **_: Any) -> Tensor:
        found: Tensor = self.lm_head(self.model(input_ids).last_hidden_state)
        found[..., 3] += 1.0
        return found


class _WritesElsewhere(transformers.LlamaForCausalLM):
    def forward(self, input_ids: Tensor, **_: Any) -> Tensor:
        input_ids[:, 0] = 1
        hidden = self.model(input_ids).last_hidden_state
        logits: Tensor = self.lm_head(hidden)
        kept = logits.clone()
        kept[..., 3] = 1.0
        return kept


@pytest.mark.parametrize(("cls", "said"), [(_Writes, True), (_WritesElsewhere, False)])
def test_a_forward_of_ones_own_that_writes(cls: type, said: bool) -> None:
    model = cls(transformers.LlamaConfig(**TEXT)).train()
    assert bool(writing(hfpatch.plan(model, mode="training"))) == said


def test_status_says_why_a_head_ran_as_it_is() -> None:
    model = patched(built("Bart"))
    given = with_text(model)
    step(model, given)
    assert not whole(model)
    handle = model.lm_head.register_forward_hook(lambda module, args, out: None)
    with torch.no_grad():
        model(**given)
    assert not whole(model)  # nobody trains it
    step(model, given)
    assert whole(model) == [
        "`lm_head`: its logits were made whole: a forward hook stands on the head"
    ]
    handle.remove()
    model(**given).logits.argmax(-1)
    assert whole(model)[0].endswith("stands on the head; `argmax` reads them")
    hfpatch.restore(model)
    assert not whole(model)
    patched(model)
    assert not whole(model)
