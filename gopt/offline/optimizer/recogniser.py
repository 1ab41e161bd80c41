"""Which rule updates a parameter: from its gradient to where the rule itself begins, then the rule by trial."""

from __future__ import annotations

from gopt.analysis.training import Kind, Phase, Training
from gopt.analysis.updates import Cone, Mode
from gopt.graph.model import Node
from gopt.graph.types import FLOATS
from gopt.offline.optimizer.gates import ungated
from gopt.offline.optimizer.probe import close
from gopt.offline.optimizer.rules import Fit, fit
from gopt.offline.optimizer.settle import Rule, settle
from gopt.offline.optimizer.trial import Cell, Scalars, Trial, spread

TRIALS = 3
_MOST_STATES = 4


class Recogniser:
    """Recognises the rules of one step, cone by cone; what the cones share is tried once."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.trial = Trial(training)
        self.trials = [Scalars(self.trial, spread(self.trial.inputs, seed)) for seed in range(TRIALS)]
        self._carries = self._carriers()
        self._readers = training.graph.readers()
        self._in_backward = {
            name for node, phase in zip(training.graph.nodes, training.phases) if phase is not Phase.UPDATE
            for name in node.reads if name in self.trial.inputs
        }  # fmt: skip
        self.unscaled: dict[str, None] = {}
        """Scalar inputs that gradients were found to be divided by: loss scales."""

    def rule(self, cone: Cone) -> Rule:
        """The rule of one cone."""
        states = [s for s in cone.states if s.kind in (Kind.PARAMETER, Kind.OPTIMIZER_STATE)]
        fallback = _unknown(cone, len(states) - 1)
        gradient = self.effective_gradient(cone.parameter.tensor)
        cell = Cell(self.trial, gradient, {state.tensor: ungated(self.trial, state)[0] for state in states})
        floats = all(self.training.graph.type_of(s.tensor).dtype in FLOATS for s in states)
        if not floats or len(states) > _MOST_STATES or not cell.nodes:
            return fallback
        fits: list[Fit] = []
        for scalars in self.trials:
            found = fit(cell, scalars, len(states))
            if found is None or (fits and found.kind != fits[0].kind):
                return fallback
            fits.append(found)
        return settle(self.trial, self.trials, cell, fits)

    def effective_gradient(self, parameter: str) -> str:
        """The gradient after casts, unscaling, accumulation and clipping: where the rule itself begins."""
        name = self.training.gradients[parameter]
        accumulators = {s.tensor for s in self.training.states if s.kind is Kind.ACCUMULATOR}
        averaging = False
        while True:
            onward = [n for n in self._readers.get(name, ()) if any(x in self._carries for x in n.outputs)]
            onward = [n for n in onward if self.trial.producer.get(n.outputs[0]) is n]
            if len(onward) != 1:
                return name
            node = onward[0]
            others = [x for x in node.inputs if x and x != name]
            if node.is_a("Add") and len(others) == 1 and others[0] in accumulators:
                averaging = True
            elif not node.is_a("Cast", "Identity") and not self._scaled(parameter, node, name, averaging):
                return name
            name = node.outputs[0]

    def _scaled(self, parameter: str, node: Node, name: str, averaging: bool) -> bool:
        """Whether a node multiplies the gradient by a scalar that is no part of the rule."""
        over = node.is_a("Div") and node.inputs[0] == name
        others = [x for x in node.inputs if x != name]
        if not (over or node.is_a("Mul")) or len(others) != 1:
            return False
        return self._scales(others[0], averaging or self._read_by_rule(parameter, node.outputs[0]))

    def _read_by_rule(self, parameter: str, name: str) -> bool:
        """Whether a scaled gradient is used more than once, or joined by weight decay: then its constant is a scale
        of the loss (the backward of a mean), and not, say, a dampening."""
        onward = [n for n in self._readers.get(name, ()) if any(x in self._carries for x in n.outputs)]
        if len(onward) != 1:
            return len(onward) > 1
        makers = [self.trial.producer.get(x) for x in onward[0].inputs if x != name]
        return onward[0].is_a("Add") and any(m is not None and m.is_a("Mul") and parameter in m.inputs for m in makers)

    def _scales(self, scalar: str, averaging: bool) -> bool:
        """Whether a scalar undoes the loss scale, clips, or averages what was accumulated: no learning rate."""
        if not self.trial.single(scalar) or scalar in self.trial.owners.wide:
            return False
        if self.trial.is_constant(scalar):
            return averaging
        if scalar in self.trial.owners.reduced:
            return all(close(each.number(scalar), 1.0) for each in self.trials)
        behind = self.trial.inputs_behind(scalar)
        if not behind or not behind <= self._in_backward:
            return False
        self.unscaled.update(dict.fromkeys(sorted(behind)))
        return True

    def _carriers(self) -> set[str]:
        """Floating full-shaped values that reach a new parameter or optimizer state, reductions aside."""
        training = self.training
        targets = {s.updated for s in training.states if s.kind in (Kind.PARAMETER, Kind.OPTIMIZER_STATE)}
        for node, phase in zip(reversed(training.graph.nodes), reversed(training.phases)):
            one = all(self.trial.single(name) for name in node.outputs if name)
            if one and not all(self.trial.single(name) for name in node.reads):
                continue
            if phase is Phase.UPDATE and any(name in targets for name in node.outputs):
                targets.update(name for name in node.inputs if training.graph.type_of(name).dtype in FLOATS)
        return targets


def _unknown(cone: Cone, states: int) -> Rule:
    count = f"{states} state{'' if states == 1 else 's'}" if states else "no state"
    alike = cone.mode is not Mode.WHOLE and not cone.reductions
    return Rule(f"{'elementwise' if alike else 'non-elementwise'} update with {count}", recognised=False)
