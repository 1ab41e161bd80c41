"""Calls over torch.distributed against the reference, in three processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch
RANKS = Path(__file__).parents[1] / "engines" / "call_ranks.py"


def test_calls_of_three_ranks_give_what_the_reference_does():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", str(RANKS), "torch"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(RANKS.parent), *sys.path])}
    done = subprocess.run(torchrun, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout) > 200
