"""What a run of a split does about what goes wrong: options, and what trainers push that is no number."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gopt.artifact.server_entries import KeyEntry
from gopt.errors import RunError
from gopt.runtime.merge import Contribution
from gopt.runtime.parameter_server.waits import ServerSummary


def _nothing(_: object) -> None:
    return None


@dataclass(frozen=True, slots=True)
class FaultOptions:
    """``nan_aborts``: a pushed value that is NaN or infinite ends the run. ``tell``: the chief calls it with a line for
    each trainer that is lost. ``summarise``: it calls that at the end, with what each server did."""

    nan_aborts: bool = False
    tell: Callable[[str], None] = _nothing
    summarise: Callable[[Sequence[ServerSummary]], None] = _nothing


def refuse_not_finite(
    found: Mapping[int, Contribution], keys: Sequence[KeyEntry], round_number: int, what: str
) -> None:
    """Raise RunError where a contribution to these keys, one behind the other, has a value that is NaN or infinite.

    It names the first trainer, the parameter and the round; ``what``: what was asked of trainers, for where there are
    no keys. A contribution of weight zero counts for nothing.
    """
    for trainer in sorted(found):
        each = found[trainer]
        flat = each.values.reshape(-1)
        wrong = np.flatnonzero(~np.isfinite(flat))
        if wrong.size and each.weight:
            place = int(wrong[0])
            raise RunError(
                f"trainer {trainer} pushed {flat[place]} for {_name(keys, place)} in round {round_number}"
                if keys
                else f"trainer {trainer} pushed {flat[place]} where it was to {what}",
                "lower the learning rate, scale the loss, or take --nan pass",
            )


def _name(keys: Sequence[KeyEntry], place: int) -> str:
    """The key, and the parameter, in which an element of a bucket lies."""
    for key in keys:
        if place < key.elements:
            for piece in key.pieces:
                if place < piece.elements:
                    return f"{piece.tensor} (key {key.name})"
                place -= piece.elements
            return key.name
        place -= key.elements
    return "no key"
