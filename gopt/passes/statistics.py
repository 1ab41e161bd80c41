"""Keep statistics (BatchNorm's running mean and variance) equal on all ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from gopt.analysis.spmd import Step
from gopt.analysis.training import Kind, State
from gopt.graph.edit import Draft
from gopt.graph.model import COMM
from gopt.passes.base import Pass
from gopt.report import Change


class Keep(str, Enum):
    """What becomes of the ranks' statistics after a step."""

    MEAN = "mean"
    LOCAL = "local"


@dataclass(frozen=True, kw_only=True)
class Options:
    """``mean`` averages over the ranks that see different data, ``local`` leaves them apart."""

    statistics: Keep = Keep.MEAN


def statistics(step: Step, options: Options) -> Change:
    """Average the new statistics over the ranks that see different data, in one packed call per dtype.

    Guarantees: replicated statistics are equal after every step, or marked local in the manifest. On the wire:
    2(N-1)/N of their bytes.
    """
    group = step.mesh.data_group
    states = [state for state in step.training.states if state.kind is Kind.STATISTIC]
    if not states or group is None or step.mesh.size(group) == 1:
        return Change(note="no statistics" if not states else "one rank")
    if options.statistics is Keep.LOCAL:
        names = {state.tensor for state in states}
        step.hold([replace(h, local=True) if h.input in names else h for h in step.holdings])
        return Change(facts={"local": len(states)})
    draft = Draft(step.graph, "statistics")
    by_dtype: dict[str, list[State]] = {}
    for state in states:
        by_dtype.setdefault(step.graph.types[state.updated].dtype, []).append(state)
    makers, readers = step.graph.producers(), step.graph.readers()
    for number, held in enumerate(by_dtype.values()):
        inputs = []
        for place, state in enumerate(held):
            name, local = state.updated, f"gopt.statistics.b{number}.local{place}"
            draft.rename_output(makers[name], name, local)
            for reader in readers.get(name, ()):
                draft.rewire(reader, name, local)
            if step.micro_steps > 1:
                step.carried[state.tensor] = local  # the mean is taken of what the last micro-step left
            inputs.append(state.tensor if step.micro_steps > 1 else local)
        types = {state.updated: step.graph.types[state.updated] for state in held}
        draft.add("AllReduce", inputs, types, domain=COMM, attributes={"group": group, "reduce": "mean"})
    draft.finish()
    return Change(facts={"averaged": len(states), "calls": len(by_dtype)})


def needed(step: Step) -> str:
    """Why a step cannot do without this pass."""
    held = next((state.tensor for state in step.training.states if state.kind is Kind.STATISTIC), None)
    if held is None or step.mesh.data_ranks == 1:
        return ""
    return f"statistic {held!r} follows each rank's own data, and nothing else averages it or marks it local"


PASS = Pass("statistics", Options, statistics, needed=needed)
