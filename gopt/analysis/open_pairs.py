"""Pairs of states and outputs that the data flow leaves open: all that a step needs stand in one refusal.

A refusal proposes pairs, and is tried with them: what is open behind it is asked for in the same message. Pairs that
the data flow leaves open and names settle (``name_hints``) are taken, with a note.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from gopt.analysis.role_hints import MOST, others, states_hints
from gopt.analysis.role_map import RoleMap
from gopt.analysis.training import TrainingGraph
from gopt.errors import GoptError, InputError, OptionError, UnsupportedError

_TRIED = 24
"""How often a step is looked at with what is proposed for it."""


class OpenPairsError(UnsupportedError):
    """The data flow does not say which outputs replace which inputs.

    ``pairs``: the pairs that may be meant, input -> output; ``other``: hints for where they are not. ``by_name``: the
    data flow leaves these pairs or none, and the names of both say that they are pairs. ``fed``: rather than that, the
    inputs are fed.
    """

    def __init__(
        self, message: str, pairs: Mapping[str, str], *other: str, by_name: bool = False, fed: bool = False
    ) -> None:
        hints = states_hints(pairs)
        super().__init__(message, *([*other, *hints] if fed else [*hints, *other]))
        self.pairs, self.other, self.by_name, self.fed = dict(pairs), other, by_name, fed


def settle_pairs(roles: RoleMap, recovered: Callable[[RoleMap], TrainingGraph]) -> TrainingGraph:
    """The step that ``recovered`` finds, by a map of roles with all pairs that names settle.

    Raises its error; an OpenPairsError with the pairs of those that would follow it.
    """
    named: dict[str, str] = {}
    while True:
        told = _with(roles, named)
        try:
            training = recovered(told)
        except OpenPairsError as error:
            if not error.by_name or error.pairs.keys() <= told.states.keys():
                raise _whole(error, told, recovered) from error
            named |= error.pairs
        else:
            training.notes += _notes(named)
            return training


def _with(roles: RoleMap, pairs: Mapping[str, str]) -> RoleMap:
    return replace(roles, states={**roles.states, **pairs}) if pairs else roles


def _notes(named: Mapping[str, str]) -> Iterable[str]:
    if named:
        name, output = next(iter(named.items()))
        yield (
            f"input {name} and output {output}{others(len(named) - 1, 'pair')} are paired by their names: the data "
            "flow leaves them no other"
        )


def _whole(first: OpenPairsError, roles: RoleMap, recovered: Callable[[RoleMap], TrainingGraph]) -> UnsupportedError:
    """The refusal ``first`` with all pairs that the step needs, and with what is refused behind them."""
    pairs: dict[str, str] = {}
    other: dict[str, None] = {}
    error: GoptError = first
    for _ in range(_TRIED):
        if not isinstance(error, OpenPairsError) or error.pairs.keys() <= pairs.keys():
            break
        other |= dict.fromkeys(error.other)
        proposed = pairs | error.pairs
        try:
            recovered(_with(roles, proposed))
        except OptionError:  # what cannot be said is no hint
            break
        except (InputError, UnsupportedError) as refused:
            pairs, error = proposed, refused
        else:
            pairs, error = proposed, first
            break
    more = len(pairs) - len(first.pairs)
    message = first.message + (f"; nor of {more} more pair{'s' * (more > 1)}" if more > 0 else "")
    hints, rest = states_hints(pairs), list(other)[:MOST]
    hints = [*rest, *hints] if first.fed else [*hints, *rest]
    if error is not first and not isinstance(error, OpenPairsError):
        hints += [f"behind that stands another refusal: {error.message}", *error.hints]
    return UnsupportedError(message, *hints)
