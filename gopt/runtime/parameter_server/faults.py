"""Fault policy of a split's run: options, and the handling of NaN and infinite pushes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from gopt.artifact.server_entries import KeyEntry, KeyKind, Mode, ServerPlanEntry
from gopt.errors import OptionError, RunError
from gopt.runtime.merge import Contribution
from gopt.runtime.parameter_server.waits import ServerSummary
from gopt.runtime.session import Array

OUT_OF_DATA = -1
"""Reason why a run ends, in place of a signal's number: a trainer has no more data."""
TOLD = 10
"""Faults of one kind that a server tells one by one; the rest are only counted."""
HINT = "lower the learning rate, scale the loss, or take --nan pass"


class OnNan(StrEnum):
    """Policy of servers for NaN and infinite gradients."""

    PASS = "pass"
    ABORT = "abort"
    SKIP = "skip"


class StopFault(StrEnum):
    """The end of a run of trainers with unequal amounts of data: with the first trainer without more data, or with the
    last."""

    FIRST = "first"
    ALL = "all"


def _nothing(_: object) -> None:
    return None


@dataclass(frozen=True, slots=True)
class FaultOptions:
    """Options of a run.

    ``continues``: rounds go on without a lost trainer. ``stop``: None where the end of data is an error. ``staleness``:
    the ``bound`` of AsyncServer. ``tell``: called with a line for each trainer that is lost or out of data, and for
    gradients not applied. ``summarise``: called by the chief at the end, with each server's counts."""

    nan: OnNan = OnNan.PASS
    stop: StopFault | None = None
    continues: bool = False
    staleness: int | None = None
    tell: Callable[[str], None] = _nothing
    summarise: Callable[[Sequence[ServerSummary]], None] = _nothing

    @property
    def decides_rounds(self) -> bool:
        """Whether servers decide together, in every round, whose contributions it uses."""
        return self.continues or self.nan is OnNan.SKIP or self.stop is not None

    def check(self, plan: ServerPlanEntry) -> None:
        """Raise OptionError for options that have no effect with a split."""
        if self.staleness is not None and plan.mode.rounds:
            raise OptionError("--staleness: in rounds trainers wait for one another in every step", "leave it out")
        if self.nan is not OnNan.SKIP:
            return
        if plan.mode is Mode.GEO:
            raise OptionError("--nan skip: in mode geo a trainer's own parameters stay NaN", "take --nan abort")
        scale = next((key for key in plan.keys if key.kind is KeyKind.SCALAR), None)
        if scale is not None:
            raise OptionError(
                f"--nan skip: the update itself handles infinite gradients: it changes {scale.name!r}",
                "take --nan pass",
            )

    def __str__(self) -> str:
        """Return the options on which all endpoints must agree, as text."""
        return f"{self.nan}, {self.stop}, {self.continues}, {self.staleness}"


@dataclass(slots=True)
class FaultLog:
    """Reports the first faults of a kind one by one, and counts the others."""

    tell: Callable[[str], None]
    count: int = 0

    def __call__(self, text: str) -> None:
        self.count += 1
        if self.count <= TOLD:
            more = "" if self.count < TOLD else "; further ones are counted, but not reported"
            self.tell(text + more)


def not_finite(pushes: Mapping[int, Contribution], keys: Sequence[KeyEntry], round_number: int, what: str) -> str:
    """A message on the first NaN or infinite value pushed, with the trainer, parameter and round; '' where all values
    are finite.

    ``keys`` are adjacent in the push; without keys, ``what`` describes the push. A contribution of weight zero is not
    looked at."""
    for trainer in sorted(pushes):
        index = _first(pushes[trainer].values)
        if index is not None and pushes[trainer].weight:
            value = pushes[trainer].values.reshape(-1)[index]
            if keys:
                return f"trainer {trainer} pushed {value} for {_name(keys, index)} in round {round_number}"
            return f"trainer {trainer} pushed {value} where it was to {what}"
    return ""


def overflow(merged: Sequence[Array], keys: Sequence[KeyEntry], round_number: int, what: str) -> str:
    """As ``not_finite``, for the result of merging finite contributions."""
    start = 0
    for value in merged:
        index = _first(value)
        if index is not None:
            name = _name(keys, start + index) if keys else f"what was to {what}"
            return f"the merged gradient of {name} overflows in round {round_number}"
        start += value.size
    return ""


def _first(values: Array) -> int | None:
    flat = values.reshape(-1)
    if flat.dtype.kind in "iub":
        return None
    finite = np.isfinite(flat)
    return None if finite.all() else int(np.argmin(finite))


def _name(keys: Sequence[KeyEntry], index: int) -> str:
    """The key and the parameter with an element of a bucket."""
    for key in keys:
        if index < key.elements:
            for piece in key.pieces:
                if index < piece.elements:
                    return f"{piece.tensor} (key {key.name})"
                index -= piece.elements
            return key.name
        index -= key.elements
    return "no key"


def refuse(wrong: str) -> None:
    """Raise RunError with the message, unless empty."""
    if wrong:
        raise RunError(wrong, HINT)
