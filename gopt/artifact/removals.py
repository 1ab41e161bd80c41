"""Nodes, values and states of the source missing on some ranks, with reasons and replacements."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from gopt.analysis.training import TrainingGraph
from gopt.artifact.report_tables import Head, OpTables, RemovedVarTables
from gopt.ir.graph import Node, origin
from gopt.ir.phase import Phase
from gopt.ir.rewriter import Removal
from gopt.ir.symbol_table import RESERVED
from gopt.ir.types import TensorType
from gopt.records.placements import FULLY_REPLICATED, Sharding
from gopt.spmd.pass_records import PassRun
from gopt.spmd.program import ShardedState, SpmdProgram
from gopt.text.amounts import rank_ranges


class RemovalReason(NamedTuple):
    """Why a source node was removed: the pass, its reason, and the parameter the node serves."""

    pass_name: str
    why: str
    of: str | None = None


LOOKED_THROUGH = RemovalReason("load", "it changes nothing: its readers read what it reads")
REWRITTEN = RemovalReason("load", "a simpler operator makes the same value")
UNKNOWN = TensorType("undefined", None)
_ROLES: dict[Phase | None, str] = {None: "unread", **{phase: phase.value for phase in Phase}}
UNREAD = RemovalReason("prune", "nothing reads it any more")
Variants = Sequence[tuple[SpmdProgram, list[int]]]
"""The variants of a program, each with the ranks that are written."""
CONSTANT = "constant"
"""Role of initializers that are no states."""


class Removals:
    """Removals recorded by the passes: of a pass the first reason for a node counts, of several passes the last."""

    def __init__(self, ran: Iterable[PassRun]) -> None:
        self._found: dict[str, RemovalReason] = {}
        self.replaced: dict[str, tuple[str, ...]] = {}
        """Value -> the values that replace it."""
        for run in ran:
            reasons, replaced = _reasons(run.record.name, run.result.removed)
            self._found = self._found | reasons if self._found else reasons
            self.replaced = self.replaced | replaced if self.replaced else replaced

    def of(self, node: Node, default: RemovalReason = UNREAD) -> RemovalReason:
        """Return the removal of a source node; ``default`` without a record."""
        return self._found.get(node.first_output, default)


def _reasons(pass_name: str, removed: Iterable[Removal]) -> tuple[dict[str, RemovalReason], dict[str, tuple[str, ...]]]:
    """The removals of one pass by the first outputs of nodes, and the replacements of values."""
    reasons: dict[str, RemovalReason] = {}
    replaced: dict[str, tuple[str, ...]] = {}
    for removal in removed:
        reason = RemovalReason(pass_name, removal.why, removal.of)
        outputs = [node.first_output for node in removal.sources]
        if reasons.keys().isdisjoint(outputs):
            reasons.update(dict.fromkeys(outputs, reason))
        else:  # the first reason counts
            for name in outputs:
                recorded = reasons.setdefault(name, reason)
                if recorded.of is None and removal.of is not None:
                    reasons[name] = recorded._replace(of=removal.of)
        for node, names in zip(removal.sources, removal.by):
            for old, new in zip(node.outputs, names):
                if new:
                    replaced[old] = (*replaced[old], new) if old in replaced else (new,)
    return reasons, replaced


def roles(training: TrainingGraph) -> dict[str, str]:
    """Value of the source -> its own role, if any; other values have the node's role."""
    names = dict.fromkeys(training.gradients.values(), "gradient")
    names.update((state.tensor, state.kind.value) for state in training.states)
    return names


def looked_through(training: TrainingGraph) -> Iterator[tuple[Node, RemovalReason, tuple[str, ...], list[str]]]:
    """Yield the file's operators removed on load: reason, replacement for readers, and removed values."""
    roots: dict[str, str] = {}
    nodes = {name for node in training.graph.nodes for name in node.outputs} if training.looked_through else set()
    for node in training.looked_through:
        if node.first_output in nodes:
            yield node, REWRITTEN, (node.first_output,), []
            continue
        source = node.inputs[0] if node.inputs else ""
        root = roots.get(source, source)
        gone = [name for name in node.outputs if name]
        roots.update(dict.fromkeys(gone, root))
        yield node, LOOKED_THROUGH, (root,) if root else (), gone


def role_of(node: Node) -> str:
    """The role of a node of the source."""
    return _ROLES[node.phase]


def find_removals(program: SpmdProgram, classes: Variants, ops: OpTables, variables: RemovedVarTables) -> None:
    """Add the operators and values of the source missing on some ranks.

    ``classes``: the variants, each with written ranks.
    """
    removed = _Removed(program, classes, ops, variables)
    removed.nodes()
    removed.aliases()
    removed.states()
    removed.constants()


class _Removed:
    def __init__(self, program: SpmdProgram, classes: Variants, ops: OpTables, variables: RemovedVarTables) -> None:
        self.program, self.classes, self.ops, self.variables = program, classes, ops, variables
        self.removals, self.roles = Removals(program.passes), roles(program.source)
        self._heads: dict[Head, Head] = {}
        """One object for each beginning of a group's key: most items have the beginning of the item before."""
        self.types = program.source.graph.types
        self.left = [_left(variant) for variant, _ in classes]
        self.made = {name for node in program.graph.nodes if node.made_by for name in node.outputs}
        """Values that passes make, under names of the source too."""
        self.known = program.graph.types.keys() | self.made
        every = sorted(rank for _, ranks in classes for rank in ranks)
        self.on_every = rank_ranges(every)
        coordinates = {rank: program.mesh.coordinates(rank) for rank in every}

        @functools.cache
        def missing_on(*shardings: Sharding | None) -> str:
            gone = [
                rank for sharding, (_, ranks) in zip(shardings, classes) for rank in ranks
                if sharding is None or not sharding.covers(coordinates[rank])
            ]  # fmt: skip
            return rank_ranges(sorted(gone))

        self.missing_on = missing_on
        """Function from the shardings of an item in each variant to the ranks without the item.
        """

    def nodes(self) -> None:
        """Nodes some ranks do not run."""
        nowhere = self.missing_on(*(None for _ in self.classes))
        lone = self.left[0] if len(self.left) == 1 else None
        for node in self.program.source.graph.nodes:
            if node.origin is not None:
                continue  # part of an opaque operator, which has its own record
            if lone is not None:
                node_left = lone.get(id(node))
                where = nowhere if node_left is None else self._lacking(node_left)
            else:
                every = [nodes.get(id(node)) for nodes in self.left]
                node_left = next(filter(None, every), None)
                where = self._lacking(*every)
            if where or (node_left is not None and node_left.outputs != node.outputs):
                self._remove(node, self.removals.of(node, self._elsewhere(node_left)), where, node_left)

    def _elsewhere(self, copy: Node | None) -> RemovalReason:
        """The reason of a node not removed by a pass. ``copy``: the node on the other ranks."""
        stage = None if copy is None else self.program.value_stages.get(copy.first_output)
        return UNREAD if stage is None else RemovalReason("stage-transfers", f"pipeline stage {stage} runs it")

    def constants(self) -> None:
        """Initializers, other than states, without readers on a rank, with the reasons of the first removed reader."""
        source = self.program.source
        stored = source.graph.initializers.keys() - source.state_of().keys() - source.graph.inputs.keys()
        unread = [stored - variant.graph.used() for variant, _ in self.classes]
        lost = set[str]().union(*unread)
        if not lost:
            return
        reasons: dict[str, RemovalReason] = {}
        for node in source.graph.nodes:
            if not lost.isdisjoint(node.reads):
                reason = self.removals.of(node)
                reasons |= {name: reason for name in node.reads if name in lost and name not in reasons}
        for name in filter(lost.__contains__, source.graph.initializers):
            where = self.missing_on(*(None if name in gone else FULLY_REPLICATED for gone in unread))
            self._value(name, reasons.get(name, UNREAD), where, CONSTANT, ())

    def _lacking(self, *nodes: Node | None) -> str:
        if all(copy is not None and not copy.sharding.by_axis for copy in nodes):
            return ""
        return self.missing_on(*(None if copy is None else copy.sharding for copy in nodes))

    def _remove(self, node: Node, reason: RemovalReason, where: str, copy: Node | None) -> None:
        """Add a node missing on ``where``, and the results. ``copy``: the node on the other ranks, perhaps with renamed
        results."""
        inputs, replaced = self.program.graph.inputs, self.removals.replaced
        role = role_of(node)
        now: tuple[str, ...] = ()
        for name, new in zip(node.outputs, node.outputs if copy is None else copy.outputs):
            if not name or (node.added and name.startswith(RESERVED)):
                continue
            by, again = replaced.get(name, ()), name in self.made  # again: another node makes it
            if by and not self.known.issuperset(by):
                by = tuple(name for name in by if name in self.known)
            elif again and not by:
                by = (name,)
            now = now or by
            lacking = where if new == name else self.on_every
            if lacking and not again and name not in inputs:
                self._value(name, reason, lacking, self.roles.get(name, role), by if new == name else by or (new,))
        if where and not node.added:
            self.ops.add(self._head(reason, where, role), reason.of, node.label, node.op_type, now)

    def _value(self, name: str, reason: RemovalReason, where: str, role: str, by: tuple[str, ...]) -> None:
        self.variables.add(self._head(reason, where, role), reason.of, name, self.types.get(name, UNKNOWN), by)

    def _head(self, reason: RemovalReason, where: str, role: str) -> Head:
        head = reason.pass_name, reason.why, where, role
        return self._heads.setdefault(head, head)

    def aliases(self) -> None:
        """Nodes looked through on load."""
        role = Phase.UPDATE.value  # no other phase loses its aliases
        for node, reason, by, gone in looked_through(self.program.source):
            self.ops.add(self._head(reason, self.on_every, role), None, node.label, node.op_type, by)
            for name in gone:
                self._value(name, reason, self.on_every, self.roles.get(name, role), by)

    def states(self) -> None:
        """States missing on some ranks, or held by all as parts of a bucket."""
        types, owners = self.program.source.graph.types, self.program.source.state_of()
        for copies in zip(*(variant.states for variant, _ in self.classes)):  # alike but for sizes: see check_variants
            state: ShardedState = copies[0]
            if not state.sharded:
                continue
            if state.input not in types:
                for part in state.slices:
                    reason = RemovalReason(
                        "shard", "held as the rank's run of a bucket", _parameter(owners, part.tensor)
                    )
                    by = (state.input,)
                    self._value(part.tensor, reason, self.on_every, self.roles.get(part.tensor, "state"), by)
            elif where := self.missing_on(*(sharded.sharding for sharded in copies)):
                reason = RemovalReason("shard", "held by its owner alone", _parameter(owners, state.input))
                self._value(state.input, reason, where, self.roles.get(state.input, "state"), ())


def _parameter(states: Mapping[str, object], name: str) -> str | None:
    """The parameter to which a state belongs."""
    state = states.get(name)
    return getattr(state, "of", None) or (name if state is not None else None)


def _left(program: SpmdProgram) -> dict[int, Node]:
    """Remaining nodes of the source, by id -> the program's node."""
    return {id(root): node for node in program.graph.nodes if (root := origin(node)) is not None}


def classes_of(program: SpmdProgram, ranks: Sequence[int]) -> list[tuple[SpmdProgram, list[int]]]:
    """The variants of a program, each with its members of ``ranks``."""
    if not program.others:
        return [(program, list(ranks))]
    of = {rank: program.of(rank) for rank in ranks}
    return [(variant, [rank for rank in ranks if of[rank] is variant]) for variant in program.variants]
