"""The action of every node of a micro-batch, on stages of a pipeline whose schedule runs actions one by one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gopt.errors import UnsupportedError
from gopt.ir.graph import COMM, SPMD, Node
from gopt.ir.phase import Phase
from gopt.operators.kinds import CASTS, MOVES, VIEWS
from gopt.records.mesh import PIPELINE
from gopt.records.placements import OnMember
from gopt.schedules.actions import ActionKind
from gopt.spmd.program import SpmdProgram
from gopt.spmd.stage_plan import StagePlan, transfers

ChunkAction = tuple[ActionKind, int]
"""The kind of an action, and the number of the stage in ``chunk_numbers``."""


class StageActions:
    """The actions of a micro-batch. ``micro``: output of a micro-batch -> value; ``nodes``: of a micro-batch, in
    order.

    Raises UnsupportedError for a running statistic made of a value that a backward sends.
    """

    def __init__(self, program: SpmdProgram, plan: StagePlan, micro: Mapping[str, str]) -> None:
        self.program, self.plan, self.micro = program, plan, micro
        self.splits = plan.schedule is not None and plan.schedule.splits_backward
        self.backward = ActionKind.INPUT if self.splits else ActionKind.BACKWARD
        chunks = range(plan.chunks)
        self.order: list[ChunkAction] = [(ActionKind.FORWARD, chunk) for chunk in chunks]
        self.order += [(self.backward, chunk) for chunk in reversed(chunks)]
        self.order += [(ActionKind.WEIGHT, chunk) for chunk in reversed(chunks) if self.splits]
        self.nodes = self._of_micro_batch()
        self.moving = self._moving()
        """The ids of the nodes behind running statistics: of the forward, where micro-batches run in order."""
        self._kinds: dict[int, ActionKind] = {}
        self.common: set[int] = set()
        """The ids of nodes run by every action with a reader: nodes of all members, views, and gathers, moves and casts
        of states, since another run costs less than a saved value of each micro-batch."""
        self.steady = {state.input for state in program.states} - program.loop_carried.keys()
        """States not moved by micro-batches, and gathers, moves and casts of such states."""
        self.steady.update(program.graph.initializers)
        self._sort()

    def remade(self, node: Node) -> bool:
        """Return whether every action with a reader runs a node, and the node is more than a view of a saved value."""
        return id(node) in self.common and not (node.is_in(VIEWS) and self.steady.isdisjoint(node.outputs[:1]))

    def part(self, node: Node) -> ChunkAction:
        """The action of a node of a single member."""
        return self._kinds[id(node)], self.plan.chunk(self.program.value_stages[node.first_output])

    def kind(self, node: Node) -> ActionKind:
        """The kind of the actions of a node."""
        return self._kinds[id(node)]

    def in_order(
        self, kind: ActionKind, single: Iterable[tuple[int, Node]], common: Iterable[tuple[int, Node]]
    ) -> list[Node]:
        """The nodes of an action of some kind, by the positions in the step. Behind the forward, gathers, moves and
        casts of states stand right before the first reader, so that few gathered values are alive at once."""
        keys = {id(node): (number, 1, number) for number, node in single}
        nodes = {id(node): node for _, node in single}
        readers: dict[str, int] = {}
        for number, node in single:
            for name in node.reads:
                readers[name] = min(number, readers.get(name, number))
        for number, node in sorted(common, key=lambda item: -item[0]):
            at = number
            nodes[id(node)], keys[id(node)] = node, (number, 1, number)
            if kind is not ActionKind.FORWARD and self.steady.issuperset(node.outputs):
                at = min((readers[name] for name in node.outputs if name in readers), default=number)
                keys[id(node)] = (at, 0, number)
            for name in node.reads:
                readers[name] = min(at, readers.get(name, at))
        return sorted(nodes.values(), key=lambda node: keys[id(node)])

    def _of_micro_batch(self) -> list[Node]:
        needed, nodes = set(self.micro.values()), list[Node]()
        for node in reversed(self.program.graph.nodes):
            if not needed.isdisjoint(node.outputs):
                needed.update(node.reads)
                nodes.append(node)
        return nodes[::-1]

    def _sort(self) -> None:
        behind, weights, results = set[str](), self._weights(), set(self.micro.values())
        results.update(name for node in self.nodes if transfers(node, to_all=True) for name in node.inputs)
        for node in self.nodes:
            late = node.phase is Phase.BACKWARD or not behind.isdisjoint(node.reads)
            late = late and id(node) not in self.moving
            if late:
                behind.update(node.outputs)
            weight = late and id(node) in weights
            self._kinds[id(node)] = ActionKind.WEIGHT if weight else self.backward if late else ActionKind.FORWARD
            if transfers(node):
                continue
            steady = node.is_in(MOVES | CASTS) and self.steady.issuperset(node.inputs[:1])
            steady = steady or (node.domain in (COMM, SPMD) and self.steady.issuperset(node.reads))
            light = (node.is_in(VIEWS) or (steady and not late)) and results.isdisjoint(node.outputs)
            if steady and light:
                self.steady.update(node.outputs)
            if light or not isinstance(node.sharding.on(PIPELINE), OnMember):
                self.common.add(id(node))

    def _moving(self) -> set[int]:
        states = {state.output for state in self.program.states}
        needed = {value for output, value in self.micro.items() if output in states}
        moving = set()
        for node in reversed(self.nodes):
            if not needed.isdisjoint(node.outputs):
                if transfers(node) and node.phase is Phase.BACKWARD:
                    raise UnsupportedError(
                        f"a running statistic is made of {node.inputs[0]!r}, which the backward sends to another stage",
                        "leave out --micro-batches, or the axis pp",
                    )
                needed.update(node.reads)
                moving.add(id(node))
        return moving

    def _weights(self) -> set[int]:
        """The ids of the nodes without an effect on a sent gradient; empty if backwards are not split."""
        needed: set[str] = set()
        weights = set()
        for node in reversed(self.nodes) if self.splits else ():
            if (transfers(node) and node.phase is Phase.BACKWARD) or not needed.isdisjoint(node.outputs):
                needed.update(node.reads)
            else:
                weights.add(id(node))
        return weights


def stage_actions(program: SpmdProgram) -> StageActions:
    """The actions of a program with a schedule; found once for all schedules with the same kinds of actions, until
    nodes change."""
    plan = program.stages
    assert plan is not None
    splits = plan.schedule is not None and plan.schedule.splits_backward
    return program.once(("actions", splits), lambda: StageActions(program, plan, program.phase_results()[0]))


def with_common(needed: set[str], common: Sequence[Node]) -> list[Node]:
    """The nodes of ``common``, in order, behind values ``needed`` by an action; adds the operands of the nodes."""
    nodes = []
    for node in reversed(common):
        if not needed.isdisjoint(node.outputs):
            needed.update(node.reads)
            nodes.append(node)
    return nodes[::-1]
