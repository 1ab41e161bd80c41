"""What a user says of the roles, held against the graph."""

import pytest
from small_graphs import chain

from gopt.analysis.role_map import RoleMap
from gopt.errors import OptionError
from gopt.ir.types import TensorType

GRAPH = chain("xa", "yb", outputs=["a", "b"])


@pytest.mark.parametrize(
    ("roles", "said"),
    [
        (RoleMap(states={"q": "a"}), "the model has no input 'q'"),
        (RoleMap(params={"a": ""}), "the model has no input 'a'"),
        (RoleMap(batch=["q"]), "the model has no input 'q'"),
        (RoleMap(states={"x": "x"}), "the model has no output 'x'"),
        (RoleMap(loss="x"), "the model has no output 'x'"),
        (RoleMap(states={"x": "a", "y": "a"}), "'a' is given as the new value of both 'x' and 'y'"),
        (RoleMap(loss="b"), r"'b' cannot be the loss: it is float32\[2\], and a loss is one floating number"),
    ],
)
def test_names_that_the_graph_has_not_are_refused(roles, said):
    with pytest.raises(OptionError, match=said):
        roles.check(GRAPH)


@pytest.mark.parametrize("kind", [("float32", ()), ("float64", (1, 1)), ("bfloat16", None), ("undefined", None)])
def test_a_map_that_fits_is_accepted(kind):
    graph = GRAPH.twin()
    graph.outputs["b"] = TensorType(*kind)
    RoleMap(loss="b", states={"x": "a"}, params={"x": ""}, batch=["y"]).check(graph)


@pytest.mark.parametrize("kind", [("int64", ()), ("float32", ("n",)), ("float32", (1, 2))])
def test_a_loss_is_one_floating_number(kind):
    graph = GRAPH.twin()
    graph.outputs["b"] = TensorType(*kind)
    with pytest.raises(OptionError, match="'b' cannot be the loss"):
        RoleMap(loss="b").check(graph)
