"""Which states count samples, and which count steps."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import Builder, perceptron, sgd

import gopt
from gopt.analysis.coupling import analyse_couplings
from gopt.analysis.role_map import RoleMap
from gopt.analysis.training import StateKind
from gopt.errors import UnsupportedError


def counted(tmp_path, added, form=None, **statistics):
    """A step with a state ``seen`` to which each step adds what ``added`` writes, or which ``form`` counts on."""
    b = Builder()
    sgd(b, perceptron(b, (3, 5, 2)))
    seen = b.state("seen", np.float32(3))
    b.output("seen_out", form(b, seen) if form else b.op("Add", seen, added(b)), ())
    return gopt.load(b.save(tmp_path / "step.onnx"), roles=RoleMap(statistics=statistics)).training


def rows(b: Builder) -> str:
    return b.op(
        "Squeeze", b.op("Cast", b.op("Slice", b.op("Shape", "x"), b.const([0], "int64"), b.const([1], "int64")), to=1)
    )


def columns(b: Builder) -> str:
    return b.op(
        "Squeeze", b.op("Cast", b.op("Slice", b.op("Shape", "x"), b.const([1], "int64"), b.const([2], "int64")), to=1)
    )


def the_batch_size(b: Builder) -> str:
    return b.const(4.0)


def test_the_rows_of_a_batch_are_counted(tmp_path):
    training = counted(tmp_path, rows)
    assert training.state_of()["seen"].kind is StateKind.STATISTIC and list(training.counted) == ["seen"]


@pytest.mark.parametrize(
    "added", [columns, lambda b: b.const(1.0), lambda b: b.const(-7.5)], ids=["columns", "1", "-7.5"]
)
def test_what_follows_no_number_of_samples_counts_none(added, tmp_path):
    training = counted(tmp_path, added)
    assert not training.counted
    known = analyse_couplings(training).statistics.known
    assert training.state_of()["seen"].kind is StateKind.SCALAR or known["seen"].rule == "mean"


def test_a_constant_of_the_batch_size_is_asked_for_and_the_answer_settles_it(tmp_path):
    with pytest.raises(UnsupportedError, match="adds 4 to 'seen', which is the size of a batch") as caught:
        counted(tmp_path, the_batch_size)
    assert "--statistics seen=sum" in caught.value.hints[0] and "--statistics seen=mean" in caught.value.hints[0]
    assert counted(tmp_path, the_batch_size, seen="sum").state_of()["seen"].kind is StateKind.STATISTIC
    assert counted(tmp_path, the_batch_size, seen="mean").state_of()["seen"].kind is StateKind.SCALAR


@pytest.mark.parametrize(
    "form",
    [
        lambda b, n: b.op("Add", b.op("Add", n, b.const(1.0)), b.const(3.0)),
        lambda b, n: b.op("Add", n, b.const(3.0)),
        lambda b, n: b.op("Mul", b.op("Add", b.op("Div", n, b.const(4.0)), b.const(1.0)), b.const(4.0)),
    ],
    ids=["in parts", "less one", "reversed"],
)
def test_the_size_of_a_batch_is_asked_for_in_whatever_form_it_is_added(form, tmp_path):
    with pytest.raises(UnsupportedError, match="the size of a batch") as caught:
        counted(tmp_path, None, form)
    assert "--statistics seen=mean" in caught.value.hints[0]
    assert not counted(tmp_path, None, form, seen="mean").counted


def test_a_share_of_the_batch_is_noted(tmp_path):
    training = counted(tmp_path, lambda b: b.const(0.004))
    assert "ranks together add no more" in training.doubted["seen"]
    assert not counted(tmp_path, lambda b: b.const(-0.004)).doubted


def test_a_count_by_a_shape_that_the_user_calls_none_is_noted(tmp_path):
    training = counted(tmp_path, rows, seen="mean")
    assert "by the shape of an input" in training.doubted["seen"]
