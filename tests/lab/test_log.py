"""The experience log: entries, appending from two processes, merging, and what hfpatch ships."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hfpatch import cli
from hfpatch.lab.experience import (
    BOTTLENECKS,
    OUTCOMES,
    SHIPPED,
    Entry,
    Log,
    matches,
    merge,
    stats,
)
from hfpatch.lab.problems import Refused
from hfpatch.lab.recommend import likeness, recommend

TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
SAID = TEXT.filter(str.strip)
NUMBER = st.floats(allow_nan=False, allow_infinity=False)
ENTRIES = st.builds(
    Entry,
    op=SAID,
    backend=SAID,
    chip=SAID,
    bottleneck=st.sampled_from(BOTTLENECKS),
    technique=SAID,
    outcome=st.sampled_from(OUTCOMES),
    gain=st.none() | st.floats(1e-3, 1e3),
    shape=TEXT,
    dtype=TEXT,
    hypothesis=TEXT,
    rationale=TEXT,
    metrics=st.dictionaries(TEXT, NUMBER, max_size=3),
    note=TEXT,
    time=st.floats(0, 4e9),
)
FEW = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def entry(**changes: Any) -> Entry:
    given = {
        "op": "softmax", "backend": "cuda", "chip": "H100", "bottleneck": "memory",
        "technique": "rows in registers", "outcome": "success", "gain": 1.2,
    }  # fmt: skip
    return Entry(**{**given, **changes})


@FEW
@given(ENTRIES)
def test_a_line_is_the_entry(one: Entry) -> None:
    line = one.line()
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    assert Entry.read(line) == one


@FEW
@given(st.lists(ENTRIES, max_size=6), st.lists(ENTRIES, max_size=6))
def test_merging_is_a_union(tmp_path: Path, a: list[Entry], b: list[Entry]) -> None:
    one, other = Log(tmp_path / "a.jsonl"), Log(tmp_path / "b.jsonl")
    for log, those in ((one, a), (other, b)):
        log.path.unlink(missing_ok=True)
        assert log.append(those) == len({e.id for e in those})
    union = {e.id for e in (*a, *b)}
    if other.path.is_file():
        merge(one, other.path)
    assert {e.id for e in one.entries()} == union
    before = one.path.read_bytes() if one.path.is_file() else b""
    assert one.append([*b, *a]) == 0  # again changes nothing
    assert (one.path.read_bytes() if one.path.is_file() else b"") == before


@FEW
@given(st.lists(ENTRIES, min_size=1, max_size=4, unique_by=lambda e: e.id), st.data())
def test_a_log_that_was_cut_off_loses_one_line(
    tmp_path: Path, those: list[Entry], data: st.DataObject
) -> None:
    log = Log(tmp_path / "log.jsonl")
    log.path.unlink(missing_ok=True)
    log.append(those[:-1])
    whole = log.path.read_bytes() if log.path.is_file() else b""
    torn = those[-1].line()[: data.draw(st.integers(1, len(those[-1].line()) - 2))]
    log.path.write_bytes(whole + torn)
    assert [e.id for e in log.entries()] == [e.id for e in those[:-1]] and log.skipped == 1
    more = entry(technique="after the cut")
    assert log.append([more]) == 1
    assert [e.id for e in log.entries()] == [*(e.id for e in those[:-1]), more.id]


def test_two_processes_append_at_once(tmp_path: Path) -> None:
    code = (
        "import sys; from hfpatch.lab.experience import Entry, Log; from pathlib import Path\n"
        "for i in range(40):\n"
        "    e = Entry(op='o', backend='b', chip=sys.argv[2], bottleneck='memory',\n"
        "              technique=f't {i} ' + 'x' * 5000, outcome='neutral')\n"
        "    Log(Path(sys.argv[1])).append([e])\n"
    )
    path = tmp_path / "log.jsonl"
    running = [
        subprocess.Popen([sys.executable, "-c", code, str(path), name]) for name in ("one", "two")
    ]
    assert [process.wait() for process in running] == [0, 0]
    log = Log(path)
    assert len(log.entries()) == 80 and log.skipped == 0


BAD: list[tuple[dict[str, Any], str]] = [
    ({"outcome": "won"}, "`outcome` of an entry must be one of success, failure, neutral"),
    ({"bottleneck": "io"}, "`bottleneck`"),
    ({"op": " "}, "`op` of an entry must be a text"),
    ({"gain": 0.0}, "a ratio above 0"),
    ({"gain": float("nan")}, "a ratio above 0"),
    ({"metrics": {"us": float("inf")}}, "finite numbers"),
    ({"schema": 2}, "`schema` of an entry must be 1, got 2"),
    ({"id": "0"}, "`id` of an entry is '0'"),
]


@pytest.mark.parametrize(("changes", "said"), BAD, ids=[b[1][:20] for b in BAD])
def test_what_is_no_entry(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        entry(**changes)


def test_lines_of_others_are_skipped_and_counted(tmp_path: Path) -> None:
    log = Log(tmp_path / "log.jsonl")
    newer = {**json.loads(entry().line()), "schema": 2}
    unknown = {**json.loads(entry().line()), "color": "red"}
    lines = [b"[]", b"{", b"\xff\xfe", json.dumps(newer).encode(), json.dumps(unknown).encode()]
    log.path.write_bytes(b"\n".join(lines) + b"\n" + entry().line())
    assert log.entries() == [entry()] and log.skipped == 5


def test_what_is_shipped() -> None:
    """Every line is an entry; gains agree with outcomes; what docs/gpus.md told is in there."""
    log = Log(SHIPPED)
    found = log.entries()
    assert log.skipped == 0 and len(found) > 200
    for e in found:
        assert e.gain is None or (e.outcome != "success" or e.gain > 1)
        assert e.gain is None or (e.outcome != "failure" or e.gain <= 1)
        if "us before" in e.metrics and e.gain is not None:
            ratio = e.metrics["us before"] / e.metrics["us after"]
            # Of the lab, which knows its noise, the gain is the median of the rounds' ratios:
            # no ratio of medians, where the clock moves between rounds.
            bound = max(0.02, e.metrics["noise"]) if "noise" in e.metrics else 1e-3
            assert ratio == pytest.approx(e.gain, rel=bound)
    counts = stats(found)
    assert {"H100", "H200"} <= set(counts["chip"])
    assert {"memory", "compute", "latency", "occupancy"} <= set(counts["bottleneck"])
    assert counts["outcome"]["failure"] > 50 < counts["outcome"]["success"]
    ops = {"group_norm", "layer_norm", "softmax", "topk", "decode_product", "rms_norm_backward"}
    assert ops <= set(counts["op"])


def test_recommendations() -> None:
    found = recommend(Log(SHIPPED).entries(), "softmax", "cuda", "H100", "memory")
    assert found["try"][0]["op"] == "softmax" and "registers" in found["try"][0]["technique"]
    assert all(r["gain"] is None or r["gain"] > 1 for r in found["try"])
    assert found["leave"] and found["seen"] > 20
    other = recommend(Log(SHIPPED).entries(), "a new thing", None, None, None)
    assert other["seen"] == 0 and not other["try"]
    by_limit = recommend(Log(SHIPPED).entries(), "a new thing", None, None, "occupancy")
    assert {r["bottleneck"] for r in by_limit["try"]} == {"occupancy"}


def test_likeness_grows_with_what_is_shared() -> None:
    e = entry()
    scores = [
        likeness(e, "gemm", None, None, "compute")[0],
        likeness(e, "gemm", None, None, "memory")[0],
        likeness(e, "argmax", None, None, "memory")[0],
        likeness(e, "softmax", None, None, "memory")[0],
        likeness(e, "softmax", "cuda", "H200", "memory")[0],
        likeness(e, "softmax", "cuda", "NVIDIA H100 80GB HBM3", "memory")[0],
    ]
    assert scores[0] == 0 and scores == sorted(set(scores))


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine, theirs = tmp_path / "mine.jsonl", tmp_path / "theirs.jsonl"
    Log(theirs).append([entry(technique="an odd thing"), entry(technique="another odd thing")])
    Log(mine).append([entry(technique="a third odd thing", outcome="failure", gain=0.5)])

    def run(*words: str, status: int = 0) -> Any:
        assert cli.main(["lab", *words, "--json", "--log", str(mine)]) == status
        return json.loads(capsys.readouterr().out)

    assert run("search", "odd", "thing")["count"] == 1
    assert run("merge", str(theirs))["added"] == 2
    assert run("search", "odd", "thing", "--outcome", "success")["count"] == 2
    assert run("list", "--most", "3")["count"] == 3 + len(Log(SHIPPED).entries())
    assert run("sync", str(theirs)) | {"log": ""} == {
        "added": 0, "sent": 1, "skipped": 0, "log": "", "status": 0,
    }  # fmt: skip
    assert len(Log(theirs).entries()) == 3
    assert run("stats")["outcome"]["failure"] > 1
    assert "no file" in run("merge", str(tmp_path / "absent"), status=3)["error"]["message"]
    assert run("recommend", "--kernel", "group_norm", "--bottleneck", "latency")["try"]
    with pytest.raises(Refused, match="cannot be written"):
        Log(tmp_path).append([entry()])


def test_words_are_looked_for_everywhere() -> None:
    e = entry(note="Mailboxes in shared memory")
    assert matches(e, ["MAILBOXES", "softmax"]) and not matches(e, ["mailboxes", "gemm"])
