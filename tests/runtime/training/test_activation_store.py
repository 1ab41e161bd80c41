"""Values between the forward and the backward of a micro-batch: kept until their last reader, for each micro-batch."""

from __future__ import annotations

import numpy as np

from gopt.runtime.training.activation_store import ActivationStore


def test_a_value_is_kept_until_its_last_reader():
    backward, weight = {"mask", "hidden"}, {"hidden"}
    saved = ActivationStore(["mask", "hidden"], [{"x"}, backward, weight])
    results = {"mask": np.ones(2), "hidden": np.arange(2.0), "loss": np.zeros(())}
    saved.keep(0, results)
    assert results.keys() == {"loss"}
    assert saved.take(0, {"x"}) == {}
    assert saved.take(1, backward) == {}, "another micro-batch has left nothing"
    assert saved.take(0, backward).keys() == {"mask", "hidden"}
    assert saved.take(0, weight).keys() == {"hidden"}
    assert saved.take(0, backward) == saved.take(0, weight) == {}


def test_arrays_are_copies_of_what_the_next_run_writes_over():
    saved, view = ActivationStore(["hidden"], [{"hidden"}]), np.zeros(2)
    saved.keep(0, {"hidden": view})
    view[:] = 7
    saved.keep(1, {"hidden": view})
    assert [saved.take(turn, {"hidden"})["hidden"].tolist() for turn in (0, 1)] == [[0, 0], [7, 7]]
