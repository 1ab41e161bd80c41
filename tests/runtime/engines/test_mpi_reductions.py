"""How arrays are combined, without MPI: the wide types, the mean, and NaN in a maximum."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from gopt.ir.graph import Node
from gopt.runtime.engines.mpi_reductions import Reductions, reduce_op
from gopt.runtime.memory import Pool

MPI = SimpleNamespace(SUM="sum", MAX="max", MIN="min", Op=SimpleNamespace(Create=lambda combine, commute: combine))


def call(how: str = "sum") -> Node:
    return Node("AllReduce", ["x"], ["y"], attributes={"reduce": how})


def test_halves_are_combined_in_float32_and_rounded_once() -> None:
    reductions = Reductions(MPI, Pool())
    flat, narrow = reductions.upcast([np.full((2, 1), 1, "f2"), np.full(1, 3, "f2")], None)
    assert flat.dtype == np.float32 and flat.tolist() == [1, 1, 3] and narrow == np.float16
    made = reductions.mean(flat * 4098, SimpleNamespace(size=2), call("mean"), narrow)
    assert made.dtype == np.float16 and made.tolist() == [2048, 2048, 6148]  # 2049 and 6147 are not halves


def test_flags_are_counted_and_memory_that_waits_is_taken() -> None:
    reductions = Reductions(MPI, Pool())
    flat, narrow = reductions.upcast([np.array([True, False])], None)
    assert flat.dtype == np.uint8 and narrow == np.bool_
    buffer = np.zeros(2, "f4")
    assert reductions.upcast([np.ones(2, "f4")], buffer) == (buffer, None)


@pytest.mark.parametrize(("how", "wanted"), [("max", [np.nan, np.nan, 2]), ("min", [np.nan, np.nan, 1])])
def test_nan_wins(how: str, wanted: list[float]) -> None:
    reductions = Reductions(MPI, Pool())
    given, held = np.array([np.nan, 1, 2], "f4"), np.array([1, np.nan, 1], "f4")
    combine = reductions.op(call(how), held)
    combine(given, held, None)
    np.testing.assert_array_equal(held, np.array(wanted, "f4"))
    assert reductions.op(call(how), held) is combine
    assert reductions.op(call(how), np.zeros(3, int)) == how and reductions.op(call(), held) == "sum"


def test_a_call_sums_unless_it_says_otherwise() -> None:
    assert reduce_op(Node("AllReduce", ["x"], ["y"])) == "sum"
