"""Assigns pieces to servers by a table for both pushes and pulls."""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby

from gopt.errors import InvariantError, OptionError
from gopt.parameter_server.server_map import assigned
from gopt.text.sanitize import show


class Placement(str, Enum):
    """How pieces are assigned to servers."""

    ROUND_ROBIN = "round-robin"
    """In turn: the numbers of pieces of two servers differ by one at most."""
    HASH = "hash"
    """By a stable digest of the piece's key: a piece keeps its server when other pieces come or go."""
    BYTES = "bytes"
    """Largest first to the server with the fewest bytes."""


@dataclass(frozen=True, slots=True)
class PieceSize:
    """A piece to place: ``index`` among its tensor's pieces, and bytes."""

    tensor: str
    index: int
    nbytes: int

    @property
    def key(self) -> str:
        """Return a unique text for a piece: only digits follow the last ``#``, so any name may precede it."""
        return f"{self.tensor}#{self.index}"


def place(
    pieces: Sequence[PieceSize], servers: int, placement: Placement, server_map: Mapping[str, int] | None = None
) -> tuple[int, ...]:
    """Return the server of each piece; equal arguments give equal results on every machine.

    ``server_map`` is the user's: its pieces go where it says and take no turn, and their bytes
    count before others are placed. A piece without bytes goes to server 0 and takes no turn either. Takes time O(n log
    n) for n pieces. Raises OptionError.
    """
    if servers < 1:
        raise OptionError(f"the number of servers cannot be {show(servers)}", "it is at least 1")
    if len({(piece.tensor, piece.index) for piece in pieces}) != len(pieces):
        raise InvariantError("a piece is to be placed twice")
    fixed = assigned([(piece.tensor, piece.index) for piece in pieces], servers, server_map or {})
    rest = [position for position, piece in enumerate(pieces) if position not in fixed and piece.nbytes]
    owners = [fixed.get(position, 0) for position in range(len(pieces))]
    for position, server in zip(rest, _PLACE[placement](pieces, rest, servers, fixed), strict=True):
        owners[position] = server
    return tuple(owners)


def _round_robin(
    pieces: Sequence[PieceSize], rest: Sequence[int], servers: int, fixed: Mapping[int, int]
) -> Sequence[int]:
    return [turn % servers for turn in range(len(rest))]


def _hash(pieces: Sequence[PieceSize], rest: Sequence[int], servers: int, fixed: Mapping[int, int]) -> Sequence[int]:
    digests = (hashlib.sha256(pieces[position].key.encode()).digest() for position in rest)
    return [int.from_bytes(digest[:8], "big") % servers for digest in digests]


def _bytes(pieces: Sequence[PieceSize], rest: Sequence[int], servers: int, fixed: Mapping[int, int]) -> Sequence[int]:
    """Assign by bytes: among the servers with the fewest bytes, take the one with the fewest pieces of this tensor,
    then the lowest number.

    Bytes decide first: pieces of one tensor share a server only where that balances the bytes better, or where all
    servers with the fewest bytes have one.
    """
    load = [0] * servers
    counter: Counter[tuple[str, int]] = Counter()
    for position, server in fixed.items():
        load[server] += pieces[position].nbytes
        counter[pieces[position].tensor, server] += 1
    heap = [(nbytes, server) for server, nbytes in enumerate(load)]
    heapq.heapify(heap)
    owner = {}
    largest_first = sorted(rest, key=lambda position: (-pieces[position].nbytes, position))
    for (tensor, nbytes), run in groupby(largest_first, lambda at: (pieces[at].tensor, pieces[at].nbytes)):
        for position, server in _spread(heap, counter, tensor, nbytes, run):
            owner[position] = server
    return [owner[position] for position in rest]


def _spread(
    heap: list[tuple[int, int]], counter: Counter[tuple[str, int]], tensor: str, nbytes: int, run: Iterable[int]
) -> Iterator[tuple[int, int]]:
    """Take servers from a heap of (bytes, server) for a run of equal pieces of one tensor.

    ``aside`` has the servers of the fewest bytes, ``level``, that have a piece of the tensor already. These servers
    stay aside for the whole run, so that a run looks once at each server, and again at a chosen server.
    """
    aside: list[tuple[int, int]] = []
    level = 0
    for position in run:
        chosen = None
        while chosen is None and heap and (not aside or heap[0][0] == level):
            level, server = heapq.heappop(heap)
            if counter[tensor, server]:
                heapq.heappush(aside, (counter[tensor, server], server))
            else:
                chosen = server
        if chosen is None:
            _, chosen = heapq.heappop(aside)
        counter[tensor, chosen] += 1
        heapq.heappush(heap, (level + nbytes, chosen))
        yield position, chosen
    for _, server in aside:
        heapq.heappush(heap, (level, server))


_PLACE: dict[Placement, Callable[[Sequence[PieceSize], Sequence[int], int, Mapping[int, int]], Sequence[int]]] = {
    Placement.ROUND_ROBIN: _round_robin,
    Placement.HASH: _hash,
    Placement.BYTES: _bytes,
}
