"""Place every node on a stage of the pipeline, and send values from stage to stage."""

from __future__ import annotations

from dataclasses import dataclass

from gopt.ir.phase import complete_phases
from gopt.passes.base import Pass
from gopt.passes.stage_transfers.follow import follow
from gopt.passes.stage_transfers.pack import pack
from gopt.passes.stage_transfers.place import NAME, StagePlacement
from gopt.passes.stage_transfers.sums import sum_on_stages
from gopt.records.mesh import PIPELINE
from gopt.records.pass_facts import PassOptions, StageTransferFacts
from gopt.spmd.pass_records import PassResult
from gopt.spmd.program import SpmdProgram


@dataclass(frozen=True, kw_only=True)
class StageTransferOptions(PassOptions):
    """The pass has no options."""


def stage_transfers(program: SpmdProgram, options: StageTransferOptions) -> PassResult:
    """Place the nodes of a pipeline on stages by data flow; send values to the other stages with a reader, once each.

    Requires: the pass pipeline, and all passes that emit updates. A node of the forward goes to the latest stage of
    the operands, a node of the backward to the latest stage with all operands, or else to the earliest stage of an
    operand, a node of the update to the stage with most bytes of the operands. Nodes of inputs and constants alone run
    on all stages. On the wire: each value once for each other stage that reads it; views are made there again. What the
    update of a stage hands to another stage travels together.
    """
    if program.stages is None:
        return PassResult(note=f"the mesh has no axis {PIPELINE}")
    complete_phases(program.graph.nodes)
    placement = StagePlacement(program, program.stages)
    placement.place()
    follow(placement)
    removed = sum_on_stages(program, program.stages)
    joined = pack(program)
    nodes = tuple(placement.counts[stage] for stage in range(program.stages.stages))
    return PassResult(removed=removed, facts=StageTransferFacts(transfers=placement.transfers - joined, nodes=nodes))


PASS = Pass(
    NAME, StageTransferOptions, stage_transfers,
    after=("pipeline", "tensor-parallel", "shard", "refold-optimizers", "statistics"), facts=StageTransferFacts,
    axis=PIPELINE,
)  # fmt: skip
