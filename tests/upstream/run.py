"""Run upstream's own tests twice, plain and patched, and compare test by test.

    HFPATCH_UPSTREAM=/path/to/checkouts python tests/upstream/run.py [FAMILY ...] [--page]

The folder holds `transformers`, `diffusers` and `trl`, checked out at the installed versions:

    git clone --depth 1 --branch v5.23.0 https://github.com/huggingface/transformers
    git clone --depth 1 --branch v0.42.1 https://github.com/huggingface/diffusers
    git clone --depth 1 --branch v1.16.0 https://github.com/huggingface/trl

Of the first two these are the model test classes, of TRL its trainers' tests (trl_plugin.py). They
need `pip install -r requirements/upstream.txt`, TRL's also what tests/training does. A CHECKOUT.txt
in a checkout that is no tag says on the page how it was put together.

A test that passes plain and fails patched is run three times more either way; if it goes on failing
it is a regression, unless `expected.toml` gives the reason. Exit status: 1 if there are regressions
or reasons out of date. What the tests printed stays in `.cache/upstream/`; how a family ended is in
`results/` beside this file, of which `--page` makes docs/compatibility-upstream.md.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
RECORDS = ROOT / ".cache" / "upstream"
RESULTS = HERE / "results"
PAGE = ROOT / "docs" / "compatibility-upstream.md"
RERUNS = 3
TIMEOUT = 3600  # seconds of one run of a family

_DIFFUSION = "tests/models/transformers/test_models_transformer_{}.py"
_LANGUAGE = "tests/models/{0}/test_modeling_{0}.py"
_EXPERIMENTAL = "tests/experimental/test_{}_trainer.py"

#: Family: (repository, test files).
FAMILIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "ltx": ("diffusers", (_DIFFUSION.format("ltx"),)),
    "flux": ("diffusers", (_DIFFUSION.format("flux"), _DIFFUSION.format("flux2"))),
    "wan": ("diffusers", (_DIFFUSION.format("wan"),)),
    "unet": ("diffusers", ("tests/models/unets/test_models_unet_2d_condition.py",)),
    "sd3": ("diffusers", (_DIFFUSION.format("sd3"),)),
    "qwen-image": ("diffusers", (_DIFFUSION.format("qwenimage"),)),
    "hunyuan-video": ("diffusers", (_DIFFUSION.format("hunyuan_video"),)),
    "pixart": ("diffusers", ("tests/models/transformers/test_models_pixart_transformer2d.py",)),
    "vae": ("diffusers", ("tests/models/autoencoders/test_models_autoencoder_kl.py",)),
    "z-image": ("diffusers", (_DIFFUSION.format("z_image"),)),
    "audio-video": ("diffusers", (_DIFFUSION.format("ltx2"),)),
    "audio": ("diffusers", (_DIFFUSION.format("ace_step"), _DIFFUSION.format("longcat_audio_dit"))),
    "llama": ("transformers", (_LANGUAGE.format("llama"),)),
    "qwen3": ("transformers", (_LANGUAGE.format("qwen3"),)),
    "gemma": ("transformers", (_LANGUAGE.format("gemma"), _LANGUAGE.format("gemma2"))),
    "t5": ("transformers", (_LANGUAGE.format("t5"),)),
    "bert": ("transformers", (_LANGUAGE.format("bert"),)),
    "mamba2": ("transformers", (_LANGUAGE.format("mamba2"),)),
    "bamba": ("transformers", (_LANGUAGE.format("bamba"),)),
    "trl-sft": ("trl", ("tests/test_sft_trainer.py",)),
    "trl-dpo": ("trl", ("tests/test_dpo_trainer.py",)),
    "trl-kto": ("trl", ("tests/test_kto_trainer.py",)),
    "trl-grpo": ("trl", ("tests/test_grpo_trainer.py",)),
    "trl-rloo": ("trl", ("tests/test_rloo_trainer.py",)),
    "trl-reward": ("trl", ("tests/test_reward_trainer.py",)),
    "trl-cpo-orpo": ("trl", (_EXPERIMENTAL.format("cpo"), _EXPERIMENTAL.format("orpo"))),
}

_MODELS = "not slow and not fsdp and not tensor_parallel and not expert_parallel and not tp_"
#: By repository, for pytest's -k, tests that are not run: their work is done in processes of their
#: own, where no plugin is, or they only compare source files; TRL's of models with images, whose
#: processors are the Hub's.
DESELECT = {
    "transformers": _MODELS,
    "diffusers": _MODELS,
    "trl": "not slow and not vlm and not vision and not vllm",
}


@dataclass
class Comparison:
    """How the tests of a family ended."""

    family: str
    plain: Counter[str] = field(default_factory=Counter)
    patched: Counter[str] = field(default_factory=Counter)
    regressions: dict[str, str] = field(default_factory=dict)  # test: what it said
    expected: dict[str, str] = field(default_factory=dict)  # test: the reason
    flaky: dict[str, str] = field(default_factory=dict)  # test: how often it passed
    stale: list[str] = field(default_factory=list)  # of expected.toml: not worse than plain
    details: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "plain": dict(self.plain), "patched": dict(self.patched)}


def checkout(repository: str) -> Path:
    """Where the repository's sources are."""
    folder = os.environ.get("HFPATCH_UPSTREAM")
    if not folder:
        raise SystemExit("HFPATCH_UPSTREAM must name a folder with checkouts; see --help")
    path = Path(folder).resolve() / repository
    if not (path / "tests").is_dir():
        raise SystemExit(
            f"`{path}` has no folder `tests`; expected a checkout of {repository} "
            f"v{importlib.metadata.version(repository)}: see --help"
        )
    return path


def version_of(path: Path) -> str:
    """The version that a checkout's setup.py, or TRL's VERSION, declares."""
    if (path / "VERSION").exists():
        return (path / "VERSION").read_text().strip()
    found = re.search(r'version="([^"]+)"', (path / "setup.py").read_text())
    return found[1] if found else "unknown"


def remark_on(path: Path) -> str:
    """What its CHECKOUT.txt says of a checkout that is no tag: how it was put together."""
    note = path / "CHECKOUT.txt"
    return f" ({' '.join(note.read_text().split())})" if note.exists() else ""


def commit_of(path: Path) -> str:
    """The commit of a work tree, "+" behind it if files were changed."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(path), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    return git("rev-parse", "--short=10", "HEAD") + ("+" if git("status", "--porcelain") else "")


def run(repository: str, tests: list[str], patch: bool, record: Path) -> dict[str, Any]:
    """One pytest process; what the plugin recorded."""
    path = checkout(repository)
    record.parent.mkdir(parents=True, exist_ok=True)
    record.unlink(missing_ok=True)
    places = [str(ROOT), str(HERE), str(path / "utils"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in places if p),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "HFPATCH_UPSTREAM_RECORD": str(record),
        "HFPATCH_UPSTREAM_PATCH": "1" if patch else "",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "plugin", "-p", "no:cacheprovider"]
    if repository == "trl":
        environment |= offline(path)
        command += ["-p", "trl_plugin"]
    command += ["-p", "no:randomly", "-k", DESELECT[repository], *tests]
    log = record.with_suffix(".log")
    with open(log, "w") as output:
        try:
            subprocess.run(
                command,
                cwd=path,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=TIMEOUT,
                check=False,
            )
        except subprocess.TimeoutExpired as e:
            raise SystemExit(f"{' '.join(tests)} took over {TIMEOUT} s; see {log}") from e
    if not record.exists():
        raise SystemExit(f"pytest did not finish; see {log}")
    result: dict[str, Any] = json.loads(record.read_text())
    return result


def offline(path: Path) -> dict[str, str]:
    """What TRL's tests find in place of the Hub: see trl_hub.py."""
    folder = RECORDS / "trl-hub"
    found = {
        "HF_HUB_CACHE": str(folder / "hub"),
        "HFPATCH_UPSTREAM_DATA": str(folder / "data"),
        "HFPATCH_UPSTREAM_BY": "trainers",
        "PYTHONSAFEPATH": "1",  # the checkout's own package is not the one that is tested
    }
    if not (folder / "left-out.json").exists():
        command = [sys.executable, str(HERE / "trl_hub.py"), str(path), str(folder)]
        environment = {**os.environ, **found, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"the models of TRL's tests could not be made:\n{done.stderr[-2000:]}")
    return found


def reasons(family: str) -> dict[str, str]:
    """{test name: why it cannot pass patched} of a family."""
    found: dict[str, str] = tomllib.loads((HERE / "expected.toml").read_text()).get(family, {})
    return found


def _failed(entry: dict[str, Any] | None) -> bool:
    return entry is None or entry["outcome"] in ("failed", "error")


def compare(family: str) -> Comparison:
    """Run a family plain and patched and look at every test that ends differently."""
    repository, files = FAMILIES[family]
    plain = run(repository, list(files), False, RECORDS / f"{family}-plain.json")
    patched = run(repository, list(files), True, RECORDS / f"{family}-patched.json")
    if not any(t["outcome"] == "passed" for t in plain["tests"].values()):
        raise SystemExit(f"no test of {family} passes plain; see {RECORDS / family}-plain.log")
    result = Comparison(family, details=patched["patched"])
    result.plain = Counter(t["outcome"] for t in plain["tests"].values())
    result.patched = Counter(t["outcome"] for t in patched["tests"].values())
    result.details["seconds"] = [
        round(sum(t["seconds"] for t in r["tests"].values())) for r in (plain, patched)
    ]
    worse = [
        name
        for name, entry in plain["tests"].items()
        if not _failed(entry)
        and (_failed(other := patched["tests"].get(name)) or _lost(entry, other))
    ]
    known = reasons(family)
    result.stale = sorted(set(known) - {name.rpartition("::")[2] for name in worse})
    for name in worse:
        message = patched["tests"].get(name, {}).get("message", "it was skipped or not run")
        short = name.rpartition("::")[2]
        if short in known:
            result.expected[name] = known[short]
            continue
        passed = [_again(repository, name, patch) for patch in (False, True)]
        if passed[1] == 0 or passed[1] < passed[0]:
            result.regressions[name] = message
        else:
            result.flaky[name] = f"passed {passed[0]} of {RERUNS} plain, {passed[1]} patched"
    return result


def _lost(before: dict[str, Any], after: dict[str, Any] | None) -> bool:
    return before["outcome"] == "passed" and (after is None or after["outcome"] != "passed")


def _again(repository: str, test: str, patch: bool) -> int:
    """How often the test passes in as many more runs."""
    record = RECORDS / "again.json"
    count = 0
    for _ in range(RERUNS):
        entry = run(repository, [test], patch, record)["tests"].get(test)
        count += entry is not None and entry["outcome"] == "passed"
    return count


# The page ----------------------------------------------------------------------------------------

HEAD = """# Upstream's own tests

The model test classes of transformers and diffusers, run with `hfpatch.apply` on every model they
build: patched when its constructor or `from_pretrained` returns, in training mode while the model
is in training mode, and again at each `train()` and `eval()`. A test that passes without hfpatch
must pass with it. Of TRL these are the tests of its trainers: each trainer's model is patched with
`mode="training"` when the trainer is made, the function of TRL's fused head with it, its reference
model for inference, and its AdamW is `hfpatch.optim.AdamW`.
Written by `tests/upstream/run.py --page`; do not edit.

"""

NOTES = """
Tests that are marked slow, that need a GPU or the network are skipped by their own decorators, and
those that start processes of their own (FSDP, tensor and expert parallel) are left out: hfpatch's
tests/sharding covers these. "Failed plain" are tests that fail here without hfpatch, of TRL mostly
those of what the installed version no longer has. TRL's small models and data are made here by its
own scripts, with another tokenizer (`trl_hub.py`); tests of models with images, and with vLLM, are
left out. "Layer calls" are calls of decoder layers that were served under autograd; "–": not
counted.
"""


def page() -> str:
    """docs/compatibility-upstream.md of the results that are there."""
    found = [
        json.loads(path.read_text())
        for name in FAMILIES
        if (path := RESULTS / f"{name}.json").exists()
    ]
    lines = [HEAD, "| family | passed plain | passed patched | failed plain | failed patched "]
    lines += ["| skipped | models patched | modules swapped | kernel calls | layer calls |\n"]
    lines += ["|---" * 10, "|\n"]
    for r in found:
        plain, patched = Counter(r["plain"]), Counter(r["patched"])
        swaps = ", ".join(f"{n} {op}" for op, n in sorted(r["details"]["swaps"].items()))
        lines.append(
            f"| {r['family']} | {plain['passed']} | {patched['passed']} "
            f"| {plain['failed'] + plain['error']} | {patched['failed'] + patched['error']} "
            f"| {patched['skipped']} | {r['details']['applied']} | {swaps} "
            f"| {r['details'].get('calls', 'not counted')} "
            f"| {r['details'].get('layer_calls', '–')} |\n"
        )
    lines.append(NOTES)
    for title, key in (
        ("Regressions", "regressions"),
        ("Expected", "expected"),
        ("Not reproducible", "flaky"),
    ):
        rows = [(r["family"], n, why) for r in found for n, why in r[key].items()]
        lines.append(f"\n## {title}\n\n" + ("" if rows else "None.\n"))
        for family, name, why in rows:
            last = (why.strip().splitlines() or [""])[-1][:200]
            lines.append(f"- {family}: `{name.partition('::')[2]}`: {last}\n")
    lines.append("\n## Versions\n\n")
    together: dict[str, list[str]] = {}
    for r in found:
        commit = r.get("commit", "a commit that was not recorded")
        state = f"{r['versions']}, hfpatch at {commit}, {r['date']}"
        together.setdefault(state, []).append(r["family"])
    lines += [f"- {', '.join(families)}: {state}\n" for state, families in together.items()]
    return "".join(lines)


def _versions(repository: str) -> str:
    installed = importlib.metadata.version(repository)
    sources = version_of(checkout(repository))
    return (
        f"{repository} {installed} with the tests of {sources}{remark_on(checkout(repository))}, "
        f"torch {importlib.metadata.version('torch')}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=", ".join(FAMILIES))
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    arguments = parser.parse_args()
    if unknown := set(arguments.families) - set(FAMILIES):
        parser.error(f"unknown {', '.join(sorted(unknown))}; expected of: {', '.join(FAMILIES)}")
    bad = False
    families = arguments.families or ([] if arguments.page else list(FAMILIES))
    for family in families:
        result = compare(family)
        bad = bad or bool(result.regressions or result.stale)
        data = {
            **result.to_json(),
            "versions": _versions(FAMILIES[family][0]),
            "commit": commit_of(ROOT),
            "date": datetime.date.today().isoformat(),
        }
        (RESULTS / f"{family}.json").write_text(json.dumps(data, indent=1) + "\n")
        print(f"{family}: plain {dict(result.plain)}, patched {dict(result.patched)}", flush=True)
        for name in result.stale:
            print(f"  expected.toml: `{name}` is not worse than plain; take it out", flush=True)
        for kind in ("regressions", "expected", "flaky"):
            for name, why in getattr(result, kind).items():
                print(f"  {kind}: {name}\n    {why.strip()[-600:]}", flush=True)
    if arguments.page:
        PAGE.write_text(page())
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
