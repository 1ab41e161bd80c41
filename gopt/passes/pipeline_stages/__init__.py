"""Cut a step into the stages of a pipeline (axis pp): the stage of every parameter and of its states."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from gopt.passes.base import Pass
from gopt.passes.pipeline_stages.choose import check_stages, parameter_stages
from gopt.records.pass_facts import PassOptions, PipelineFacts
from gopt.spmd.pass_records import PassResult
from gopt.spmd.program import SpmdProgram
from gopt.spmd.stage_plan import PIPELINE, StagePlan


@dataclass(frozen=True, kw_only=True)
class PipelineOptions(PassOptions):
    """The options of pipeline divide the step into stages."""

    stages: str = ""
    """The text gives the parameters of each stage by patterns, such as `wte+h.0.*|h.1.*|ln_f*`; a parameter
    without a pattern goes with the parameter read before. The text is empty where gopt cuts the forward into stages of
    about equal cost with few bytes between stages."""


def pipeline(program: SpmdProgram, options: PipelineOptions) -> PassResult:
    """Choose the stage of every parameter along the axis pp; gradient, update and states follow.

    Requires: no sharding yet. The forward is cut in the order of first readers of parameters; a parameter read by
    several stages belongs to the first. The pass stage-transfers places all nodes accordingly.
    """
    members = dict(program.mesh.axes).get(PIPELINE, 1)
    if members == 1:
        return PassResult(note=f"the mesh has no axis {PIPELINE}")
    training = program.source
    stages = parameter_stages(training, members, options.stages)
    parameters = Counter(stages[state.tensor] for state in training.parameters if state.tensor in stages)
    check_stages(parameters, members)
    program.stages = StagePlan(program.mesh, tuple(range(members)), stages)
    elements = Counter[int]()
    for state in training.parameters:
        if state.tensor in stages:
            elements[stages[state.tensor]] += training.graph.types[state.tensor].elements
    return PassResult(facts=PipelineFacts(
        parameters=tuple(parameters[stage] for stage in range(members)),
        elements=tuple(elements[stage] for stage in range(members)),
    ))  # fmt: skip


def needed(program: SpmdProgram) -> str:
    """Return the reason why a step needs this pass, or ''."""
    stages = dict(program.mesh.axes).get(PIPELINE, 1)
    return f"nothing else cuts the step into {stages} stages" if stages > 1 else ""


PASS = Pass("pipeline", PipelineOptions, pipeline, needed=needed, facts=PipelineFacts, axis=PIPELINE)
