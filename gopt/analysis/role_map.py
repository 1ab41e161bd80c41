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

    loss: str | Sequence[str] = ""
    """The loss, or all of them: in a list, or in a text with commas between them."""
    states: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, str] = field(default_factory=dict)
    batch: Sequence[str] = ()
    shared: Sequence[str] = ()
    """Scalars of the forward that the update reads as means over the ranks."""

    def __post_init__(self) -> None:
        check_types(self)

    def losses(self, graph: Graph) -> tuple[str, ...]:
        """The losses that are named, each once; a name with a comma in it is one where the graph has such an output."""
        given = [self.loss] if isinstance(self.loss, str) else self.loss
        parted = ((name,) if name in graph.outputs else map(str.strip, name.split(",")) for name in given)
        return tuple(dict.fromkeys(name for names in parted for name in names if name))

    def check(self, graph: Graph) -> None:
        """Raise OptionError when the map names something the graph has not."""
        given = {*graph.inputs, *graph.initializers}
        for name in (*self.states, *self.params, *self.batch):
            if name not in given:
                raise OptionError(
                    f"the role map names {name!r}, which is not an input of the graph",
                    did_you_mean(name, given) or "gopt inspect MODEL --text lists the graph's inputs",
                )
        losses = self.losses(graph)
        for name in (*self.states.values(), *losses):
            if name not in graph.outputs:
                raise OptionError(
                    f"the role map names {name!r}, which is not an output of the graph",
                    did_you_mean(name, graph.outputs) or "gopt inspect MODEL --text lists the graph's outputs",
                )
        for name in losses:
            if not _may_be_loss(graph.outputs[name]):
                raise OptionError(
                    f"{name!r} cannot be the loss: it is {graph.outputs[name]}, and a loss is one floating number",
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
