"""`hfpatch bench`: the table of cases, the filters, what is measured, what is written."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from hfpatch import cli
from hfpatch.bench import inputs, ops, page, peers, show, timing
from hfpatch.bench.cases import CASES, Case
from hfpatch.bench.shapes import CPU, GPU

ROOT = Path(__file__).resolve().parent.parent
CPU_DEVICE = torch.device("cpu")
SMALL = 8


def small(case: Case) -> dict[str, int]:
    return {name: min(size, SMALL) for name, size in CPU[case.shapes][0].items()}


def test_names_are_unique_and_kinds_exist() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    for case in CASES:
        for kind in filter(None, (case.shapes, case.extra_dtypes)):
            assert kind in GPU and kind in CPU
            assert len({tuple(shape) for shape in (*GPU[kind], *CPU[kind])}) == 1


def test_every_operator_of_the_header_is_measured() -> None:
    header = (ROOT / "kernel_src" / "hfpatch.h").read_text(encoding="utf-8")
    table = header.split("#define HFP_OP_TABLE(X)", 1)[1]
    measured = {case.op for case in CASES}
    if "cross_entropy and gradient" in {case.name for case in CASES}:
        measured.add("cross_entropy_with_gradient")
    measured |= {"gemm", "gemm_batched", "attention"}  # benchmarks/clib_products.py
    measured |= {"decode_step", "decode_choose"}  # benchmarks/decode.py
    assert set(re.findall(r"\bX\((\w+),", table)) <= measured


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ours_and_the_eager_formula_are_the_same(case: Case, kernels_module: ModuleType) -> None:
    if not hasattr(kernels_module.ops, case.op):
        pytest.skip(f"{case.op} is not in this build")
    task = ops.Task(case, small(case), torch.float32)
    ops._calls(task, kernels_module, ("eager", "torch"), [ops.inputs_of(task, CPU_DEVICE)])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_fp32_is_measured_once(device: str, kernels_module: ModuleType) -> None:
    for dtypes in (None, ["bfloat16", "float32"]):
        tasks, _ = ops.select(kernels_module, device, ops=["adamw_step"], dtypes=dtypes)
        assert [task.dtype for task in tasks] == [torch.float32] * len(tasks)
        assert len({str(task) for task in tasks}) == len(tasks) > 1
    with pytest.raises(ValueError, match=r"--dtype bfloat16: .* expected float32, or no --dtype"):
        ops.select(kernels_module, device, ops=["adamw_step"], dtypes=["bfloat16"])


def test_a_row_that_compares_different_things_is_refused(kernels_module: ModuleType) -> None:
    case = Case("silu", "x R D", "wide", lambda k, x: k.silu(x), lambda x: x)
    task = ops.Task(case, {"R": 4, "D": 8}, torch.float32)
    with pytest.raises(RuntimeError, match="silu 4x8 float32: ours and the eager formula differ"):
        ops.measure(task, kernels_module, CPU_DEVICE, ("eager",), None)


def test_a_peer_that_fails_is_said(kernels_module: ModuleType) -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such luck\nand more")

    case = Case("silu", "x R D", "wide", lambda k, x: k.silu(x), broken)
    task = ops.Task(case, {"R": 4, "D": 8}, torch.float32)
    row = ops.measure(task, kernels_module, CPU_DEVICE, ("eager",), None)
    assert row["failed"] == {"eager": "RuntimeError: no such luck"}
    assert set(row["cold_us"]) == {"hfpatch"}
    assert row["bytes"] == 2 * 4 * 8 * 4


def test_inputs_are_what_the_line_says() -> None:
    x, q, cos, target, half = inputs.make_inputs(
        "x B 1 H*D; q B S H D third; cos S D fp32 halves; target B S int<V; half S D pairs",
        {"B": 2, "S": 3, "H": 4, "D": 6, "V": 5},
        torch.bfloat16,
        CPU_DEVICE,
    )
    assert x.shape == (2, 1, 24) and x.dtype == torch.bfloat16
    assert q.shape == (2, 3, 4, 6) and q.stride() == (3 * 3 * 24, 3 * 24, 6, 1)
    assert cos.dtype == torch.float32 and torch.equal(cos[:, :3], cos[:, 3:])
    assert target.dtype == torch.int64 and int(target.min()) >= 0 and int(target.max()) < 5
    assert torch.equal(half[:, ::2], half[:, 1::2])
    with pytest.raises(ValueError, match="input `x`: `Z` is not a dimension"):
        inputs.make_inputs("x Z", {"B": 2}, torch.float32, CPU_DEVICE)


def test_filters(kernels_module: ModuleType) -> None:
    def chosen(**filters: list[str]) -> set[str]:
        return {str(task) for task in ops.select(kernels_module, "cuda", **filters)[0]}

    assert chosen(ops=["silu"], shapes=["3x8"]) == {"silu 3x8 bfloat16"}
    assert chosen(ops=["gelu*"], shapes=["3x8"], dtypes=["float16"]) == {
        f"{name} 3x8 float16"
        for name in ("gelu tanh", "gelu erf", "gelu_backward tanh", "gelu_backward erf")
    }
    everything = chosen()
    assert "rms_norm 1x16384x128 bfloat16" in everything
    assert {name.split()[0] for name in everything} == {
        c.op for c in CASES if hasattr(kernels_module.ops, c.op)
    }
    for filters, message in (
        ({"ops": ["sliu"]}, "--op sliu: no such op; there are: rms_norm"),
        ({"shapes": ["4*8"]}, "--shape 4\\*8: expected sizes with x"),
        ({"shapes": ["4"]}, "--shape 4: no selected op has as many dimensions; expected BxSxD, "),
        (
            {"ops": ["gelu"], "shapes": ["1x512x768"]},
            "--shape 1x512x768: no selected op has as many dimensions; expected RxD$",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            ops.select(kernels_module, "cuda", **filters)


def test_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peers.choose(None, "cpu") == ("eager", "torch")
    assert peers.choose(["torch", "eager"], "cpu") == ("eager", "torch")
    assert set(peers.choose(["all"], "cpu")) == {"eager", "torch", "compile", "max-autotune"}
    with pytest.raises(ValueError, match="--peer quack: expected one of eager, torch"):
        peers.choose(["quack"], "cpu")
    with pytest.raises(ValueError, match="--peer liger: Liger's kernels are Triton's"):
        peers.choose(["liger"], "cpu")
    monkeypatch.setattr(peers.liger, "available", lambda: False)
    assert "liger" not in peers.choose(None, "cuda")


def test_times_are_of_what_was_called() -> None:
    order: list[str] = []
    times = timing.cpu_microseconds(
        {name: [lambda n=name: order.append(n)] for name in "ab"}, budget_s=0.0
    )
    assert set(times) == {"a", "b"} and all(us > 0 for us in times.values())
    assert order[-4:] == ["a", "b", "a", "b"]  # in turns


def test_speedup_is_against_the_best_peer() -> None:
    assert show.speedup({"eager": 9.0, "torch": 3.0, "hfpatch": 2.0}) == 1.5
    assert show.speedup({"hfpatch": 2.0}) is None


@pytest.mark.parametrize("suite", ["ops", "host"])
def test_the_command(
    suite: str, tmp_path: Path, kernels_module: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    output = tmp_path / "result.json"
    arguments = ["bench", suite, "--device", "cpu", "--output", str(output), "--threads", "1"]
    try:
        few = ["--op", "silu", "--shape", "4x64", "--dtype", "float32"] if suite == "ops" else []
        assert cli.main([*arguments, *few]) == 0
    finally:
        torch.set_num_threads(threads)
    result = json.loads(output.read_text())
    assert result["suite"] == suite and result["threads"] == 1 and result["device"]
    out = capsys.readouterr().out
    if suite == "ops":
        (row,) = result["rows"]
        assert (row["op"], row["shape"], row["dtype"]) == ("silu", "4x64", "float32")
        assert set(row["cold_us"]) == {"eager", "hfpatch"}
        assert "silu, µs" in out and "× best peer" in out
    else:
        calls = [row["call"] for row in result["rows"] if "call" in row]
        assert {"patched LlamaRMSNorm module", "torch.nn.RMSNorm module", "x * x"} <= set(calls)
        timed = [row["op"] for row in result["rows"] if "op" in row]
        expected = {case.name for case in CASES if hasattr(kernels_module.ops, case.op)}
        assert set(timed) == expected and len(timed) == len(expected)


def test_a_row_that_fails_does_not_take_the_others_along(
    tmp_path: Path,
    kernels_module: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And what was measured is on the disk before the next op is."""
    threads, measure = torch.get_num_threads(), ops.measure
    before: list[list[str]] = []

    def one_fails(task: ops.Task, *rest: Any) -> dict[str, Any]:
        rows = json.loads(output.read_text())["rows"] if output.exists() else []
        before.append([row["op"] for row in rows])
        if task.case.op == "silu":
            raise RuntimeError("no [kernel] here")
        return measure(task, *rest)

    monkeypatch.setattr(ops, "measure", one_fails)
    output = tmp_path / "ops-cpu.json"  # in the folder that is named
    few = ["--op", "silu", "--op", "mul_add", "--op", "gelu", "--shape", "4x64"]
    arguments = ["bench", "ops", "--device", "cpu", "--threads", "1", "--dtype", "float32"]
    try:
        assert cli.main([*arguments, *few, "--output", str(tmp_path)]) == 1
    finally:
        torch.set_num_threads(threads)
    result = json.loads(output.read_text())
    assert result["failed"] == {"silu 4x64 float32": "RuntimeError: no [kernel] here"}
    measured = [row["op"] for row in result["rows"]]
    assert len(measured) >= 2 and before[-1] == measured[: len(before[-1])] and before[-1]
    assert "silu 4x64 float32: RuntimeError: no [kernel] here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["opps"], "suite `opps`: expected one of ops, host"),
        (["--page"], "--page: no benchmarks/results in"),
        (["--op", "nothing"], "--op nothing: no such op"),
        (["--check"], "--check belongs to --page: write `hfpatch bench --page --check`"),
        (["host", "--op", "silu"], "--op is a filter of the suite `ops`; `host` has none"),
        (["ops", "host", "--dtype", "float32"], "--dtype is a filter of the suite `ops`"),
        (["--list", "--output", "a.json"], "--output a.json: expected a folder for two suites"),
    ],
)
def test_bad_arguments(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    kernels_module: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.json").touch()
    threads = torch.get_num_threads()
    assert cli.main(["bench", "--device", "cpu", *arguments]) == 2
    torch.set_num_threads(threads)
    assert message in capsys.readouterr().err


def test_a_filter_selects_the_suite_that_has_it(
    kernels_module: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    list_ = ["bench", "--device", "cpu", "--list"]
    assert cli.main([*list_, "--op", "silu", "--shape", "4x64"]) == 0
    filtered = capsys.readouterr().out
    assert "silu 4x64" in filtered and "host time" not in filtered
    assert cli.main(list_) == 0
    torch.set_num_threads(threads)
    assert "host time of each op" in capsys.readouterr().out


def test_page_of_attention_kernels(tmp_path: Path) -> None:
    size = {"batch": 2, "length": 2688, "heads": 32, "dim": 64, "keys": 2688}
    times = {"cuDNN": 286.0, "FlashAttention-3": 234.04}
    rows = [
        {"model": "a", **size, "gpu_us": times, "host_us": dict.fromkeys(times, 12.3)},
        {"model": "b", **size, "keys": 128, "gpu_us": {"cuDNN": 26.3}, "host_us": {"cuDNN": 9.0}},
    ]
    versions = {"torch": "2", "fa3-fwd": "0.0.3", "accelerate": "1"}
    head = {"suite": "attention", "device": "GPU", "commit": "0" * 40, "versions": versions}
    (tmp_path / "attention-gpu.json").write_text(json.dumps({**head, "rows": rows}))
    text = page.render(tmp_path)["performance.md"]
    assert "## Attention kernels" in text and "torch 2, fa3-fwd 0.0.3, commit" in text
    assert "| a | 2, 2688, 32, 64 | 2688 | 0.118 | 286.0 (12) | **234.0** (12) |" in text
    assert "| b | 2, 2688, 32, 64 | 128 | 0.006 | **26.3** (9) |  |" in text


def test_page_of_new_results(tmp_path: Path) -> None:
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    rows = [
        {
            "op": "gelu erf",
            "shape": f"{n}x64",
            "dtype": "bfloat16",
            "bytes": 64 * n,
            "floor_us": n / 2,
            "copy_us": n / 1.25,
            "cold_us": {"eager": 3.0 * n, "hfpatch": 1.0 * n},
            "warm_us": {"eager": 2.0 * n, "hfpatch": 0.5 * n},
        }
        for n in (4, 8)
    ]
    head = {"device": "GPU", "commit": "0" * 40, "versions": {"torch": "2"}}
    gpu = {**head, "suite": "ops", "copy_bytes_per_s": 3e12, "rows": rows}
    (results / "ops-gpu.json").write_text(json.dumps(gpu))
    (results / "ops-cpu.json").write_text(json.dumps({**head, "threads": 2, "rows": rows}))
    assert page.update(tmp_path, check=True) == 1
    assert page.update(tmp_path, check=False) == 0
    assert page.update(tmp_path, check=True) == 0
    text = (tmp_path / "docs" / "performance.md").read_text(encoding="utf-8")
    assert "| 4×64 | bfloat16 | 2.0 | 3.20 | 12.00 | **4.00** | 80 % | 3.00 | 8.00 | 2.00 |" in text
    assert "| gelu erf | 8×64 | bfloat16 | 3.00× |  |" in text
    picture = tmp_path / "docs" / "images" / "gelu-erf.svg"
    assert "hfpatch" in picture.read_text(encoding="utf-8")
    rows[0]["cold_us"]["hfpatch"] = 5.0
    del rows[0]["copy_us"], rows[1]["copy_us"]  # as results of before it was measured
    (results / "ops-gpu.json").write_text(json.dumps(gpu))
    assert page.update(tmp_path, check=True) == 1
    (results / "ops-gpv.json").write_text(json.dumps({**gpu, "device": "newer"}))
    assert page.update(tmp_path, check=False) == 0
    text = (tmp_path / "docs" / "performance.md").read_text(encoding="utf-8")
    older = tmp_path / "docs" / "performance-gpu.md"
    assert "newer, torch 2" in text and "[GPU](performance-gpu.md)" in text
    assert "| 4×64 | bfloat16 | 2.0 | 12.00 | **5.00** | 40 % | 2.40 | 8.00 | 2.00 |" in text
    assert "GPU, torch 2" in older.read_text(encoding="utf-8")
    (results / "ops-gpu.json").unlink()
    assert page.update(tmp_path, check=True) == 1
    assert page.update(tmp_path, check=False) == 0
    assert not older.exists()
