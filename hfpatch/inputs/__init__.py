"""Small inputs for any model, made from its signature and its configuration.

`sample_inputs(model)` proposes what the names of the forward's arguments and the numbers of the
configuration say, several layouts where they leave it open, and takes the first that runs: as for
kernels, the name proposes and a run decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hfpatch.inputs.proposal import Inputs, NoInputs, Proposal, Sizes, config_of

__all__ = ["Inputs", "NoInputs", "Sizes", "cast", "sample_inputs"]

#: Layouts that are tried before it is said that there is none.
_TRIES = 64


def sample_inputs(
    model: nn.Module, batch: int = 2, seed: int = 0, sizes: Sizes | None = None
) -> Inputs:
    """Keyword arguments of one forward of a transformers or diffusers model.

    Args:
        model: on the device and in the dtype that it is to run in; it runs, without gradients.
        batch: the first dimension.
        seed: other numbers of the same shapes; equal seeds give equal values in every dtype.
        sizes: what differs from the small sizes that are chosen here; notes which were used.

    Returns:
        Tensors on the model's device, floating ones in its dtype where they are activations.

    Raises:
        NoInputs: none could be made; the message says which argument, or how the last try ended.
    """
    first: Exception | None = None
    tried = 0
    for inputs in _proposals(model, batch, seed, sizes):
        tried += 1
        try:
            with torch.no_grad():
                model(**inputs)
            return inputs
        except torch.OutOfMemoryError:
            raise
        except Exception as e:  # whatever a forward ends with that another layout may not
            first = first or e
        if tried == _TRIES:
            break
    name = type(model).__name__
    if first is None:
        raise NoInputs(f"`{name}`: no layout of inputs is known for it")
    said = str(first).strip().splitlines()
    raise NoInputs(
        f"`{name}` ran with none of {tried} layouts of inputs; the likeliest ended with "
        f"{type(first).__name__}: {said[0] if said else ''}"
    ) from first


def _proposals(model: nn.Module, batch: int, seed: int, sizes: Sizes | None) -> Iterator[Inputs]:
    config = config_of(model)
    if config is None:
        raise NoInputs(f"`{type(model).__name__}` has no `config` to make inputs from")
    proposal = Proposal(model, batch, seed, sizes)
    if hasattr(config, "to_diff_dict"):  # a PretrainedConfig
        from hfpatch.inputs.of_transformers import proposals
    else:
        from hfpatch.inputs.of_diffusers import proposals
    return proposals(proposal)


def cast(value: Any, before: torch.dtype, after: torch.dtype) -> Any:
    """`value` with the tensors of the dtype `before` in `after`; containers too."""
    if isinstance(value, torch.Tensor):
        return value.to(after) if value.dtype == before else value
    if isinstance(value, dict):
        return {k: cast(v, before, after) for k, v in value.items()}
    if isinstance(value, list):
        return [cast(v, before, after) for v in value]
    if type(value) is tuple:
        return tuple(cast(v, before, after) for v in value)
    return value
