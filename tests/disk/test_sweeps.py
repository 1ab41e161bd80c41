"""Commands killed and failed at every one of their writes: old whole or new whole, and the next run works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SWEEP = str(Path(__file__).with_name("sweep.py"))
OUTPUTS = ["shard", "shard-jobs", "split-force", "merge-force-plain", "golden"]
"""A new folder, one that several processes compute, a folder exchanged for another, a file over another where the
system can exchange none, and goldens."""
RUNS = ["run"]
AGAIN = ["shard-force", "reshard", "reshard-force", "merge", "merge-force", "shard-force-plain", "resume"]
"""They write by the same lines as one of the others."""
REST = "full,broken,interrupt,terminate"


def swept(*arguments: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, SWEEP, *arguments], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1) and done.stdout, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    "cases", [OUTPUTS, RUNS, pytest.param(AGAIN, marks=pytest.mark.slow)], ids=["outputs", "runs", "again"]
)
def test_killed_at_every_write_and_failed_at_some(cases):
    for found in swept(*cases, "--faults", "kill,torn", "--some", REST):
        assert found["broken"] == [] and found["unsynced"] == [], found["case"]
        assert found["faults"]["kill"] == found["writes"] > 8 and found["faults"]["full"]


@pytest.mark.slow
@pytest.mark.parametrize("case", [*OUTPUTS, *AGAIN, *RUNS])
def test_failed_and_interrupted_at_every_write(case):
    [found] = swept(case, "--faults", REST)
    assert found["broken"] == [] and found["faults"]["full"] == found["writes"]


def test_planted_mistakes_are_found():
    found = swept("--plants")
    assert len(found) > 7 and [each for each in found if not each["found"]] == []
