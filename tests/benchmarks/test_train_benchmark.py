"""The benchmark of training steps: its counters, its reading of traces, and real runs of a tiny step."""

from __future__ import annotations

import importlib.util

import counters
import graphs
import numpy as np
import pytest
import runs
import spans
import targets
import train
from cases import Case, prepare

mpi = pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="needs pip install 'gopt[mpi]'")

DEV = """Inter-|   Receive                                      |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls
    lo:     111      2    3    4    5     6          7         8 44553474303  862357    0    0    0     0
  eth0:3241696885   63953    0    0    0     0          0         0  2989012   38505    0    0    0     0
"""


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return prepare("tiny", graphs.mlp(2, width=256, batch=4), tmp_path_factory.mktemp("bench") / "tiny")


def test_the_counters_of_an_interface_are_found() -> None:
    assert counters.sent_on(DEV) == 44553474303
    assert counters.sent_on(DEV, "eth0") == 2989012
    with pytest.raises(KeyError):
        counters.sent_on(DEV, "eth1")


@pytest.mark.rest
def test_memory_is_that_of_the_program() -> None:
    assert counters.memory("Name:\tx\nVmHWM:\t  2048 kB\nVmRSS:\t    1024 kB\n") == (1 << 20, 2 << 20)
    _, before = counters.memory()
    room = np.ones(max(1, before // 4), np.float64)  # twice the peak so far
    now, peak = counters.memory()
    assert peak >= now >= room.nbytes


def test_a_union_of_spans_covers_what_they_do() -> None:
    union = spans.merged([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0)])
    assert union == [(0.0, 3.0), (5.0, 6.0)]
    assert spans.covered(union, 1.0, 5.5) == 2.5
    assert spans.covered(union, 3.0, 5.0) == 0.0


def test_a_step_is_compute_exposed_calls_and_overhead() -> None:
    def event(name: str, lane: int, begin: float, end: float) -> dict[str, object]:
        return {"name": name, "ph": "X", "pid": 0, "tid": lane, "ts": begin * 1e6, "dur": (end - begin) * 1e6}

    events = [
        event("segment of 9", 0, 10.0, 14.0), event("AllGather 0 over shard", 1, 13.0, 16.0),
        event("14 elementwise over 1000", 0, 17.0, 19.0), {"name": "rank 0", "ph": "M", "pid": 0},
        event("segment of 9", 0, 30.0, 31.0) | {"pid": 1},
    ]  # fmt: skip
    notes = {"steps": [0.0, 10.0, 20.0], "sessions": [(10.5, 13.5)], "agreed": [(19.0, 19.5)]}
    (step,) = spans.shares(events, notes, rank=0, skip=1)
    assert step.wall == pytest.approx(10.0)
    assert step.compute == pytest.approx(3.0 + 2.0)
    assert step.exposed == pytest.approx(2.5 + 0.5)
    assert step.overhead == pytest.approx(2.0)
    assert step.loop == pytest.approx(1.5)
    assert step.update == pytest.approx(2.0)
    assert spans.middle([step])["update_ns"] == pytest.approx(2e9 / (28 * 1000))


@pytest.mark.parametrize(
    ("op", "given", "made", "sent"),
    [
        ("AllReduce", 8, 8, 12),
        ("ReduceScatter", 8, 2, 6),
        ("AllGather", 2, 8, 6),
        ("Broadcast", 0, 8, 6),
        ("Send", 8, 0, 8),
    ],
)
def test_bytes_on_a_ring_of_four(op: str, given: int, made: int, sent: float) -> None:
    assert spans.ring_bytes(op, 4, given, made) == sent


def test_one_session_and_one_rank_run_the_same_step(case: Case) -> None:
    whole = runs.session(case, 3)
    assert len(whole["seconds"]) == 3
    rank = runs.gopt(case, 1, 2, 3, threads=True)
    assert len(rank["seconds"]) == 3
    assert rank["calls"] == 0
    assert rank["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    assert len({*whole["losses"]}) == len(whole["losses"]) == runs.WARMUP + 3, "no step does nothing"
    for step in rank["shares"]:
        assert step.wall == pytest.approx(step.compute + step.exposed + step.overhead)
        assert 0 < step.loop <= step.overhead < step.wall
        # Weights and biases.
        assert step.update_elements == case.parameters
    for run in (whole, rank):
        assert min(run["seconds"]) > 0
        assert all(peak > 30 << 20 for peak in run["peak"])


@mpi
def test_calls_and_bytes_are_those_of_the_report(case: Case) -> None:
    run = runs.gopt(case, 2, 3, 3, wire=True)
    planned = case.figures(2, 3)
    assert run["calls"] == planned["calls"]["count"]
    assert run["handed"] == pytest.approx(planned["traffic"]["sent"])
    assert len(run["peak"]) == 2
    assert len(run["shares"]) == 2 * 2  # two ranks; the last step's end is not noted


def test_rounds_become_a_row_and_rows_verdicts() -> None:
    def run(*milliseconds: float) -> runs.Run:
        step = spans.Shares(0.01, 0.008, 0.001, 0.001, 0.0005, 0.002, 0.004, 1000)
        seconds = [each / 1000 for each in milliseconds]
        return {"seconds": seconds, "peak": [5, 7], "handed": 100.0, "calls": 3.0, "shares": [step], "took": 1.0}

    row = train.row([run(5, 6, 90), run(10, 11, 12), run(7, 8, 9)], imports=2)
    assert (row["ms"], row["min_ms"], row["peak"]) == (pytest.approx(8), pytest.approx(5), 7)
    (made, *_) = targets.decide("mlp10", dict.fromkeys(("gopt1", "gopt2.2", "gopt2.3"), row))
    assert made.value == pytest.approx(0.1)
    assert not made.met
    traffic = {"sent": 150.0, "of_bound": 1.5, "measured": False, "planned_ratio": 1.5}
    memory = {"ns": 100.0, "min_ns": 90.0}
    rows = {
        **dict.fromkeys(("gopt2.2", "gopt2.3"), row | traffic), "gopt1": row, "gopt1x2": row | {"ms": 7.0},
        "ddp": row | {"ms": 16.0, "min_ms": 4.0}, "pass1": memory, "pass2": memory,
    }  # fmt: skip
    found = {each.what: each for each in targets.decide("mlp", rows)}
    assert found["mlp: gopt, 2 ranks, stage 2 / torch DDP"].met
    assert found["mlp: gopt, 2 ranks, stage 2 / torch DDP"].best == pytest.approx(1.25)
    assert not found["mlp: gopt, 2 ranks, stage 3 / gopt, 1 rank, twice at once"].met
    assert found["mlp: gopt, 2 ranks, stage 3 / gopt, 1 rank"].met
    assert not found["mlp, gopt, 2 ranks, stage 3: bytes sent / bound"].met
    update = found["mlp, gopt, 1 rank: update / memory pass"]
    assert update.value == pytest.approx(4e6 / 28000 / 100)
    assert update.best == pytest.approx(4e6 / 28000 / 90)
