"""Replaces the calls by which a source reduces gradients; gopt inserts other reductions instead.

A source with calls over data axes is the step of one data-parallel rank. The all-reduce of a gradient is replaced by an
expression of the mean gradient: the value itself for a mean, D times the value for a sum over D ranks. The factor is
applied at the position of the call, so a half-precision value overflows exactly when the source's sum does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from gopt.analysis.look_through import SAME, data_axes
from gopt.analysis.role_map import RoleMap
from gopt.analysis.roles import recover
from gopt.analysis.training import Phase, TrainingGraph
from gopt.errors import OptionError, UnsupportedError
from gopt.ir.graph import COMM, Graph, Node, clone
from gopt.ir.graph_index import GraphIndex, descendants
from gopt.ir.node_kinds import in_proportion
from gopt.ir.tensor import Tensor
from gopt.ir.types import FLOATS, TensorType, numpy_dtype
from gopt.operators.kinds import CASTS, LAYOUT
from gopt.records.mesh import Mesh

_MULTIPLES = LAYOUT | {"Neg"}
HINT = "gopt reduces over axes that see different data itself: leave only the calls that reduce gradients"


def adopt_source_collectives(training: TrainingGraph, roles: RoleMap, mesh: Mesh) -> TrainingGraph:
    """The step without calls over data axes, and without calls over groups of one rank; roles found anew.

    Returns ``training`` itself without such calls. Raises OptionError for a group unknown to the mesh, UnsupportedError
    for a call over data axes that is not a reduction of whole gradients over all data axes."""
    calls = training.calls
    if not calls:
        return training
    finder = _Finder(training, mesh)
    unused = {id(node): 1 for node in calls if not finder.live(node)}
    if unused:
        return adopt_source_collectives(recover(_without(training.graph, unused), roles), roles, mesh)
    data = [node for node in calls if finder.live(node) & finder.data]
    if not data:
        return training
    result = recover(_without(training.graph, finder.taken(data)), roles)
    if result.gradients != training.gradients:
        moved = next(name for name in training.gradients if result.gradients.get(name) != training.gradients[name])
        raise UnsupportedError(
            f"the gradient of {moved!r} is another value once the source's own calls are taken over",
            f"name it: --params {moved}={training.gradients[moved]}",
        )
    result.notes += [
        f"{node.op_type} {node.label} over {node.attributes['group']} is taken over: gopt reduces the gradients itself"
        for node in data
    ]
    return result


@dataclass(slots=True)
class _Finder:
    """Classifies each call of a source on a mesh."""

    training: TrainingGraph
    mesh: Mesh
    data: set[str] = field(init=False)
    index: GraphIndex = field(init=False)
    tainted: set[str] = field(init=False)

    def __post_init__(self) -> None:
        training = self.training
        self.data = set(self.mesh.live(self.mesh.data_group)) if self.mesh.data_group is not None else set()
        self.index = GraphIndex(training.graph)
        drawn = (name for node in training.random for name in node.outputs)
        self.tainted = descendants(self.index, [*training.batch, *drawn])

    def live(self, node: Node) -> set[str]:
        """The axes of a call's group with more than one rank in the mesh."""
        try:
            axes = set(self.mesh.live(str(node.attributes["group"])))
        except OptionError as error:
            raise OptionError(
                f"{node.op_type} {node.label!r}: {error.message}", "name the axis in --mesh, such as shard=2,tp=2"
            ) from error
        unsaid = sorted((axes & self.data) - data_axes(self.training.graph))
        if unsaid:
            raise OptionError(
                f"{node.op_type} {node.label!r} joins ranks that read different data along {unsaid[0]!r}, and this "
                "axis was not declared when the source was loaded",
                f"load it with axes={{{unsaid[0]!r}: 'data'}}",
            )
        return axes

    def taken(self, calls: Sequence[Node]) -> dict[int, int]:
        """Calls that reduce gradients -> factor on the mean; refuses all others."""
        reducers = [node for node in calls if node.op_type in ("AllReduce", "Reduce")]
        sent = {id(self._broadcast(node)): node for node in reducers if node.op_type == "Reduce"}
        for node in calls:
            self._check(node, pair=id(node) in sent)
        followed: dict[str, set[int]] = {}
        for node in reducers:
            for name in node.inputs:
                self._follow(node, name, followed)
        self._check_readers(followed)
        missing = [name for name, value in self.training.gradients.items() if reducers and value not in followed]
        if missing:
            raise UnsupportedError(
                f"the source reduces some gradients itself, but not the gradient of {missing[0]!r}",
                "reduce all gradients over the data axes, or none: gopt reduces them all",
            )
        ranks = self.mesh.size(self.mesh.data_group or "") if reducers else 1
        factors = {id(node): ranks if node.attributes.get("reduce", "sum") == "sum" else 1 for node in reducers}
        return factors | dict.fromkeys(sent, 1)

    def _check(self, node: Node, *, pair: bool) -> None:
        """Refuse a call over data axes that cannot be the reduction of a gradient."""
        what = f"{node.op_type} {node.label!r} over {node.attributes['group']}"
        if self.live(node) != self.data:
            raise UnsupportedError(f"{what} joins only a part of the ranks that see different data, {self.mesh}", HINT)
        if node.phase is not None and node.phase is not Phase.UPDATE:
            raise UnsupportedError(f"{what} is in the {node.phase.value}", HINT)
        if node.op_type not in SAME or (node.op_type == "Broadcast" and not pair):
            raise UnsupportedError(f"{what} is in the update: the source is sharded already", HINT)
        if node.attributes.get("reduce", "sum") not in ("sum", "mean"):
            raise UnsupportedError(f"{what} is not a sum or mean of gradients", HINT)

    def _broadcast(self, reduce: Node) -> Node:
        """The Broadcast of a Reduce's result from the root."""
        users = [user for name in reduce.outputs for user in self.index.users.get(name, ())]
        below = users[0] if users else None
        if (
            below is None
            or below.domain != COMM
            or below.op_type != "Broadcast"
            or any(user is not below for user in users)
            or sorted(below.inputs) != sorted(reduce.outputs)
            or any(below.attributes[key] != reduce.attributes[key] for key in ("group", "root"))
            or any(name in self.training.graph.outputs for name in reduce.outputs)
        ):
            raise UnsupportedError(
                f"Reduce {reduce.label!r} over {reduce.attributes['group']}: its results are not just broadcast", HINT
            )
        return below

    def _follow(self, call: Node, name: str, followed: dict[str, set[int]]) -> None:
        """Walk back from a call's operand, a multiple of a gradient, to the gradient; record the permitted readers of
        each value."""
        gradients, reader, value = set(self.training.gradients.values()), call, name
        while True:
            followed.setdefault(value, set()).add(id(reader))
            if value in gradients:
                return
            node = self.index.producers.get(value)
            source = self._scaled(node) if node is not None else None
            if node is None or source is None or value in self.training.graph.outputs:
                raise UnsupportedError(
                    f"{call.op_type} {call.label!r} over {call.attributes['group']} carries {name!r}, which is not a "
                    "parameter's gradient, nor a scaled one",
                    HINT,
                )
            reader, value = node, source

    def _scaled(self, node: Node) -> str | None:
        """The operand that a node multiplies by a factor, the same on all ranks; None for any other node."""
        types = self.index.graph
        if node.is_in(CASTS):
            dtypes = {types.type_of(name).dtype for name in (node.inputs[0], node.outputs[0])}
            return node.inputs[0] if dtypes <= FLOATS else None
        if node.is_in(_MULTIPLES):
            return None if any(name in self.tainted for name in node.inputs[1:]) else node.inputs[0]
        moving = [name for name in node.inputs if name in self.tainted]
        return moving[0] if len(moving) == 1 and in_proportion(node, moving[0]) else None

    def _check_readers(self, followed: dict[str, set[int]]) -> None:
        """The update may see a gradient through the call alone."""
        for value, allowed in followed.items():
            for reader in self.index.users.get(value, ()):
                if reader.phase is Phase.UPDATE and id(reader) not in allowed:
                    raise UnsupportedError(
                        f"{reader.op_type} {reader.label!r} reads {value!r} before the source reduces it",
                        "let the update read the reduced gradient alone",
                    )


def _without(graph: Graph, factors: dict[int, int]) -> Graph:
    """A copy of the graph in which some calls hand operands on, multiplied by a factor."""
    result = graph.copy()
    preserved = set(graph.outputs).union(*(node.captures for node in graph.nodes))
    alias: dict[str, str] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        inputs = [alias.get(name, name) for name in node.inputs]
        if id(node) not in factors:
            copy = clone(node)
            copy.inputs = inputs
            nodes.append(copy)
            continue
        factor, name = factors[id(node)], node.name
        for old, new in zip(inputs, node.outputs):
            if factor == 1 and new not in preserved:
                alias[new] = old
                continue
            operands = [old] if factor == 1 else [old, _constant(result, factor, graph.types[old].dtype)]
            stand_in = Node("Identity" if factor == 1 else "Mul", operands, [new], name=name)
            name = ""  # the runtime wants names to be unique
            stand_in._attributes = {}
            stand_in.proto = stand_in.to_proto()
            nodes.append(stand_in)
    result.nodes = nodes
    if not any(node.origin is not None for node in nodes):
        result.file_nodes = None  # without its calls, the step is not as the file has it
    return result


def _constant(graph: Graph, factor: int, dtype: str) -> str:
    name = f"gopt.collectives.ranks.{dtype}"
    type = TensorType(dtype, ())
    graph.initializers[name] = Tensor(type, array=np.array(factor, numpy_dtype(dtype)))
    graph.types[name] = type
    return name
