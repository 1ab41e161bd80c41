"""A counter with a stored value is a state, or gopt refuses: taken for a constant, it would stay what it is."""

from __future__ import annotations

import pytest
from gopt.cli.main import main
from helpers import FIXTURES
from onnx import ModelProto
from written_steps import NET, SHAPES, Written, each, hold_ranks, saved, sgd

import gopt
from gopt.analysis.state_matching import FACTOR_COST, match_states

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


def renamed(model: ModelProto, old: str, new: str) -> ModelProto:
    """The model with another name for an output."""
    for names in (names for node in model.graph.node for names in (node.input, node.output)):
        names[:] = [new if name == old else name for name in names]
    for output in model.graph.output:
        output.name = new if output.name == old else output.name
    return model


@pytest.mark.parametrize("name", COUNTERS)
def test_a_counter_that_no_walk_finds_is_refused(name, tmp_path, capsys):
    model = renamed(Written(NET + COUNTERS[name] + sgd(), STATES).model(), "step_out", "ticks")
    assert main(["shard", str(saved(model, tmp_path)), "--ranks", "2", "-o", str(tmp_path / "out")]) == 4
    said = capsys.readouterr().err
    assert "output 'ticks' may be the new value of input 'step'" in said and "--states step=ticks" in said


@pytest.mark.parametrize("name", COUNTERS)
def test_names_settle_what_the_data_flow_leaves_open(name, tmp_path):
    step = Written(NET + COUNTERS[name] + sgd(), STATES)
    hold_ranks(step, tmp_path, 2, 2)
    notes = gopt.load(saved(step.model(), tmp_path)).training.notes
    assert any(note.startswith("input step and output step_out are paired by their names") for note in notes)


ANEW = {
    "a rate of the counter": (
        "  one_f = Constant<value = float {1}>()\n  count_out = Add(count, one_f)\n  own_out = Reciprocal(count_out)\n"
        + each("  r_@ = Mul(g@, own)\n  @_out = Sub(@, r_@)\n"),
        {"count": ("float", ()), "own": ("float", ())},
    ),
    "the last norm": (
        each("  q_@ = ReduceSumSquare<keepdims = 0>(g@)\n")
        + f"  all = Sum({', '.join(f'q_{name}' for name in SHAPES)})\n"
        + "  own_out = Sqrt(all)\n  ratio = Div(own, own_out)\n  rate = Mul(ratio, lr)\n"
        + each("  r_@ = Mul(g@, rate)\n  @_out = Sub(@, r_@)\n"),
        {"own": ("float", ())},
    ),
    "the scale of a moment": (
        sgd(("b0", "w1", "b1")) + "  m0 = Mul(w0_m, own)\n  m1 = Add(m0, gw0)\n  m2 = Abs(m1)\n"
        "  own_out = ReduceMax<keepdims = 0>(m2)\n  w0_m_out = Div(m1, own_out)\n"
        "  r_w0 = Mul(m1, lr)\n  w0_out = Sub(w0, r_w0)\n",
        {"w0_m": ("float", (3, 5)), "own": ("float", ())},
    ),
}  # fmt: skip
"""A state of one element that a step makes anew, or behind a reduction: update, states."""


@pytest.mark.parametrize("name", ANEW)
def test_a_stored_value_that_a_step_makes_anew_is_no_constant(name, tmp_path, capsys):
    body, states = ANEW[name]
    step = Written(NET + body, states)
    path = saved(renamed(step.model(), "own_out", "made"), tmp_path)
    assert main(["shard", str(path), "--ranks", "2", "-o", str(tmp_path / "out")]) == 4
    said = capsys.readouterr().err
    assert "output 'made' may be the new value of 'own'" in said and "--states own=made" in said
    hold_ranks(step, tmp_path, 2, 2)


def test_a_norm_beside_a_stored_rate_is_refused(tmp_path, capsys):
    """A norm that the next step's update is bounded by looks the same; without the stored value it is a metric."""
    step = Written(NET + sgd() + "  norm = ReduceL2<keepdims = 0>(w0_out)\n", shown={"norm": ("float", ())})
    file = step.model()
    file.graph.initializer.add(name="lr", data_type=1, float_data=[0.05])
    assert main(["shard", str(saved(file, tmp_path)), "--ranks", "2", "-o", str(tmp_path / "out")]) == 4
    assert "if it is fed, leave its value out" in capsys.readouterr().err
    hold_ranks(step, tmp_path, 2, 2)


@pytest.mark.parametrize("name", ["lr", "x"])
def test_a_statistic_that_is_no_state_is_refused(name, tmp_path, capsys):
    command = ["shard", str(FIXTURES / "mlp_adamw.onnx"), "--ranks", "2", "-o", str(tmp_path / "out")]
    assert main([*command, "--statistics", f"{name}=mean"]) == 2
    assert f"{name!r} is no state" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("order", range(4))
def test_what_others_take_leaves_the_nearest_factor(order):
    """Two relative steps that meet in the forward: each adds its moment alone, which is the new moment's old value."""
    reach = {
        "w_new": {"w.m": 3, "w": FACTOR_COST + 1, "u": FACTOR_COST + 9},
        "w.m_new": {"w.m": 1, "u": FACTOR_COST + 7, "w": FACTOR_COST + 8},
        "u_new": {"u.m": 3, "u": FACTOR_COST + 1, "w": FACTOR_COST + 10},
        "u.m_new": {"u.m": 1, "u": FACTOR_COST + 7, "w": FACTOR_COST + 8},
    }
    names = [*reach][order:] + [*reach][:order]
    pairs, unsettled = match_states({name: reach[name] for name in names})
    assert not unsettled
    assert pairs == {f"{name}_new": name for name in ("w", "w.m", "u", "u.m")}
