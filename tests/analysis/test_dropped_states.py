"""States whose new value reads no old one by elements: paired by names where nothing else is left, or refused."""

from __future__ import annotations

import pytest
from written_steps import NET, Written, each, saved, sgd

import gopt
from gopt.errors import UnsupportedError

FLAT = "  all = Constant<value_ints = [-1]>()\n" + each(
    "  u_@ = Reshape(g@, all)\n  k_@ = Abs(u_@)\n  m_@ = ReduceMax<keepdims = 1>(k_@)\n  h_@ = Div(u_@, m_@)\n",
    ("b0", "b1"),
)
STATES = {"b0_q": ("int8", (5,)), "b1_q": ("int8", (2,))}
TURNED = FLAT + each(
    "  d_@ = Cast<to = 1>(@_q)\n  e_@ = ReduceMax<keepdims = 1>(d_@)\n  f_@ = Mul(h_@, e_@)\n  p_@ = Round(f_@)\n"
    "  @_q_out = Cast<to = 3>(p_@)\n",
    ("b0", "b1"),
)
"""The new value reads a maximum of the old one: the walk by elements ends there."""


def loaded(step: Written, folder, names: dict[str, str] | None = None):
    model = step.model()
    for kept in (model.graph.input, model.graph.output, model.graph.initializer):
        for each_ in kept:
            each_.name = (names or {}).get(each_.name, each_.name)
    for node in model.graph.node:
        for kept in (node.input, node.output):
            kept[:] = [(names or {}).get(name, name) for name in kept]
    return gopt.load(saved(model, folder)).training


def test_names_pair_what_the_data_flow_leaves_open(tmp_path):
    training = loaded(Written(NET + TURNED + sgd(), STATES), tmp_path)
    assert {(state.tensor, state.updated) for state in training.states} >= {("b0_q", "b0_q_out"), ("b1_q", "b1_q_out")}
    (note,) = [note for note in training.notes if "by their names" in note]
    assert note.startswith("input b0_q and output b0_q_out (and 1 other pair) are paired by their names")


@pytest.mark.parametrize(
    "output", ["b0_q_new", "new_b0_q", "b0_q.updated", "b0_q_next", "updated/b0_q", "b0_q'", "b0_q_OUT"]
)
def test_words_of_new_values(output, tmp_path):
    training = loaded(Written(NET + TURNED + sgd(), STATES), tmp_path, {"b0_q_out": output})
    assert ("b0_q", output) in {(state.tensor, state.updated) for state in training.states}


def test_all_pairs_stand_in_one_refusal(tmp_path):
    with pytest.raises(UnsupportedError) as refused:
        loaded(Written(NET + TURNED + sgd(), STATES), tmp_path, {"b0_q_out": "one_", "b1_q_out": "two"})
    assert refused.value.hints[0] == "name the pairs: --states b0_q=one_,b1_q=two"
    assert refused.value.hints[1] == 'or in gopt.toml, under [roles]: states = {"b0_q" = "one_", "b1_q" = "two"}'


def test_names_do_not_choose_between_two_outputs(tmp_path):
    """``shown`` has the type of the state and is made of it, too."""
    shown = "  x_b0 = Mul(p_b0, p_b0)\n  shown = Cast<to = 3>(x_b0)\n"
    step = Written(NET + TURNED + shown + sgd(), STATES, {"shown": ("int8", (5,))})
    with pytest.raises(UnsupportedError, match="may be the new value of input 'b0_q'") as refused:
        loaded(step, tmp_path)
    assert "--states b0_q=b0_q_out" in refused.value.hints[0]


def test_how_ranks_agree_on_a_queue_is_not_in_its_name(tmp_path):
    """Names pair it; a queue of rows of the batch is refused behind that, once."""
    queue = (
        "  zero_at = Constant<value_ints = [0]>()\n  four = Constant<value_ints = [4]>()\n"
        "  kept = Slice(keys, zero_at, four)\n  keys_out = Concat<axis = 0>(h, kept)\n"
    )
    path = saved(Written(NET + queue + sgd(), {"keys": ("float", (8, 5))}).model(), tmp_path)
    with pytest.raises(UnsupportedError, match="'keys_out' keeps rows of single samples, by Concat") as caught:
        gopt.shard(path, 2)
    assert caught.value.hints == (
        "--statistics keys=gather: ranks gather the rows of all; local keeps each rank's own, and root the first "
        "rank's",
    )
