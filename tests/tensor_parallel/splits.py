"""Fixtures split along ``tp``, in logical types, for tests of the modules that do it."""

from __future__ import annotations

from dataclasses import dataclass

from helpers import source

from gopt.analysis.training import TrainingGraph
from gopt.records.placements import Placement
from gopt.tensor_parallel.choose import choose
from gopt.tensor_parallel.forward import Forward
from gopt.tensor_parallel.propagate import propagate
from gopt.tensor_parallel.propagated import Propagated
from gopt.tensor_parallel.sizes import Sizes
from gopt.tensor_parallel.tokens import Tokens


@dataclass(frozen=True)
class Split:
    """A step, the placements of its states, and what propagation made of it."""

    training: TrainingGraph
    states: dict[str, Placement]
    made: Propagated


def seeds(training: TrainingGraph, members: int) -> dict[str, Placement]:
    """Placements of the parameters that are chosen, and of states of their shape."""
    chosen, types = choose(training, members, Sizes.BALANCED), training.graph.types
    return {
        state.tensor: chosen[of].placement for state in training.states
        if (of := state.of or state.tensor) in chosen and types[of].shape == types[state.tensor].shape
    }  # fmt: skip


def split(name: str, members: int = 2, *, sequence: bool = False) -> Split:
    return split_training(source(name).training, members, sequence=sequence)


def split_training(training: TrainingGraph, members: int = 2, *, sequence: bool = False) -> Split:
    tokens = Tokens.streams(Forward(training), members, Sizes.BALANCED) if sequence else None
    states = seeds(training, members)
    return Split(training, states, propagate(training, training.graph.copy(), "tp", members, states, tokens))
