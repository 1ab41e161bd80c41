"""Finds everything in the source missing in files of trainers and servers: operators and values, with reasons."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from gopt.artifact.removals import RemovalReason, Removals, looked_through, role_of, roles
from gopt.artifact.report_groups import OpFact, RemovedVarFact
from gopt.ir.graph import Node, origin
from gopt.ir.graph_index import GraphIndex, ancestors
from gopt.ir.phase import Phase
from gopt.lower.rank_graph import RankGraph
from gopt.parameter_server.servers import PASS
from gopt.parameter_server.split import SplitStep
from gopt.records.pass_facts import PassRecord
from gopt.spmd.pass_records import PassRun
from gopt.text.amounts import rank_ranges

_ON_TRAINERS = RemovalReason(PASS, "trainers run forward and backward")
_ON_SERVERS = RemovalReason(PASS, "servers run the update")
_UNREAD = RemovalReason(PASS, "nothing reads it there")
_UNUSED = RemovalReason(PASS, "no output of the step depends on it")
_NARROW = RemovalReason(PASS, "the parameter is pulled in this type")
_HELD = RemovalReason(PASS, "servers hold the state")
_PIECES = RemovalReason(PASS, "the server holds pieces of it, or another server has it")
_LOCAL = RemovalReason(PASS, "trainers hold the state")


class Removed:
    """Compares the source with the files of all roles. ``ops`` and ``variables``: missing in some files."""

    def __init__(self, split: SplitStep) -> None:
        self.split, self.training = split, split.training
        self.ops: list[OpFact] = []
        self.variables: list[RemovedVarFact] = []
        count = split.options.trainers
        self._trainers = list(range(count))
        self._numbers = [count + graph.rank for graph in split.server_graphs.ranks]
        self._removals = Removals([PassRun(PassRecord(PASS, {}, {}), split.result)])
        self._roles = roles(self.training)
        self._on_trainers = {name for graph in split.trainer_graphs.ranks for name in _values(graph)}
        self._on_trainers.update(state.input for state in split.trainer_graphs.common)
        shared = {name for state in split.server_graphs.common for name in (state.input, state.output)}
        self._on_server = [_values(graph) | shared for graph in split.server_graphs.ranks]
        self._nodes()
        self._values()
        self._aliases()

    @cached_property
    def _used(self) -> set[int]:
        """Nodes behind an output, by id."""
        ends = [*self.training.graph.outputs, *(state.updated for state in self.training.states)]
        return ancestors(GraphIndex(self.training.graph), ends)[0]

    @cached_property
    def _pieces(self) -> dict[str, tuple[str, ...]]:
        """Value of a state of the source -> values of servers that are pieces of the state."""
        updated = {state.tensor: state.updated for state in self.training.states}
        pieces: dict[str, dict[str, None]] = {}
        for graph in self.split.server_graphs.ranks:
            for state in graph.states:
                for piece in state.pieces:
                    pieces.setdefault(piece.tensor, {})[state.input] = None
                    if piece.tensor in updated:
                        pieces.setdefault(updated[piece.tensor], {})[state.output] = None
        return {name: tuple(values) for name, values in pieces.items()}

    # --- operators --------------------------------------------------------------------------------------------------

    def _nodes(self) -> None:
        split = self.split
        programs = [program for program, _ in split.trainer_files()]
        mine = {id(root) for program in programs for node in program.graph.nodes if (root := origin(node)) is not None}
        node_of = {id(root): node for node in split.servers.graph.nodes if (root := origin(node)) is not None}
        members = [split.servers.mesh.coordinates(graph.rank) for graph in split.server_graphs.ranks]
        placed = {id(node) for node in split.placement.trainer_nodes}
        served = {id(node) for node in split.placement.server_nodes}
        self._why: dict[str, RemovalReason] = {}
        """Value -> why trainers do not make it."""
        for node in self.training.graph.nodes:
            copy = node_of.get(id(node))
            gone = [n for n, at in zip(self._numbers, members) if copy is None or not copy.sharding.covers(at)]
            reason = _NARROW if id(node) in placed else _ON_SERVERS if id(node) in served else _UNUSED
            self._why.update(dict.fromkeys(node.outputs, reason))
            if node.added:
                continue  # the file has another operator there
            if id(node) not in mine:
                self._op(node, self._trainers, reason)
            if gone:
                self._op(node, gone, self._server_reason(node))

    def _server_reason(self, node: Node) -> RemovalReason:
        return self._removals.of(node, _ON_TRAINERS if id(node) in self._used else _UNUSED)

    def _op(self, node: Node, ranks: Sequence[int], reason: RemovalReason) -> None:
        by = next((self._removals.replaced[name] for name in node.outputs if name in self._removals.replaced), ())
        head = (PASS, reason.why, rank_ranges(list(ranks)), role_of(node))
        of = reason.of or self._removals.of(node, _ON_TRAINERS).of
        self.ops.append(OpFact(*head, of, node.label, node.op_type, by))

    # --- values -----------------------------------------------------------------------------------------------------

    def _values(self) -> None:
        graph, producers = self.training.graph, self.training.graph.producers()
        states = {name: state for state in self.training.states for name in (state.tensor, state.updated)}
        for name in dict.fromkeys([*graph.inputs, *graph.initializers, *producers]):
            if not name:
                continue
            node, state = producers.get(name), states.get(name)
            role = self._roles.get(name) or (role_of(node) if node is not None else self._input_role(name))
            of = (state.of or state.tensor) if state is not None else None
            by = self._removals.replaced.get(name, ()) or self._pieces.get(name, ())
            if name not in self._on_trainers:
                default = _UNREAD if state is None else _HELD
                self._value(name, self._trainers, self._why.get(name, default), role, of, by)
            gone = [number for number, stored in zip(self._numbers, self._on_server) if name not in stored]
            if gone:
                local = state is not None and state.tensor not in self.split.placement.served
                default = _LOCAL if local else _UNREAD if state is None else _PIECES
                reason = default if node is None else self._server_reason(node)
                self._value(name, gone, reason, role, reason.of or of, by)

    def _input_role(self, name: str) -> str:
        return "batch" if name in self.training.batch else "hyper" if name in self.training.hyper else "constant"

    def _value(
        self, name: str, ranks: Sequence[int], reason: RemovalReason, role: str, of: str | None, by: tuple[str, ...]
    ) -> None:
        type = self.training.graph.type_of(name)
        head = (PASS, reason.why, rank_ranges(list(ranks)), role, of)
        self.variables.append(RemovedVarFact(*head, name, type.dtype, type.shape, type.nbytes, by))

    def _aliases(self) -> None:
        """Nodes looked through on load, on every rank."""
        every = rank_ranges([*self._trainers, *self._numbers])
        for node, reason, by, gone in looked_through(self.training):
            head = (reason.pass_name, reason.why, every, Phase.UPDATE.value)
            self.ops.append(OpFact(*head, None, node.label, node.op_type, by))
            for name in gone:
                type = self.training.graph.type_of(name)
                self.variables.append(RemovedVarFact(*head, None, name, type.dtype, type.shape, type.nbytes, by))


def _values(part: RankGraph) -> set[str]:
    """The values of a file: states, results of operators, and operands."""
    names = {name for block in part.blocks for node in block.nodes for name in (*node.outputs, *node.reads)}
    return names | {name for state in part.states for name in (state.input, state.output)}
