"""What a step looks at: each change is seen, by what the build notes and by what Python does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoding.families import make
from torch import nn

from hfpatch.decoding import watch
from hfpatch.kernels.sources import local_package

CHANGES: dict[str, Callable[[Any], object]] = {
    "weight": lambda m: setattr(m.mlp.up_proj, "weight", nn.Parameter(m.mlp.up_proj.weight)),
    "a bias where none was": lambda m: setattr(
        m.self_attn.o_proj, "bias", nn.Parameter(torch.zeros(m.self_attn.o_proj.out_features))
    ),
    "a child": lambda m: setattr(m.mlp, "act_fn", nn.SiLU()),
    "children in another order": lambda m: m._modules.__setitem__("mlp", m._modules.pop("mlp")),
    "one child more": lambda m: m.mlp.add_module("further", nn.Identity()),
    "one child less": lambda m: m._modules.pop("mlp"),
    "data": lambda m: setattr(m.mlp.up_proj.weight, "data", m.mlp.up_proj.weight.clone()),
    "data elsewhere in the same memory": lambda m: setattr(
        m.mlp.up_proj.weight, "data", m.mlp.up_proj.weight.data[1:]
    ),
    "memory": lambda m: m.mlp.up_proj.weight.data.untyped_storage().resize_(1 << 20),
    "exchanged tensors": lambda m: torch.utils.swap_tensors(
        m.mlp.up_proj.weight, nn.Parameter(torch.ones(3))
    ),
    "exchanged with a sparse tensor": lambda m: torch.utils.swap_tensors(
        m.mlp.up_proj.weight, nn.Parameter(torch.eye(3).to_sparse())
    ),
    "a hook": lambda m: m.mlp.up_proj.register_forward_hook(lambda *_: None),
    "a hook before": lambda m: m.mlp.register_forward_pre_hook(lambda *_: None),
    "a forward": lambda m: setattr(m.mlp, "forward", lambda x: x),
    "another forward": lambda m: setattr(m.self_attn, "forward", lambda x: x),
    "no forward any more": lambda m: delattr(m.self_attn, "forward"),
}


def _nothing(x: torch.Tensor) -> torch.Tensor:
    return x


@pytest.fixture(params=["build", "python"])
def model(request: Any, kernels_module: object, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "python":
        monkeypatch.setattr("hfpatch.kernels.sources.local_package", _no_package)
    made = copy.deepcopy(make("llama"))
    made.model.layers[0].self_attn.forward = _nothing
    return made


def _no_package() -> Any:
    raise AttributeError("there is none")


def _is_same(seen: watch.Watch) -> bool:
    return seen.in_place() and seen.same_parts() and seen._same_wrappers()


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(model: Any, change: str) -> None:
    seen = watch.Watch(model)
    layer = model.model.layers[0]
    assert _is_same(seen)
    CHANGES[change](layer)
    assert not _is_same(seen) and not _is_same(seen)
    assert _is_same(watch.Watch(model))


def test_what_is_set_to_the_same_is_no_change(model: Any) -> None:
    seen = watch.Watch(model)
    layer = model.model.layers[0]
    layer.mlp.up_proj.weight = layer.mlp.up_proj.weight
    layer.mlp = layer.mlp
    layer.self_attn.forward = _nothing
    with torch.no_grad():
        layer.mlp.up_proj.weight.mul_(2)
    assert _is_same(seen) and _is_same(seen)


def test_nothing_is_held_twice_or_too_long(model: Any) -> None:
    weight = model.model.layers[0].mlp.up_proj.weight
    seen = watch.Watch(model)
    held = torch._C._storage_Use_Count(weight.untyped_storage()._cdata)
    for _ in range(50):
        seen = watch.Watch(model)
    assert torch._C._storage_Use_Count(weight.untyped_storage()._cdata) == held
    assert _is_same(seen)


def test_the_build_reads_tensors_and_dictionaries(kernels_module: object) -> None:
    """Where it cannot, looks are slow and nobody is told: here it can."""
    calls = local_package().module.calls
    tensors = [
        torch.empty(9),
        torch.empty(5, dtype=torch.bfloat16)[2:],
        nn.Parameter(torch.ones(1)),
    ]
    assert calls.note_places(tensors)()
    sparse = torch.eye(3).to_sparse()
    assert calls.note_places([sparse]) is None
    with pytest.raises(TypeError, match="expected dictionaries"):
        calls.notes_of_dicts().note_values([1])
