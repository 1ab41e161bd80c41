"""What a step should give: local gradients of every batch by the source, then its own update of their mean."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from gopt.analysis.training import Kind, Training
from gopt.errors import UnsupportedError
from gopt.mesh import Mesh
from gopt.runtime.program import Program
from gopt.runtime.proof.compare import Values
from gopt.runtime.proof.gates import Gate, watched
from gopt.runtime.proof.reference import equal_members, local_graph, update_graph
from gopt.runtime.proof.variants import Variant
from gopt.runtime.session import SessionCache

Batches = Sequence[Sequence[Values]]
"""Inputs by micro-step and by data rank."""


@dataclass(frozen=True, slots=True)
class Local:
    """What the batches give before anything is reduced, by micro-step and data rank.

    ``gradients``: by name, as the variant wants them; ``statistics``: the new ones of each data rank at the end.
    """

    losses: list[list[np.ndarray]]
    gradients: list[list[Values]]
    statistics: list[Values]


@dataclass(frozen=True, slots=True)
class Step:
    """A step of the source: its new ``states``, what the batches gave, and what the update's ``gates`` showed."""

    states: Values
    local: Local
    means: Values
    gates: Values


class Expected:
    """The source cut at its gradients; ``call`` answers the collectives that it holds itself."""

    def __init__(self, training: Training, mesh: Mesh, cache: SessionCache, gates: Sequence[Gate] = ()) -> None:
        self.training = training
        self.call = equal_members(mesh)
        self.gradients = set(training.gradients.values())
        self.marked = next(iter(training.gradients.values()))
        """The gradient that an infinity is put into."""
        self.statistics = [state for state in training.states if state.kind is Kind.STATISTIC]
        update = update_graph(training)
        self.watched = watched(update, gates)
        self._local = Program(local_graph(training), cache)
        self._update = Program(update_graph(training, self.watched), cache)

    def refuse_inputs(self, drawn: Iterable[str]) -> None:
        """Raise UnsupportedError where the update draws random numbers of its own: ranks could not agree on them."""
        name = next((name for name in drawn if name in self._update.graph.inputs), None)
        if name is not None:
            raise UnsupportedError(
                f"the update reads {name.removesuffix('.drawn')!r}, which is random: no reference has its draws",
                "make the random numbers an input of the step",
            )

    def step(self, variant: Variant, states: Values, settings: Values, batches: Batches) -> Step:
        """One step of the source on the mean gradient of all batches."""
        local = self.local(variant, states, settings, batches)
        return self.finish(states, settings, local)

    def local(self, variant: Variant, states: Values, settings: Values, batches: Batches) -> Local:
        """Losses, gradients and statistics of every batch; micro-steps hand their statistics on."""
        held = [dict(states) for _ in batches[0]]
        losses, gradients = [], []
        for turn in batches:
            outputs = [self._run(self._local, {**own, **settings, **batch}) for own, batch in zip(held, turn)]
            losses.append([np.asarray(out[self.training.loss], np.float64) for out in outputs])
            for own, out in zip(held, outputs):
                own.update({state.tensor: np.asarray(out[state.updated]) for state in self.statistics})
            gradients.append([self.varied(variant, out, r == len(turn) - 1) for r, out in enumerate(outputs)])
        return Local(losses, gradients, [{s.tensor: own[s.tensor] for s in self.statistics} for own in held])

    def varied(self, variant: Variant, made: Values, last: bool) -> Values:
        """Those of some values that are gradients, as the variant wants them; ``last``: of the last data rank."""
        return {
            name: variant.vary(np.asarray(made[name]), name == self.marked and last)
            for name in dict.fromkeys(self.training.gradients.values())
            if name in made
        }

    def finish(self, states: Values, settings: Values, local: Local, means: Values | None = None) -> Step:
        """The source's own update of the mean of all gradients, or of ``means``."""
        if means is None:
            means = self.means(local)
        updated = self._run(self._update, {**states, **settings, **means})
        new = {}
        for state in self.training.states:
            if state.kind is Kind.STATISTIC:
                new[state.tensor] = mean_of([own[state.tensor] for own in local.statistics])
            else:
                new[state.tensor] = np.asarray(updated[state.updated])
        return Step(new, local, means, {name: np.asarray(updated[name]) for name in self.watched})

    def means(self, local: Local) -> Values:
        """Every gradient's mean over all batches."""
        every = [values for turn in local.gradients for values in turn]
        return {name: mean_of([values[name] for values in every]) for name in every[0]}

    def _run(self, program: Program, values: Values) -> Values:
        """Run the source, as one rank, on those of the values that it reads."""
        return program.run({name: values[name] for name in program.graph.inputs if name in values}, self.call)


def mean_of(values: Sequence[np.ndarray]) -> np.ndarray:
    """In float64, rounded once."""
    with np.errstate(all="ignore"):
        mean: np.ndarray = np.mean([each.astype(np.float64) for each in values], axis=0).astype(values[0].dtype)
    return mean
