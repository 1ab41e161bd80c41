"""Recognise the rule of a parameter: follow the gradient to the input of the rule, then try formulas."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from gopt.analysis.isomorphism import ValueNumbers
from gopt.analysis.training import StateKind, TrainingGraph
from gopt.analysis.updates import UpdateMode, UpdateSubgraph
from gopt.ir.graph import Node
from gopt.ir.graph_index import walk
from gopt.ir.types import FLOATS
from gopt.offline.optimizer.evidence import Rule, fit_rule
from gopt.offline.optimizer.formulas import Fit, fit_update
from gopt.offline.optimizer.gradient_path import GradientPaths
from gopt.offline.optimizer.probe import Probe, UpdateFunction

_MOST_STATES = 4


class Recogniser:
    """Recognises the rules of one step, subgraph by subgraph; updates that are the same function are tried once. A
    one-element state read by an update, such as a separate step counter, is an operand of the function."""

    def __init__(self, training: TrainingGraph) -> None:
        self.training, self.probe = training, Probe(training)
        self.trials = self.probe.runs()
        self.paths = GradientPaths(training, self.probe, self.trials)
        self._known: dict[Hashable, tuple[UpdateSubgraph, Rule]] = {}
        self._numbers: dict[Hashable, int] = {}

    def rule(self, subgraph: UpdateSubgraph) -> Rule:
        """The rule of one subgraph."""
        path, number = self.paths.path(subgraph.parameter.tensor), subgraph.equivalence_class
        alike = number, path.flipped, path.end == subgraph.gradient
        if number < 0 or alike not in self._known:
            key = self._key(subgraph, path.end), path.flipped
            if key not in self._known:
                self._known[key] = subgraph, self._tried(subgraph)
            reference, rule = self._known[key]
            rule = replace(rule, step_size=self._counterpart(rule.step_size, reference, subgraph))
            if number < 0:
                return rule
            self._known[alike] = subgraph, rule
        return self._known[alike][1]

    def _tried(self, subgraph: UpdateSubgraph) -> Rule:
        states = [s for s in subgraph.states if s.kind in (StateKind.PARAMETER, StateKind.OPTIMIZER_STATE)]
        path = self.paths.path(subgraph.parameter.tensor)
        tensors = [state.tensor for state in states]
        names = [path.end, *tensors]
        update_fn = UpdateFunction(self.probe, names, [self.probe.ungated(state)[0] for state in states])
        fits: list[Fit] = []
        floats = all(self.training.graph.type_of(tensor).dtype in FLOATS for tensor in tensors)
        if floats and len(states) <= _MOST_STATES and update_fn.nodes:
            for scalars in self.trials:
                fit = fit_update(update_fn, scalars, names)
                if fit is None:
                    break
                fits.append(fit)
            else:
                rule = fit_rule(self.probe, self.trials, update_fn, fits)
                if rule is not None:
                    return replace(rule, flipped=rule.flipped != path.flipped)
        # Clips before an update without a known rule are not part of it.
        count = f"{len(states) - 1} state{'' if len(states) == 2 else 's'}" if len(states) > 1 else "no state"
        whole = subgraph.mode is UpdateMode.WHOLE
        suffix = " and norms of its own" if update_fn.reduces and not whole else ""
        return Rule(f"{'non-' if whole else ''}elementwise update with {count}{suffix}", recognised=False)

    def _key(self, subgraph: UpdateSubgraph, start: str) -> Hashable:
        """A key, equal for updates that are the same function: the gradient ``start``, behind casts and clips, and the
        states."""
        probe, graph = self.probe, self.training.graph
        positions = {
            name: position for position, name in enumerate((start, *(state.tensor for state in subgraph.states)))
        }

        def maker(name: str) -> Node | None:
            return None if name in positions or probe.owners.reduced.get(name) == "" else probe.producers.get(name)

        def leaf(name: str) -> Hashable:
            """An operand of the function by position and type, a small constant by value, else a value by name."""
            type = graph.type_of(name)
            if name in positions or name in probe.updated:
                position = positions.setdefault(name, len(positions))
                return "operand", position, str(type) if probe.single(name) else type.dtype
            if probe.is_constant(name) and (value := probe.constant(name)) is not None:
                return "constant", type.dtype, value.shape, value.tobytes()
            return "value", name

        numbers = ValueNumbers(maker, leaf, numbers=self._numbers)
        kinds = tuple((state.kind, graph.type_of(state.tensor).dtype) for state in subgraph.states)
        return subgraph.mode, kinds, *(numbers.of_value(state.updated) for state in subgraph.states)

    def _counterpart(self, name: str, reference: UpdateSubgraph, target: UpdateSubgraph) -> str:
        """Return the value of ``target`` that corresponds to ``name``, a value of ``reference``; both are one
        function."""
        if reference is target or self.probe.inputs_behind(name) <= self.probe.hyper:
            return name

        def following(pair: tuple[str, str]) -> Sequence[tuple[str, str]]:
            nodes = [self.probe.producers.get(value) for value in pair]
            ends = pair[0] == pair[1] or nodes[0] is None or nodes[1] is None
            return () if ends else [*zip(*(node.inputs for node in nodes if node is not None))]

        pairs = walk([(s.updated, o.updated) for s, o in zip(reference.states, target.states)], following)
        return next((theirs for mine, theirs in pairs if mine == name), name)
