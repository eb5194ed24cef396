"""pytest plugin: hfpatch in Liger's place in Liger's own convergence tests.

Loaded into a run of them by `liger_convergence.py` (`-p liger_plugin`); never by hfpatch's own
suite. Their files are not changed. Of each module that is collected

- the functions `apply_liger_kernel_to_*` do nothing, in its globals and in its table of models;
- `create_model` gives a model that is patched by `hfpatch.apply(model, mode="training")` behind
  its `.to(device)`, for the second of the two trainings of a test, which is Liger's there;
- `run_mini_model` (`run_mini_model_multimodal`) fails where nothing of the patched model was
  served.

What was found goes with the test's report: see `Turn`. HFPATCH_LIGER_CONTROL=1 patches nothing: the
same model is trained twice.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from counting import Calls
from torch import nn

import hfpatch

LIGER = "apply_liger_kernel_to_"
CONTROL = bool(os.environ.get("HFPATCH_LIGER_CONTROL"))


@dataclasses.dataclass
class Turn:
    """What one test came to.

    Attributes:
        stage: how far it got: "not begun", "unpatched" (in its first training), "patched" (in its
            second), "compared".
        swaps: how many modules were swapped, by op.
        layer_calls: of decoder layers, served in the patched training.
        kernel_calls: of kernels of single modules, in it.
        loss: how far its losses are from the unpatched ones at most, relative to these.
        notes: what `hfpatch.status` says behind it, and what was warned of.
    """

    stage: str = "not begun"
    swaps: dict[str, int] = dataclasses.field(default_factory=dict)
    layer_calls: int = 0
    kernel_calls: int = 0
    loss: float | None = None
    notes: list[str] = dataclasses.field(default_factory=list)


class InLigersPlace:
    """What is replaced in the modules of Liger's tests, and what is seen of a test that runs."""

    def __init__(self) -> None:
        self.turn = Turn()
        self._calls = Calls()
        self._calls.paused = True
        self._model: nn.Module | None = None  # that the patched training made
        self._losses: list[float] = []  # of the unpatched training

    # --- the modules ----------------------------------------------------------------------------

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for module in {item.module for item in items if isinstance(item, pytest.Function)}:
            self._take(module)

    def _take(self, module: Any) -> None:
        missing = [n for n in ("MINI_MODEL_SETUPS", "create_model") if not hasattr(module, n)]
        trainings = [n for n in vars(module) if n.startswith("run_mini_model")]
        if missing or len(trainings) != 1:
            raise pytest.UsageError(
                f"`{module.__name__}` is no convergence test as this plugin knows them: expected "
                "`MINI_MODEL_SETUPS`, `create_model` and one `run_mini_model*`, found "
                f"{trainings} and not {missing}; take the tests of the Liger-Kernel version that "
                "the plugin was written for (0.8.5), or see what they are called now"
            )
        for name in [n for n in vars(module) if n.startswith(LIGER)]:
            setattr(module, name, _nothing)
        for setup in module.MINI_MODEL_SETUPS.values():
            setup.liger_kernel_patch_func = _nothing
        module.create_model = self._made(module.create_model)
        setattr(module, trainings[0], self._trained(getattr(module, trainings[0])))

    def _made(self, create: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(create)
        def create_model(*args: Any, **kwargs: Any) -> Any:
            model = create(*args, **kwargs)
            if self.turn.stage == "patched" and not CONTROL:
                self._model = model
                model.to = functools.partial(self._moved, model)
            return model

        return create_model

    def _moved(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """`model.to`, of an instance, until it is on its device."""
        moved = type(model).to(model, *args, **kwargs)
        if not any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values())):
            del model.to
            with self._calls.not_counted():  # proofs call kernels too
                report = hfpatch.apply(model, mode="training")
            self.turn.swaps = dict(Counter(s.op for s in report.swaps))
        return moved

    # --- a test ---------------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        self.turn, self._losses = Turn(), []
        try:
            return (yield)  # type: ignore[misc]
        finally:
            item.user_properties.append(("turn", dataclasses.asdict(self.turn)))
            self._model = None

    def _trained(self, train: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(train)
        def run(*args: Any, with_liger: bool = False, **kwargs: Any) -> Any:
            if not with_liger:
                self.turn.stage = "unpatched"
                result = train(*args, with_liger=False, **kwargs)
                self._losses = result["loss"]
                return result
            self.turn.stage = "patched"
            with self._watched():
                # the functions that Liger patches are called, and do nothing: so its arguments
                # (`skip_logits`), which the models' own forwards hand on, reach the patched ones
                result = train(*args, with_liger=True, **kwargs)
            self.turn.stage = "compared"
            pairs = zip(result["loss"], self._losses, strict=True)
            self.turn.loss = max(abs(a - b) / abs(b) for a, b in pairs)
            if not CONTROL:
                self._must_be_served(kwargs["num_steps"])
            return result

        return run

    @contextmanager
    def _watched(self) -> Iterator[None]:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            self._calls.kernels = self._calls.layers = 0
            self._calls.paused = False
            try:
                yield
            finally:
                self._calls.paused = True
                self.turn.kernel_calls = self._calls.kernels
                self.turn.layer_calls = self._calls.layers
                told = [str(w.message) for w in seen if str(w.message).startswith("hfpatch: ")]
                status = [] if self._model is None else hfpatch.status(self._model).notes
                self.turn.notes = list(dict.fromkeys([*told, *status]))

    def _must_be_served(self, steps: int) -> None:
        turn = self.turn
        layers = turn.swaps.get("layer", 0)
        assert turn.swaps, f"hfpatch swapped nothing: {hfpatch.status(self._model)}"
        assert turn.layer_calls + turn.kernel_calls > 0, f"no kernel ran: {turn}"
        assert turn.layer_calls >= layers * steps, f"layers' own forwards ran: {turn}"


def _nothing(*args: Any, **kwargs: Any) -> None:
    """In the place of `apply_liger_kernel_to_*`."""


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(InLigersPlace(), "hfpatch-in-ligers-place")
