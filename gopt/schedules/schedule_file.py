"""A schedule as text: ``schedule.txt`` of a folder, and the files of users (``docs/schedules.md``)."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator

from gopt import limits
from gopt.documents import read_bytes
from gopt.errors import InputError
from gopt.options.types import is_digits
from gopt.schedules.actions import Action, ActionKind, Schedule
from gopt.schedules.builders import check_size
from gopt.schedules.simulation import structure_faults
from gopt.text.sanitize import clean_line, show, show_path

FILE = "schedule.txt"
"""The name in a folder."""
FORMAT = "gopt-schedule/1"
_COLUMNS = "# member action   stage micro-batch"
_LINE_BYTES = 64
"""Bytes of a line, on average, with comments."""
_KEYS = ("name", "members", "stages", "micro-batches", "placement")


def to_text(schedule: Schedule) -> str:
    """The text of a schedule: a header, then a line for every member and slot."""
    values = (
        clean_line(schedule.name), len(schedule.members), schedule.stages, schedule.micro_batches,
        " ".join(map(str, schedule.placement)),
    )  # fmt: skip
    lines = [f"format {FORMAT}", *(f"{key} {value}" for key, value in zip(_KEYS, values, strict=True))]
    for member, actions in enumerate(schedule.members):
        lines += ["", _COLUMNS]
        lines += [f"{member:8} {action.kind:8} {action.stage:5} {action.micro_batch:11}".rstrip() for action in actions]
    return "\n".join(lines) + "\n"


def read_schedule(path: str | os.PathLike[str]) -> Schedule:
    """Read a file; raises as ``from_text``."""
    name = os.fspath(path)
    try:
        return from_text(read_bytes(path, "DOCUMENT_BYTES").decode(), name)
    except UnicodeDecodeError as error:
        raise InputError(f"{show_path(name)} is no text: byte {error.start} is not UTF-8") from None


def from_text(text: str, name: str) -> Schedule:
    """Read a schedule; ``name``: of the file, for messages. Lines with ``#`` in front are comments;
    members may take turns.

    Raises InputError with the wrong line, OptionError for a schedule beyond the limits. Whether the
    schedule can run is told by ``simulate``."""
    check_size(name, len(text) // _LINE_BYTES)
    reader = _Reader(name, text)
    reader.take("format", FORMAT)
    title = reader.take("name")
    members, stages, micro_batches = (reader.number(reader.take(key), key, least=1) for key in _KEYS[1:4])
    check_size(name, max(3 * stages * micro_batches, members))
    placement = [reader.number(word, "a member", most=members - 1) for word in reader.take("placement").split()]
    if len(placement) != stages:
        raise reader.error(f"places {len(placement)} stages", f"the members of {stages} stages, with spaces between")
    rows: list[list[Action]] = [[] for _ in range(members)]
    lines: list[list[int]] = [[] for _ in range(members)]
    for words in reader.rest():
        member = reader.number(words[0], "a member", most=members - 1)
        rows[member].append(reader.action(words))
        lines[member].append(reader.line)
    schedule = Schedule(title, stages, micro_batches, tuple(placement), tuple(map(tuple, rows)))
    for fault in structure_faults(schedule):
        reader.line = lines[fault.member][fault.slot]
        raise reader.error(f"is wrong: {fault.text}")
    return schedule


def member_runs(
    schedule: Schedule, member: int, sizes: tuple[int, int, int], phases: Collection[str], name: os.PathLike[str]
) -> list[tuple[str, int]]:
    """The runs of a member of the pipeline in order, phase and micro-batch; phases of no action come last, once, and
    phases of actions of other members alone do not run.

    ``sizes``: members, stages and micro-batches of the ranks; ``phases``: phases of the member, in order; ``name``:
    of the file. Raises InputError for a schedule of another pipeline."""
    own = (len(schedule.members), schedule.stages, schedule.micro_batches)
    runs = schedule.runs(member) if own == sizes else []
    if own != sizes or not dict(runs).keys() <= set(phases):
        raise InputError(
            "{} is for {} members, {} stages and {} micro-batches, the ranks have {}, {} and {}".format(
                name, *own, *sizes
            ),
            "shard the step again with this schedule",
        )
    return [*runs, *((phase, 0) for phase in phases if phase not in schedule.phases)]


class _Reader:
    """The lines of a file without comments, in order. ``line``: the number of the last line."""

    def __init__(self, name: str, text: str) -> None:
        self.line = 0
        self._name = name
        self._lines = self._split(text)

    def _split(self, text: str) -> Iterator[list[str]]:
        for self.line, line in enumerate(text.split("\n"), 1):
            words = line.split()
            if words and not words[0].startswith("#"):
                yield words

    def rest(self) -> Iterator[list[str]]:
        """Yield the words of the other lines, four on a line."""
        for words in self._lines:
            if len(words) != 4:
                raise self.error(f"has {len(words)} words", "member, action, stage and micro-batch")
            yield words

    def take(self, key: str, value: str | None = None) -> str:
        """The value of a line of the header."""
        words = next(self._lines, [])
        if len(words) < 2 or words[0] != key or value not in (None, " ".join(words[1:])):
            raise self.error(f"is {show(' '.join(words))}", f"{key} {value or 'VALUE'}")
        return " ".join(words[1:])

    def number(self, word: str, meaning: str, least: int = 0, most: int = limits.ELEMENTS) -> int:
        """A whole number in a range."""
        if not (is_digits(word) and least <= int(word) <= most):
            top = f" to {most}" if most < limits.ELEMENTS else " or more"
            raise self.error(f"has {show(word)}", f"{meaning}: a number, {least}{top}")
        return int(word)

    def action(self, words: list[str]) -> Action:
        """The action of a line."""
        if words[1] not in list(ActionKind):
            raise self.error(f"has {show(words[1])}", f"an action: {', '.join(ActionKind)}")
        return Action(ActionKind(words[1]), self.number(words[2], "a stage"), self.number(words[3], "a micro-batch"))

    def error(self, fault: str, expected: str = "") -> InputError:
        """The refusal of the last line."""
        hints = [f"expected: {expected}"] if expected else []
        return InputError(f"{show_path(self._name)}, line {self.line} {fault}", *hints)
