"""Commands killed and failed at every one of their writes: old whole or new whole, and the next run works."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SWEEP = str(Path(__file__).with_name("sweep.py"))
OUTPUTS = ["shard-jobs", "split-force", "merge-force-plain", "golden"]
"""A new folder that several processes compute, a folder exchanged for another, a file over another where the
system can exchange none, and goldens."""
FILES = ["state-dict-force", "report-force", "reduce"]
"""Commands that write one file, over an older one."""
RUNS = ["run"]
AGAIN = [
    "shard", "shard-jobs-new", "shard-jobs-plain", "split-jobs", "load-state-force", "reproducer", "shard-force",
    "reshard", "reshard-force", "merge", "merge-force", "shard-force-plain", "resume", "best", "load-state",
    "state-dict", "report", "seal", "shard-stages", "reshard-stages", "merge-stages", "run-stages",
]  # fmt: skip
"""They write by the same lines as one of the others."""
EXPORTS = ["export", "export-force", "dcp"]
"""They need PyTorch."""
HANGING = ["shard-jobs-new", "shard-jobs-plain", "split-jobs"]
REST = "full,quota,broken,short,interrupt,terminate"


def swept(*arguments: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, SWEEP, *arguments], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1) and done.stdout, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.rest
def test_killed_and_failed_at_a_part_of_the_writes():
    """Every command, and every fault of each: the points go round with the fault."""
    made = [
        found for cases, every in ((OUTPUTS, 64), (FILES, 24), (RUNS, 136))
        for found in swept(*cases, "--faults", "", "--some", f"kill,torn,{REST}", "--every", str(every))
    ]  # fmt: skip
    for found in made:
        assert found["broken"] == [] and found["unsynced"] == [], found["case"]
        assert found["writes"] > 4 and found["faults"].keys() >= {"kill", "full", "interrupt"}


@pytest.mark.slow
@pytest.mark.parametrize("cases", [OUTPUTS, FILES, RUNS, AGAIN], ids=["outputs", "files", "runs", "again"])
def test_killed_at_every_write_and_failed_at_some(cases):
    for found in swept(*cases, "--faults", "kill,torn", "--some", REST):
        assert found["broken"] == [] and found["unsynced"] == [], found["case"]
        assert found["faults"]["kill"] == found["writes"] > 4 and found["faults"]["full"]


@pytest.mark.slow
@pytest.mark.parametrize("case", [*OUTPUTS, *FILES, *AGAIN, *RUNS])
def test_failed_and_interrupted_at_every_write(case):
    [found] = swept(case, "--faults", REST)
    assert found["broken"] == [] and found["faults"]["full"] == found["writes"]


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.torch
def test_exports_are_killed_and_failed_at_a_part_of_the_writes():
    for found in swept(*EXPORTS, "--faults", "", "--some", f"kill,torn,{REST}", "--every", "4"):
        assert found["broken"] == [] and found["unsynced"] == [], found["case"]


@pytest.mark.rest
@pytest.mark.parametrize(
    "names", ["shard-split,merge-force,run", pytest.param("", marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_two_commands_on_one_target(names):
    """At once: one of them wins, or both end whole."""
    done = subprocess.run(
        [sys.executable, str(Path(SWEEP).with_name("together.py")), *(["2", "1", names] if names else ["12", "1"])],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.count(" shots, 0 wrong") > 2, done.stdout + done.stderr


@pytest.mark.slow
def test_planted_mistakes_are_found():
    found = swept("--plants")
    assert len(found) > 7 and [each for each in found if not each["found"]] == []


@pytest.mark.slow
@pytest.mark.parametrize("case", ["shard-jobs", *HANGING])
def test_children_that_hang_or_die(case):
    done = subprocess.run(
        [sys.executable, str(Path(SWEEP).with_name("hanging.py")), case], capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["broken"] == [] and found["children"] > 0
    assert len(found["faults"]) == 8 * found["children"]


def test_every_case_is_swept():
    """The list is read as text: who imports it has other limits of sizes."""
    cases = re.findall(r'Case\(\s*"([\w-]+)"', Path(SWEEP).with_name("swept.py").read_text(encoding="utf-8"))
    assert len(cases) > 15 and sorted([*OUTPUTS, *FILES, *AGAIN, *RUNS, *EXPORTS]) == sorted(cases)
