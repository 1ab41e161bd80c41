"""Where samples of different ranks still meet in a sharded step."""

from __future__ import annotations

from gopt.analysis.coupling import Coupling, analyse_couplings, without_advice
from gopt.analysis.coupling.step_couplings import couplings_as_run, other_sums
from gopt.analysis.loss_reduction import LossRule
from gopt.program import SpmdProgram
from gopt.records.mesh import AxisKind


def open_couplings(step: SpmdProgram) -> tuple[Coupling, ...]:
    """The couplings that a sharded step still has; none where one micro-step of one rank sees all the data."""
    group = step.mesh.data_group
    if (group is None or step.mesh.size(group) == 1) and step.micro_steps == 1:
        return ()
    found = couplings_as_run(step.source, step.loss_reduction, step.synchronised, step.reductions.values())
    return found if _may_synchronise(step) else without_advice(found, "--statistics sync")


def _may_synchronise(step: SpmdProgram) -> bool:
    """Return whether ``--statistics sync`` may be taken: not with micro-steps, not with weights of ranks or another
    reduction than the gradients have, and not where ranks have parts of samples."""
    asked = step.loss_reduction
    parts = any(size > 1 and step.mesh.kind(name) is AxisKind.PART for name, size in step.mesh.axes)
    other = any(other_sums(analyse_couplings(step.source).readings, asked))
    return step.micro_steps == 1 and asked.rule is not LossRule.WEIGHTED and not parts and not other
