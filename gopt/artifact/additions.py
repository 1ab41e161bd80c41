"""Operators and values added by passes: ranks, purpose, and local shapes on each rank."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from gopt.artifact.local_types import LocalTypes, OnRank
from gopt.artifact.removals import CONSTANT
from gopt.artifact.report_groups import AddedVarFact, LocalShape, OpFact
from gopt.collectives.table import COLLECTIVES
from gopt.ir.graph import COMM, SPMD, Graph, Node
from gopt.ir.phase import Phase
from gopt.ir.types import TensorType
from gopt.lower.rank_graph import RankBlock, RankGraph, alike
from gopt.records.mesh import PIPELINE
from gopt.spmd.program import SpmdProgram
from gopt.spmd.traffic import CallContent, CollectiveCall
from gopt.text.amounts import rank_ranges

_BUCKET = re.compile(r"gopt\.[a-z-]+\.([a-z]+\d+)\.")
"""Values that passes create are named ``gopt.<pass>.<bucket>.<role>`` (contract section 4)."""
_REASONS = {
    Phase.FORWARD: "forward on the rank's part, or its layout",
    Phase.BACKWARD: "backward on the rank's part, or its layout",
    Phase.UPDATE: "update on the rank's shard, or its layout",
}
_CONSTANT = CONSTANT, "a size, a range or a factor that added operators read"
"""Role and reason of an initializer."""
_BETWEEN: dict[Phase | None, str] = {Phase.FORWARD: "activations", Phase.BACKWARD: "gradients of activations"}
"""Phase -> content of a call between its operators that is neither a parameter nor its gradient."""


@dataclass(frozen=True, slots=True, eq=False)
class _Members:
    """Ranks that have an operator or a value alike."""

    ranks: tuple[int, ...]


@dataclass(slots=True)
class _AddedOp:
    node: Node
    purpose: tuple[str, str]
    """Role and reason."""
    ranks: dict[_Members, None] = field(default_factory=dict)
    phases: dict[str, None] = field(default_factory=dict)


@dataclass(slots=True)
class _AddedVar:
    """A value in the making: ``shapes`` has the ranks by type."""

    pass_name: str
    purpose: tuple[str, str]
    of: str | None
    shapes: dict[TensorType, dict[_Members, None]] = field(default_factory=dict)


def added(
    program: SpmdProgram,
    classes: Sequence[tuple[SpmdProgram, list[int]]],
    ranks: Sequence[RankGraph],
    calls: Iterable[CollectiveCall],
) -> tuple[list[OpFact], list[AddedVarFact]]:
    """Operators and values made by passes, with their ranks."""
    additions = _Added(program, {call.node.outputs[0]: call.carries for call in calls if call.node.outputs})
    for variant, numbers in classes:
        on_all = _Members(tuple(numbers))
        additions.shared_nodes(variant, on_all)
        additions.shared_constants(variant.graph, on_all)
    types = {id(variant): LocalTypes(variant) for variant, _ in classes}
    for twins in alike(ranks):
        rank = twins[0]
        members = _Members(tuple(twin.rank for twin in twins))
        additions.of_ranks(members, rank, types[id(program.of(rank.rank))].on(rank))
    if program.micro_steps > 1:
        additions.phases(ranks)
    return list(additions.op_facts()), list(additions.var_facts())


class _Added:
    def __init__(self, program: SpmdProgram, carries: dict[str, CallContent]) -> None:
        graph = program.source.graph
        results = (name for nodes in (graph.nodes, graph.file_nodes or ()) for node in nodes for name in node.outputs)
        self.source: Container[str] = {*graph.types, *results}
        """Names of the source, also of what operators of the file make that were expanded."""
        self.carries = carries
        self.gradients = set(program.source.gradients.values())
        self._states = {state.input for state in program.states}
        self._makers = {name: node for node in program.graph.nodes if node.made_by for name in node.outputs}
        self.accumulators = {sums.input for sums in program.accumulators}
        self.ops: dict[tuple[str, str], _AddedOp] = {}
        self.variables: dict[str, _AddedVar] = {}
        self._known: set[int] = set()
        """Nodes that all ranks have, whose values are the same on all."""
        self._renamed: dict[RankBlock, list[Node]] = {}
        self._ranges: dict[tuple[_Members, ...], str] = {}

    def shared_nodes(self, program: SpmdProgram, members: _Members) -> None:
        """Nodes run by all ranks of a variant on equal values."""
        renamed = {sums.added for sums in program.accumulators} | set(program.loop_carried.values())
        for node in program.graph.nodes:
            if node.sharding.by_axis or not node.made_by or node.domain == SPMD:
                continue
            if renamed and not renamed.isdisjoint([*node.inputs, *node.outputs]):
                continue  # phases give its values other names
            if program.sharded and any(name in program.sharded for name in node.outputs):
                continue  # its type is a rank's
            self._known.add(id(node))
            self._op(node).ranks[members] = None
            for name in self._names(node):
                self._var(name, node).shapes.setdefault(program.graph.type_of(name), {})[members] = None

    def shared_constants(self, graph: Graph, members: _Members) -> None:
        """Initializers made by passes and common to all ranks of a variant."""
        new = [name for name in graph.initializers if self._is_new(name)]
        used = graph.used() if new else set()
        for name in new:
            if name in used:
                self._constant(name, graph.initializers[name].type, members)

    def _constant(self, name: str, type: TensorType, members: _Members) -> None:
        variable = self.variables.get(name)
        if variable is None:
            variable = self.variables[name] = _AddedVar(_pass_of(name), _CONSTANT, bucket_of([name]))
        variable.shapes.setdefault(type, {})[members] = None

    def of_ranks(self, members: _Members, rank: RankGraph, types: OnRank) -> None:
        """Own nodes, values and states of ranks that are alike."""
        for node in self._nodes(rank):
            if node.made_by:
                self._op(node).ranks[members] = None
            for name, type in zip(node.outputs, types.results(node)):
                if self._is_new(name):
                    self._var(name, node).shapes.setdefault(type, {})[members] = None
        for name, array in rank.constants.items():
            self._constant(name, TensorType(array.dtype.name, array.shape), members)
        for state in rank.own:
            if state.input not in self.source:
                summed = state.input in self.accumulators
                what = "the rank's sum of gradients" if summed else "the rank's run of a bucket's states"
                purpose = ("accumulator" if summed else "state", what)
                variable = self.variables.setdefault(state.input, _AddedVar("shard", purpose, bucket_of([state.input])))
                variable.shapes.setdefault(state.type, {})[members] = None

    def phases(self, ranks: Iterable[RankGraph]) -> None:
        """Note the phases of each operator."""
        blocks = {block: rank.phase.name for rank in ranks for block in rank.blocks}
        for block, phase in blocks.items():
            for node in block.nodes:
                if (operator := self.ops.get((node.label, node.op_type))) is not None:
                    operator.phases[phase] = None

    def _nodes(self, rank: RankGraph) -> Iterator[Node]:
        for block in rank.blocks:
            if not block.shared:
                yield from self._unknown(block)
                continue
            if block not in self._renamed:  # what a phase gave other names
                self._renamed[block] = list(self._unknown(block))
            yield from self._renamed[block]

    def _unknown(self, block: RankBlock) -> Iterator[Node]:
        """Nodes of passes, and nodes of the source with renamed results."""
        return (
            node for node in block.nodes
            if id(node) not in self._known and (node.made_by or any(map(self._is_new, node.outputs)))
        )  # fmt: skip

    def _op(self, node: Node) -> _AddedOp:
        key = (node.label, node.op_type)
        operator = self.ops.get(key)
        if operator is None:
            operator = self.ops[key] = _AddedOp(node, self._purpose(node))
        return operator

    def _var(self, name: str, node: Node) -> _AddedVar:
        variable = self.variables.get(name)
        if variable is None:
            of = bucket_of([name, *node.outputs[:1], *node.inputs[:1]])
            variable = self.variables[name] = _AddedVar(node.made_by or _pass_of(name), self._purpose(node), of)
        return variable

    def _names(self, node: Node) -> Iterator[str]:
        return (name for name in node.outputs if self._is_new(name))

    def _is_new(self, name: str) -> bool:
        return bool(name) and (name not in self.source or name.startswith("gopt."))

    def _purpose(self, node: Node) -> tuple[str, str]:
        if node.domain == COMM:
            return "communication", f"communication over {node.attributes.get('group', 'roles')}: {self._carried(node)}"
        phase = node.phase or Phase.UPDATE  # an opaque optimizer has none
        return phase.value, _REASONS[phase]

    def _carried(self, node: Node) -> str:
        """Content of a call."""
        if node.attributes.get("group") == PIPELINE and COLLECTIVES[node.op_type].pairwise:
            return "values that another pipeline stage reads"
        kind = self.carries.get(node.outputs[0] if node.outputs else "", CallContent.OTHER)
        if kind is CallContent.OTHER:
            return "scalars or running statistics"
        of_model = not self.gradients.isdisjoint([*node.inputs, *node.outputs]) or any(map(self._is_held, node.inputs))
        return str(kind.value) if of_model else _BETWEEN.get(node.phase, str(kind.value))

    def _is_held(self, name: str) -> bool:
        """Return whether a value is a state, or made of a state by passes."""
        while (node := self._makers.get(name)) is not None and node.inputs:
            name = node.inputs[0]
        return name in self._states

    def _where(self, parts: Iterable[_Members]) -> str:
        """The ranks of some members in ranges."""
        key = tuple(parts)
        if key not in self._ranges:
            self._ranges[key] = rank_ranges(sorted({rank for members in key for rank in members.ranks}))
        return self._ranges[key]

    def op_facts(self) -> Iterator[OpFact]:
        """Yield operators in the order of addition."""
        for (label, _), operator in self.ops.items():
            node, (role, reason) = operator.node, operator.purpose
            of = bucket_of([*node.outputs[:1], *node.inputs[:1]])
            kind = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
            where = self._where(operator.ranks)
            yield OpFact(node.made_by, reason, where, role, of, label, kind, phases=tuple(operator.phases))

    def var_facts(self) -> Iterator[AddedVarFact]:
        """Yield values in the order of addition."""
        for name, var in self.variables.items():
            dtype = next(iter(var.shapes)).dtype
            shapes = tuple(
                LocalShape(self._where(ranks), type.shape, type.nbytes) for type, ranks in var.shapes.items()
            )
            role, reason = var.purpose
            yield AddedVarFact(var.pass_name, reason, role, var.of, name, dtype, shapes)


def _pass_of(name: str) -> str:
    """The pass behind the new name of a source node's value."""
    return name.split(".")[1]


def bucket_of(names: Iterable[str]) -> str | None:
    """The first bucket named by one of some values."""
    return next((match[1] for name in names if (match := _BUCKET.match(name))), None)
