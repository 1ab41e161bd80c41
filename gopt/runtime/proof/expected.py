"""What a step should give: local gradients of every batch by the source, then its own update of their mean."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gopt.analysis.coupling.synchronise import Shared
from gopt.analysis.loss_reduction import LossReduction, Rule
from gopt.analysis.training import Kind, Training
from gopt.mesh import Mesh
from gopt.runtime.program import Program
from gopt.runtime.proof.compare import Values
from gopt.runtime.proof.reference import equal_members, local_graph, update_graph
from gopt.runtime.proof.together import run_together, with_means
from gopt.runtime.proof.variants import Variant
from gopt.runtime.session import SessionCache


class Expected:
    """The source cut at its gradients; ``call`` answers the collectives that it holds itself."""

    def __init__(
        self, training: Training, mesh: Mesh, cache: SessionCache, reduction: LossReduction = LossReduction(),
        shared: Shared = Shared(),
    ) -> None:  # fmt: skip
        self.training = training
        self.reduction = reduction
        self.shared = shared
        self.call = equal_members(mesh)
        self.gradients = set(training.gradients.values())
        self.marked = next(iter(training.gradients.values()))
        """The gradient that an infinity is put into."""
        local = local_graph(training, reduction.value)
        self._local = Program(local if shared == Shared() else with_means(local, shared), cache)
        self._update = Program(update_graph(training), cache)

    def step(
        self, variant: Variant, states: Values, settings: Values, batches: Sequence[Sequence[Values]]
    ) -> tuple[Values, list[list[np.ndarray]]]:
        """One step of the source on the mean gradient of all batches: ``batches`` and losses by micro-step and rank."""
        training = self.training
        statistics = [state for state in training.states if state.kind is Kind.STATISTIC]
        held = [dict(states) for _ in batches[0]]
        local: dict[str, list[np.ndarray]] = {name: [] for name in training.gradients.values()}
        losses, weights = [], []
        shown: dict[str, list[np.ndarray]] = {name: [] for name in training.shared}
        for turn in batches:
            outputs = self._locals([{**own, **settings, **batch} for own, batch in zip(held, turn)])
            losses.append([np.asarray(out[training.loss], np.float64) for out in outputs])
            weights += [float(np.asarray(out[self.reduction.value]).item()) for out in outputs if self.reduction.value]
            for made, own in training.shared.items():
                shown[made] += [np.asarray(out[own]) for out in outputs]
            for r, out in enumerate(outputs):
                held[r].update({state.tensor: np.asarray(out[state.updated]) for state in statistics})
                for name, found in local.items():
                    found.append(variant.vary(np.asarray(out[name]), name == self.marked and r == len(turn) - 1))
        means = {name: _put_together(self.reduction, found, weights) for name, found in local.items()}
        means |= {name: _mean(found) for name, found in shown.items()}
        updated = self._run(self._update, {**states, **settings, **means})
        new = {}
        for state in training.states:
            if state.kind is Kind.STATISTIC:
                new[state.tensor] = _mean([own[state.tensor] for own in held])
            else:
                new[state.tensor] = np.asarray(updated[state.updated])
        return new, losses

    def _locals(self, values: Sequence[Values]) -> list[Values]:
        """Run the local part of every data rank: one by one, or together where they share values on the way."""
        if self.shared == Shared():
            return [self._run(self._local, each) for each in values]
        inputs = self._local.graph.inputs
        feeds = [{name: value for name, value in each.items() if name in inputs} for each in values]
        return run_together(self._local, feeds, self.call)

    def _run(self, program: Program, values: Values) -> Values:
        """Run the source, as one rank, on those of the values that it reads."""
        return program.run({name: values[name] for name in program.graph.inputs if name in values}, self.call)


def _put_together(reduction: LossReduction, values: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    """What the update reads of the gradients of all ranks and micro-steps. What weighs nothing is left out."""
    if reduction.rule is Rule.MEAN:
        return _mean(values)
    if reduction.rule is Rule.SUM:
        weights = [1.0] * len(values)
    with np.errstate(all="ignore"):
        terms = [weight * each.astype(np.float64) for each, weight in zip(values, weights) if weight]
        total = np.sum(terms, axis=0) if terms else np.zeros(values[0].shape)
        over = sum(weights) if reduction.rule is Rule.WEIGHTED else 1.0
        result: np.ndarray = np.asarray(total / (over or 1.0)).astype(values[0].dtype)
    return result


def _mean(values: Sequence[np.ndarray]) -> np.ndarray:
    with np.errstate(all="ignore"):
        mean: np.ndarray = np.mean([each.astype(np.float64) for each in values], axis=0).astype(values[0].dtype)
    return mean
