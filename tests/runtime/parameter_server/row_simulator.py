"""Trainers and servers of tables without rounds, one message at a time, in NumPy. Nothing of gopt is imported here.

It reads what a folder's manifest says of its tables, and the order in which each server received. Everything else it
computes itself: which rows a trainer asks for and of whom, gradients of ``row_steps.lookups``, the sum of the rows that
a batch has several times, and the updates.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
Batch = Mapping[str, npt.NDArray[Any]]


class Fault(Exception):
    """A server received what it should not have, or nobody can go on."""


@dataclass(frozen=True)
class Event:
    """One message that a server received: a pull of rows of a table, or a push."""

    trainer: int
    table: int
    round: int
    push: bool


@dataclass
class Part:
    """What a server has of a table: the numbers of its rows and columns, and these of each state."""

    rows: Ids
    columns: Ids
    held: dict[str, Values]
    step: float = 1.0
    """How far the counter is; the fixture's begins with one."""
    due: int = 0

    def places(self, wanted: Ids) -> Ids:
        """Which of its own rows are wanted."""
        return np.flatnonzero(np.isin(self.rows, wanted))


@dataclass(frozen=True)
class Rule:
    """An optimizer. ``lazy``: it changes the rows that were pushed alone."""

    name: str
    rate: float
    lazy: bool

    def apply(self, part: Part, ids: Ids, sums: Values) -> None:
        """Update a part by gradients of rows, each of which is listed once."""
        rows = part.places(ids) if self.lazy else np.arange(part.rows.size)
        whole = np.zeros((part.rows.size, part.columns.size), np.float32)
        for id, row in zip(ids, sums):
            whole[part.rows == id] = row[part.columns]
        held, gradient, one = part.held, whole[rows], np.float32
        way = gradient
        if self.name == "adagrad":
            held["sum"][rows] += gradient * gradient
            way = gradient / (np.sqrt(held["sum"][rows]) + one(1e-6))
        if self.name == "adam":
            new = one(part.step + 1)
            first = held["exp_avg"][rows] * one(0.9) + gradient * one(0.1)
            second = held["exp_avg_sq"][rows] * one(0.999) + gradient * gradient * one(0.001)
            held["exp_avg"][rows], held["exp_avg_sq"][rows] = first, second
            way = first / (one(1) - one(0.9) ** new) / (np.sqrt(second / (one(1) - one(0.999) ** new)) + one(1e-6))
        held[""][rows] -= way * one(self.rate)


@dataclass
class Simulation:
    """``tables``: the manifest's records; ``start``: tensor -> its value; ``batches``: of a trainer and a round;
    ``padding``: table -> the id without a gradient."""

    tables: Sequence[Mapping[str, Any]]
    start: Mapping[str, Values]
    trainers: int
    rule: Rule
    batches: Callable[[int, int], Batch]
    padding: Mapping[str, int]
    parts: dict[tuple[int, int], Part] = field(default_factory=dict)
    """Table and server -> what is there."""
    losses: dict[tuple[int, int], float] = field(default_factory=dict)
    """Trainer and round -> its loss."""

    def __post_init__(self) -> None:
        self._known: dict[tuple[int, int], dict[str, Values]] = {}
        self._pulled: dict[tuple[int, int], set[tuple[int, int]]] = {}
        self._made: dict[tuple[int, int], dict[str, tuple[Ids, Values]]] = {}
        for number, entry in enumerate(self.tables):
            for place, server in enumerate(entry["servers"]):
                rows, columns = _own(entry, place)
                names = [name for name in self.start if name == entry["parameter"] or _of(name, entry)]
                held = {_of(name, entry): self.start[name][np.ix_(rows, columns)].copy() for name in names}
                self.parts[number, server] = Part(rows, columns, held)

    def run(self, received: Mapping[int, Sequence[Event]]) -> None:
        """Apply what each server received, in its order; a push behind all pulls of its step."""
        queues = {server: deque(events) for server, events in received.items()}
        while any(queues.values()):
            before = sum(map(len, queues.values()))
            for server, queue in queues.items():
                while queue and self._take(server, queue[0]):
                    queue.popleft()
            if sum(map(len, queues.values())) == before:
                raise Fault(f"pushes come before their pulls: {[queue[0] for queue in queues.values() if queue]}")

    def _take(self, server: int, event: Event) -> bool:
        """Whether a message could be taken."""
        slot = event.trainer, event.round
        wanted = self._wanted(slot)
        if not event.push:
            if (event.table, server) not in wanted:
                raise Fault(f"server {server} is asked for rows of {event} that it has not")
            self._pull(slot, event.table, server)
            return True
        if self._pulled.get(slot, set()) != wanted:
            return False
        if slot not in self._made:
            self._made[slot] = self._gradients(slot)
        name = self.tables[event.table]["parameter"]
        part = self.parts[event.table, server]
        ids, sums = self._made[slot][name]
        mine = np.isin(ids, part.rows)
        self.rule.apply(part, ids[mine], sums[mine])
        part.due += 1
        if part.due == self.trainers:  # counters go on behind one push of each trainer
            part.step, part.due = part.step + 1, 0
        return True

    def _wanted(self, slot: tuple[int, int]) -> set[tuple[int, int]]:
        """Of which tables and servers a step pulls rows."""
        batch = self.batches(*slot)
        return {
            (number, server) for (number, server), part in self.parts.items()
            if part.places(batch[f"{self.tables[number]['parameter']}_ids"].reshape(-1)).size
        }  # fmt: skip

    def _pull(self, slot: tuple[int, int], table: int, server: int) -> None:
        name, part = self.tables[table]["parameter"], self.parts[table, server]
        known = self._known.setdefault(slot, {}).setdefault(name, np.full_like(self.start[name], np.nan))
        rows = part.places(self.batches(*slot)[f"{name}_ids"].reshape(-1))
        known[np.ix_(part.rows[rows], part.columns)] = part.held[""][rows]
        self._pulled.setdefault(slot, set()).add((table, server))

    def _gradients(self, slot: tuple[int, int]) -> dict[str, tuple[Ids, Values]]:
        """Of each table the rows of a batch, each once, and the sums of their gradients."""
        batch, known = self.batches(*slot), self._known[slot]
        names = [entry["parameter"] for entry in self.tables]
        sums = {name: known[name][batch[f"{name}_ids"]].sum(1, dtype=np.float32) for name in names}
        first, second = names
        off = (sums[first] * sums[second]).sum(1, dtype=np.float32) - batch["target"]
        self.losses[slot] = float((off * off).mean(dtype=np.float32))
        adjoint = (off * np.float32(2 / off.size))[:, None]
        found = {}
        for name, other in ((first, second), (second, first)):
            ids = batch[f"{name}_ids"]
            each = np.repeat((adjoint * sums[other])[:, None], ids.shape[1], 1)
            if name in self.padding:
                each[ids == self.padding[name]] = 0
            rows = np.unique(ids)
            total = np.zeros((rows.size, each.shape[-1]), np.float32)
            np.add.at(total, np.searchsorted(rows, ids.reshape(-1)), each.reshape(ids.size, -1))
            found[name] = rows, total
        return found


def _own(entry: Mapping[str, Any], place: int) -> tuple[Ids, Ids]:
    """The rows and columns of a part, by the documented layouts."""
    rows, columns = np.arange(entry["rows"]), np.arange(entry["width"])
    if entry["layout"] == "modulo":
        rows = rows[rows % len(entry["servers"]) == place]
    elif entry["layout"] == "range":
        rows = rows[entry["cuts"][place] : entry["cuts"][place + 1]]
    elif entry["layout"] == "columns":
        columns = columns[entry["cuts"][place] : entry["cuts"][place + 1]]
    return rows, columns


def _of(name: str, entry: Mapping[str, Any]) -> str:
    """What an optimizer calls a state of a table: ``sum`` of ``user.sum``; '' for the table and for all others."""
    return name.removeprefix(f"{entry['parameter']}.") if name.startswith(f"{entry['parameter']}.") else ""
