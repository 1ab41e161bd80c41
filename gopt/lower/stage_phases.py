"""The phases of a micro-batch on stages of a pipeline: an action of each stage of a member, as a schedule names them.

An action takes saved values of earlier actions of the same micro-batch. Values on all stages, views, and states that
are moved or cast are made again by each action that reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from gopt.errors import InvariantError, UnsupportedError
from gopt.ir.graph import Node, clone
from gopt.lower.lowered import AHEAD_RECEIVE, AHEAD_SEND, RECEIVE, SEND, SHOWN
from gopt.lower.phases import LoweredPhase, phase_of
from gopt.records.mesh import PIPELINE
from gopt.records.placements import OnMember
from gopt.schedules.actions import ActionKind
from gopt.spmd.program import SpmdProgram
from gopt.spmd.stage_actions import ChunkAction, StageActions, stage_actions, with_common
from gopt.spmd.stage_plan import StagePlan, transfers
from gopt.text.sanitize import show

_Pair = tuple[ChunkAction, ChunkAction, tuple[int, ...]]


@dataclass(slots=True)
class _Action:
    """The nodes of an action; ``needed``: their operands."""

    nodes: list[Node] = field(default_factory=list)
    needed: set[str] = field(default_factory=set)

    def add(self, node: Node) -> None:
        self.nodes.append(node)
        self.needed.update(node.reads)


def stage_phases(program: SpmdProgram) -> list[LoweredPhase]:
    """The phases of a micro-batch, in an order in which all ranks may run them together.

    Raises UnsupportedError for a running statistic or a metric that a pipeline cannot move along.
    """
    plan = program.stages
    assert plan is not None
    return _Divided(program, plan, stage_actions(program)).phases()


class _Divided:
    """The nodes of a micro-batch, divided among the actions of a member."""

    def __init__(self, program: SpmdProgram, plan: StagePlan, actions: StageActions) -> None:
        self.program, self.plan, self.micro, self.steps = program, plan, actions.micro, actions
        self.order, self.backward = actions.order, actions.backward
        self.actions = {part: _Action() for part in self.order}
        self.members: dict[str, tuple[int, ...]] = {}
        """Value of some members -> these members."""
        self.part_of: dict[str, ChunkAction] = {}
        """Value of some members -> the action that makes it."""
        self.common = [node for node in actions.nodes if id(node) in actions.common]
        """Nodes that every action with a reader runs."""
        self._divide(actions)

    def _divide(self, actions: StageActions) -> None:
        for node in actions.nodes:
            place = node.sharding.on(PIPELINE)
            if transfers(node, to_all=True):
                self._to_all(node)
            elif transfers(node):
                self._transfer(node, actions.kind(node))
            elif id(node) not in actions.common and isinstance(place, OnMember):
                self._add(actions.part(node), node, (place.member,))

    def _add(self, part: ChunkAction, node: Node, members: tuple[int, ...]) -> None:
        self.actions[part].add(node)
        self.members.update(dict.fromkeys(node.outputs, members))
        self.part_of.update(dict.fromkeys(node.outputs, part))

    def _transfer(self, node: Node, kind: ActionKind) -> None:
        home, stage = (int(number) for number in node.attributes["stages"])
        sends, receives = (kind, self.plan.chunk(home)), (kind, self.plan.chunk(stage))
        if sends == receives:
            self._add(sends, node, (node.attributes["target"],))
            return
        self._add(sends, self._half(node, SEND, f"{node.outputs[0]}.sent"), ())
        self._add(receives, self._half(node, RECEIVE), (node.attributes["target"],))

    def _to_all(self, node: Node) -> None:
        """A value for all members: later stages receive ahead, in the forward."""
        value, result = node.inputs[0], node.outputs[0]
        home, last = int(node.attributes["stages"][0]), self.plan.chunks - 1
        later = self._later(node)
        shown = self.backward, last
        if not later:
            self._add(shown, self._half(node, SHOWN), ())
            return
        if self.part_of[value][0] is not ActionKind.FORWARD:
            raise UnsupportedError(
                f"{show(result)} is made by the backward of pipeline stage {home}, and later stages show it too",
                "leave the output out of the model, or leave out --micro-batches",
            )
        ahead = f"{result}.ahead"
        sends, receives = (ActionKind.FORWARD, self.plan.chunk(home)), (ActionKind.FORWARD, last)
        self._add(sends, self._half(node, AHEAD_SEND, f"{result}.sent"), ())
        self._add(receives, self._half(node, AHEAD_RECEIVE, ahead), later)
        half = self._half(node, SHOWN)
        half.inputs = [value, ahead]
        self._add(shown, half, ())

    def _later(self, node: Node) -> tuple[int, ...]:
        """The members with a later stage than the sender's, without the sender."""
        home, source = int(node.attributes["stages"][0]), node.attributes["source"]
        return tuple(sorted({*self.plan.placement[home + 1 :]} - {source}))

    def _half(self, node: Node, half: str, output: str = "") -> Node:
        copy = clone(node)
        copy.outputs = [output or node.outputs[0]]
        copy._attributes = {**node.attributes, "half": half, "later": self._later(node)}
        types = self.program.graph.types
        types[copy.outputs[0]] = types[node.outputs[0]]
        if half in (RECEIVE, AHEAD_RECEIVE):
            copy.inputs = []
        return copy

    def phases(self) -> list[LoweredPhase]:
        """The phases in order, each with the common nodes that it reads."""
        results = {part: dict[str, str]() for part in self.order}
        shown = self.backward, self.plan.chunks - 1
        for output, value in self.micro.items():
            results[self.part_of.get(value, shown)][output] = value
        readers: dict[str, list[ChunkAction]] = {}
        common: dict[ChunkAction, list[Node]] = {}
        ran, pairs = set[ChunkAction](), dict[_Pair, str]()
        for part, action in self.actions.items():
            ran.add(part)
            action.needed.update(results[part].values())
            common[part] = with_common(action.needed, self.common)
            for name, made_by in self.part_of.items():
                if made_by != part and name in action.needed:
                    if made_by not in ran:
                        self._refuse_late(name, part, made_by)
                    pairs[made_by, part, self.members[name]] = name
                    readers.setdefault(name, []).append(part)
        self._check_schedule(pairs)
        position = {node.first_output: number for number, node in enumerate(self.program.graph.nodes)}
        position |= {node.first_output: number for number, node in self._numbered_halves(position)}
        times, lowered = self.program.micro_steps, []
        for part, action in self.actions.items():
            nodes = self.steps.in_order(part[0], *(
                [(position[node.first_output], node) for node in some] for some in (action.nodes, common[part])
            ))  # fmt: skip
            saved = {name: self.members[name] for name, parts in readers.items() if part in parts}
            saved |= {name: self.members[name] for name in readers if self.part_of[name] == part}
            name = self.plan.phase(*part)
            lowered.append(phase_of(self.program, name, times, results[part], nodes, action.needed, saved))
        self._check_statistics(lowered)
        return lowered

    def _refuse_late(self, name: str, reader: ChunkAction, maker: ChunkAction) -> None:
        actions = [f"action {self.plan.phase(*part)} of a micro-batch" for part in (reader, maker)]
        raise InvariantError(f"{actions[0]} reads {name!r}, made later by {actions[1]}")

    def _check_schedule(self, pairs: Mapping[_Pair, str]) -> None:
        """Raise UnsupportedError where a schedule runs the reader of a value before the maker, which it may where a
        bucket joins gradients of several stages of a member. ``pairs``: maker and reader on members -> the value."""
        schedule = self.plan.schedule
        if schedule is None:
            return
        turns = [
            {run: turn for turn, run in enumerate(schedule.runs(member))} for member in range(len(schedule.members))
        ]
        for (maker, reader, members), name in pairs.items():
            phases = self.plan.phase(*maker), self.plan.phase(*reader)
            for member, micro_batch in product(members, range(schedule.micro_batches)):
                first_turn, second_turn = (turns[member][phase, micro_batch] for phase in phases)
                if first_turn > second_turn:
                    raise UnsupportedError(
                        f"schedule {schedule.name}: {phases[1]} of micro-batch {micro_batch} on member {member} reads "
                        f"{show(name)}, and runs before {phases[0]}, which makes it",
                        f"let {phases[0]} of each micro-batch run before {phases[1]}",
                    )

    def _numbered_halves(self, position: Mapping[str, int]) -> Iterable[tuple[int, Node]]:
        """The halves of transfers, at the places of the transfers."""
        for action in self.actions.values():
            for node in action.nodes:
                if "half" in node.attributes:
                    name = node.outputs[0].removesuffix(".sent").removesuffix(".ahead")
                    yield position[name], node

    def _check_statistics(self, lowered: Sequence[LoweredPhase]) -> None:
        """Raise UnsupportedError for a statistic that an action moves, and another one reads: actions of other
        micro-batches run in between. So is a statistic where forwards do not run in the order of micro-batches."""
        schedule = self.plan.schedule
        order = [] if schedule is None else schedule.forwards
        for state in self.program.states:
            if state.output not in self.micro:
                continue
            if schedule is not None and order != sorted(order):
                raise UnsupportedError(
                    f"schedule {schedule.name}: forwards run micro-batches in the order {order}, and the running "
                    f"statistic {show(state.input)} follows the order",
                    "number micro-batches in the order of their forwards",
                )
            uses = [
                phase.name for phase in lowered
                if state.input in phase.graph.inputs or state.output in phase.graph.outputs
            ]  # fmt: skip
            if len(uses) > 1:
                raise UnsupportedError(
                    f"the {uses[0]} and the {uses[-1]} of a micro-batch read the running statistic "
                    f"{show(state.input)}, which other micro-batches move in between",
                    "leave out --micro-batches, or the axis pp",
                )
