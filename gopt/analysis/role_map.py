"""Roles of a step as declared by the user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gopt.documents.config import RolesTable
from gopt.documents.default_values import DefaultValue
from gopt.documents.draws import Draw
from gopt.documents.roles import STATISTIC_RULES as STATISTIC_RULES
from gopt.errors import OptionError
from gopt.ir.graph import Graph
from gopt.ir.types import FLOATS, TensorType, known
from gopt.options.records import check_types
from gopt.text.suggestions import did_you_mean

STATISTIC_WORDS = ("auto", "mean", "root", "local", "sync")
"""How all statistics are combined."""

_LISTED = 8
"""Outputs that a hint lists, at most."""


def parse_statistics(text: str) -> tuple[str | None, dict[str, str]]:
    """Parse ``sync`` or ``ema=sum,amax=max``, or both: the word for all statistics, and named statistics.

    Raises OptionError for a second word, and for a statistic named twice."""
    word: str | None = None
    named: dict[str, str] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, equals, rule = part.partition("=")
        if not equals:
            if word not in (None, part):
                raise OptionError(f"--statistics says {word} and {part}", "give one word for all statistics")
            if part not in STATISTIC_WORDS:
                raise OptionError(
                    f"--statistics cannot be {part!r}",
                    f"give {', '.join(STATISTIC_WORDS)} for all statistics, or INPUT=mean, sum, max, min, "
                    "gather, root or local for one",
                )
            word = part
        elif named.setdefault(name, rule) != rule:
            raise OptionError(
                f"--statistics gives {name!r} two rules: {named[name]!r} and {rule!r}", "keep one of them"
            )
    return word, named


@dataclass(frozen=True)
class RoleMap:
    """Roles declared by the user; declared roles take precedence over all inferred roles.

    ``params`` and ``gradients`` map input -> value ('' = infer it), ``states`` maps input -> output.
    """

    loss: str | Sequence[str] = ""
    """The loss, or all of them: in a list, or in a text with commas between them."""
    states: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, str] = field(default_factory=dict)
    batch: Sequence[str] = ()
    shared: Sequence[str] = ()
    """Scalars of the forward that the update reads as means over the ranks."""
    statistics: Mapping[str, str] = field(default_factory=dict)
    """States that follow the batch without a gradient -> how they are combined over ranks ('' = infer it)."""
    draws: Mapping[str, Draw] = field(default_factory=dict)
    """Inputs of random numbers -> what they are drawn from; they belong to the batch."""
    hyper: Mapping[str, DefaultValue] = field(default_factory=dict)
    """Hyper-parameters -> their values where a run sets none."""

    def __post_init__(self) -> None:
        check_types(self)

    @classmethod
    def of_table(cls, table: RolesTable) -> RoleMap:
        """The map of a document's table."""
        params = dict.fromkeys(table.params, "") if isinstance(table.params, tuple) else dict(table.params)
        return cls(table.loss, table.states or {}, params, table.batch, table.shared, table.statistics or {})

    def losses(self, graph: Graph) -> tuple[str, ...]:
        """The named losses, each once; a name with a comma is a single loss where the graph has such an output."""
        words = [self.loss] if isinstance(self.loss, str) else self.loss
        parted = ((name,) if name in graph.outputs else map(str.strip, name.split(",")) for name in words)
        return tuple(dict.fromkeys(name for names in parted for name in names if name))

    def check(self, graph: Graph) -> None:
        """Raise OptionError when the map names something the graph has not."""
        tensors = {*graph.inputs, *graph.initializers}
        tables = {
            "states": self.states, "params": self.params, "batch": self.batch, "statistics": self.statistics,
            "hyper": self.hyper,
        }  # fmt: skip
        for option, name in ((option, name) for option, names in tables.items() for name in names):
            if name not in tensors:
                raise OptionError(
                    f"--{option} {name}: the model has no input {name!r}",
                    did_you_mean(name, tensors) or "gopt inspect MODEL --text lists the graph's inputs",
                )
        for name, draw in self.draws.items():
            type = graph.inputs.get(name)
            fault = "the model has no such input" if type is None else draw.fault(type.dtype, type.shape == ())
            if fault is not None:
                raise OptionError(
                    f"{name!r} cannot be drawn from {draw}: {fault}", "leave it out of draws, or name what it holds"
                )
        doubled = next((name for name in self.statistics if name in self.params), None)
        if doubled is not None:
            raise OptionError(
                f"{doubled!r} is given as a parameter and as a statistic",
                "name it once: a statistic has no gradient",
            )
        for name, rule in self.statistics.items():
            if rule not in ("", *STATISTIC_RULES):
                raise OptionError(
                    f"statistic {name!r} cannot be combined by {rule!r}",
                    f"write one of {', '.join(STATISTIC_RULES)}",
                )
        losses = self.losses(graph)
        options = [(f"--states {name}={output}", output) for name, output in self.states.items()]
        for option, name in (*options, *((f"--loss {name}", name) for name in losses)):
            if name not in graph.outputs:
                scalars = [output for output, kind in graph.outputs.items() if _may_be_loss(kind)]
                few = option.startswith("--loss") and 0 < len(scalars) <= _LISTED
                all_of_them = f"outputs of one number: {', '.join(map(repr, scalars))}" if few else ""
                hint = all_of_them or "gopt inspect MODEL --text lists the graph's outputs"
                raise OptionError(
                    f"{option}: the model has no output {name!r}", did_you_mean(name, graph.outputs) or hint
                )
        for name in losses:
            if not _may_be_loss(graph.outputs[name]):
                raise OptionError(
                    f"{name!r} cannot be the loss: it is {graph.outputs[name]}, and a loss is one floating number",
                    "name a scalar output, such as the mean of it",
                )
        name_of: dict[str, str] = {}
        for name, output in self.states.items():
            if name_of.setdefault(output, name) != name:
                raise OptionError(
                    f"output {output!r} is given as the new value of both {name_of[output]!r} and {name!r}",
                    "name another output for one of them",
                )


def _may_be_loss(kind: TensorType) -> bool:
    """Return whether a type, as far as known, is one floating number."""
    return (not known(kind.dtype) or kind.dtype in FLOATS) and all(size == 1 for size in kind.shape or ())
