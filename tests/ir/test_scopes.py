"""Names of bodies that stand outside too are others once a file is loaded; what a file computes is the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import gopt
from gopt.errors import UnsupportedError
from gopt.frontends.derive.derive import derive
from gopt.frontends.derive.options import DeriveOptions
from gopt.ir.load import graph_of, load
from gopt.ir.scopes import bodies, name_bodies_apart

CASES = Path(__file__).parents[2] / "fixtures" / "cases" / "scopes"
op = helper.make_node


def body(name, nodes, out, stored=()):
    return helper.make_graph(
        nodes, name, [], [helper.make_tensor_value_info(out, TensorProto.FLOAT, [3])], list(stored)
    )


def number(name, value):
    return numpy_helper.from_array(np.array(value, np.float32), name)


def model(then, other, functions=(), behind=()) -> ModelProto:
    """``x`` of three through an If whose result is u."""
    value = helper.make_tensor_value_info
    nodes = [op("Identity", ["x"], ["t"]), op("If", ["c"], ["u"], then_branch=then, else_branch=other), *behind]
    graph = helper.make_graph(
        nodes, "g", [value("x", TensorProto.FLOAT, [3]), value("c", TensorProto.BOOL, [])],
        [value(nodes[-1].output[0], TensorProto.FLOAT, [3])], [number("k", 5)],
    )  # fmt: skip
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("own", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10, functions=list(functions))


def names(one: ModelProto) -> set[str]:
    """Names of the values that the bodies of a model make or store."""
    inside = [each for node in one.graph.node for each in bodies(node)]
    made = {name for each in inside for node in each.node for name in node.output}
    return made | {tensor.name for each in inside for tensor in each.initializer}


def scaled(out, stored=(), factor="k"):
    return body("b", [op("Mul", ["t", factor], [out])], out, stored)


def test_what_hides_an_outer_value_is_refused():
    """ONNX Runtime reads the outer k where the other branch reads it too, else the inner one; onnx always the outer."""
    one = model(scaled("z", [number("k", 2)]), scaled("z"))
    with pytest.raises(UnsupportedError, match="'k', which a body of If 'u' stores, hides the value of that name"):
        graph_of(one)


def test_a_copy_of_an_outer_value_is_renamed():
    """The branch that reads the outer one keeps its name; branches may have names in common."""
    one = model(scaled("z", [number("k", 5)]), scaled("z"), behind=[op("Mul", ["u", "k"], ["y"])])
    two = ModelProto.FromString(one.SerializeToString())
    assert name_bodies_apart(two)
    assert names(two) == {"z", "k_1"}
    assert [tensor.name for tensor in two.graph.initializer] == ["k"]
    for c in (True, False):
        feeds = {"x": np.arange(3, dtype=np.float32), "c": np.array(c)}
        (due,), (found,) = (ReferenceEvaluator(each).run(None, feeds) for each in (one, two))
        np.testing.assert_array_equal(found, due)
    assert not name_bodies_apart(two)


def test_a_name_that_stands_outside_later_and_one_that_is_taken():
    one = model(scaled("u"), scaled("v"), behind=[op("Neg", ["u"], ["v"]), op("Neg", ["v"], ["u_1"])])
    assert name_bodies_apart(one)
    assert names(one) == {"u_2", "v_1"}
    onnx.checker.check_model(one, full_check=True)


def test_bodies_in_bodies():
    """A name of the outer body that stands there later on, and one of the graph."""
    inner = body("i", [op("Neg", ["t"], ["e"]), op("Neg", ["e"], ["y"])], "y")
    outer = body(
        "o", [op("If", ["c"], ["w"], then_branch=inner, else_branch=scaled("z")), op("Neg", ["w"], ["e"])], "e"
    )
    one = model(outer, scaled("z"), behind=[op("Neg", ["u"], ["y"])])
    feeds = {"x": np.ones(3, np.float32), "c": np.array(True)}
    assert name_bodies_apart(one)
    assert {"e_1", "y_1"} <= {
        name for node in bodies(bodies(one.graph.node[1])[1].node[0])[1].node for name in node.output
    }
    assert ReferenceEvaluator(one).run(None, feeds)[0].tolist() == [1, 1, 1]
    deep = model(body("o", [op("If", ["c"], ["w"], then_branch=scaled("z", [number("s", 2)]), else_branch=scaled("z")),
                            op("Mul", ["w", "s"], ["e"])], "e", [number("s", 3)]), scaled("z"))  # fmt: skip
    with pytest.raises(UnsupportedError, match="'s', which a body of If 'w' stores"):
        name_bodies_apart(deep)


def hiding(*inputs):
    true = op("Constant", [], ["c"], value=helper.make_tensor("c", TensorProto.BOOL, [], [True]))
    hides = op("If", ["c"], ["o"], then_branch=scaled("z", [number("k", 2)]), else_branch=scaled("z", [number("k", 3)]))
    held = helper.make_function("own", "F", ["t", "k"], ["o"], [true, hides], [helper.make_opsetid("", 20)])
    return model(scaled("z"), scaled("z"), [held], [op("F", list(inputs), ["y"], domain="own")])


def test_functions_have_scopes_of_their_own():
    """What hides an operand is clear where no call gives the operand."""
    one = hiding("u")
    assert name_bodies_apart(one)
    stored = [tensor.name for each in bodies(one.functions[0].node[1]) for tensor in each.initializer]
    assert sorted(stored) == ["k_1", "k_2"]
    assert names(one) == {"z"}
    with pytest.raises(UnsupportedError, match="'k', which a body of If 'o' stores, hides"):
        name_bodies_apart(hiding("u", "x"))


def test_a_load_keeps_the_file_where_names_are_apart():
    one = model(scaled("z"), scaled("z"))
    node = graph_of(one).nodes[1]
    assert node.encoded == one.graph.node[1].SerializeToString(deterministic=True)
    assert graph_of(model(scaled("u"), scaled("z"))).nodes[1].captures == ("t", "k")


def test_a_forward_model_that_hides_a_value_is_refused(tmp_path):
    with pytest.raises(UnsupportedError, match="'k', which a body of If 'u' stores"):
        load(CASES / "i2303_shadow_initializer.onnx")


@pytest.mark.parametrize("name", ["shadow_inner_value_later", "shadow_result"])
def test_a_forward_model_is_derived(name, tmp_path):
    step = tmp_path / "step.onnx"
    derive(CASES / f"{name}.onnx", step, DeriveOptions(loss="mse", optimizer="sgd"))
    gopt.shard(step, 2, stage=3).write(tmp_path / "out")
    assert gopt.verify(tmp_path / "out", steps=1).equal


@pytest.mark.parametrize("stage", [2, 3])
def test_a_call_that_omits_an_operand_whose_name_a_body_uses(stage, tmp_path):
    """ONNX Runtime ended with a signal."""
    gopt.shard(CASES / "pr8305_step.onnx", 2, stage=stage).write(tmp_path / "out")
    assert gopt.verify(tmp_path / "out", steps=1).equal
