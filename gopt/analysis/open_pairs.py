"""Pairs of states and outputs left open by the data flow: one refusal lists all pairs that a step needs.

A refusal proposes pairs, and is tried with the proposal: the same message asks for pairs found open afterwards. Pairs
left open by the data flow and settled by names (``name_hints``) are taken, with a note."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from gopt.analysis.role_hints import batch_hint, leave_out, others, states_hints, states_option
from gopt.analysis.role_map import RoleMap
from gopt.analysis.training import TrainingGraph
from gopt.errors import GoptError, InputError, OptionError, UnsupportedError

_TRIED = 24
"""How often a step is looked at with what is proposed for it."""


class OpenPairsError(UnsupportedError):
    """The data flow leaves open which outputs replace which inputs.

    ``pairs``: possible pairs, input -> output. Where these are no pairs, the outputs ``shown`` may be left out of the
    step, the inputs ``fed`` may be fed, or ``other`` hints hold; ``rather_fed``: feeding is more likely. ``instead``:
    the pairs of the data flow for the same inputs. ``by_name``: the data flow allows these pairs or no pair, and the
    names of inputs and outputs agree with the pairs."""

    def __init__(
        self,
        message: str,
        pairs: Mapping[str, str],
        *hints: str,
        shown: Iterable[str] = (),
        fed: Iterable[str] = (),
        rather_fed: bool = False,
        by_name: bool = False,
        instead: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.pairs, self.shown, self.fed, self.instead = dict(pairs), tuple(shown), tuple(fed), instead
        self.other, self.rather_fed, self.by_name = hints, rather_fed, by_name
        super().__init__(message, *self.hints_with(self.pairs, self.shown, self.fed, instead, {}))

    def hints_with(
        self,
        pairs: Mapping[str, str],
        shown: Collection[str],
        fed: Collection[str],
        instead: Mapping[str, str],
        beside: Mapping[str, str],
    ) -> list[str]:
        """The hints of this refusal for all open pairs, outputs and inputs; ``beside``: the pairs that feeding the
        inputs needs as well."""
        states = states_hints(pairs)
        hint = [batch_hint(fed)] * bool(fed) + [states_option(beside)] * bool(beside)
        hints = [" ".join(hint)] * bool(hint) + [leave_out(list(shown))] * bool(shown) + [*self.other]
        hints += [f"or as the data flow has it: {states_option(instead)}"] if instead else []
        return [*hints, *states] if self.rather_fed else [*states, *hints]


def settle_pairs(roles: RoleMap, recovered: Callable[[RoleMap], TrainingGraph]) -> TrainingGraph:
    """The step that ``recovered`` finds, by a map of roles with all pairs settled by names.

    Raises the error of ``recovered``; an OpenPairsError gathers the pairs of later errors."""
    named: dict[str, str] = {}
    while True:
        extended = _with(roles, named)
        try:
            training = recovered(extended)
        except OpenPairsError as error:
            if not error.by_name or error.pairs.keys() <= extended.states.keys():
                raise _whole(error, extended, recovered) from error
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


def _whole(refusal: OpenPairsError, roles: RoleMap, recovered: Callable[[RoleMap], TrainingGraph]) -> UnsupportedError:
    """The refusal ``refusal`` with all pairs that the step needs, and with later refusals."""
    pairs, shown, fed, error = _followed(refusal, refusal.pairs, roles, recovered)
    instead = _followed(refusal, refusal.instead, roles, recovered)[0] if refusal.instead else {}
    more = len(pairs) - len(refusal.pairs)
    message = refusal.message + (f"; nor of {more} more pair{'s' * (more > 1)}" if more > 0 else "")
    beside: dict[str, str] = {}
    if fed and not refusal.fed:
        as_fed = replace(roles, batch=(*roles.batch, *fed))
        unfed = {old: new for old, new in refusal.pairs.items() if old not in fed}
        beside = _followed(refusal, unfed, as_fed, recovered)[0]
    hints = refusal.hints_with(pairs, shown, fed, instead, beside)
    if error is not refusal and not isinstance(error, OpenPairsError):
        hints += [f"behind that stands another refusal: {error.message}", *error.hints]
    return UnsupportedError(message, *hints)


def _followed(
    refusal: OpenPairsError, requested: Mapping[str, str], roles: RoleMap, recovered: Callable[[RoleMap], TrainingGraph]
) -> tuple[dict[str, str], list[str], list[str], GoptError]:
    """All pairs, outputs and inputs asked for along the hints with the pairs ``requested``, and the last refusal."""
    pairs: dict[str, str] = {}
    shown: dict[str, None] = {}
    fed: dict[str, None] = {}
    error: GoptError = refusal
    for _ in range(_TRIED):
        if not isinstance(error, OpenPairsError) or requested.keys() <= pairs.keys():
            break
        shown |= dict.fromkeys(error.shown)
        fed |= dict.fromkeys(error.fed)
        proposed = {**pairs, **requested}
        try:
            recovered(_with(roles, proposed))
        except OptionError:  # what cannot be said is no hint
            break
        except (InputError, UnsupportedError) as refused:
            pairs, error = proposed, refused
            requested = refused.pairs if isinstance(refused, OpenPairsError) else {}
        else:
            pairs, error = proposed, refusal
            break
    return pairs, [*shown], [*fed], error
