"""Copies and files: a copy is patched and works, or is cleanly unpatched; never half."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import pickle
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import workers
from row import Case, Row, forward
from torch import nn

import hfpatch
from hfpatch import swap

GROUP = "Copies and files"
UNPATCHED = (
    "A pickle holds the unpatched model, so that it loads where hfpatch is not installed: call "
    "`apply` on what was loaded."
)
MADE_ANEW = (
    "`from_pretrained` makes a new model, which is not patched: call `apply` on what it returns."
)


def copied(case: Case, model: nn.Module) -> nn.Module:
    case.notes["first"] = model
    return copy.deepcopy(model)


def first_still_patched(case: Case, target: Any) -> None:
    """A copy is restored alone, and holds no module of the first."""
    first = case.notes["first"]
    count = len(hfpatch.status(first).swaps)
    assert count and hfpatch.restore(target) == count
    assert len(hfpatch.status(first).swaps) == count
    assert not hfpatch.status(target).swaps


def cleanly_unpatched(case: Case, target: nn.Module) -> None:
    """What an instance holds as its forward, if anything, is its class's own, bound to itself."""
    assert not hfpatch.status(target).swaps
    for path, module in target.named_modules():
        held = module.__dict__.get("forward")
        assert held is None or swap.is_native(module, held), path


def pickled(case: Case, model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def saved_whole(case: Case, model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def saved_state(case: Case, model: nn.Module) -> nn.Module:
    """Saved, other weights loaded, its own loaded again; the file must be the unpatched one's."""
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    case.notes["files"] = [hashlib.sha256(buffer.getvalue()).hexdigest()]
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    buffer.seek(0)
    model.load_state_dict(torch.load(buffer, weights_only=True))
    return model


def saved_pretrained(case: Case, model: nn.Module) -> nn.Module:
    folder = case.path("saved")
    model.save_pretrained(folder)
    case.notes["files"] = digests(folder)
    return type(model).from_pretrained(folder).eval()


def saved_and_kept(case: Case, model: nn.Module) -> nn.Module:
    """The model that was saved goes on working."""
    folder = case.path("saved")
    model.save_pretrained(folder)
    case.notes["files"] = digests(folder)
    return model


def saved_safetensors(case: Case, model: nn.Module) -> nn.Module:
    from safetensors.torch import load_model, save_model

    path = case.path("model.safetensors")
    save_model(model, str(path))
    load_model(model, str(path))
    data = path.read_bytes()
    length = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:length])  # the names of tied weights come in a random order in it
    case.notes["files"] = [
        json.dumps(header, sort_keys=True),
        hashlib.sha256(data[length:]).hexdigest(),
    ]
    return model


def digests(folder: Path) -> list[str]:
    return [
        f"{p.name} {hashlib.sha256(p.read_bytes()).hexdigest()}" for p in sorted(folder.iterdir())
    ]


def with_files(case: Case, model: Any) -> Any:
    """The output, and what was written: it must be the unpatched model's to the byte."""
    return forward(case, model), case.notes["files"]


def shared(case: Case, model: nn.Module) -> nn.Module:
    return model.share_memory()


@cache
def pool() -> ProcessPoolExecutor:
    """One spawned process for all cells: it imports torch once."""
    return ProcessPoolExecutor(1, get_context("spawn"))


def in_spawned(case: Case, model: nn.Module) -> Any:
    """The model sent to a spawned process and called there; and called here afterwards."""
    state = pickle.dumps((model, case.inputs()))
    there = pool().submit(workers.call, state, case.column.name).result(timeout=120)
    return torch.from_numpy(there), forward(case, model)


def in_data_loader(case: Case, model: nn.Module) -> Any:
    """A data set that computes with the model in a forked worker."""
    data = workers.Computed(model, case)
    loader = torch.utils.data.DataLoader(data, batch_size=None, num_workers=1)
    (there,) = list(loader)
    return there, forward(case, model)


def module_by_module(case: Case, model: nn.Module) -> nn.Module:
    """Patched modules copied one by one into another model, as in weight surgery."""
    other = case.build()
    for name, child in list(model.named_children()):
        setattr(other, name, copy.deepcopy(child))
    for name, p in model.named_parameters(recurse=False):
        setattr(other, name, p)
    return other


def shallow(case: Case, model: nn.Module) -> nn.Module:
    """`copy.copy` of the model: the same modules inside."""
    return copy.copy(model)


ROWS = (
    Row(GROUP, "`copy.deepcopy`", copied, afterwards=first_still_patched),
    Row(GROUP, "`copy.copy`", shallow, lasting=False),
    Row(GROUP, "modules copied into another model", module_by_module),
    Row(GROUP, "`pickle`", pickled, why={"original": UNPATCHED}, afterwards=cleanly_unpatched),
    Row(
        GROUP,
        "`torch.save(model)`, `torch.load`",
        saved_whole,
        why={"original": UNPATCHED},
        afterwards=cleanly_unpatched,
    ),
    Row(
        GROUP,
        "`torch.save(model.state_dict())`, `load_state_dict`",
        saved_state,
        with_files,
        forwards=1,
    ),
    Row(
        GROUP, "`safetensors` `save_model`, `load_model`", saved_safetensors, with_files, forwards=1
    ),
    Row(GROUP, "`save_pretrained`", saved_and_kept, with_files, forwards=1, lasting=False),
    Row(
        GROUP,
        "`save_pretrained`, `from_pretrained`",
        saved_pretrained,
        with_files,
        forwards=1,
        why={"original": MADE_ANEW},
    ),
    Row(GROUP, "`share_memory()`", shared),
    Row(GROUP, "sent to a spawned process", run=in_spawned, forwards=1),
    Row(GROUP, "in a DataLoader worker", run=in_data_loader, forwards=1),
)
