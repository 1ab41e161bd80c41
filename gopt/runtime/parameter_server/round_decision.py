"""Decides the contributors of a round, and whether the round is applied; all servers decide the same.

A trainer lost between two pushes has reached some servers and not others. If each server merged its received pushes,
the keys of one step would be means over different trainers. So each server waits until every participating trainer has
ended the round; the round uses the trainers whose whole contribution is on every server."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gopt.runtime.parameter_server.server_exchange import HeldPart, ServerExchange


@dataclass(frozen=True, slots=True)
class Contributors:
    """``trainers``: the contributors of a round. ``left_out``: trainers with a part on some server, and not with
    all parts on every server."""

    trainers: tuple[int, ...]
    left_out: tuple[int, ...]


def agree_on_contributors(
    exchange: ServerExchange, round_number: int, complete: Iterable[int], some: Iterable[int]
) -> Contributors:  # fmt: skip
    """Decide the contributors of a round; all servers call this function.

    ``complete``: trainers with a whole contribution on this server. ``some``: trainers with any part here."""

    def join(parts: list[HeldPart]) -> list[HeldPart]:
        whole = set.intersection(*(set(part.note["complete"]) for part in parts))
        anything = set[int]().union(*(part.note["complete"] + part.note["some"] for part in parts))
        return [HeldPart(note=[sorted(whole), sorted(anything - whole)])] * len(parts)

    mine = HeldPart(note={"complete": sorted(complete), "some": sorted(some)})
    whole, left_out = exchange(round_number, mine, join).note
    return Contributors(tuple(whole), tuple(left_out))


def agree_on_fault(exchange: ServerExchange, round_number: int, wrong: str) -> str:
    """Return the fault found in a round by the first server with a fault, or ''; all servers call this function, and
    get the same."""

    def join(parts: list[HeldPart]) -> list[HeldPart]:
        return [HeldPart(note=next((part.note for part in parts if part.note), ""))] * len(parts)

    note: str = exchange(round_number, HeldPart(note=wrong), join).note
    return note
