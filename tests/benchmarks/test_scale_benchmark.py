"""The benchmark of growth: what it decides from figures, and one tiny run of all it does. No time is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import parts
import pytest
import scale
from scale import Measured

SCALE = Path(__file__).parents[2] / "benchmarks" / "scale.py"


def case(nodes: int, ranks: int, cpu: float, peak: float = 100.0, floor: float | None = None) -> Measured:
    return Measured(nodes, ranks, 2 * cpu, cpu, peak, floor, None if floor is None else 3 * floor)


def test_cases_are_nodes_and_ranks_smallest_first() -> None:
    assert scale.parse_cases("100000x64,5000x8") == [(5000, 8), (100000, 64)]


@pytest.mark.parametrize("text", ["5000", "5000x8x2", "5000xmany", ""])
def test_a_case_of_another_form_ends_the_benchmark(text: str) -> None:
    with pytest.raises(SystemExit, match="NODESxRANKS"):
        scale.parse_cases(text)


def test_every_target_is_decided_by_its_own_cases() -> None:
    cases = [
        case(4_990, 8, 1.0), case(4_990, 1024, 21.32), case(20_000, 8, 4.0), case(100_020, 8, 20.0, floor=50.0),
        case(100_020, 64, 40.0, floor=400.0), case(999_996, 8, 200.0, peak=2600.0),
    ]  # fmt: skip
    decided = {verdict.what: verdict for verdict in scale.verdicts(cases, quiet=True)}
    assert [(what, round(verdict.value, 3), verdict.holds) for what, verdict in decided.items()] == [
        ("20000 to 999996 nodes, 8 ranks: growth exponent", 1.0, True),
        ("4990 nodes, 8 to 1024 ranks: seconds for each further rank", 0.02, False),
        ("100020 nodes, 8 ranks: wall time over the floor's", 0.267, True),
        ("999996 nodes, 8 ranks: peak MB", 2600.0, False),
    ]


def test_on_a_busy_machine_the_floor_is_held_in_cpu_seconds() -> None:
    [verdict] = scale.verdicts([case(100_020, 8, 20.0, floor=50.0)], quiet=False)
    assert (verdict.what, verdict.value, verdict.holds) == (
        "100020 nodes, 8 ranks: CPU time, for the machine is busy, over the floor's", 0.4, False,
    )  # fmt: skip


def test_cases_that_decide_no_target_give_no_verdict() -> None:
    assert scale.verdicts([case(600, 2, 1.0), case(900, 2, 9.0), case(900, 4, 99.0)], quiet=True) == []


@pytest.mark.slow
def test_a_tiny_run_measures_every_part() -> None:
    command = [sys.executable, str(SCALE), "--cases", "200x2,200x3", "--floor-nodes", "0", "--parts", "--json"]
    record = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert [(each["nodes"], each["ranks"], each["floor_s"]) for each in record["cases"]] == [
        (184, 2, None),
        (184, 3, None),
    ]
    assert list(record["further_rank_s"]) == ["184"]
    assert record["exponents"] == {}
    for each in record["cases"]:
        assert each["cpu_s"] > 0
        names = [part["part"] for part in each["parts"]]
        assert names[:3] == ["start", "load", "analysis"]
        assert names[-2:] == ["rank graphs and checks", "write"]
        assert "pass shard" in names
        assert all(part["peak_mib"] >= part["mib"] > 10 for part in each["parts"])


def test_memory_is_read_in_mebibytes() -> None:
    assert parts.resident("Name:\tx\nVmHWM:\t  2048 kB\nVmRSS:\t    1024 kB\n") == (1.0, 2.0)
