"""Commands that write, killed and failed at every write (``sweep.py``): old whole or new whole, and the next run works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SWEEP = str(Path(__file__).with_name("sweep.py"))
CASES = (
    "shard", "shard-force", "merge", "merge-force", "reshard", "reshard-force", "run", "resume", "shard-force-plain",
    "merge-force-plain",
)  # fmt: skip


def swept(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, SWEEP, "--json", *arguments], capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr
    record: dict[str, Any] = json.loads(done.stdout)
    return record


@pytest.mark.parametrize("case", CASES)
def test_killed_at_every_write(case):
    found = swept(case, "--faults", "kill,torn")
    assert found["what"] == [] and found["faults"]["kill"] == found["writes"] > 8


@pytest.mark.parametrize("case", CASES)
def test_failed_and_interrupted_here_and_there(case):
    found = swept(case, "--faults", "full,broken,interrupt,terminate", "--every", "7", "--offset", str(CASES.index(case)))
    assert found["what"] == []
    assert found["unsynced"] == []


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_failed_and_interrupted_at_every_write(case):
    found = swept(case, "--faults", "full,broken,interrupt,terminate")
    assert found["what"] == [] and found["faults"]["full"] == found["writes"]


@pytest.mark.parametrize(
    ("plant", "case", "faults"),
    [
        ("two-steps", "shard-force", "kill"),
        ("no-sweep", "shard", "kill"),
        ("no-removal", "merge", "full"),
        ("in-place", "resume", "torn"),
        ("values-first", "merge-force", "kill"),
        ("any-order", "resume", "kill"),
        ("past-the-layer", "run", "broken"),
        ("no-sync", "shard", "torn"),
    ],
)
def test_planted_mistakes_are_found(plant, case, faults):
    found = swept(case, "--faults", faults, "--every", "2" if faults == "broken" else "1", "--plant", plant)
    assert found["what"] or found["unsynced"], plant
