"""Stop signals at drawn times: ``signal_sweep.py``, a shot at each kind of start, and more of them slow."""

from __future__ import annotations

import importlib.util

import pytest
import signal_sweep

SEED = 3
mpi = pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="needs pip install 'gopt[mpi]'")


@pytest.mark.rest
@mpi
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("sync", 1),
        *(pytest.param(name, 6, marks=pytest.mark.slow) for name in signal_sweep.SCENES),
    ],
)
def test_a_signal_at_any_time_ends_a_command_in_order(name, count, tmp_path):
    signal_sweep.prepare(tmp_path, signal_sweep.SCENES[name].folder)
    assert signal_sweep.sweep(tmp_path, [name], count, SEED) == []
