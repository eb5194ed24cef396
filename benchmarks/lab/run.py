"""The lab on a GPU: four kernels of known limits, kernels that must stop it, and the case studies.

    python benchmarks/lab/run.py OUT [--only NAME ...] [--seconds 230]

Every step is a command of `hfpatch lab`, as a program would drive it. Labs run beside each other;
the lab itself lets only one measure at a time. Writes `OUT/lab.tar.gz` (every file but compiled
ones) and `OUT/summary.json`, and prints what came out; exit status 1 if something is not as it must
be.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
#: Kernel, sizes, and what must be found to limit it.
SYNTHETIC = {
    "copy": (["n=67108864"], "memory"),
    "fma": (["n=8388608"], "compute"),
    "chase": (["threads=4096,steps=2000"], "latency"),
    "hog": (["n=33554432"], "occupancy"),
}
STUDIES = (
    "softmax_op",
    "softmax_op_32k",
    "softmax_cuda",
    "batched_gemm_cuda",
    "softmax_triton",
    "attention_triton",
)
START = time.monotonic()


class Output:
    """Standard output by thread: steps run beside each other in this process."""

    def __init__(self, real: Any) -> None:
        self.real, self.own = real, threading.local()

    def write(self, text: str) -> int:
        return int(getattr(self.own, "file", self.real).write(text))

    def flush(self) -> None:
        getattr(self.own, "file", self.real).flush()


class Driver:
    """Runs steps and keeps what they said."""

    def __init__(self, work: Path, seconds: float) -> None:
        self.work, self.seconds = work, seconds
        self.log: list[dict[str, Any]] = []
        self.problems: list[str] = []
        self.found: dict[str, Any] = {}

    def left(self) -> float:
        return self.seconds - (time.monotonic() - START)

    def step(self, name: str, *words: str, env: dict[str, str] | None = None) -> dict[str, Any]:
        start = time.monotonic()
        if self.left() < 5:
            found: dict[str, Any] = {"status": -1, "error": {"message": "no time left"}}
        elif env is None:
            found = self._here(*words)
        else:
            found = self._apart(env, *words)
        found.setdefault("status", found.get("error", {}).get("status", -1))
        said = found.get("error", {}).get("message", "")
        row = {"lab": name, "step": words[0], "status": found["status"], "said": said}
        at = round(start - START, 1)
        self.log.append({**row, "at": at, "seconds": round(time.monotonic() - start, 1)})
        return found

    @staticmethod
    def _here(*words: str) -> dict[str, Any]:
        """The command in this process: its imports are what takes most of the time."""
        from hfpatch import cli

        output = sys.stdout
        assert isinstance(output, Output)
        output.own.file = io.StringIO()
        try:
            status = cli.main(["lab", *words, "--json"])
            found: dict[str, Any] = json.loads(output.own.file.getvalue())
        except (SystemExit, ValueError) as e:
            return {"status": -1, "error": {"message": f"{type(e).__name__}: {e}"}}
        finally:
            del output.own.file
        return {**found, "status": status}

    def _apart(self, env: dict[str, str], *words: str) -> dict[str, Any]:
        """The command in a process with another environment."""
        command = [sys.executable, "-m", "hfpatch", "lab", *words, "--json"]
        whole = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **env}
        try:
            done = subprocess.run(
                command, env=whole, capture_output=True, text=True, timeout=max(5.0, self.left())
            )
            found: dict[str, Any] = json.loads(done.stdout)
            return found
        except subprocess.TimeoutExpired:
            return {"status": -1, "error": {"message": "no time left"}}
        except ValueError:
            return {"status": done.returncode, "error": {"message": done.stderr[-2000:]}}

    def want(self, name: str, what: str, got: Any, wanted: Any) -> None:
        if got != wanted:
            self.problems.append(f"{name}: {what}: got {got!r}, expected {wanted!r}")


def synthetic(driver: Driver, name: str) -> dict[str, Any]:
    sizes, limit = SYNTHETIC[name]
    folder, out = HERE / "synthetic", driver.work / "synthetic" / name
    words = [w for s in sizes for w in ("--size", s)]
    driver.step(name, "init", str(folder / f"{name}.cu"), "--ref", str(folder / f"{name}_ref.py"),
                "--iterations", "1", "--out", str(out), *words)  # fmt: skip
    checked = driver.step(name, "check", "--out", str(out))
    driver.want(name, "check", checked.get("passed"), True)
    found = driver.step(name, "profile", "--out", str(out))
    got = found.get("bottleneck", {})
    driver.want(name, "limit", got.get("kind"), limit)
    driver.want(name, "source", found.get("source"), "counters")
    return {"limit": got.get("kind"), "why": got.get("reason"), "numbers": got.get("numbers")}


def stops(driver: Driver) -> dict[str, Any]:
    """Wrong kernels and writes beyond outputs stop at check, a missing tool at profile."""
    found = {}
    ref, where = str(HERE / "synthetic" / "copy_ref.py"), driver.work / "stops"
    for name in ("wrong", "beyond"):
        out = str(where / name)
        driver.step(name, "init", str(HERE / "stops" / f"{name}.cu"), "--ref", ref,
                    "--iterations", "1", "--size", "n=1000003", "--out", out)  # fmt: skip
        checked = driver.step(name, "check", "--out", out)
        driver.want(name, "status of check", checked["status"], 1)
        rows = [r for r in checked.get("rows", []) if r["passed"] is False]
        found[name] = rows
        refused = driver.step(name, "profile", "--out", out)
        driver.want(name, "status of profile", refused["status"], 3)
    out = str(where / "no-ncu")  # large: a launch is a third of a copy of 8 MB
    driver.step("no-ncu", "init", str(HERE / "synthetic" / "copy.cu"), "--ref", ref,
                "--iterations", "1", "--size", "n=67108864", "--out", out)  # fmt: skip
    driver.step("no-ncu", "check", "--out", out)
    tools = driver.work / "tools"
    tools.mkdir(exist_ok=True)
    for folder in os.environ["PATH"].split(os.pathsep):  # a PATH on which all is but `ncu`
        for tool in Path(folder).iterdir() if Path(folder).is_dir() else ():
            if not tool.name.startswith(("ncu", "nv-nsight")) and not (tools / tool.name).exists():
                (tools / tool.name).symlink_to(tool)
    missing = driver.step("no-ncu", "profile", "--out", out, env={"PATH": str(tools)})
    driver.want("no-ncu", "status of profile", missing["status"], 4)
    found["no-ncu"] = missing.get("error", {}).get("message")
    timed = driver.step("no-ncu", "profile", "--roofline", "--out", out, env={"PATH": str(tools)})
    driver.want("no-ncu", "source", timed.get("source"), "roofline")
    driver.want("no-ncu", "limit", timed.get("bottleneck", {}).get("kind"), "memory")
    return found


def study(driver: Driver, name: str) -> dict[str, Any]:
    folder, out = HERE / name, str(driver.work / name)
    plan = json.loads((folder / "study.json").read_text(encoding="utf-8"))
    log = ("--log", str(driver.work / "experience.jsonl"))
    words = [w for s in plan["sizes"] for w in ("--size", s)]
    flags = [f"--flags={plan['flags'].format(root=ROOT)}"] if "flags" in plan else []
    driver.step(name, "init", str(folder / plan["kernel"]), "--ref", str(folder / "ref.py"),
                "--name", plan["name"], "--iterations", str(len(plan["versions"])),
                "--seeds", "2", "--out", out, *words, *flags)  # fmt: skip
    driver.want(name, "check of v0", driver.step(name, "check", "--out", out).get("passed"), True)
    driver.step(name, "profile", "--out", out)
    driver.step(name, "recommend", "--out", out, *log)
    for n, version in enumerate(plan["versions"], 1):
        driver.step(name, "hypothesis", "--out", out, "--from", str(version["from"]),
                    *(w for k in ("change", "hypothesis", "rationale", "expected")
                      for w in (f"--{k}", version[k])))  # fmt: skip
        made = driver.step(name, "next", str(folder / version["file"]), "--out", out)
        driver.want(name, f"v{n}", made.get("version"), n)
        checked = driver.step(name, "check", "--out", out)
        if checked.get("passed"):
            driver.step(name, "profile", "--out", out)
        driver.step(name, "record", "--out", out, *log)
    found = driver.step(name, "report", "--out", out)
    keys = ("version", "change", "outcome", "gain", "gain of v0", "bottleneck", "us", "passed")
    return {
        "best": found.get("best"),
        "gain": found.get("gain"),
        "times": found.get("times"),
        "absent": found.get("absent"),
        "path": [{k: row[k] for k in keys} for row in found.get("path", [])],
    }


def save(driver: Driver, out: Path, lock: threading.Lock) -> None:
    """What there is so far: the machine may be taken away."""
    with lock:
        data = {
            "seconds": round(time.monotonic() - START, 1),
            "problems": driver.problems,
            "found": driver.found,
            "steps": driver.log,
        }
        text = json.dumps(data, indent=1)
        (out / "summary.json").write_text(f"{text}\n", encoding="utf-8")
        with tarfile.open(out / "new.tar.gz", "w:gz") as tar:
            tar.add(driver.work, "labs", filter=lambda i: None if _left_out(i.name) else i)
        os.replace(out / "new.tar.gz", out / "lab.tar.gz")


def _left_out(name: str) -> bool:
    return name.endswith((".so", ".ncu-rep", ".pyc")) or "/tools" in name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--seconds", type=float, default=230.0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(ROOT))
    sys.stdout = Output(sys.stdout)  # type: ignore[assignment]
    import torch

    if torch.cuda.is_available():  # else every step says so itself
        torch.cuda.init()
    driver = Driver(Path(tempfile.mkdtemp(prefix="labs-")), args.seconds)
    lock = threading.Lock()
    jobs: dict[str, Any] = {n: lambda n=n: study(driver, n) for n in STUDIES}
    jobs |= {n: lambda n=n: synthetic(driver, n) for n in SYNTHETIC}
    jobs["stops"] = lambda: stops(driver)
    jobs["env"] = lambda: driver.step("env", "env", "--out", str(driver.work), "--backend", "cuda")
    jobs = {n: j for n, j in jobs.items() if not args.only or n in args.only}
    if unknown := sorted(set(args.only) - set(jobs)):
        parser.error(f"--only {unknown[0]}: no such job")

    def run(name: str) -> None:
        try:
            driver.found[name] = jobs[name]()
        except Exception as e:
            driver.problems.append(f"{name}: {type(e).__name__}: {e}")
        save(driver, args.out, lock)

    threads = [threading.Thread(target=run, args=(name,), daemon=True) for name in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, driver.left()))
    late = [name for name, thread in zip(jobs, threads, strict=True) if thread.is_alive()]
    driver.problems += [f"{name}: not done in {args.seconds:g} s" for name in late]
    save(driver, args.out, lock)
    show(driver)
    sys.stdout.flush()
    os._exit(int(bool(driver.problems)))  # steps that still run are no loss


def show(driver: Driver) -> None:
    found = driver.found
    for name, row in found.items():
        if "limit" in row:
            print(f"{name}: {row['limit']}-bound: {row['why']}")
        for v in row.get("path", []):
            gain = "" if v["gain"] is None else f" {v['gain']:.3f}x"
            print(f"{name} v{v['version']}: {v['change']}: {v['outcome']}{gain}, {v['us']} µs, "
                  f"{v['bottleneck']}")  # fmt: skip
        if "times" in row:
            times = {k: round(t["median"], 2) for k, t in (row["times"] or {}).items()}
            print(f"{name}: best v{row['best']}", times, row["absent"] or "")
    for row in driver.log:
        if row["said"]:
            print(f"  {row['lab']} {row['step']} ({row['status']}): {row['said'][:300]}")
    print(f"{time.monotonic() - START:.0f} s, {len(driver.problems)} problems")
    for line in driver.problems:
        print(f"PROBLEM {line}")


if __name__ == "__main__":
    main()
