"""Members of a source with calls of its own, run side by side."""

import numpy as np
import pytest
from onnx import ModelProto

from gopt.errors import UnsupportedError
from gopt.ir.graph import COMM, Graph, Node
from gopt.ir.types import TensorType
from gopt.records.mesh import Mesh
from gopt.runtime.executor import Executor
from gopt.runtime.session import SessionCache
from gopt.verification.source_members import SourceMembers, member_mesh, run_members

MESH = Mesh.parse("dp=2,tp=2")
WHOLE, PART = TensorType("float32", (4,)), TensorType("float32", (2,))
SCATTER = Node("ReduceScatter", ["a"], ["b"], domain=COMM, attributes={"group": "tp", "axis": 0, "sizes": [2, 2]})
GATHER = Node("AllGather", ["b"], ["c"], domain=COMM, attributes={"group": "tp", "axis": 0, "sizes": [2, 2]})
VALUE = np.arange(4, dtype=np.float32)


def program(*nodes, out):
    header = ModelProto(ir_version=10)
    header.opset_import.add(domain="", version=20)
    types = {"a": WHOLE, "b": PART, "c": WHOLE}
    return Executor(Graph("g", list(nodes), {"a": WHOLE}, {out: types[out]}, {}, types, header), SessionCache())


def test_members_exchange_parts_and_agree():
    made = SourceMembers(MESH).run(program(SCATTER, GATHER, out="c"), {"a": VALUE})
    assert np.array_equal(made["c"], 2 * VALUE)


def test_members_that_end_with_parts_of_their_own_are_refused():
    with pytest.raises(UnsupportedError, match="'b' differs among members that start equal: ReduceScatter"):
        SourceMembers(MESH).run(program(SCATTER, out="b"), {"a": VALUE})


def test_each_member_has_its_own_feeds():
    members = member_mesh(MESH, [SCATTER])
    made = run_members(program(SCATTER, out="b"), [{"a": VALUE}, {"a": VALUE + 1}], members)
    assert [each["b"].tolist() for each in made] == [[1, 3], [5, 7]]


def test_which_axes_have_members():
    data = Node("AllReduce", ["a"], ["b"], domain=COMM, attributes={"group": "dp"})
    both = Node("AllReduce", ["a"], ["b"], domain=COMM, attributes={"group": "cp+tp"})
    mesh = Mesh.parse("dp=2,cp=3,tp=2")
    assert member_mesh(mesh, [data]) is None
    assert str(member_mesh(mesh, [data, both])) == "cp=3,tp=2"
