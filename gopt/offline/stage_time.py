"""The time and the memory of micro-batches on pipeline stages: actions timed apart, then the schedule simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gopt.lower.phases import UPDATE, LoweredPhase, phases
from gopt.offline.step_simulation import ComputeStream, StepSimulation
from gopt.offline.step_time import Clock, Machine, StepTime, joined, total
from gopt.schedules.actions import ActionKind, Schedule, StageAction
from gopt.schedules.simulation import Costs, simulate
from gopt.spmd.program import SpmdProgram


@dataclass(frozen=True, slots=True)
class ActionTimes:
    """The actions of a micro-batch. ``parts``: the work of each; ``transfers``: seconds on the link behind an action;
    ``lowered``: all phases."""

    parts: Mapping[StageAction, ComputeStream]
    transfers: Mapping[StageAction, float]
    lowered: Sequence[LoweredPhase]


class StagedStep:
    """A step on pipeline stages with several micro-batches, in the order of schedules with the same placement and the
    same kinds of actions."""

    def __init__(
        self, program: SpmdProgram, machine: Machine, coordinates: Mapping[str, int], schedule: Schedule
    ) -> None:
        self.program, self.device = program, machine.device
        self.clock = Clock(ordered(program, schedule), machine, coordinates)
        self._times = self._timed(phases(program), schedule)
        self._update = self.clock.timed(next(phase for phase in self._times.lowered if phase.name == UPDATE))

    def time(self, schedule: Schedule) -> StepTime:
        """The time of a step in the order of a schedule: the micro-batches, then the update of each member."""
        times = self._times
        update = StepSimulation(self.clock.members, self.clock.prices)
        update.streams = scheduled(schedule, times.parts, times.transfers)
        self.clock.add(update, self._update)
        return total(update.streams, self.device)

    def phases(self, micro_batches: int) -> list[LoweredPhase]:
        """The phases of a step of so many micro-batches."""
        lowered = self._times.lowered
        return [phase if phase.name == UPDATE else replace(phase, times=micro_batches) for phase in lowered]

    def _timed(self, lowered: Sequence[LoweredPhase], schedule: Schedule) -> ActionTimes:
        plan = self.program.stages
        assert plan is not None
        part_of = {plan.phase(kind, chunk): (kind, chunk) for kind in ActionKind for chunk in range(plan.chunks)}
        stage_at = {(member, plan.chunk(stage)): stage for stage, member in enumerate(schedule.placement)}
        parts: dict[StageAction, ComputeStream] = {}
        transfers: dict[StageAction, float] = {}
        for phase in lowered:
            if phase.name != UPDATE:
                simulation = self.clock.run(phase, apart=True)
                kind, chunk = part_of[phase.name]
                for member, stream in enumerate(simulation.streams):
                    if (member, chunk) in stage_at:
                        parts[kind, stage_at[member, chunk]] = stream
                        transfers[kind, stage_at[member, chunk]] = simulation.sent[member]
        return ActionTimes(parts, transfers, lowered)


def ordered(program: SpmdProgram, schedule: Schedule) -> SpmdProgram:
    """A program on stages, set to the order of a schedule."""
    assert program.stages is not None
    program.stages, program.micro_steps = replace(program.stages, schedule=schedule), schedule.micro_batches
    return program


def scheduled(
    schedule: Schedule, parts: Mapping[StageAction, ComputeStream], transfers: Mapping[StageAction, float]
) -> list[ComputeStream]:
    """The streams of all members at the end of their last actions."""
    costs = Costs({part: stream.clock for part, stream in parts.items()}, transfers=transfers)
    streams = []
    for row in simulate(schedule, costs).slots:
        stream = joined([parts[slot.action.of_stage] for slot in row])
        stream.clock = row[-1].end if row else 0.0
        streams.append(stream)
    return streams
