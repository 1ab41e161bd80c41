"""Ifs around an update: the ranks are those of the If itself, also where one rank's gradient is infinite."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from gopt.cli.main import main
from products import spread
from written_steps import (
    FINITE,
    MOMENTS,
    NET,
    Written,
    each,
    hold_ranks,
    infinite_on_one,
    saved,
    sgd,
)

import gopt

ONE = "  one = Constant<value_int = 1>()\n"
KEPT = "  kept = Constant<value = float {0.9}>()\n"


def per_parameter(then: str, flag: str = "ok") -> str:
    """An If for each parameter; ``then`` makes ``new_@``."""
    return each(
        f"  @_out = If ({flag}) <then_branch = up_@ () => (float[#] new_@) {{ {then} }}, "
        "else_branch = keep_@ () => (float[#] old_@) { old_@ = Identity(@) }>\n"
    )


def for_all() -> str:
    """One If whose branches make parameters and moments."""
    results = ", ".join(each("@_m_out, @_out, ").split(", ")[:-1])
    new = each("a_@ = Mul(@_m, kept)\n m_@ = Add(a_@, g@)\n s_@ = Mul(m_@, lr)\n new_@ = Sub(@, s_@)\n")
    old = each("same_@ = Identity(@_m)\n old_@ = Identity(@)\n")
    made, kept = (each(text)[:-2] for text in ("float[#] m_@, float[#] new_@, ", "float[#] same_@, float[#] old_@, "))
    return (
        f"  {results} = If (ok) <then_branch = update () => ({made}) {{ {new} }}, "
        f"else_branch = keep () => ({kept}) {{ {old} }}>\n"
    )


STEP = "t_@ = Mul(g@, lr)\n new_@ = Sub(@, t_@)"
COUNT = (
    "  step_out = If (go) <then_branch = up () => (int64 more) { more = Add(step, one) }, "
    "else_branch = keep () => (int64 same) { same = Identity(step) }>\n"
)
SCALE = (
    ONE + "  two = Constant<value = float {2}>()\n  half = Constant<value = float {0.5}>()\n"
    "  scale_out, count_out = If (ok) <then_branch = grow () => (float larger, int64 more) "
    "{ more = Add(count, one)\n larger = Mul(scale, two) }, else_branch = shrink () => (float smaller, int64 none) "
    "{ smaller = Mul(scale, half)\n none = Constant<value_int = 0>() }>\n"
)
SCALED = each("  back_@ = Reciprocal(scale)\n  u_@ = Mul(g@, back_@)\n")
GATES = {
    "one for all": Written(NET + FINITE + KEPT + for_all(), MOMENTS),
    "one for each": Written(NET + FINITE + per_parameter(STEP)),
    "in a branch": Written(
        NET + FINITE + "  fast = Greater(lr, zero)\n" + per_parameter(
            "t_@ = Mul(g@, lr)\n new_@ = If (fast) <then_branch = a_@ () => (float[#] r) { r = Sub(@, t_@) }, "
            "else_branch = b_@ () => (float[#] r) { r = Add(@, t_@) }>"
        )
    ),
    "a condition of one row": Written(
        NET + FINITE + "  flags = Unsqueeze(ok, first)\n" + ONE + "  go = Identity(flags)\n" + COUNT
        + per_parameter(STEP, "flags"), {"step": ("int64", ())}
    ),
    "scale and count": Written(
        NET.replace("do = Mul(d, quarter)", "ds = Mul(d, quarter)\n  do = Mul(ds, scale)") + FINITE + SCALED + SCALE
        + per_parameter("t_@ = Mul(u_@, lr)\n new_@ = Sub(@, t_@)"),
        {"scale": ("float", ()), "count": ("int64", ())}, start={"scale": 8, "count": 3},
    ),
    "a flag": Written(
        NET + FINITE + per_parameter(STEP)
        + "  last_out = If (ok) <then_branch = a () => (bool p) { p = Identity(ok) }, "
        "else_branch = b () => (bool q) { q = Not(last) }>\n",
        {"last": ("bool", ())}, start={"last": True},
    ),
    "a product in a branch": Written(
        NET + FINITE + per_parameter(STEP).replace(
            "t_w0 = Mul(gw0, lr)", "tr = Transpose(gw0)\n p = MatMul(gw0, tr)\n q = MatMul(p, gw0)\n t_w0 = Mul(q, lr)"
        )
    ),
    "a norm in a branch": Written(
        NET + FINITE + per_parameter("l_@ = ReduceL2<keepdims = 0>(g@)\n u_@ = Div(g@, l_@)\n t_@ = Mul(u_@, lr)\n "
                                     "new_@ = Sub(@, t_@)")
    ),
    "a clip": Written(
        NET + "  most = Constant<value = float {0.1}>()\n" + each(
            "  l_@ = ReduceL2<keepdims = 0>(g@)\n  big_@ = Greater(l_@, most)\n"
            "  c_@ = If (big_@) <then_branch = a_@ () => (float[#] cut_@) { f_@ = Div(most, l_@)\n "
            "cut_@ = Mul(g@, f_@) }, else_branch = b_@ () => (float[#] all_@) { all_@ = Identity(g@) }>\n"
            "  s_@ = Mul(c_@, lr)\n  @_out = Sub(@, s_@)\n"
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "ranks", "stage"), spread(GATES, (2, 3), (0, 1, 2, 3)))
def test_ranks_are_those_of_the_if(name, ranks, stage, tmp_path):
    hold_ranks(GATES[name], tmp_path, ranks, stage, change=infinite_on_one)


def test_the_commands_read_it(tmp_path, capsys):
    """The kept source and a merged model have the If, and ranks have none; a branch's stored value is read."""
    model = GATES["one for all"].model()
    branch = next(node for node in model.graph.node if node.op_type == "If").attribute[0].g
    branch.initializer.append(onnx.numpy_helper.from_array(np.full((), 2, np.float32), "twice"))
    branch.node.append(onnx.helper.make_node("Mul", ["new_w0", "twice"], ["doubled"]))
    branch.output[1].name = "doubled"
    path, out = saved(model, tmp_path), tmp_path / "out"
    assert main(["shard", str(path), "--ranks", "2", "-o", str(out)]) == 0
    assert gopt.verify(out, steps=1).equal
    assert main(["merge", str(out), "-o", str(tmp_path / "merged.onnx")]) == 0
    assert main(["diff", str(path), str(tmp_path / "merged.onnx")]) == 0
    ops = [
        {node.op_type for node in onnx.load(out / name, load_external_data=False).graph.node}
        for name in ("source.onnx", "rank_0000.onnx")
    ]
    assert "If" in ops[0] and "If" not in ops[1]
    capsys.readouterr()
    label = next(node.name for node in model.graph.node if node.op_type == "If")
    assert main(["explain", str(out), label]) == 0
    assert "both branches are written out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("then", "word"),
    [
        ("rows_@ = Constant<value_ints = [0]>()\n v_@ = Gather<axis = 0>(@, rows_@)\n t_@ = Mul(g@, lr)\n "
         "new_@ = Sub(@, t_@)", "'w0_out' is made by If"),
        ("k_@ = Size(@)\n e_@ = Div(k_@, k_@)\n z_@ = Cast<to = 1>(e_@)\n t_@ = Mul(g@, z_@)\n new_@ = Sub(@, t_@)",
         "'w0_out' is made by If"),
    ],
    ids=["Gather", "Div of whole numbers"],
)  # fmt: skip
def test_a_branch_that_may_fail_is_refused(then, word, tmp_path, capsys):
    path = saved(Written(NET + FINITE + per_parameter(then)).model(), tmp_path)
    assert main(["shard", str(path), "--ranks", "2", "-o", str(tmp_path / "out")]) == 4
    said = capsys.readouterr().err
    assert word in said and "hint: " in said
    assert not (tmp_path / "out").exists()


def test_an_if_of_the_forward_stays(tmp_path):
    """No output hangs on it by values of its size."""
    forward = NET.replace(
        "h = Relu(h1)",
        "pos = Greater(lr, zero)\n  h = If (pos) <then_branch = a () => (float[4,5] r) { r = Relu(h1) }, "
        "else_branch = b () => (float[4,5] s) { s = Relu(h1) }>",
    )
    graph = gopt.load(saved(Written(forward + sgd()).model(), tmp_path)).training.graph
    assert [node.op_type for node in graph.nodes].count("If") == 1 and graph.file_nodes is None
