"""The known schedules, from the definitions of their papers: a list of actions for every member."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from gopt import limits
from gopt.errors import OptionError
from gopt.options.types import is_digits
from gopt.schedules.actions import Action, ActionKind, Schedule
from gopt.text.sanitize import show
from gopt.text.suggestions import did_you_mean

FORWARD, BACKWARD, INPUT, WEIGHT = ActionKind
INTERLEAVED = "interleaved"


@dataclass(frozen=True, slots=True)
class _Size:
    """A pipeline: ``chunks`` stages on each of ``members``."""

    members: int
    chunks: int
    micro_batches: int


def _gpipe(size: _Size, member: int) -> Iterator[Action]:
    """All forwards, then all backwards (arXiv 1811.06965)."""
    for kind in (FORWARD, BACKWARD):
        yield from (Action(kind, member, micro_batch) for micro_batch in range(size.micro_batches))


def _1f1b(size: _Size, member: int) -> Iterator[Action]:
    """Forwards until the first gradient can arrive, then a forward and a backward in turn: PipeDream-flush
    (arXiv 2006.09503)."""
    forwards = [Action(FORWARD, member, micro_batch) for micro_batch in range(size.micro_batches)]
    backwards = [(Action(BACKWARD, member, micro_batch),) for micro_batch in range(size.micro_batches)]
    return _in_turn(forwards, backwards, size.members - 1 - member)


def _interleaved(size: _Size, member: int) -> Iterator[Action]:
    """Several stages on a member, all ``members`` apart; micro-batches go through in groups of ``members``, a forward
    and a backward in turn (Megatron-LM, arXiv 2104.04473). The last group may have fewer."""
    ways = [
        (chunk, start + offset)
        for start in range(0, size.micro_batches, size.members)
        for chunk in range(size.chunks)
        for offset in range(size.members)
    ]
    forwards = [Action(FORWARD, chunk * size.members + member, micro_batch) for chunk, micro_batch in ways]
    backwards = [
        (Action(BACKWARD, (size.chunks - 1 - chunk) * size.members + member, micro_batch),)
        for chunk, micro_batch in ways
    ]
    return _in_turn(forwards, backwards, 2 * (size.members - 1 - member) + (size.chunks - 1) * size.members)


def _zb_h1(size: _Size, member: int) -> Iterator[Action]:
    """As 1F1B with split backwards. A member runs as many inputs ahead of weights as it runs fewer forwards ahead than
    member 0: the last weights stand where 1F1B waits (arXiv 2401.10241)."""
    forwards = [Action(FORWARD, member, micro_batch) for micro_batch in range(size.micro_batches)]
    backwards = [
        (Action(INPUT, member, micro_batch), *_weight(member, micro_batch - member))
        for micro_batch in range(size.micro_batches)
    ]
    yield from _in_turn(forwards, backwards, size.members - 1 - member)
    for micro_batch in range(max(size.micro_batches - member, 0), size.micro_batches):
        yield Action(WEIGHT, member, micro_batch)


def _weight(stage: int, micro_batch: int) -> tuple[Action, ...]:
    return (Action(WEIGHT, stage, micro_batch),) if micro_batch >= 0 else ()


def _zb_v(size: _Size, member: int) -> Iterator[Action]:
    """Two stages on a member, down and back up: the last member has the middle of the model, member 0 both ends (arXiv
    2401.10241, section 6; 2405.15362). With equal costs of forward, input and weight a member never waits between its
    first action and its last."""
    down, up = member, 2 * size.members - 1 - member
    below = size.members - member
    micro_batches = max(size.micro_batches, 2 * size.members - 1)
    numbers = {(kind, stage): count() for kind in (FORWARD, INPUT, WEIGHT) for stage in (down, up)}

    def run(*actions: tuple[ActionKind, int], times: int = 1) -> Iterator[Action]:
        for _ in range(times):
            for kind, stage in actions:
                yield Action(kind, stage, next(numbers[kind, stage]))

    yield from run((FORWARD, down), times=2 * below - 1)
    yield from run((FORWARD, up), (FORWARD, down), times=member)
    yield from run((FORWARD, up), (INPUT, up), (WEIGHT, up), times=below)
    steady = micro_batches - size.members
    downs = micro_batches - (2 * below - 1) - member
    for turn in range(steady):
        yield from run((FORWARD, down), times=int(turn < downs))
        yield from run((INPUT, down), (WEIGHT, down), (FORWARD, up), (INPUT, up), (WEIGHT, up))
    yield from run((INPUT, down), (INPUT, up), times=member)
    yield from run((INPUT, down), (WEIGHT, down), times=below)
    yield from run((WEIGHT, up), times=member)
    yield from run((WEIGHT, down), times=member)


def _in_turn(forwards: Sequence[Action], backwards: Sequence[Sequence[Action]], ahead: int) -> Iterator[Action]:
    """Some forwards ahead, then a forward and a backward in turn, then the rest of the backwards."""
    yield from forwards[:ahead]
    later = iter(forwards[ahead:])
    for backward in backwards:
        yield from (forward for forward in [next(later, None)] if forward is not None)
        yield from backward


@dataclass(frozen=True, slots=True)
class _Recipe:
    """A known schedule. ``order``: the actions of a member, more micro-batches than asked for among them.
    ``chunks``: stages of a member, 0 where the name says how many."""

    order: Callable[[_Size, int], Iterator[Action]]
    chunks: int = 1
    down_and_up: bool = False


_RECIPES = {
    "gpipe": _Recipe(_gpipe), "1f1b": _Recipe(_1f1b), INTERLEAVED: _Recipe(_interleaved, chunks=0),
    "zb-h1": _Recipe(_zb_h1), "zb-v": _Recipe(_zb_v, chunks=2, down_and_up=True),
}  # fmt: skip
NAMES = tuple(f"{name}:V" if not recipe.chunks else name for name, recipe in _RECIPES.items())
"""The known schedules, as a user writes them."""


def build_schedule(name: str, members: int, micro_batches: int) -> Schedule:
    """Return a known schedule for a number of members and micro-batches.

    Raises OptionError for an unknown name, and for a size beyond the limits."""
    recipe, chunks = _recipe(name)
    for unit, number in (("members", members), ("micro-batches", micro_batches)):
        if number < 1:
            raise OptionError(f"schedule {show(name)} has {number} {unit}", f"{unit} are 1 or more")
    check_size(name, 3 * members * chunks * micro_batches)
    size = _Size(members, chunks, micro_batches)
    placement = [stage % members for stage in range(members * chunks)]
    if recipe.down_and_up:
        placement[members:] = reversed(placement[:members])
    orders = (recipe.order(size, member) for member in range(members))
    return Schedule(
        name, len(placement), micro_batches, tuple(placement),
        tuple(tuple(action for action in order if action.micro_batch < micro_batches) for order in orders),
    )  # fmt: skip


def is_name(text: str) -> bool:
    """Return whether a text names a known schedule, right or wrong in its number, and not a file."""
    return text.partition(":")[0] in _RECIPES


def stages_of(name: str, members: int) -> int:
    """The stages of a known schedule; raises OptionError for an unknown name."""
    return members * _recipe(name)[1]


def check_size(name: str, actions: int) -> None:
    """Raise OptionError for a schedule of too many actions."""
    if actions > limits.SCHEDULE_ACTIONS:
        raise OptionError(
            f"schedule {show(name)} has {actions} actions, more than {limits.SCHEDULE_ACTIONS} (SCHEDULE_ACTIONS)",
            "ask for fewer micro-batches or stages",
            limits.hint("SCHEDULE_ACTIONS", actions),
        )


def _recipe(name: str) -> tuple[_Recipe, int]:
    """The recipe of a name, and the stages of a member."""
    head, colon, chunks = name.partition(":")
    recipe = _RECIPES.get(head)
    if recipe is None:
        raise OptionError(
            f"there is no schedule {show(name)}", did_you_mean(name, NAMES) or f"there are {', '.join(NAMES)}"
        )
    if recipe.chunks and colon:
        raise OptionError(f"schedule {head} takes no number: {show(name)}", f"write {head}")
    if not recipe.chunks and not (is_digits(chunks) and int(chunks) > 1):
        raise OptionError(
            f"schedule {show(name)} does not say how many stages a member has, two or more",
            f"write {head}:2, or 1f1b for one stage on each member",
        )
    return recipe, recipe.chunks or int(chunks)
