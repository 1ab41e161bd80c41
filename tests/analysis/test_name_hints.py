"""Names of new values: where they contradict the data flow, nothing is taken for granted."""

from __future__ import annotations

import pytest
from written_steps import NET, Written, each, hold_ranks, saved, sgd

import gopt
from gopt.analysis.name_hints import pairs_by_name
from gopt.errors import UnsupportedError
from gopt.ir.load import load

NESTEROV = "  half = Constant<value = float {0.5}>()\n" + each(
    "  s_@ = Mul(g@, lr)\n  @_x_out = Sub(@, s_@)\n  d_@ = Sub(@_x_out, @_x)\n  h_@ = Mul(d_@, half)\n"
    "  @_out = Add(@_x_out, h_@)\n"
)
"""Each parameter is the second sequence; to the data flow the first looks like its new value."""
SECOND = {f"{name}_x": ("float", shape) for name, shape in Written("").shapes.items()}


def test_two_sequences_are_not_exchanged(tmp_path):
    step = Written(NET + NESTEROV, SECOND)
    path = saved(step.model(), tmp_path)
    with pytest.raises(UnsupportedError, match="the names of all states pair it with 'w0_out'") as caught:
        gopt.load(path)
    assert any("--states w0=w0_out" in hint for hint in caught.value.hints)
    pairs = ",".join(f"{name}={name}_out" for name in (*step.shapes, *SECOND))
    hold_ranks(step, tmp_path, 2, 2, "--states", pairs)


def test_an_average_is_what_it_looks_like(tmp_path):
    """The same data flow, and names that agree."""
    average = NESTEROV.replace("_x_out", "_tmp").replace("_out", "_x_out").replace("_tmp", "_out")
    hold_ranks(Written(NET + average, SECOND), tmp_path, 2, 2)


def test_the_rule_of_most_names_counts(tmp_path):
    graph = load(saved(Written(NET + sgd()).model(), tmp_path))
    assert pairs_by_name(graph) == {name: f"{name}_out" for name in Written("").shapes}
    graph.outputs = {f"o{place}": type for place, type in enumerate(graph.outputs.values())}
    assert pairs_by_name(graph) == {}


def test_names_of_what_is_shown_beside_new_values_raise_no_doubt(tmp_path):
    """Two rules for all states: ``NAME_moved`` is shown, ``NAME_out`` is what the data flow finds."""
    shapes = Written("").shapes
    shown = {f"{name}_moved": ("float", shape) for name, shape in shapes.items()}
    step = Written(NET + each("  @_moved = Mul(g@, lr)\n  @_out = Sub(@, @_moved)\n"), shown=shown)
    path = saved(step.model(), tmp_path)
    assert pairs_by_name(load(path)) == {name: f"{name}_moved" for name in shapes}
    found = {state.tensor: state.updated for state in gopt.load(path).training.states}
    assert found == {name: f"{name}_out" for name in shapes}
