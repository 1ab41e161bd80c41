"""Outputs made of an input of the same type alone: the new value of a state, or a shown value of a fed input."""

from __future__ import annotations

from collections.abc import Mapping

from gopt.analysis.counters import counts_steps
from gopt.analysis.open_pairs import OpenPairsError
from gopt.analysis.role_hints import others
from gopt.analysis.role_map import RoleMap
from gopt.analysis.training import StateKind, TrainingGraph
from gopt.ir.graph_index import GraphIndex, copied_from

_DOUBTED = (StateKind.STATISTIC, StateKind.PARAMETER, StateKind.SCALAR)


def refuse_unchanged(index: GraphIndex, pairs: Mapping[str, str], roles: RoleMap) -> None:
    """Raise UnsupportedError for an output that is an input without a stored value, unchanged, and no declared state.

    A batch taken for a state would be the same on all ranks. ``pairs``: output -> replaced input."""
    for output, name in pairs.items():
        if name in index.graph.initializers or name in roles.states:
            continue
        if copied_from(index, output) == name:
            raise OpenPairsError(
                f"output {output!r} is input {name!r} unchanged, which has no stored value: the data flow does not say "
                "whether it is a state or fed anew in each step",
                {name: output},
                shown=[output],
                fed=[name],
                rather_fed=True,
            )


def refuse_unvalued(training: TrainingGraph, roles: RoleMap) -> None:
    """Raise UnsupportedError for a state without gradient and stored value where others have values, unless declared.

    A mask or an error by element, shown of a batch, has the data flow of a statistic, or of a frozen parameter. The
    rate in effect, shown of the fed rate, has the data flow of a schedule."""
    initializers = training.graph.initializers
    if not any(state.tensor in initializers for state in training.states):
        return
    valued = {*initializers, *roles.states, *training.gradients}
    doubted = [state for state in training.states if state.kind in _DOUBTED and state.tensor not in valued]
    if doubted:
        index = GraphIndex(training.graph)
        doubted = [state for state in doubted if not counts_steps(index, state.tensor, state.updated)]
    if not doubted:
        return
    doubt = doubted[0]
    scalar = doubt.kind is StateKind.SCALAR
    pairs = {state.tensor: state.updated for state in doubted if (state.kind is StateKind.SCALAR) is scalar}
    raise OpenPairsError(
        f"input {doubt.tensor!r}{others(len(pairs) - 1, 'input')} has no stored value, as other states have, and "
        f"output {doubt.updated!r} has the type of its new value: the data flow does not say whether it is a state or "
        "fed anew in each step",
        pairs,
        shown=pairs.values() if scalar else (),
        fed=() if scalar else pairs,
        rather_fed=True,
    )
