"""The roles of a step as an entry of a model's metadata: the one reader and the one writer of that text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from gopt.documents import ROLES, parse_json
from gopt.documents.default_values import DefaultValue
from gopt.documents.draws import Draw
from gopt.documents.records import OPTIONAL, from_document, to_document


@dataclass(frozen=True, slots=True, kw_only=True)
class RolesRecord:
    """The loss, and others beside it; state -> its new value; parameter -> gradient; inputs of the batch; scalars
    averaged over ranks; statistics, and how ranks combine them; inputs of random numbers, and what each is drawn from;
    hyper-parameters, and their values where none is set.

    An empty loss or gradient is one that data flow finds.
    """

    loss: str = ""
    more_losses: tuple[str, ...] = field(default=(), metadata=OPTIONAL)
    states: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, str] = field(default_factory=dict)
    batch: tuple[str, ...] = ()
    shared: tuple[str, ...] = field(default=(), metadata=OPTIONAL)
    statistics: Mapping[str, str] | None = field(default=None, metadata=OPTIONAL)
    draws: Mapping[str, Draw] | None = field(default=None, metadata=OPTIONAL)
    hyper: Mapping[str, DefaultValue] | None = field(default=None, metadata=OPTIONAL)

    @property
    def losses(self) -> tuple[str, ...]:
        """All that are named."""
        return (*filter(None, [self.loss]), *self.more_losses)

    @classmethod
    def parse(cls, text: str, name: str) -> RolesRecord:
        """Read the entry; ``name`` is what an error calls it. Raises InputError."""
        return from_document(cls, parse_json(text, ROLES, name))

    def text(self) -> str:
        return json.dumps(to_document(self), ensure_ascii=False)
