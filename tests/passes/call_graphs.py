"""Rank-independent graphs with calls, made by hand, and running all ranks of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx

from gopt.analysis.training import Phase, TrainingGraph
from gopt.ir.def_use_check import check_graph
from gopt.ir.graph import COMM, Graph, Node
from gopt.ir.types import TensorType
from gopt.lower.phases import phases
from gopt.lower.specialise import Specialiser
from gopt.records.mesh import Mesh
from gopt.runtime.engines.threads import run_ranks
from gopt.runtime.executor import Executor
from gopt.runtime.session import SessionCache
from gopt.spmd.program import SpmdProgram
from gopt.spmd.verifier import infer_shardings

CACHE = SessionCache()


class Calls:
    """Writes a graph node by node; every method returns the name of the value it makes."""

    def __init__(self, members: int = 2) -> None:
        self.members = members
        self.nodes: list[Node] = []
        self.inputs: dict[str, TensorType] = {}
        self.types: dict[str, TensorType] = {}
        self.late: set[int] = set()

    def input(self, shape: Sequence[int], dtype: str = "float32") -> str:
        name = f"x{len(self.inputs)}"
        self.inputs[name] = self.types[name] = TensorType(dtype, tuple(shape))
        return name

    def op(self, op_type: str, *inputs: str, shape: Sequence[int] | None = None, late: bool = False, **given) -> str:
        """A node with one output, shaped like its first operand unless said otherwise."""
        name = f"v{len(self.nodes)}"
        like = self.types[inputs[0]]
        self.types[name] = TensorType(like.dtype, like.shape if shape is None else tuple(shape))
        domain = given.pop("domain", "")
        node = Node(op_type, inputs, [name], domain=domain, attributes=given)
        node.proto = node.to_proto()
        self.nodes.append(node)
        if late:
            self.late.add(id(node))
        return name

    def call(self, op_type: str, *inputs: str, shape: Sequence[int] | None = None, **given) -> str:
        return self.op(op_type, *inputs, shape=shape, domain=COMM, **{"group": "shard", **given})

    def broadcast(self, value: str, root: int = 0, group: str = "shard") -> str:
        type = self.types[value]
        shapes = [",".join(map(str, type.dims))]
        return self.call("Broadcast", value, root=root, group=group, dtype=type.dtype, shapes=shapes)

    def scatter(self, value: str, axis: int = 0, group: str = "shard") -> str:
        dims = list(self.types[value].dims)
        dims[axis] //= self.members
        sizes = [dims[axis]] * self.members
        return self.call("ReduceScatter", value, shape=dims, group=group, reduce="sum", axis=axis, sizes=sizes)

    def gather(self, value: str, axis: int = 0, group: str = "shard") -> str:
        dims = list(self.types[value].dims)
        sizes = [dims[axis]] * self.members
        dims[axis] *= self.members
        return self.call("AllGather", value, shape=dims, group=group, axis=axis, sizes=sizes)

    def step(self, outputs: Sequence[str] = (), mesh: Mesh | None = None) -> SpmdProgram:
        """The graph as a step without states; what nobody reads is an output, the first of all the loss."""
        read = {name for node in self.nodes for name in node.inputs}
        shown = [*outputs, *(n for node in self.nodes for n in node.outputs if n not in read and n not in outputs)]
        header = onnx.ModelProto(ir_version=9, opset_import=[onnx.helper.make_opsetid("", 20)])
        header.opset_import.append(onnx.helper.make_opsetid(COMM, 1))
        table = {name: self.types[name] for name in shown}
        graph = Graph("calls", self.nodes, dict(self.inputs), table, {}, dict(self.types), header)
        for node in self.nodes:
            node.phase = Phase.UPDATE if id(node) in self.late else Phase.FORWARD
        training = TrainingGraph(graph, (shown[0],), [], {}, list(self.inputs), [], shown[1:], [])
        return SpmdProgram.start(training, mesh or Mesh((("shard", self.members),)))


def run(step: SpmdProgram, seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Outputs of every rank, each with inputs of its own."""
    check_graph(step.graph)
    programs, feeds = [], []
    step.sharded = infer_shardings(step, strict=False).parts()
    specialiser = Specialiser(step, phases(step)[0])
    for rank in range(step.mesh.ranks):
        made = specialiser.rank(rank)
        graph = step.graph.copy()
        graph.nodes = made.nodes
        graph.types.update(made.types)
        graph.types.update({name: TensorType(str(a.dtype), a.shape) for name, a in made.constants.items()})
        for name, array in made.constants.items():
            from gopt.ir.tensor import Tensor

            graph.initializers[name] = Tensor(graph.types[name], array=array)
        programs.append(Executor(graph, CACHE))
        generator = np.random.default_rng([seed, rank])
        feeds.append(
            {name: generator.standard_normal(type.dims).astype(type.dtype) for name, type in graph.inputs.items()}
        )
    return run_ranks(programs, feeds, step.mesh)


def same(left: Sequence[dict[str, np.ndarray]], right: Sequence[dict[str, np.ndarray]]) -> None:
    for one, other in zip(left, right, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            np.testing.assert_array_equal(value, other[name], err_msg=name)


def calls(step: SpmdProgram) -> list[Node]:
    return [node for node in step.graph.nodes if node.domain == COMM]
