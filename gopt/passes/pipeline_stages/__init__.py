"""Cut a step into the stages of a pipeline (axis pp): the stage of every parameter and of its states."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from gopt.errors import OptionError
from gopt.passes.base import Pass
from gopt.passes.pipeline_stages.choose import check_stages, parameter_stages
from gopt.records.mesh import PIPELINE
from gopt.records.pass_facts import PassOptions, PipelineFacts
from gopt.schedules.actions import Schedule
from gopt.schedules.builders import build_schedule, is_name
from gopt.schedules.schedule_file import read_schedule
from gopt.schedules.simulation import simulate
from gopt.spmd.pass_records import PassResult
from gopt.spmd.program import SpmdProgram
from gopt.spmd.stage_plan import StagePlan
from gopt.text.sanitize import show


@dataclass(frozen=True, kw_only=True)
class PipelineOptions(PassOptions):
    """The options of pipeline divide the step into stages."""

    stages: str = ""
    """The text gives the parameters of each stage by patterns, such as `wte+h.0.*|h.1.*|ln_f*`; a parameter
    without a pattern goes with the parameter read before. The text is empty where gopt cuts the forward into stages of
    about equal cost with few bytes between stages."""
    schedule: str = ""
    """The order of micro-batches is gpipe, 1f1b, interleaved:V, zb-h1, zb-v, or the path of a file in the form of
    schedule.txt; empty: 1f1b where a step has several micro-batches."""


def pipeline(program: SpmdProgram, options: PipelineOptions) -> PassResult:
    """Choose the stage of every parameter along the axis pp; gradient, update and states follow.

    Requires: no sharding yet. The forward is cut in the order of first readers of parameters; a parameter read by
    several stages belongs to the first. The pass stage-transfers places all nodes accordingly.
    """
    members = program.mesh.along(PIPELINE)
    if members == 1:
        return PassResult(note=f"the mesh has no axis {PIPELINE}")
    training, schedule = program.source, _schedule(options.schedule, members, program.micro_steps)
    placement = tuple(range(members)) if schedule is None else schedule.placement
    stages = parameter_stages(training, len(placement), options.stages)
    parameters = Counter(stages[state.tensor] for state in training.parameters if state.tensor in stages)
    check_stages(parameters, len(placement))
    program.stages = StagePlan(program.mesh, placement, stages, schedule)
    elements = Counter[int]()
    for state in training.parameters:
        if state.tensor in stages:
            elements[stages[state.tensor]] += training.graph.types[state.tensor].elements
    return PassResult(facts=PipelineFacts(
        parameters=tuple(parameters[stage] for stage in range(len(placement))),
        elements=tuple(elements[stage] for stage in range(len(placement))),
    ))  # fmt: skip


def _schedule(text: str, members: int, micro_batches: int) -> Schedule | None:
    """The schedule of a step, run without the model; None of a step with a single micro-batch."""
    if micro_batches == 1:
        if text:
            raise OptionError(
                f"pipeline: schedule {show(text)} orders micro-batches, and a step has one", "add --micro-batches 4"
            )
        return None
    if not text or is_name(text):
        schedule = build_schedule(text or "1f1b", members, micro_batches)
    else:
        schedule = read_schedule(text)
        sizes = {"members": (len(schedule.members), members), "micro-batches": (schedule.micro_batches, micro_batches)}
        for what, (size, due) in sizes.items():
            if size != due:
                raise OptionError(
                    f"schedule {show(text)} is for {size} {what}, and there are {due}",
                    "give the axis pp and --micro-batches the sizes of the file",
                )
    simulate(schedule)
    return schedule


def needed(program: SpmdProgram) -> str:
    """Return the reason why a step needs this pass, or ''."""
    stages = program.mesh.along(PIPELINE)
    return f"nothing else cuts the step into {stages} stages" if stages > 1 else ""


PASS = Pass("pipeline", PipelineOptions, pipeline, needed=needed, facts=PipelineFacts, axis=PIPELINE)
