"""pytest plugin for TRL's own tests: without the Hub, and with hfpatch in its trainers.

Loaded by `run.py` into TRL's tests (`-p trl_plugin`), behind plugin.py, which records. The models
are those of trl_hub.py, by HF_HUB_CACHE; HFPATCH_UPSTREAM_DATA names its folder `data`.

HFPATCH_UPSTREAM_PATCH=1 patches: `hfpatch.apply` on a trainer's model (`mode="training"`) and on
the other models that it holds when its outermost `__init__` returns, which is where the function of
TRL's fused head is replaced; and the trainer's AdamW is `hfpatch.optim.AdamW`.

The tests may be older than the TRL that is installed. What they import of it and is not there any
more is put there as something that fails where it is used: so the file's other tests run.
"""

from __future__ import annotations

import ast
import functools
import importlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import trl  # before the checkout, which may have such a package, comes to `sys.path`
from torch import nn

ORGANIZATION = "trl-internal-testing/"


def load_dataset(path: str, name: str = "default", *args: Any, **kwargs: Any) -> Any:
    """`datasets.load_dataset` that finds `trl-internal-testing` here."""
    if not str(path).startswith(ORGANIZATION):
        return _load_dataset(path, name if name != "default" else None, *args, **kwargs)
    folder = Path(os.environ["HFPATCH_UPSTREAM_DATA"]) / path.removeprefix(ORGANIZATION) / name
    if not folder.is_dir():
        raise ConnectionError(f"`{path}` has no `{name}` here: trl_hub.py makes no such data")
    streaming, split = kwargs.pop("streaming", False), kwargs.pop("split", None)
    if args or kwargs:
        raise TypeError(f"expected `split` and `streaming` alone, got {args} and {kwargs}")
    found: Any = datasets.load_from_disk(str(folder))
    if streaming:
        streams = {key: part.to_iterable_dataset() for key, part in found.items()}
        found = datasets.IterableDatasetDict(streams)
    if split is None:
        return found
    part = re.fullmatch(r"(\w+)(?:\[:(\d+)\])?", split)
    if part is None:
        raise ValueError(f"expected `split` as `train` or `train[:2]`, got {split!r}")
    whole = found[part[1]]
    return whole if part[2] is None else whole.select(range(int(part[2])))


_load_dataset = datasets.load_dataset


class Absent:
    """Stands for what an older TRL had: a name that tests import."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._name.endswith("_available"):  # of a package: the tests that need it are skipped
            return False
        raise NotImplementedError(f"the TRL that is installed has no `{self._name}`")


def give_names(source: str) -> None:
    """Put what a test file imports of `trl`, and is not there, in its place."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ImportFrom) or node.level or node.module is None:
            continue
        if node.module.partition(".")[0] != "trl":
            continue
        try:
            module = importlib.import_module(node.module)
        except ModuleNotFoundError:
            continue  # its import says so
        for alias in node.names:
            if not hasattr(module, alias.name):
                setattr(module, alias.name, Absent(f"{node.module}.{alias.name}"))


class Trainers:
    """hfpatch in each trainer."""

    def __init__(self, patcher: Any) -> None:
        import transformers

        self.patcher = patcher
        self._wrap_all(transformers.Trainer)
        get = transformers.Trainer.get_optimizer_cls_and_kwargs
        transformers.Trainer.get_optimizer_cls_and_kwargs = staticmethod(self._optimizer(get))

    def _wrap_all(self, base: type) -> None:
        todo = [base]
        while todo:
            todo.extend(todo[0].__subclasses__())
            self._wrap(todo.pop(0))
        original = base.__dict__.get("__init_subclass__")
        assert original is None, "transformers' Trainer makes its subclasses itself"

        def __init_subclass__(cls: type, **kwargs: Any) -> None:
            super(base, cls).__init_subclass__(**kwargs)
            self._wrap(cls)

        base.__init_subclass__ = classmethod(__init_subclass__)  # type: ignore[assignment]

    def _wrap(self, cls: type) -> None:
        if "__init__" not in cls.__dict__:
            return
        init: Callable[..., None] = cls.__dict__["__init__"]

        @functools.wraps(init)
        def wrapped(trainer: Any, *args: Any, **kwargs: Any) -> None:
            with self.patcher.building(trainer) as outermost:
                init(trainer, *args, **kwargs)
            if outermost:
                self._patch(trainer)

        cls.__init__ = wrapped  # type: ignore[misc]

    def _patch(self, trainer: Any) -> None:
        held = {id(m): m for m in vars(trainer).values() if isinstance(m, nn.Module)}
        model = trainer.accelerator.unwrap_model(trainer.model)
        held.pop(id(trainer.model), None)
        self.patcher.apply_as(model, "training")
        for other in held.values():
            if other is not model and not set(other.modules()) & set(model.modules()):
                self.patcher.apply_as(other, "inference")

    def _optimizer(self, get: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(get)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            from hfpatch.optim import AdamW

            cls, arguments = get(*args, **kwargs)
            return (AdamW if cls is torch.optim.AdamW else cls), arguments

        return wrapped


class Names:
    """`give_names` of each file before it is imported."""

    def pytest_collect_file(self, file_path: Path) -> None:
        if file_path.suffix == ".py" and file_path.name.startswith("test_"):
            give_names(file_path.read_text("utf-8"))


@pytest.hookimpl(trylast=True)  # behind plugin.py's
def pytest_configure(config: pytest.Config) -> None:
    if config.rootpath in Path(trl.__file__).parents:
        raise pytest.UsageError(f"the TRL of the checkout is tested, `{trl.__file__}`: install it")
    datasets.load_dataset = load_dataset
    give_names((config.rootpath / "tests" / "testing_utils.py").read_text("utf-8"))
    config.pluginmanager.register(Names(), "hfpatch-trl-names")
    if os.environ.get("HFPATCH_UPSTREAM_PATCH"):
        recorder: Any = config.pluginmanager.get_plugin("hfpatch-upstream")
        Trainers(recorder.patcher)
