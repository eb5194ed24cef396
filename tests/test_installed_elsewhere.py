"""Libraries that lie in no folder of Python's are theirs all the same, and no user's own code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import transformers

_CODE = """
import torch, transformers, hfpatch
from decoding.families import make, prompts
from hfpatch.decoding import kept
assert transformers.__file__.startswith({folder!r}), transformers.__file__
model = make("llama")
report = hfpatch.apply(model, blocks=True)
assert not report.skips, report
model.generate(**prompts(1), max_new_tokens=6, do_sample=False)
assert kept.decoders[model].steps > 2, kept.notes(model)
with torch.no_grad():
    for _ in range(2):
        model(torch.arange(20)[None], use_cache=False)
assert {{c.state for c in hfpatch.status(model).plan.candidates}} == {{"fused"}}
"""


@pytest.mark.parametrize("how", ["pip install --target", "a clone"])
def test_transformers_of_a_folder_of_pythonpath(
    how: str, kernels_module: ModuleType, tmp_path: Path
) -> None:
    folder, here = tmp_path / "site", Path(__file__).parent
    folder.mkdir()
    (folder / "transformers").symlink_to(Path(transformers.__file__).parent)
    if how != "a clone":
        (folder / f"transformers-{transformers.__version__}.dist-info").mkdir()
    paths = [str(folder), str(here), str(here.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HFPATCH_TEST_BUILD": "0"}
    done = subprocess.run(
        [sys.executable, "-c", _CODE.format(folder=str(folder))], env=environment,
        cwd=tmp_path, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
