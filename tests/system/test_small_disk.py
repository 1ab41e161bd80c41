"""Commands on a real file system without room (``small_disk.py``)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from products import part

SCRIPT = str(Path(__file__).with_name("small_disk.py"))
MOUNTS = "mount -t tmpfs -o size=1m tmpfs /mnt"


def _namespace() -> str:
    """Why no file system can be mounted here; empty where one can."""
    if shutil.which("unshare") is None:
        return "there is no unshare"
    done = subprocess.run(["unshare", "-rm", "sh", "-c", MOUNTS], capture_output=True, text=True, check=False)
    return done.stderr.strip() and f"no namespace to mount in: {done.stderr.strip()}"


WHY = _namespace()


@pytest.mark.rest
@pytest.mark.skipif(bool(WHY), reason=WHY)
@pytest.mark.parametrize(
    "case", part(["shard-force", "shard-jobs", "shard-jobs-new", "split-jobs", "run", "merge-force", "resume"], 1)
)
def test_without_room(case):
    done = subprocess.run(
        ["unshare", "-rm", sys.executable, SCRIPT, case], capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["broken"] == [] and min(found["faults"].values()) > 2
