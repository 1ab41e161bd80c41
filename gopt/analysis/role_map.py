"""Roles of a step as declared by the user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gopt.errors import OptionError
from gopt.ir.graph import Graph
from gopt.ir.types import FLOATS, TensorType, known
from gopt.option_records import check_types
from gopt.suggestions import did_you_mean


@dataclass(frozen=True)
class RoleMap:
    """Roles declared by the user; they take precedence over all inferred roles.

    ``params`` and ``gradients`` map input -> value ('' = infer it), ``states`` maps input -> output.
    """

    loss: str = ""
    states: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, str] = field(default_factory=dict)
    batch: Sequence[str] = ()
    shared: Sequence[str] = ()
    """Scalars of the forward that the update reads as means over the ranks."""

    def __post_init__(self) -> None:
        check_types(self)

    def check(self, graph: Graph) -> None:
        """Raise OptionError when the map names something the graph has not."""
        given = {*graph.inputs, *graph.initializers}
        for name in (*self.states, *self.params, *self.batch):
            if name not in given:
                raise OptionError(
                    f"the role map names {name!r}, which is not an input of the graph",
                    did_you_mean(name, given) or "gopt inspect MODEL --text lists the graph's inputs",
                )
        for name in (*self.states.values(), *([self.loss] if self.loss else [])):
            if name not in graph.outputs:
                raise OptionError(
                    f"the role map names {name!r}, which is not an output of the graph",
                    did_you_mean(name, graph.outputs) or "gopt inspect MODEL --text lists the graph's outputs",
                )
        kind = graph.outputs.get(self.loss)
        if kind is not None and not _may_be_loss(kind):
            raise OptionError(
                f"{self.loss!r} cannot be the loss: it is {kind}, and a loss is one floating number",
                "name a scalar output, such as the mean of it",
            )
        first: dict[str, str] = {}
        for name, output in self.states.items():
            if first.setdefault(output, name) != name:
                raise OptionError(
                    f"the role map says that {output!r} replaces both {first[output]!r} and {name!r}",
                    "name another output for one of them",
                )


def _may_be_loss(kind: TensorType) -> bool:
    """Return whether what is known of a type is one floating number."""
    return (not known(kind.dtype) or kind.dtype in FLOATS) and all(size == 1 for size in kind.shape or ())
