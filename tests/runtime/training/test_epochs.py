"""Steps of a run by passes over its samples."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import FIXTURES

import gopt
from gopt.errors import GoptError
from gopt.runtime.training.array_source import Last
from gopt.runtime.training.epochs import steps_of_epochs
from gopt.runtime.training.job import Job


@pytest.mark.parametrize(("last", "steps"), [("carry", 7), ("drop", 6), ("pad", 8)])
def test_passes_are_counted_in_steps_of_all_ranks(last, steps, tmp_path):
    folder = tmp_path / "r"
    gopt.shard(FIXTURES / "mlp_sgd.onnx", 2).write(folder)
    np.savez(tmp_path / "d.npz", x=np.zeros((56, 32), "f4"), y=np.zeros(56, "i8"))
    job = Job(folder=folder, data=str(tmp_path / "d.npz"), steps=1, last=Last(last))
    assert steps_of_epochs(job, 2) == steps
    with pytest.raises(GoptError, match="the length of this data is not known"):
        steps_of_epochs(Job(folder=folder, data="module:function", steps=1), 2)
