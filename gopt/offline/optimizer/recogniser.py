"""Recognise the rule that updates a parameter: follow the gradient to the input of the rule, then try rules."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from gopt.analysis.training import StateKind, TrainingGraph
from gopt.analysis.updates import UpdateMode, UpdateSubgraph
from gopt.ir.types import FLOATS
from gopt.offline.optimizer.evidence import Rule, fit_rule
from gopt.offline.optimizer.formulas import Fit, fit_update
from gopt.offline.optimizer.gradient_path import GradientPaths
from gopt.offline.optimizer.predicates import strip_predicates
from gopt.offline.optimizer.probe_harness import ProbeHarness
from gopt.offline.optimizer.update_classes import UpdateClass, UpdateClasses
from gopt.offline.optimizer.update_function import UpdateFunction

_MOST_STATES = 4


class Recogniser:
    """Recognises the rules of one step, subgraph by subgraph; what subgraphs share is run once."""

    def __init__(self, training: TrainingGraph) -> None:
        self.training = training
        self.harness = ProbeHarness(training)
        self.trials = self.harness.runs()
        self.paths = GradientPaths(training, self.harness, self.trials)
        self._classes = UpdateClasses(self.harness)
        self._known: dict[tuple[Hashable, bool], tuple[UpdateClass, Rule]] = {}

    def rule(self, subgraph: UpdateSubgraph) -> Rule:
        """The rule of one subgraph, tried once for all that are the same function of their own values."""
        path = self.paths.path(subgraph.parameter.tensor)
        found = self._classes.of(subgraph, path.end)
        key = found.key, path.flipped
        if key not in self._known:
            self._known[key] = found, self._tried(subgraph)
        first, rule = self._known[key]
        return replace(rule, step_size=first.counterpart(rule.step_size, found))

    def _tried(self, subgraph: UpdateSubgraph) -> Rule:
        states = [s for s in subgraph.states if s.kind in (StateKind.PARAMETER, StateKind.OPTIMIZER_STATE)]
        path = self.paths.path(subgraph.parameter.tensor)
        tensors = [state.tensor for state in states]
        update_fn = UpdateFunction(
            self.harness, [path.end, *tensors], [strip_predicates(self.harness, state)[0] for state in states]
        )
        fallback = _unknown(subgraph, update_fn, len(states) - 1)
        floats = all(self.training.graph.type_of(tensor).dtype in FLOATS for tensor in tensors)
        if not floats or len(states) > _MOST_STATES or not update_fn.nodes:
            return fallback
        fits: list[Fit] = []
        for scalars in self.trials:
            found = fit_update(update_fn, scalars, [path.end, *tensors])
            if found is None:
                return fallback
            fits.append(found)
        rule = fit_rule(self.harness, self.trials, update_fn, fits)
        if rule is None:
            return fallback
        return replace(rule, flipped=rule.flipped != path.flipped)


def _unknown(subgraph: UpdateSubgraph, update_fn: UpdateFunction, states: int) -> Rule:
    """Describe an update without a known rule; clips before it are not part of it."""
    count = f"{states} state{'' if states == 1 else 's'}" if states else "no state"
    if subgraph.mode is UpdateMode.WHOLE:
        return Rule(f"non-elementwise update with {count}", recognised=False)
    own = " and norms of its own" if update_fn.reduces else ""
    return Rule(f"elementwise update with {count}{own}", recognised=False)
