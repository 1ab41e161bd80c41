"""A counter with a stored value is a state, or gopt refuses: taken for a constant, it would stay what it is."""

from __future__ import annotations

import pytest
from gopt.cli.main import main
from written_steps import NET, Written, hold_ranks, saved, sgd

ONE = "  one = Constant<value_int = 1>()\n"
LOOP = (
    ONE
    + "  go = Cast<to = 9>(one)\n  step_out = Loop (one, go, step) <body = turn (int64 place, bool on, int64 old) => "
    "(bool next, int64 new) { next = Identity(on)\n new = Add(old, one) }>\n"
)
COUNTERS = {
    "Loop": LOOP,
    "ReduceSum": "  ones = Constant<value_ints = [1]>()\n  row = Unsqueeze(step, first)\n  more = Add(row, ones)\n"
    "  step_out = ReduceSum<keepdims = 0>(more)\n",
    "Concat": "  ones = Constant<value_ints = [1]>()\n  row = Unsqueeze(step, first)\n"
    "  both = Concat<axis = 0>(row, ones)\n  step_out = ReduceSum<keepdims = 0>(both)\n",
    "remainder in a branch": ONE + "  seven = Constant<value_int = 7>()\n  go = Greater(lr, zero)\n"
    "  step_out = If (go) <then_branch = a () => (int64 left) { more = Add(step, one)\n left = Mod(more, seven) }, "
    "else_branch = b () => (int64 same) { same = Identity(step) }>\n",
}  # fmt: skip
STATES = {"step": ("int64", ())}


@pytest.mark.parametrize("name", COUNTERS)
def test_a_counter_that_no_walk_finds_is_refused(name, tmp_path, capsys):
    path = saved(Written(NET + COUNTERS[name] + sgd(), STATES).model(), tmp_path)
    assert main(["shard", str(path), "--ranks", "2", "-o", str(tmp_path / "out")]) == 4
    said = capsys.readouterr().err
    assert "output 'step_out' may be the new value of input 'step'" in said and "--states step=step_out" in said


@pytest.mark.parametrize("name", COUNTERS)
def test_what_the_hint_says_settles_it(name, tmp_path):
    hold_ranks(Written(NET + COUNTERS[name] + sgd(), STATES), tmp_path, 2, 2, "--states", "step=step_out")


def test_a_norm_that_depends_on_a_stored_rate_is_a_metric(tmp_path):
    """It has the rate's type, and is not made of it at its size."""
    step = Written(NET + sgd() + "  norm = ReduceL2<keepdims = 0>(w0_out)\n", shown={"norm": ("float", ())})
    file = step.model()
    file.graph.initializer.add(name="lr", data_type=1, float_data=[0.05])
    hold_ranks(step, tmp_path, 2, 2, file=file)
