"""pytest plugin: `hfpatch.apply` on every model that is built, and a record of how tests ended.

Loaded into upstream's own test runs by `run.py` (`-p plugin`); never by hfpatch's own suite.

HFPATCH_UPSTREAM_PATCH=1 patches; without it the run is plain. HFPATCH_UPSTREAM_RECORD names the
JSON file to write: how each test ended, and what was patched. HFPATCH_UPSTREAM_BY=trainers leaves
it to another plugin which models are patched (trl_plugin.py).

A model is a `PreTrainedModel` or `ModelMixin` that no other one is being built around. It is
patched when its outermost `__init__` or `from_pretrained` returns, with the mode of its `training`
flag, and again with the other mode whenever `train()` or `eval()` changes it.
"""

from __future__ import annotations

import functools
import json
import os
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from counting import Calls
from torch import nn

_RANK = {"skipped": 0, "xpassed": 1, "xfailed": 1, "passed": 2, "failed": 3, "error": 4}


class Patcher:
    """Keeps track of what is being built, and patches it when it is done."""

    def __init__(self) -> None:
        self.local = threading.local()
        self.modes: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self.applied = 0
        self.calls = Calls()  # by models: without those of the probes
        self.swaps: Counter[str] = Counter()
        self.untouched: Counter[str] = Counter()

    @contextmanager
    def building(self, model: nn.Module | None) -> Iterator[bool]:
        """True for whoever builds a whole model, outermost: no `__init__` around it."""
        stack = self.local.__dict__.setdefault("stack", [])
        outermost = not stack
        stack.append(model)
        try:
            yield outermost
        finally:
            stack.pop()

    def apply(self, model: nn.Module) -> None:
        mode = "training" if model.training else "inference"
        if self.modes.get(model) == mode:
            return
        self.modes[model] = mode
        self.apply_as(model, mode)

    def apply_as(self, model: nn.Module, mode: str) -> None:
        """`hfpatch.apply`, counted."""
        import hfpatch

        with self.calls.not_counted():
            report = hfpatch.apply(model, mode=mode)
        self.applied += 1
        self.swaps.update(swap.op for swap in report.swaps)
        if not report.swaps:
            reason = report.skips[0].reason if report.skips else "nothing nominated"
            self.untouched[f"{type(model).__name__}: {reason}"] += 1

    def constructor(self, init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def wrapped(model: nn.Module, *args: Any, **kwargs: Any) -> None:
            with self.building(model) as outermost:
                init(model, *args, **kwargs)
            if outermost:
                self.apply(model)

        return wrapped

    def loader(self, load: Any) -> classmethod[Any, Any, Any]:
        @functools.wraps(load.__func__)
        def wrapped(cls: type, *args: Any, **kwargs: Any) -> Any:
            with self.building(None) as outermost:
                result = load.__func__(cls, *args, **kwargs)
            if outermost:
                model = result[0] if isinstance(result, tuple) else result
                if isinstance(model, nn.Module):
                    self.apply(model)
            return result

        return classmethod(wrapped)

    def trainer(self, train: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        @functools.wraps(train)
        def wrapped(model: nn.Module, mode: bool = True) -> nn.Module:
            result = train(model, mode)
            if model in self.modes:
                self.apply(model)
            return result

        return wrapped

    def watch(self, base: type[nn.Module]) -> None:
        """Patch what is built of `base`, its subclasses of now and of later."""

        def wrap(cls: type) -> None:
            # one that it inherits too: it may come from a mixin, in the middle of which
            # `PreTrainedModel.__init__` ends
            cls.__init__ = self.constructor(cls.__init__)  # type: ignore[misc]
            for name in ("from_pretrained", "from_single_file", "_from_config", "from_config"):
                if isinstance(cls.__dict__.get(name), classmethod):
                    setattr(cls, name, self.loader(cls.__dict__[name]))

        inherited = base.__dict__.get("__init_subclass__")

        def __init_subclass__(cls: type, **kwargs: Any) -> None:
            if inherited is not None:
                inherited.__func__(cls, **kwargs)
            else:
                super(base, cls).__init_subclass__(**kwargs)
            wrap(cls)

        todo = [base]
        while todo:
            todo.extend(todo[0].__subclasses__())
            wrap(todo.pop(0))
        base.__init_subclass__ = classmethod(__init_subclass__)  # type: ignore[assignment]
        base.train = self.trainer(base.train)  # type: ignore[method-assign]


class Recorder:
    """How each test ended, by node id: the worst of its phases and subtests."""

    def __init__(self, path: Path, patcher: Patcher | None) -> None:
        self.path, self.patcher = path, patcher
        self.tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        expected = hasattr(report, "wasxfail")
        if report.outcome == "failed":
            outcome = "failed" if report.when == "call" else "error"
        elif expected:
            outcome = "xfailed" if report.outcome == "skipped" else "xpassed"
        elif report.outcome == "passed" and report.when != "call":
            return
        else:
            outcome = report.outcome
        entry = self.tests.setdefault(report.nodeid, {"outcome": "skipped", "seconds": 0.0})
        entry["seconds"] += report.duration
        if _RANK[outcome] >= _RANK[entry["outcome"]]:
            entry["outcome"] = outcome
        if outcome in ("failed", "error") and "message" not in entry:
            entry["message"] = str(report.longreprtext)[-4000:]
        if report.outcome == "skipped":
            told = report.longrepr  # (file, line, "Skipped: why") of a skip
            why = told[2] if isinstance(told, tuple) else getattr(report, "wasxfail", "")
            entry["reason"] = why.removeprefix("Skipped: ")
        if report.user_properties:
            entry["properties"] = dict(report.user_properties)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            message = str(report.longreprtext)[-4000:]
            self.tests[report.nodeid] = {"outcome": "error", "seconds": 0.0, "message": message}

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):  # xdist's, whose reports the controller has too
            return
        patched: dict[str, Any] = {}
        if self.patcher is not None:
            p = self.patcher
            patched = {
                "applied": p.applied,
                "swaps": dict(p.swaps),
                "calls": p.calls.kernels,
                "layer_calls": p.calls.layers,
                "untouched": dict(p.untouched),
            }
        self.path.write_text(json.dumps({"tests": self.tests, "patched": patched}, indent=1))


def pytest_configure(config: pytest.Config) -> None:
    patcher = None
    if os.environ.get("HFPATCH_UPSTREAM_PATCH"):
        from diffusers import ModelMixin
        from transformers import PreTrainedModel

        # What a user is told once is no failure of a test that counts its warnings.
        warnings.filterwarnings("ignore", message="hfpatch: ")
        patcher = Patcher()
        if os.environ.get("HFPATCH_UPSTREAM_BY") != "trainers":
            patcher.watch(PreTrainedModel)
            patcher.watch(ModelMixin)
    record = os.environ.get("HFPATCH_UPSTREAM_RECORD")
    if record:
        config.pluginmanager.register(Recorder(Path(record), patcher), "hfpatch-upstream")
