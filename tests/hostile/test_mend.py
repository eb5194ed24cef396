"""Leaves that were swapped wrongly, or raised, or were written to: each is the original's now."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from typing import Any

import leaves
import pytest
import torch
from cases import Case, Root, check, compare, copies, same, state_of
from leaves import WIDTH, DenseGatedAct, PlainRMSNorm, SomeMLP, drawn
from torch import Tensor, nn

import hfpatch
from hfpatch.proof.proofs import forget_proofs


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there: these tests are about them."""


def randn(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Any:
    return lambda g: (scale * torch.randn(shape, generator=g).to(dtype),)


#: Inputs that no proof has seen: of other ranks, rows and scales.
CALLS = (
    randn(2, 5, WIDTH),
    randn(4, WIDTH),
    randn(WIDTH),
    randn(1, 1, WIDTH, scale=20),
    randn(2, 3, 4, WIDTH),
    randn(0, WIDTH),
)


def of(make: Callable[[], nn.Module], **kwargs: Any) -> Case:
    return Case(lambda: drawn(make()), **{"calls": CALLS, **kwargs})


# Activations with values of their own ------------------------------------------------------------


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize(
    "act",
    [
        lambda: leaves.Swish(1.7),
        lambda: leaves.Swish(1.0),
        lambda: leaves.Swish(1.7, trained=False),
        lambda: leaves.NestedSwish(0.6),
    ],
)
def test_an_activation_with_a_beta(act: Callable[[], nn.Module], mode: str) -> None:
    check(of(lambda: SomeMLP(act()), mode=mode, grads=True, reason="parameters or buffers"))


def test_layers_with_other_betas() -> None:
    def make() -> nn.Module:
        layers = nn.Sequential(*(drawn(SomeMLP(leaves.Swish(1.0))) for _ in range(3)))
        for i, layer in enumerate(layers):
            layer.act_fn.beta = nn.Parameter(torch.tensor(1.0 + i))  # type: ignore[union-attr]
        return layers

    def train(model: nn.Module) -> None:
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, leaves.Swish):
                    module.beta += 0.5

    check(Case(make, CALLS[:2], after=train))
    check(Case(make, CALLS[:2], after=train, mode="training", grads=True))


# Gradients that are not the formula's ------------------------------------------------------------

ANY_MODE = [
    leaves.StraightThroughGELU,
    leaves.ClippedGELU,
    leaves.FarClippedGELU,
    leaves.DoubledSiLUActivation,
    leaves.DetachedGateMLP,
    leaves.QuietMLP,
    lambda: SomeMLP(leaves.StraightThroughGELU()),
    lambda: SomeMLP(leaves.ClippedGELU()),
]
IN_TRAINING = [
    leaves.DetachedRMSNorm,
    leaves.QuietRMSNorm,
    leaves.FrozenWeightRMSNorm,
    lambda: leaves.ScaledGradientLayerNorm(WIDTH),
]


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("make", ANY_MODE)
def test_a_gradient_of_its_own(make: Callable[[], nn.Module], mode: str) -> None:
    check(of(make, mode=mode, grads=True, swapped=False))
    check(of(make, mode=mode, grads=True, train=True))


@pytest.mark.parametrize("make", IN_TRAINING)
def test_a_norm_with_a_gradient_of_its_own(make: Callable[[], nn.Module]) -> None:
    check(of(make, mode="training", grads=True, train=True, swapped=False))
    check(of(make, mode="inference", grads=True))


def test_values_that_depend_on_gradients() -> None:
    check(of(leaves.GradDependentRMSNorm, mode="training", grads=True, swapped=False))


@pytest.mark.parametrize("make", [PlainRMSNorm, lambda: nn.LayerNorm(WIDTH), SomeMLP, nn.GELU])
def test_the_plain_ones_stay_swapped(make: Callable[[], nn.Module]) -> None:
    single = make in (nn.GELU,)
    for mode in ("inference", "training"):
        report = check(of(make, mode=mode, grads=True, train=True))
        assert bool(report.swaps) or single or all(s.kind == "no gain" for s in report.skips)
    assert check(of(PlainRMSNorm, mode="training", grads=True)).swaps
    assert check(of(SomeMLP, mode="training", grads=True)).swaps


# State -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize(
    "make",
    [
        leaves.CountingRMSNorm,
        leaves.ListingRMSNorm,
        leaves.TensorListRMSNorm,
        leaves.ConfigRMSNorm,
        leaves.AverageRMSNorm,
        leaves.SeedingRMSNorm,
        lambda: SomeMLP(leaves.RecordingSiLU()),
    ],
)
def test_a_proof_leaves_the_model_as_it_was(make: Callable[[], nn.Module], mode: str) -> None:
    """And the process. What such a module would write at a call is for the reading of its code."""
    check(of(make, mode=mode, calls=()))


def test_a_proof_leaves_the_process_as_it_was() -> None:
    check(of(leaves.SettingRMSNorm, calls=()))


@pytest.mark.parametrize("what", ["a lock", "a module"])
def test_what_cannot_be_copied_is_not_called(what: str) -> None:
    parent = nn.Module()
    parent.calls = []
    model = Root(leaves.LockedRMSNorm() if what == "a lock" else leaves.ParentedRMSNorm(parent))
    decided = hfpatch.plan(model, strict=True)
    assert [s.kind for s in decided.skips] == ["unsupported"]
    word = "cannot be copied" if what == "a lock" else "no child of it"
    assert word in decided.skips[0].reason
    assert getattr(model.inner, "calls", 0) == 0 and parent.calls == []


# Dropouts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        leaves.DroppedAfterGatedAct,
        leaves.NeverDroppedGatedAct,
        leaves.DroppedFirstGatedAct,
        leaves.DroppedGateGatedAct,
        lambda: DenseGatedAct(leaves.Halved()),
        lambda: leaves.DroppedAfterGatedAct(leaves.Halved()),
        lambda: leaves.NeverDroppedGatedAct(leaves.Halved()),
    ],
)
def test_dropouts_that_are_elsewhere_or_none(make: Callable[[], nn.Module], train: bool) -> None:
    check(of(make, train=train, swapped=False))


@pytest.mark.parametrize("train", [False, True])
def test_a_dropout_between_product_and_last_layer(train: bool) -> None:
    check(of(DenseGatedAct, train=train, swapped=True))


# Shapes and dtypes -------------------------------------------------------------------------------


def test_a_norm_per_head_takes_several_heads() -> None:
    wider = (*CALLS, randn(2, 5, 3 * WIDTH), randn(2 * WIDTH), randn(2, 5, 2 * WIDTH))
    for mode in ("inference", "training"):
        check(of(leaves.PerHeadRMSNorm, calls=wider, mode=mode))
    check(of(leaves.PerHeadRMSNorm, calls=wider, mode="training", grads=True))


def test_a_weight_of_one_element() -> None:
    check(of(leaves.ScalarRMSNorm, swapped=False, reason="one element"))


IMAGES = (randn(2, WIDTH, 3, WIDTH), randn(1, WIDTH, WIDTH, WIDTH), randn(2, WIDTH, 3, 5))


def test_a_layer_norm_that_permutes_images() -> None:
    """It takes no rows of four dimensions, so its kernel is given none."""
    for mode in ("inference", "training"):
        check(of(lambda: leaves.LayerNorm2d(WIDTH), calls=(*CALLS, *IMAGES), mode=mode))


@pytest.mark.parametrize(
    "make",
    [
        leaves.ByRankRMSNorm,
        leaves.OneDimensionRMSNorm,
        leaves.ByRankMLP,
    ],
)
def test_other_ranks_are_looked_at(make: Callable[[], nn.Module]) -> None:
    check(of(make, calls=(*CALLS, *IMAGES), swapped=False))


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("shape", [(), (0, WIDTH), (WIDTH,), (3, 7), (2, 0)])
def test_inputs_that_a_kernel_would_not_take(shape: tuple[int, ...], mode: str) -> None:
    from transformers.activations import NewGELUActivation

    makes: list[Callable[[], nn.Module]] = [
        PlainRMSNorm,
        lambda: nn.LayerNorm(WIDTH),
        lambda: nn.RMSNorm(WIDTH, eps=1e-5),
        NewGELUActivation,
        SomeMLP,
    ]
    for make in makes:
        check(of(make, calls=(randn(*shape),), mode=mode))
        check(of(make, calls=(randn(*shape),), mode=mode, grads=True))


@pytest.mark.parametrize("grads", [False, True])
def test_inference_tensors_in_training_mode(grads: bool) -> None:
    with torch.inference_mode():
        x = torch.randn(2, WIDTH)
    for make in (PlainRMSNorm, lambda: nn.RMSNorm(WIDTH, eps=1e-5), SomeMLP):
        model = Root(drawn(make()))
        twin = copy.deepcopy(model)
        assert hfpatch.apply(model, mode="training", kernels="local").swaps
        for requires in (True, False):
            results = []
            for m in (twin, model):
                m.requires_grad_(requires)
                try:
                    with torch.set_grad_enabled(grads):
                        results.append(m(x).detach())
                except RuntimeError as e:
                    results.append(type(e))
            if isinstance(results[0], type):
                assert results[1] is results[0]
            else:
                same(results[1], results[0], exactly=False)


def test_gate_and_up_of_two_dtypes() -> None:
    def mixed(module: SomeMLP, layer: nn.Linear) -> nn.Module:
        module.up_proj = layer
        return module

    wide = of(lambda: mixed(SomeMLP(), leaves.Wide(WIDTH, 80, bias=False)))
    check(wide)
    check(Case(wide.build, CALLS, grads=True, mode="training"))
    narrow = of(lambda: mixed(SomeMLP(), nn.Linear(WIDTH, 1)))
    check(narrow)
    half = of(lambda: mixed(SomeMLP(), nn.Linear(WIDTH, 80, dtype=torch.bfloat16)), swapped=False)
    check(half)


def test_a_projection_that_gives_a_tuple() -> None:
    def make() -> nn.Module:
        module = leaves.TupledMLP()
        module.gate_proj = leaves.Tupled(WIDTH, 80)
        return module

    check(of(make))
    check(of(make, grads=True, mode="training"))


# Hooks on all modules ----------------------------------------------------------------------------


def test_hooks_on_all_modules_fire() -> None:
    model = Root(drawn(SomeMLP()))
    twin = copy.deepcopy(model)
    assert hfpatch.apply(model).swaps
    x, register = torch.randn(2, WIDTH), torch.nn.modules.module
    for name in ("register_module_forward_hook", "register_module_forward_pre_hook"):
        for m in (twin, model):
            m(x)
        seen: list[list[str]] = []
        for m in (twin, model):
            called: list[str] = []
            handle = getattr(register, name)(lambda mod, *_, c=called: c.append(type(mod).__name__))
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    m(x)
            finally:
                handle.remove()
            seen.append(called)
        assert seen[0] == seen[1] and "SiLU" in seen[0]


def test_hooks_on_all_modules_that_change_results() -> None:
    forget_proofs()  # a contract warns once
    model = Root(drawn(SomeMLP()))
    twin = copy.deepcopy(model)
    hfpatch.apply(model)

    def doubled(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return out * 2

    handle = torch.nn.modules.module.register_module_forward_hook(doubled)
    try:
        with pytest.warns(RuntimeWarning, match="hooks on all modules"):
            compare(model, twin, (torch.randn(2, WIDTH),), False)
    finally:
        handle.remove()


# Copies ------------------------------------------------------------------------------------------


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = drawn(PlainRMSNorm()), drawn(SomeMLP())

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.norm(x))


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_restore_of_copies_and_of_copies_of_copies(mode: str) -> None:
    model = Both()
    before, x = state_of(model), torch.randn(3, WIDTH)
    expected = model(x)
    assert len(hfpatch.apply(model, mode=mode).swaps) == 2
    made = copies(model)
    with torch.no_grad():
        for name, other in made.items():
            same(other(x), expected.detach(), exactly=False)
            hfpatch.restore(other)
            assert state_of(other) == before, name
            assert torch.equal(other(x), expected), name
            if name != "copy":  # which has the very children of the first
                same(model(x), expected.detach(), exactly=False)
                assert len(hfpatch.status(model).swaps) == 2, name
    hfpatch.apply(model, mode=mode)
    again = copies(model)
    for other in again.values():
        hfpatch.apply(other, mode=mode)
        hfpatch.restore(other)
        assert state_of(other) == before
    hfpatch.restore(model)
    assert state_of(model) == before and torch.equal(model(x), expected)


def test_threads_may_plan_what_holds_a_list() -> None:
    """Each proof has a replica of its own."""
    model = Root(drawn(leaves.ListingRMSNorm()))
    threads = [threading.Thread(target=hfpatch.plan, args=(model,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert model.inner.seen == []
