"""The step as a timeline, from a trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gopt.errors import InputError
from gopt.offline.html_report import trace_timeline as module
from gopt.offline.html_report.trace_timeline import RANKS, trace_timeline


def event(rank: int, lane: int, name: str, begin: float, takes: float) -> dict[str, Any]:
    return {"name": name, "ph": "X", "pid": rank, "tid": lane, "ts": begin, "dur": takes}


def trace(path: Path, ranks: int = 2, steps: int = 3) -> Path:
    """Steps of a segment and two calls; times of a machine's clock in microseconds."""
    rows: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "rank 0"}}]
    for rank in range(ranks):
        for step in range(steps):
            begin = 1_795_404_140_000_000.0 + 10_000 * step
            rows += [
                event(rank, 0, "segment of 12", begin, 1000),
                event(rank, 1, "AllReduce 0 over shard", begin + 2000, 500),
                event(rank, 0, "segment of 3", begin + 2600, 100),
                event(rank, 1, "AllGather 1 over shard", begin + 3000, 50),
            ]  # fmt: skip
    path.write_text(json.dumps({"traceEvents": rows}))
    return path


def test_lanes_times_and_the_last_step(tmp_path):
    found = trace_timeline(trace(tmp_path / "t.json"), 2, [0])
    assert found.lanes == ("rank 0 compute", "rank 0 calls", "rank 1 compute", "rank 1 calls")
    assert found.unit == "ms" and found.dropped == 0 and len(found.spans) == 2 * 3 * 4
    assert found.focus == (20.0, 23.05), "from the compute before the last first call to the end"
    call = next(each for each in found.spans if each.kind == "AllReduce")
    assert (call.start, call.end, call.name) == (2.0, 2.5, "AllReduce 0 over shard")


def test_of_many_ranks_those_that_stand_for_others_are_drawn(tmp_path):
    found = trace_timeline(trace(tmp_path / "t.json", ranks=20, steps=1), 20, [0, 13])
    drawn = [int(each.split()[1]) for each in found.lanes[::2]]
    assert len(drawn) == RANKS and {0, 13} <= set(drawn) and drawn == sorted(drawn)
    assert "8 of 20 ranks" in found.note


def test_a_long_trace_keeps_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SPANS", 8)
    path = trace(tmp_path / "t.json", ranks=1, steps=5)
    record = json.loads(path.read_text())
    record["traceEvents"].append(event(0, 0, "the end", 1_795_404_140_900_000.0, 10))
    path.write_text(json.dumps(record))
    found = trace_timeline(path, 1, [0])
    assert len(found.spans) == 8 and found.dropped == 13
    assert found.spans[-1].name == "the end" and found.spans[0].start == 0


def test_without_calls_all_is_in_focus(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": [event(0, 0, "segment of 2", 5.0, 1000)]}))
    assert trace_timeline(path, 1, [0]).focus == (0, 1.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"traceEvents": []}', "has no events"),
        ('{"traceEvents": 3}', "traceEvents"),
        ("[]", "t.json"),
        ('{"traceEvents": [{"name": "a", "ph": "X", "pid": 0, "ts": "now"}]}', r"traceEvents\[0\]\.ts"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path, text, said):
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(InputError, match=said):
        trace_timeline(path, 2, [0])


def test_a_trace_of_more_ranks_is_refused(tmp_path):
    with pytest.raises(InputError, match="of another folder: it has rank 3, the folder 2 ranks"):
        trace_timeline(trace(tmp_path / "t.json", ranks=4), 2, [0])
