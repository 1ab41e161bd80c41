"""What a user says of the roles, held against the graph."""

import pytest
from small_graphs import chain

from gopt.analysis.role_map import RoleMap
from gopt.errors import OptionError

GRAPH = chain("xa", "yb", outputs=["a", "b"])


@pytest.mark.parametrize(
    ("roles", "said"),
    [
        (RoleMap(states={"q": "a"}), "'q', which is not an input of the graph"),
        (RoleMap(params={"a": ""}), "'a', which is not an input of the graph"),
        (RoleMap(batch=["q"]), "'q', which is not an input of the graph"),
        (RoleMap(states={"x": "x"}), "'x', which is not an output of the graph"),
        (RoleMap(loss="x"), "'x', which is not an output of the graph"),
        (RoleMap(states={"x": "a", "y": "a"}), "'a' replaces both 'x' and 'y'"),
    ],
)
def test_names_that_the_graph_has_not_are_refused(roles, said):
    with pytest.raises(OptionError, match=said):
        roles.check(GRAPH)


def test_a_map_that_fits_is_accepted():
    RoleMap(loss="b", states={"x": "a"}, params={"x": ""}, batch=["y"]).check(GRAPH)
