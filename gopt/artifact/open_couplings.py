"""Where samples of different ranks still meet in a sharded step."""

from __future__ import annotations

from gopt.analysis.coupling import Coupling, analyse_couplings, without_advice
from gopt.analysis.coupling.step_couplings import couplings_as_run, other_sums
from gopt.analysis.coupling.synchronise import synchronise
from gopt.analysis.loss_reduction import LossRule
from gopt.analysis.training import TrainingGraph
from gopt.errors import UnsupportedError
from gopt.records.mesh import AxisKind
from gopt.spmd.program import SpmdProgram

SYNC = "--statistics sync"


def open_couplings(step: SpmdProgram) -> tuple[Coupling, ...]:
    """The remaining couplings of a sharded step; none if a single micro-step of a single rank sees all the data."""
    group = step.mesh.data_group
    if (group is None or step.mesh.size(group) == 1) and step.micro_steps == 1:
        return ()
    couplings = couplings_as_run(step.source, step.loss_reduction, step.synchronised, step.reductions.values())
    advised = any(SYNC in coupling.exact for coupling in couplings)
    return couplings if not advised or _may_synchronise(step) else without_advice(couplings, SYNC)


def _may_synchronise(step: SpmdProgram) -> bool:
    """Return whether ``--statistics sync`` is allowed: not with micro-steps, not with weights of ranks or another
    reduction than the gradients', not with parts of samples, and not if refused."""
    reduction = step.loss_reduction
    parts = any(size > 1 and step.mesh.kind(name) is AxisKind.PART for name, size in step.mesh.axes)
    more_sums = any(other_sums(analyse_couplings(step.source).readings, reduction))
    if step.micro_steps > 1 or reduction.rule is LossRule.WEIGHTED or parts or more_sums:
        return False
    return step.source.once(SYNC, lambda: _is_synchronised(step.source))


def _is_synchronised(training: TrainingGraph) -> bool:
    """Return whether means over ranks give the step of a large batch."""
    try:
        synchronise(training, ranks=2)
    except UnsupportedError:
        return False
    return True
