"""Updates that take each row by itself, and updates that mix rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers import Builder, perceptron

import gopt
from gopt.analysis.row_updates import RowUpdate, row_update
from gopt.analysis.row_values import RowValues
from gopt.analysis.update_subgraphs import find_updates

Divisor = Callable[[Builder, str], str]
"""Builder and gradient: what it is divided by, after a root."""


def squares(b: Builder, g: str) -> str:
    return str(b.op("Mul", g, g))


def mean(b: Builder, value: str, axis: int, keepdims: int = 1) -> str:
    return str(b.op("ReduceMean", value, b.const([axis], "int64"), keepdims=keepdims))


def column(b: Builder, value: str) -> str:
    return str(b.op("Unsqueeze", value, b.const([1], "int64")))


ALONE: dict[str, Divisor] = {
    "mean": lambda b, g: mean(b, squares(b, g), 1),
    "counted from the end": lambda b, g: mean(b, squares(b, g), -1),
    "dimensions dropped and put back": lambda b, g: column(b, mean(b, squares(b, g), 1, 0)),
    "weighted": lambda b, g: mean(b, b.op("Mul", squares(b, g), b.const([0.5, 1.5])), 1),
    "weighted, in two dimensions": lambda b, g: mean(b, b.op("Mul", squares(b, g), b.const([[0.5, 1.5]])), 1),
}
MIXED: dict[str, Divisor] = {
    "mean over rows": lambda b, g: mean(b, squares(b, g), 0),
    "mean over rows, in a column": lambda b, g: column(b, mean(b, squares(b, g), 0, 0)),
    "counted from the end": lambda b, g: column(b, mean(b, squares(b, g), -2, 0)),
    "a sum of rows to one another": lambda b, g: b.op("CumSum", squares(b, g), b.const(0, "int64")),
    "rows in another order": lambda b, g: b.op("Gather", squares(b, g), b.const([2, 0, 1], "int64")),
    "a norm of all": lambda b, g: b.op("Mul", mean(b, squares(b, g), 1), b.op("ReduceMax", squares(b, g), keepdims=0)),
}


def update_of(divisor: Divisor, folder: Path, *, held: bool = False, shown: bool = False, width: int = 2) -> RowUpdate:
    b = Builder()
    net = perceptron(b, (3, width), bias=False)
    g = net.gradients["w0"]
    found = divisor(b, g)
    if held:
        found = b.op("Add", b.small("w0.row", (3, 1)), found)
    way = b.op("Div", g, b.op("Add", b.op("Sqrt", found), b.const(1e-3)))
    b.output("loss", net.loss, ())
    b.output("w0_out", b.op("Sub", "w0", b.op("Mul", way, b.input("lr", ()))), (3, width))
    if shown:
        b.output("way", way, (3, width))
    if held:
        b.output("w0.row_out", found, (3, 1))
    training = gopt.load(b.save(folder / "step.onnx")).training
    [subgraph] = find_updates(training, whole_accumulators=False).subgraphs.values()
    return row_update(RowValues(training.graph), subgraph)


@pytest.mark.parametrize("name", ALONE)
def test_each_row_by_itself(name, tmp_path):
    found = update_of(ALONE[name], tmp_path)
    assert found.by_row and not found.by_element and found.lazy_is_dense and found.states == ("w0",)


def test_a_number_for_each_row_belongs_to_the_rows(tmp_path):
    """Adagrad as recommendation models use it."""
    found = update_of(ALONE["mean"], tmp_path, held=True)
    assert found.by_row and found.lazy_is_dense and found.states == ("w0", "w0.row")


def test_an_update_that_is_shown_needs_all_rows(tmp_path):
    found = update_of(ALONE["mean"], tmp_path, shown=True)
    assert not found.by_row and found.why == "output way is computed in its update"


@pytest.mark.parametrize("name", MIXED)
def test_rows_that_meet(name, tmp_path):
    found = update_of(MIXED[name], tmp_path, width=3)  # as many as rows, so that shapes tell nothing
    assert not found.by_row and not found.lazy_is_dense and found.why and np.all(found.moved)
