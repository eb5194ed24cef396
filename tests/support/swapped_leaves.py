"""The leaf classes of both libraries that are swapped: small models, as in `hfpatch coverage`."""

from __future__ import annotations

import copy
import re

import torch
from torch import nn

import hfpatch
from hfpatch.coverage.small_diffusers import of_diffusers
from hfpatch.coverage.small_transformers import MOST, of_transformers
from hfpatch.proof.subject import class_of


def leaves_of(
    only: str, diffusers: bool = False, part: tuple[int, int] = (0, 1)
) -> dict[type, nn.Module]:
    """A module of each leaf class that is swapped in models whose name has `only`.

    `diffusers`: of its models too; all of it is imported for their names. `part`: each model whose
    number is the first one, of the second one in a row.
    """
    found: dict[type, nn.Module] = {}
    torch.manual_seed(0)
    models = (*of_transformers(), *(of_diffusers() if diffusers else ()))
    for name, make in models[part[0] :: part[1]]:
        if not re.search(only, name):
            continue
        try:
            with torch.device("meta"):
                blank = make()
            if sum(p.numel() for p in blank.parameters()) > MOST:
                continue
            model = make()
        except Exception:  # the constructor's own demands
            continue
        model.eval().requires_grad_(False)
        if not {class_of(m) for m in model.modules()} - found.keys():
            continue
        for swap in hfpatch.plan(model, blocks=False, decoding=False).swaps:
            module = model.get_submodule(swap.path)
            if swap.op != "block" and swap.source == "local":
                found.setdefault(class_of(module), copy.deepcopy(module))
        for module in model.modules():  # blocks take their norms with them
            if "norm" in type(module).__name__.lower() and type(module) not in found:
                alone = nn.Sequential(copy.deepcopy(module))
                if any(s.path == "0" for s in hfpatch.plan(alone).swaps):
                    found[type(module)] = alone[0]
    return found
