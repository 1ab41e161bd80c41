"""The roles of a step as an entry of a model's metadata: the only reader and writer of the text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from gopt.documents import ROLES, parse_json
from gopt.documents.default_values import DefaultValue
from gopt.documents.draws import Draw
from gopt.documents.records import OPTIONAL, from_document, one_of, to_document

STATISTIC_RULES = ("mean", "sum", "max", "min", "gather", "root", "local")
"""How the ranks' values of a statistic are combined."""
StatisticRule = Annotated[str, one_of("", *STATISTIC_RULES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolesRecord:
    """The roles of a training step stand as JSON text in the metadata of a kept source, under the key gopt.roles."""

    loss: str = ""
    """The loss is the output of this name; an empty name leaves it to the data flow."""
    more_losses: tuple[str, ...] = field(default=(), metadata=OPTIONAL)
    """The outputs in this list are losses beside the first; the key is absent when there is no other. Each item is the
    name of an output."""
    states: Mapping[str, str] = field(default_factory=dict)
    """The table pairs every state with the output that replaces it. The value is the output that replaces the state, an
    input, that the key names."""
    params: Mapping[str, str] = field(default_factory=dict)
    """The table gives the gradient of every parameter that is updated through one. The value is the name of the
    gradient of the parameter that the key names."""
    batch: tuple[str, ...] = ()
    """The inputs in this list are the batch. Each item is the name of an input."""
    shared: tuple[str, ...] = field(default=(), metadata=OPTIONAL)
    """The update reads the values in this list as their means over the ranks; the key is absent when there is no such
    value. Each item is the name of a scalar of the forward."""
    statistics: Mapping[str, StatisticRule] | None = field(default=None, metadata=OPTIONAL)
    """The table names the statistics; the key is absent without statistics. The value says how the ranks' values of the
    statistic that the key names are combined; an empty text leaves it to gopt."""
    draws: Mapping[str, Draw] | None = field(default=None, metadata=OPTIONAL)
    """The table names the inputs of random numbers; the key is absent without such inputs. The value says what the
    input that the key names is drawn from."""
    hyper: Mapping[str, DefaultValue] | None = field(default=None, metadata=OPTIONAL)
    """The table has hyper-parameters with their values where a run sets none; the key is absent without such values.
    The value is of the hyper-parameter that the key names."""

    @property
    def losses(self) -> tuple[str, ...]:
        """All named losses."""
        return (*filter(None, [self.loss]), *self.more_losses)

    @classmethod
    def parse(cls, text: str, name: str) -> RolesRecord:
        """Read the entry, called ``name`` in errors. Raises InputError."""
        return from_document(cls, parse_json(text, ROLES, name))

    def text(self) -> str:
        return json.dumps(to_document(self), ensure_ascii=False)
