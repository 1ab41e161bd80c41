"""The axes of a mesh that split a step."""

from helpers import source

from gopt.records.mesh import AxisKind, Mesh
from gopt.tensor_parallel.mesh_axes import splitting_axes


def test_axes_come_in_one_order_whatever_that_of_the_mesh():
    training = source("gpt_adamw").training
    assert splitting_axes(Mesh.parse("cp=2,dp=2,tp=2,h=1"), training) == ["tp", "cp"]
    copies = Mesh.parse("tp=2,cp=2", {"tp": AxisKind.REPLICA})
    assert splitting_axes(copies, training) == ["cp"], "the user says that ranks along tp are copies"
