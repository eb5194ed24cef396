"""The loss of a patched model where a training step is out of the ordinary: it is its twin's.

Every case is run with many rows, whose gradients are made with the loss, and with few, whose are
made in the backward.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.nearness import Draw, assert_as_near, draw
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.utils.checkpoint import checkpoint
from transformers import (
    BertConfig,
    BertForMaskedLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

import hfpatch
import hfpatch.loss
from hfpatch.losses import head_loss

CLASSES, WIDTH = 97, 32
#: Tokens of a row; a batch has two. In the forward where all tokens are at least WIDTH.
LENGTHS = {"in the forward": 24, "in the backward": 7}
MADE_IN_THE_FORWARD = "_SummedCrossEntropyBackward"


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled kernels must be there: these tests are about them, and about both ways, which a
    GPU takes."""
    monkeypatch.setattr(head_loss, "TIME_FIRST", frozenset())


def built(kind: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": CLASSES,
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    model: Any
    if kind == "bert":
        dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        model = BertForMaskedLM(BertConfig(**sizes, **dropouts))
    elif kind == "gemma2":  # a softcap
        model = Gemma2ForCausalLM(
            Gemma2Config(**sizes, head_dim=16, num_key_value_heads=1, pad_token_id=0)
        )
    elif kind == "cohere":  # a scale
        model = CohereForCausalLM(CohereConfig(**sizes, pad_token_id=0, logit_scale=0.3))
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=kind == "tied"))
    return model.to(dtype).train()


def batch(length: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    ids = torch.randint(3, CLASSES, (2, length), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[0, :3] = -100
    return ids, labels


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {
        name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }


Case = Callable[[Any, Tensor, Tensor], Any]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__.replace("_", " ")] = function
    return function


def loss_of(model: Any, ids: Tensor, labels: Tensor, **more: Any) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=labels, **more).loss
    return loss


@case
def plain(model: Any, ids: Tensor, labels: Tensor) -> Any:
    loss = loss_of(model, ids, labels)
    loss.backward()
    return loss


@case
def all_ignored(model: Any, ids: Tensor, labels: Tensor) -> Any:
    loss = loss_of(model, ids, torch.full_like(labels, -100))
    loss.backward()
    return loss


@case
def all_ignored_with_items(model: Any, ids: Tensor, labels: Tensor) -> Any:
    loss = loss_of(model, ids, torch.full_like(labels, -100), num_items_in_batch=torch.tensor(5))
    loss.backward()
    return loss


@case
def no_items_and_all_ignored(model: Any, ids: Tensor, labels: Tensor) -> Any:
    loss = loss_of(model, ids, torch.full_like(labels, -100), num_items_in_batch=torch.tensor(0))
    loss.backward()
    return loss


@case
def no_items(model: Any, ids: Tensor, labels: Tensor) -> Any:
    loss = loss_of(model, ids, labels, num_items_in_batch=torch.tensor(0))
    loss.backward()
    return loss


@case
def items_as_a_number(model: Any, ids: Tensor, labels: Tensor) -> Any:
    loss = loss_of(model, ids, labels, num_items_in_batch=70)
    loss.backward()
    return loss


@case
def all_ignored_of_one_of_two_batches(model: Any, ids: Tensor, labels: Tensor) -> Any:
    first = loss_of(model, ids, torch.full_like(labels, -100))
    first.backward()
    second = loss_of(model, ids, labels)
    second.backward()
    return first, second


@case
def all_ignored_smoothed(model: Any, ids: Tensor, labels: Tensor) -> Any:
    logits = model(input_ids=ids).logits.float().view(-1, CLASSES)
    loss = F.cross_entropy(logits, torch.full_like(labels, -100).view(-1), label_smoothing=0.1)
    loss.backward()
    return loss


@case
def smoothed(model: Any, ids: Tensor, labels: Tensor) -> Any:
    logits = model(input_ids=ids).logits.float().view(-1, CLASSES)
    loss = F.cross_entropy(logits, labels.view(-1), label_smoothing=0.1)
    loss.backward()
    return loss


@case
def all_ignored_sum(model: Any, ids: Tensor, labels: Tensor) -> Any:
    logits = model(input_ids=ids).logits.float().view(-1, CLASSES)
    loss = F.cross_entropy(logits, torch.full_like(labels, -100).view(-1), reduction="sum")
    (loss / 0.0).backward()
    return loss


@case
def an_empty_slice(model: Any, ids: Tensor, labels: Tensor) -> Any:
    logits = model(input_ids=ids).logits[:, :0].float().reshape(-1, CLASSES)
    loss = F.cross_entropy(logits, labels[:, :0].reshape(-1))
    loss.backward()
    return loss


@case
def an_empty_slice_sum(model: Any, ids: Tensor, labels: Tensor) -> Any:
    logits = model(input_ids=ids).logits[:, :0].float().reshape(-1, CLASSES)
    loss = F.cross_entropy(logits, labels[:, :0].reshape(-1), reduction="sum")
    loss.backward()
    return loss


@case
def labels_written_to_after_the_forward(model: Any, ids: Tensor, labels: Tensor) -> Any:
    labels = labels.clone()
    loss = F.cross_entropy(model(input_ids=ids).logits.float().view(-1, CLASSES), labels.view(-1))
    labels.zero_()
    loss.backward()
    return loss


@case
def a_models_labels_written_to_after_the_forward(model: Any, ids: Tensor, labels: Tensor) -> Any:
    labels = labels.clone()
    loss = loss_of(model, ids, labels)  # a causal model shifts them into memory of its own
    labels.zero_()
    loss.backward()
    return loss


@case
def shift_labels_written_to_after_the_forward(model: Any, ids: Tensor, labels: Tensor) -> Any:
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    loss = loss_of(model, ids, labels, shift_labels=shifted)
    shifted.fill_(5)
    loss.backward()
    return loss


@case
def weight_written_to_after_the_forward(model: Any, ids: Tensor, labels: Tensor) -> Any:
    loss = loss_of(model, ids, labels)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(2)
    loss.backward()
    return loss


@case
def hidden_written_to_after_the_forward(model: Any, ids: Tensor, labels: Tensor) -> Any:
    hidden = model.base_model(input_ids=ids).last_hidden_state * 1.5
    logits = model.get_output_embeddings()(hidden).float()
    loss = F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1))
    with torch.no_grad():
        hidden.zero_()
    loss.backward()
    return loss


@case
def ignored_labels_out_of_range(model: Any, ids: Tensor, labels: Tensor) -> Any:
    logits = model(input_ids=ids).logits.float().view(-1, CLASSES)
    strange = torch.where(labels == -100, 10_000, labels).view(-1)
    loss = F.cross_entropy(logits, strange, ignore_index=10_000)
    loss.backward()
    return loss


@case
def labels_out_of_range(model: Any, ids: Tensor, labels: Tensor) -> Any:
    return loss_of(model, ids, torch.full_like(labels, CLASSES))


@case
def divided_and_scaled(model: Any, ids: Tensor, labels: Tensor) -> Any:
    loss = loss_of(model, ids, labels)
    (loss / 3.0 * 7.5 - 2.0).backward()
    return loss


@case
def squared(model: Any, ids: Tensor, labels: Tensor) -> Any:
    loss = loss_of(model, ids, labels) ** 2
    loss.backward()
    return loss


@case
def times_zero(model: Any, ids: Tensor, labels: Tensor) -> Any:
    loss = loss_of(model, ids, labels) * 0.0
    loss.backward()
    return loss


@case
def times_infinity(model: Any, ids: Tensor, labels: Tensor) -> Any:
    loss = loss_of(model, ids, labels)
    (loss * float("inf")).backward()
    return loss


@case
def times_nan(model: Any, ids: Tensor, labels: Tensor) -> Any:
    loss = loss_of(model, ids, labels)
    (loss * float("nan")).backward()
    return loss


@case
def in_double(model: Any, ids: Tensor, labels: Tensor) -> Any:
    loss = loss_of(model, ids, labels).double() * 0.25
    loss.backward()
    return loss


@case
def a_gradient_of_ones_own(model: Any, ids: Tensor, labels: Tensor) -> Any:
    loss = loss_of(model, ids, labels)
    loss.backward(torch.tensor(-0.5))
    return loss


@case
def retained_and_taken_twice(model: Any, ids: Tensor, labels: Tensor) -> Any:
    loss = loss_of(model, ids, labels)
    loss.backward(retain_graph=True)
    once = gradients(model)
    loss.backward()
    return loss, once


@case
def taken_twice(model: Any, ids: Tensor, labels: Tensor) -> Any:
    loss = loss_of(model, ids, labels)
    loss.backward()
    loss.backward()
    return loss


@case
def not_used(model: Any, ids: Tensor, labels: Tensor) -> Any:
    loss = loss_of(model, ids, labels).detach()
    loss_of(model, ids, labels).backward()
    return loss


@case
def beside_another_use(model: Any, ids: Tensor, labels: Tensor) -> Any:
    output = model(input_ids=ids, labels=labels)
    (output.loss + 1e-3 * output.logits.float().logsumexp(-1).square().mean()).backward()
    return output.loss, output.logits.argmax(-1)


@case
def logits_read_before(model: Any, ids: Tensor, labels: Tensor) -> Any:
    logits = model(input_ids=ids).logits
    best = logits.argmax(-1)
    loss = F.cross_entropy(logits.float().view(-1, CLASSES), labels.view(-1))
    loss.backward()
    return loss, best


@case
def logits_read_after(model: Any, ids: Tensor, labels: Tensor) -> Any:
    output = model(input_ids=ids, labels=labels)
    output.loss.backward()
    return output.loss, output.logits.detach()


@case
def two_losses_of_the_same_logits(model: Any, ids: Tensor, labels: Tensor) -> Any:
    logits = model(input_ids=ids).logits.float()
    whole = F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1))
    part = F.cross_entropy(logits[:, 2:].reshape(-1, CLASSES), labels[:, 2:].reshape(-1))
    (whole - 0.5 * part).backward()
    return whole, part


@case
def without_gradients(model: Any, ids: Tensor, labels: Tensor) -> Any:
    with torch.no_grad():
        return loss_of(model, ids, labels)


@case
def in_inference_mode(model: Any, ids: Tensor, labels: Tensor) -> Any:
    with torch.inference_mode():
        return loss_of(model, ids, labels).clone()


@case
def backward_of_what_has_no_gradient(model: Any, ids: Tensor, labels: Tensor) -> Any:
    model.requires_grad_(False)
    loss = loss_of(model, ids, labels)
    loss.backward()
    return loss


@case
def frozen_head(model: Any, ids: Tensor, labels: Tensor) -> Any:
    model.get_output_embeddings().requires_grad_(False)
    loss = loss_of(model, ids, labels)
    loss.backward()
    return loss


@case
def frozen_body(model: Any, ids: Tensor, labels: Tensor) -> Any:
    model.base_model.requires_grad_(False)
    model.get_output_embeddings().requires_grad_(True)
    loss = loss_of(model, ids, labels)
    loss.backward()
    return loss


@case
def head_frozen_between(model: Any, ids: Tensor, labels: Tensor) -> Any:
    loss = loss_of(model, ids, labels)
    model.get_output_embeddings().requires_grad_(False)
    loss.backward()
    return loss


@case
def gradients_of_some(model: Any, ids: Tensor, labels: Tensor) -> Any:
    loss = loss_of(model, ids, labels)
    head, norm = model.get_output_embeddings().weight, [*model.base_model.parameters()][-1]
    first = torch.autograd.grad(loss, head, retain_graph=True)
    loss.backward(inputs=[norm])
    return loss, first


@case
def gradients_of_gradients(model: Any, ids: Tensor, labels: Tensor) -> Any:
    model.set_attn_implementation("eager")  # PyTorch's on a CPU has none
    loss = loss_of(model, ids, labels)
    chosen = [model.get_output_embeddings().weight, [*model.base_model.parameters()][-1]]
    found = torch.autograd.grad(loss, chosen, create_graph=True)
    penalty = sum(g.square().sum() for g in found)
    (loss + 0.1 * penalty).backward()
    return loss, penalty


@case
def a_graph_of_the_gradients_that_is_not_used(model: Any, ids: Tensor, labels: Tensor) -> Any:
    loss = loss_of(model, ids, labels)
    loss.backward(create_graph=True)
    return loss


@case
def a_batch_of_gradients(model: Any, ids: Tensor, labels: Tensor) -> Any:
    hidden = model.base_model(input_ids=ids).last_hidden_state.detach().requires_grad_()
    head = model.get_output_embeddings()
    loss = F.cross_entropy(head(hidden).float().view(-1, CLASSES), labels.view(-1))
    factors = torch.tensor([1.0, -2.0, 0.5])
    return torch.autograd.grad(loss, [hidden, head.weight], factors, is_grads_batched=True)


@case
def a_jacobian(model: Any, ids: Tensor, labels: Tensor) -> Any:
    hidden = model.base_model(input_ids=ids).last_hidden_state.detach()
    head = model.get_output_embeddings()

    def function(x: Tensor) -> Tensor:
        return F.cross_entropy(head(x).float().view(-1, CLASSES), labels.view(-1))

    return torch.autograd.functional.jacobian(function, hidden, vectorize=True)


@case
def a_product_with_the_hessian(model: Any, ids: Tensor, labels: Tensor) -> Any:
    hidden = model.base_model(input_ids=ids).last_hidden_state.detach()
    head = model.get_output_embeddings()

    def function(x: Tensor) -> Tensor:
        return F.cross_entropy(head(x).float().view(-1, CLASSES), labels.view(-1))

    return torch.autograd.functional.hvp(function, hidden, hidden.flip(0))


@case
def functional_gradients(model: Any, ids: Tensor, labels: Tensor) -> Any:
    parameters = {n: p.detach() for n, p in model.named_parameters()}

    def function(given: Any) -> Tensor:
        loss: Tensor = torch.func.functional_call(
            model, given, kwargs={"input_ids": ids, "labels": labels}
        ).loss
        return loss

    found, loss = torch.func.grad_and_value(function)(parameters)
    return loss, found


@case
def functional_gradients_of_embeddings(model: Any, ids: Tensor, labels: Tensor) -> Any:
    embedded = model.get_input_embeddings()(ids).detach()
    return torch.func.grad(lambda x: model(inputs_embeds=x, labels=labels).loss)(embedded)


@case
def forward_derivatives(model: Any, ids: Tensor, labels: Tensor) -> Any:
    model.set_attn_implementation("eager")
    embedded = model.get_input_embeddings()(ids).detach()
    return torch.func.jvp(
        lambda x: model(inputs_embeds=x, labels=labels).loss, (embedded,), (embedded.flip(0),)
    )


@case
def checkpointed_whole(model: Any, ids: Tensor, labels: Tensor) -> Any:
    loss: Any = checkpoint(lambda i: loss_of(model, i, labels), ids, use_reentrant=False)
    loss.backward()
    return loss


@case
def checkpointed_head_and_loss(model: Any, ids: Tensor, labels: Tensor) -> Any:
    head = model.get_output_embeddings()

    def function(hidden: Tensor) -> Tensor:
        return F.cross_entropy(head(hidden).float().view(-1, CLASSES), labels.view(-1))

    hidden = model.base_model(input_ids=ids).last_hidden_state
    reentrant: Any = checkpoint(function, hidden, use_reentrant=True)
    other: Any = checkpoint(function, hidden, use_reentrant=False)
    (reentrant + other).backward()
    return reentrant, other


@case
def checkpointed_layers(model: Any, ids: Tensor, labels: Tensor) -> Any:
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        loss = loss_of(model, ids, labels)
        loss.backward()
    model.gradient_checkpointing_disable()
    return loss


@case
def saved_elsewhere(model: Any, ids: Tensor, labels: Tensor) -> Any:
    with torch.autograd.graph.save_on_cpu():
        loss = loss_of(model, ids, labels)
    loss.backward()
    return loss


def in_compiled_autograd(loss: Tensor) -> None:
    """Its backward, as `torch._dynamo.config.compiled_autograd` runs it."""
    with compiled_autograd._enable(lambda graph: graph):
        loss.backward()


@case
def a_backward_in_compiled_autograd(model: Any, ids: Tensor, labels: Tensor) -> Any:
    loss = loss_of(model, ids, labels)
    in_compiled_autograd(loss)
    return loss


@case
def a_backward_of_some_rows_in_compiled_autograd(model: Any, ids: Tensor, labels: Tensor) -> Any:
    logits = model(input_ids=ids).logits[:, 1:-2]
    loss = F.cross_entropy(logits.reshape(-1, CLASSES), labels[:, 2:-1].reshape(-1))
    in_compiled_autograd(loss)
    return loss


@case
def a_hook_in_compiled_autograd(model: Any, ids: Tensor, labels: Tensor) -> Any:
    logits = model(input_ids=ids).logits
    loss = F.cross_entropy(logits[:, :-1].reshape(-1, CLASSES), labels[:, 1:].reshape(-1))
    logits.register_hook(lambda gradient: gradient * 2.0)
    in_compiled_autograd(loss)
    return loss


@case
def saving_forbidden(model: Any, ids: Tensor, labels: Tensor) -> Any:
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        loss = loss_of(model, ids, labels)
    loss.backward()
    return loss


@case
def anomalies_looked_for(model: Any, ids: Tensor, labels: Tensor) -> Any:
    with torch.autograd.set_detect_anomaly(True):
        loss = loss_of(model, ids, labels)
        loss.backward()
    return loss


@case
def anomalies_found(model: Any, ids: Tensor, labels: Tensor) -> Any:
    with torch.autograd.set_detect_anomaly(True):
        (loss_of(model, ids, labels) * float("nan")).backward()


@case
def nan_in_the_hidden_states(model: Any, ids: Tensor, labels: Tensor) -> Any:
    with torch.no_grad():
        model.get_input_embeddings().weight[int(ids[1, 3])] = float("nan")
    loss = loss_of(model, ids, labels)
    loss.backward()
    return loss


@case
def infinity_in_the_head(model: Any, ids: Tensor, labels: Tensor) -> Any:
    with torch.no_grad():
        model.get_output_embeddings().weight[7, 3] = float("inf")
    loss = loss_of(model, ids, labels)
    loss.backward()
    return loss


@case
def hooks_on_the_loss_and_the_weight(model: Any, ids: Tensor, labels: Tensor) -> Any:
    seen: list[Tensor] = []
    model.get_output_embeddings().weight.register_hook(lambda g: (seen.append(g.clone()), g * 2)[1])
    loss = loss_of(model, ids, labels)
    loss.register_hook(lambda g: g * 3)
    loss.backward()
    return loss, seen


@case
def backward_under_no_grad(model: Any, ids: Tensor, labels: Tensor) -> Any:
    loss = loss_of(model, ids, labels)
    with torch.no_grad():
        loss.backward()
    return loss


@case
def backward_of_a_loss_that_is_a_leaf_now(model: Any, ids: Tensor, labels: Tensor) -> Any:
    loss = loss_of(model, ids, labels)
    loss.detach_()
    loss.backward()
    return loss


@case
def loss_written_to(model: Any, ids: Tensor, labels: Tensor) -> Any:
    loss = loss_of(model, ids, labels)
    loss.mul_(2.0).add_(1.0)
    loss.backward()
    return loss


@case
def another_default_dtype(model: Any, ids: Tensor, labels: Tensor) -> Any:
    torch.set_default_dtype(torch.float64)
    try:
        loss = loss_of(model, ids, labels)
        loss.backward()
    finally:
        torch.set_default_dtype(torch.float32)
    return loss


@case
def deterministic_algorithms(model: Any, ids: Tensor, labels: Tensor) -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        loss = loss_of(model, ids, labels)
        loss.backward()
    finally:
        torch.use_deterministic_algorithms(False)
    return loss


@case
def two_threads(model: Any, ids: Tensor, labels: Tensor) -> Any:
    # as torch.nn.parallel.parallel_apply has them: each its own batch, one model
    found: dict[int, Any] = {}

    def run(number: int) -> None:
        loss = loss_of(model, ids.roll(number, 1), labels.roll(number, 1))
        weights = [model.get_output_embeddings().weight, [*model.base_model.parameters()][-1]]
        found[number] = loss, torch.autograd.grad(loss, weights)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return [found[n] for n in range(2)]


@case
def backward_in_another_thread(model: Any, ids: Tensor, labels: Tensor) -> Any:
    loss = loss_of(model, ids, labels)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    return loss


@case
def weights_that_are_results(model: Any, ids: Tensor, labels: Tensor) -> Any:
    # attributes in place of parameters, as of weights that are made of others
    twin = copy.deepcopy(model)
    found = {n: p * 1.0 for n, p in model.named_parameters()}
    for name, p in found.items():
        path, _, leaf = name.rpartition(".")
        owner = twin.get_submodule(path)
        del owner._parameters[leaf]
        setattr(owner, leaf, p)
    loss = loss_of(twin, ids, labels)
    loss.backward()
    return loss


@case
def accumulated_then_one_step(model: Any, ids: Tensor, labels: Tensor) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(2):
        for shift in range(3):
            loss = loss_of(model, ids.roll(shift, 1), labels.roll(shift, 1)) / 3
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses, [p.detach().clone() for p in model.parameters()]


@case
def detached_in_place(model: Any, ids: Tensor, labels: Tensor) -> Any:
    # as pipelines do that split the backward, once the inputs have their gradients
    loss = loss_of(model, ids, labels)
    loss.backward()
    rows = F.cross_entropy(
        model(input_ids=ids).logits.flatten(0, 1), labels.flatten(), reduction="none"
    )
    rows.sum().backward()
    return loss.detach_(), rows.detach_()


@case
def several_losses_before_one_backward(model: Any, ids: Tensor, labels: Tensor) -> Any:
    losses = [loss_of(model, ids.roll(n, 1), labels.roll(n, 1)) for n in range(3)]
    torch.stack(losses).mean().backward()
    return losses


def outcome(run: Callable[[], Any]) -> Any:
    try:
        return run()
    except Exception as e:
        return e


def assert_same(
    ours: Any, theirs: Any, tolerance: float, where: str = "result", least: float = 0.0
) -> None:
    """`least`: what is compared with at least, of a tensor whose values are 0, rounded."""
    if isinstance(theirs, Exception) or isinstance(ours, Exception):
        assert isinstance(ours, type(theirs)), f"{where}: {ours!r} for {theirs!r}"
        return
    if isinstance(theirs, Tensor):
        assert isinstance(ours, Tensor), where
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), where
        finite = (
            theirs.isfinite()
        )  # infinite or not a number: it hangs on the order of a product's sums
        assert torch.equal(ours.isfinite(), finite), f"{where}: {ours} for {theirs}"
        ours, theirs = ours.detach()[finite].double(), theirs.detach()[finite].double()
        if theirs.numel():
            off = (ours - theirs).abs().max().item()
            largest = max(theirs.abs().max().item(), least)
            assert off <= tolerance * largest, f"{where}: {off:.2e} of {largest:.2e}"
    elif isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            assert_same(ours[name], theirs[name], tolerance, f"{where}: {name}", least)
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs)
        for n, pair in enumerate(zip(ours, theirs, strict=True)):
            assert_same(*pair, tolerance, f"{where}: {n}")
    else:
        assert ours == theirs, where


#: What is tried with heads of other kinds too: biased, capped, scaled.
OF_ALL = (
    "plain",
    "all ignored",
    "no items",
    "smoothed",
    "all ignored smoothed",
    "an empty slice",
    "times infinity",
    "gradients of gradients",
    "a batch of gradients",
    "frozen body",
)
PAIRS = [(name, "llama") for name in CASES]
PAIRS += [(name, kind) for kind in ("tied", "bert", "gemma2", "cohere") for name in OF_ALL]


@pytest.mark.parametrize("way", LENGTHS)
@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_as_its_twin(name: str, kind: str, way: str) -> None:
    twin = built(kind)
    model = copy.deepcopy(twin)
    report = hfpatch.apply(model, mode="training")
    assert any(s.op == "linear_cross_entropy" for s in report.swaps), report
    ids, labels = batch(LENGTHS[way])
    found = [outcome(lambda m=m: CASES[name](m, ids, labels)) for m in (model, twin)]  # type: ignore[misc]
    if name == "gradients of gradients":
        assert not isinstance(found[1], Exception), found[1]
    assert_same(*found, 2e-4)
    whole = [g.abs().max().item() for g in gradients(twin).values() if g is not None]
    least = 1e-2 * max([g for g in whole if math.isfinite(g)], default=0.0)
    assert_same(gradients(model), gradients(twin), 2e-4, "gradient", least)


def made_by(loss: Tensor) -> set[str]:
    """The names of the functions in a loss's graph."""
    found, left = set(), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found.add(node)
            left += [following for following, _ in node.next_functions]
    return {type(node).__name__ for node in found}


def test_which_way_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built()
    hfpatch.apply(model, mode="training")
    many, few = (batch(LENGTHS[way]) for way in LENGTHS)
    assert MADE_IN_THE_FORWARD in made_by(loss_of(model, *many))
    # fewer rows than the hidden states are wide: the weight's gradient is more than the logits
    assert MADE_IN_THE_FORWARD not in made_by(loss_of(model, *few))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        assert MADE_IN_THE_FORWARD not in made_by(loss_of(model, *many))
    model.get_output_embeddings().requires_grad_(False)  # nothing is kept for the weight
    assert MADE_IN_THE_FORWARD in made_by(loss_of(model, *few))
    model.get_output_embeddings().requires_grad_()
    monkeypatch.undo()  # a CPU, where time comes first
    assert MADE_IN_THE_FORWARD in made_by(loss_of(model, *few))


@pytest.mark.parametrize("rows", [5, 40])
@pytest.mark.parametrize("recompute", [None, True, False])
def test_both_ways_can_be_asked_for(rows: int, recompute: bool | None) -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 16, generator=generator).requires_grad_() for n in (rows, CLASSES))
    target = torch.randint(CLASSES, (rows,), generator=generator)
    loss = hfpatch.loss.linear_cross_entropy(x, w, target, recompute=recompute)
    in_the_forward = rows >= 16 if recompute is None else not recompute
    assert (MADE_IN_THE_FORWARD in made_by(loss)) == in_the_forward
    ours = torch.autograd.grad(loss, [x, w])
    theirs = torch.autograd.grad(F.cross_entropy(x @ w.t(), target), [x, w])
    assert_same(ours, theirs, 1e-5)


@pytest.mark.parametrize("way", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_is_as_near_as_pytorch(dtype: torch.dtype, way: str) -> None:
    losses: list[Draw] = []
    grads: list[Draw] = []
    for seed in range(12):
        twin = built(seed=seed)
        model, wide = copy.deepcopy(twin), copy.deepcopy(twin).double()
        hfpatch.apply(model, mode="training")
        ids, labels = batch(LENGTHS[way], seed)
        found = []
        for m in (model, twin, wide):
            with torch.autocast("cpu", dtype, enabled=m is not wide):
                loss = loss_of(m, ids, labels)
            loss.backward()
            assert loss.dtype == torch.float32
            found.append((loss.detach(), torch.cat([p.grad.flatten() for p in m.parameters()])))
        losses.append(draw(*(f[0] for f in found)))
        grads.append(draw(*(f[1] for f in found)))
    assert_as_near(grads, dtype, "gradients")
    assert_as_near(losses, dtype, "loss", like=8)


@pytest.mark.parametrize("way", LENGTHS)
def test_a_scaler_skips_the_steps_that_overflow(way: str) -> None:
    ids, labels = batch(LENGTHS[way])
    twin = built()
    model = copy.deepcopy(twin)
    hfpatch.apply(model, mode="training")
    found = []
    for m in (model, twin):
        scaler: Any = torch.amp.GradScaler("cpu", init_scale=2.0**40, backoff_factor=2.0**-32)
        optimizer = torch.optim.SGD(m.parameters(), 0.5)
        scales, norms = [], []
        for _ in range(3):
            with torch.autocast("cpu", torch.float16):
                loss = loss_of(m, ids, labels)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            norms.append(m.get_output_embeddings().weight.detach().norm().item())
        found.append((scales, norms))
    (ours, own_norms), (theirs, norms) = found
    assert ours == theirs == [256.0] * 3
    assert own_norms[0] == norms[0]  # of a step that was skipped
    assert own_norms == pytest.approx(norms, rel=1e-3) and norms[1] != norms[0]
