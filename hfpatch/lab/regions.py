"""A fused block, or any module that `hfpatch.apply` swaps, as a subject: its path is in the report.

    hfpatch lab init --region model.layers.0 --model ./my-model --random-weights

The inputs are those that the module gets when the model is called; the reference is the module as
it is, and v0 what `apply` makes of it.
"""

from __future__ import annotations

import argparse
import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

#: What `lab init --region` writes as v0.
TEMPLATE = '''"""`{path}` of {model} as hfpatch has it. A version changes one thing."""

from hfpatch.lab import regions

REGION = regions.Region({model!r}, {path!r}, random_weights={random!r}, dtype={dtype!r})


def setup(seed=0, device="cpu"):
    """The tensors that the block gets in a call of the model, drawn anew."""
    return REGION.inputs(seed, device)


def reference(**inputs):
    return REGION.original(inputs)


def run_kernel(**inputs):
    return REGION.fused(inputs)
'''


@dataclass
class Region:
    """One module of a model, with the arguments of a real call.

    Attributes:
        model: a Hub id, a folder, a config.json or `FILE.py:function`.
        path: the module's, as the report has it.
    """

    model: str
    path: str
    random_weights: bool = True
    dtype: str = "float32"
    _held: dict[str, Any] = field(default_factory=dict, repr=False)

    def _load(self, device: str) -> dict[str, Any]:
        if self._held.get("device") == device:
            return self._held
        import hfpatch
        from hfpatch.bench.model_command import add_model_arguments
        from hfpatch.bench.subjects import load

        parser = argparse.ArgumentParser()
        add_model_arguments(parser)
        words = [self.model, "--dtype", self.dtype, "--device", device]
        subject = load(parser.parse_args(words + ["--random-weights"] * self.random_weights))
        whole = subject.compiled_modules()[0]
        try:
            module = whole.get_submodule(self.path)
        except AttributeError as e:
            raise ValueError(f"--region {self.path}: the model has no such module") from e
        taken: list[tuple[Any, Any]] = []

        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            taken.append((args, kwargs))

        handle = module.register_forward_pre_hook(hook, with_kwargs=True)
        try:
            with torch.no_grad():
                subject.compared()
        finally:
            handle.remove()
        if not taken:
            raise ValueError(f"--region {self.path}: a call of the model does not call it")
        original = copy.deepcopy(module)
        report = hfpatch.apply(whole)
        if not any(s.path == self.path or s.path.startswith(f"{self.path}.") for s in report.swaps):
            raise ValueError(
                f"--region {self.path}: `apply` swaps nothing there; the report names: "
                f"{', '.join(s.path for s in report.swaps[:5]) or 'nothing'}"
            )
        leaves, spec = pytree.tree_flatten(taken[0])
        self._held = {
            "device": device, "model": whole, "fused": module, "original": original,
            "leaves": leaves, "spec": spec,
        }  # fmt: skip
        return self._held

    def inputs(self, seed: int, device: str) -> dict[str, Any]:
        """The module's first tensor, drawn with the spread of the real one; what else it is called
        with (masks, tables, a cache) is as it was, since a block is proven for those."""
        held = self._load(device)
        at = next(i for i, leaf in enumerate(held["leaves"]) if isinstance(leaf, torch.Tensor))
        value = held["leaves"][at]
        drawn = torch.randn(value.shape, generator=torch.Generator().manual_seed(seed))
        return {f"t{at}": (drawn * value.float().std().cpu()).to(value)}

    def original(self, inputs: dict[str, Any]) -> Any:
        held = self._load(next(t.device.type for t in inputs.values()))
        module = held["original"]
        if any(t.dtype == torch.float64 for t in inputs.values()):
            module = held.setdefault("wide", copy.deepcopy(module).double())
        return self._call(module, held, inputs)

    def fused(self, inputs: dict[str, Any]) -> Any:
        held = self._load(next(t.device.type for t in inputs.values()))
        return self._call(held["fused"], held, inputs)

    @staticmethod
    def _call(module: nn.Module, held: dict[str, Any], inputs: dict[str, Any]) -> Any:
        leaves = [inputs.get(f"t{i}", leaf) for i, leaf in enumerate(held["leaves"])]
        args, kwargs = pytree.tree_unflatten(leaves, held["spec"])
        with torch.no_grad():
            return module(*args, **kwargs)
