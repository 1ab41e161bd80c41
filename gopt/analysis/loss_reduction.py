"""Combines the gradients of the ranks into the gradient of the step: by mean, by sum, or by a mean with per-rank
weights."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from gopt.analysis.training import TrainingGraph
from gopt.errors import OptionError
from gopt.ir.graph_index import GraphIndex, ancestors
from gopt.ir.types import FLOATS
from gopt.text.suggestions import did_you_mean

INTEGERS = frozenset({"int32", "int64", "uint8", "int8", "int16", "uint16", "uint32", "uint64", "bool"})


class LossRule(str, Enum):
    """Rule for the combination of the ranks' gradients."""

    MEAN = "mean"
    SUM = "sum"
    WEIGHTED = "weighted"


AUTO = "auto"
"""Each gradient as its own structure says; it is settled before anything is written."""


@dataclass(frozen=True, slots=True)
class LossReduction:
    """``mean``, ``sum`` or ``weighted:VALUE``: sum of w g over sum of w, with w a rank's ``value`` of one element.

    ``summed``: parameters with summed gradients where all others are averaged (``sum:NAME,NAME``). Ranks are the ranks
    that see different data; micro-steps of an update count like ranks."""

    rule: LossRule = LossRule.MEAN
    value: str = ""
    summed: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.summed:
            return f"{LossRule.SUM.value}:{','.join(self.summed)}"
        return f"{self.rule.value}:{self.value}" if self.value else self.rule.value

    def rule_of(self, parameter: str) -> LossRule:
        """The rule for the gradient of one parameter."""
        return LossRule.SUM if parameter in self.summed else self.rule

    def summed_gradients(self, training: TrainingGraph) -> frozenset[str]:
        """The gradients summed where all others are averaged."""
        return frozenset(training.gradients[name] for name in self.summed if name in training.gradients)

    @classmethod
    def parse(cls, text: str) -> LossReduction:
        """Parse the value of ``--loss-reduction``; raises OptionError for a malformed value."""
        word, _, value = text.partition(":")
        if word in (LossRule.MEAN.value, LossRule.SUM.value) and ":" not in text:
            return cls(LossRule(word))
        if word == LossRule.WEIGHTED.value and value:
            return cls(LossRule.WEIGHTED, value)
        if word == LossRule.SUM.value and all(names := [part.strip() for part in value.split(",")]):
            return cls(summed=tuple(dict.fromkeys(names)))
        if text == AUTO:
            raise OptionError(
                "--loss-reduction auto is an option of gopt shard alone", "say mean, sum or weighted:VALUE"
            )
        raise OptionError(
            f"--loss-reduction cannot be {text!r}",
            "it is mean, sum, weighted:VALUE with a value of the forward, sum:PARAMETER,PARAMETER, or auto",
        )

    def check(self, training: TrainingGraph) -> None:
        """Raise OptionError where the value cannot be a rank's weight, or a name is no parameter's."""
        odd = next((name for name in self.summed if name not in training.gradients), None)
        if odd is not None:
            raise OptionError(
                f"--loss-reduction {self}: {odd!r} is no parameter that has a gradient",
                did_you_mean(odd, training.gradients) or "gopt inspect names the parameters",
            )
        if self.rule is not LossRule.WEIGHTED:
            return
        why = _unfit(training, self.value)
        if why is not None:
            reason, *hints = why
            raise OptionError(f"--loss-reduction weighted:{self.value}: {reason}", *hints)


def _unfit(training: TrainingGraph, name: str) -> tuple[str, ...] | None:
    """Return the reason why a value cannot be a rank's weight, and a hint; None if it can."""
    graph = training.graph
    index = GraphIndex(graph)
    computed = name in index.producers
    if not computed and name not in graph.inputs:
        return (f"the step has no value {name!r}", "gopt inspect --text lists all values")
    type = graph.type_of(name)
    if type.elements != 1 or type.dtype not in FLOATS | INTEGERS:
        return (f"it is {type}, a weight is one number", "name a count of the forward, such as a sum over a mask")
    behind = ancestors(index, [name])[1]
    gradient = next((gradient for gradient in training.gradients.values() if gradient in behind), None)
    if gradient is not None:
        return (f"it depends on the gradient {gradient!r}", "a weight follows from the batch alone")
    state = next((state for state in training.states if state.tensor in behind), None)
    if state is not None:
        return (f"it depends on {state.tensor!r} ({state.kind.value})", "a weight follows from the batch alone")
    if not behind.intersection(training.batch):
        hint = f"if the input differs from rank to rank, say --batch {name}" if not computed else "mean does the same"
        return ("it does not depend on the batch", hint)
    random = next((node for node in training.random if not behind.isdisjoint(node.outputs)), None)
    if random is not None:
        return (f"it depends on random numbers of {random.label!r}", "a weight follows from the batch alone")
    return None
