"""A checkpoint outside a run: the first rank's lock is never taken for another job's, and another job's is refused."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
from helpers import FIXTURES

import gopt
import gopt.runtime.training.checkpoint as checkpoint
from gopt.artifact.checkpoint_index import LOCK_FILE
from gopt.errors import RunError
from gopt.records.mesh import Mesh
from gopt.runtime.engines.base import run_threads
from gopt.runtime.training.job import read_manifest
from gopt.system.lock import lock_file

RANKS = 3


@pytest.fixture
def folder(tmp_path):
    gopt.shard(str(FIXTURES / "mlp_adamw.onnx"), RANKS).write(tmp_path / "step.ranks")
    return tmp_path / "step.ranks"


def saved(folder, root, before=lambda rank: None) -> list[object]:
    """The paths of all ranks, as threads that each make a record of the checkpoints, as processes do."""
    manifest, _ = read_manifest(folder)
    dtypes = {state.tensor: state.dtype for state in manifest.states}

    def work(engine):
        states = manifest.states_of(manifest.ranks[engine.rank])
        values = {
            state.input: np.zeros(sum(part.elements for part in state.pieces), dtypes[state.pieces[0].tensor])
            for state in states if state.pieces
        }  # fmt: skip
        before(engine.rank)
        return checkpoint.Checkpoints(root, folder, manifest).save_alone(engine, 5, values, np.asarray)

    return run_threads(Mesh.parse(f"shard={RANKS}"), 60, work)


def test_ranks_that_come_while_the_first_has_the_lock_save_with_it(folder, tmp_path, monkeypatch):
    locked, opened = threading.Event(), checkpoint.open_checkpoint_folder

    def tells(*given):
        context = opened(*given)
        entered = context.__enter__()
        locked.set()

        class Told:
            def __enter__(self):
                return entered

            def __exit__(self, *error):
                return context.__exit__(*error)

        return Told()

    monkeypatch.setattr(checkpoint, "open_checkpoint_folder", tells)
    paths = saved(folder, tmp_path / "ck", lambda rank: rank and locked.wait(60))
    assert locked.is_set() and set(paths) == {tmp_path / "ck" / "step_00000005"}
    assert sorted(os.listdir(paths[0])) == ["index.json", *(f"rank_000{rank}.safetensors" for rank in range(RANKS))]


def test_the_lock_of_another_job_is_refused(folder, tmp_path):
    (tmp_path / "ck").mkdir()
    number = lock_file(tmp_path / "ck" / LOCK_FILE)
    try:
        with pytest.raises(RunError, match="another job writes checkpoints into"):
            saved(folder, tmp_path / "ck")
    finally:
        os.close(number)
    assert set(saved(folder, tmp_path / "ck")) == {tmp_path / "ck" / "step_00000005"}
