"""Messages among the members of a call on the host, from the memory of the senders into the memory of the results.

Gloo's calls take a tensor of all elements: a copy at the sender, and another of the elements of a member."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import torch
import torch.distributed as dist

from gopt.runtime.pytorch.group_call import GroupCall, Tensors

_SMALL = 1 << 16
"""Bytes below which pieces in a row travel together: a message costs as much as a copy of them."""
_TAGS = 1 << 24
"""Tags of messages begin here: Send and Recv have numbers of values as tags."""


def cut_pieces(tensors: Tensors, counts: Sequence[int]) -> list[list[torch.Tensor]]:
    """The elements of tensors, tensor by tensor, cut into parts of ``counts`` elements: flat pieces over the same
    memory, where that has no gaps."""
    parts: list[list[torch.Tensor]] = [[] for _ in counts]
    ends = iter(zip(parts, counts))
    part, room = next(ends)
    for flat in (tensor.contiguous().view(-1) for tensor in tensors):
        start = 0
        while start < len(flat):
            while not room:
                part, room = next(ends)
            size = min(room, len(flat) - start)
            part.append(flat[start : start + size])
            start, room = start + size, room - size
    return parts


def exchange(call: GroupCall, sent: Sequence[Tensors], into: Sequence[Tensors]) -> Callable[[], None]:
    """Start to send the flat tensors ``sent[i]`` to member i, and to receive its messages in ``into[i]``. Returns a
    function to wait. The memory of what is sent stays as it is until then."""
    tag = _TAGS + call.number
    peers = [(index, member) for index, member in enumerate(call.members) if member != call.rank]
    works = [
        dist.irecv(_bytes(part), member, call.group, tag)
        for index, member in peers for part in into[index] if len(part)
    ]  # fmt: skip
    outgoing = [(member, _joined(message)) for index, member in peers for message in messages(sent[index])]
    works += [dist.isend(_bytes(elements), member, call.group, tag) for member, elements in outgoing]

    def finish() -> None:
        for work in works:
            work.wait()
        outgoing.clear()

    return finish


def messages(pieces: Tensors) -> list[list[torch.Tensor]]:
    """The pieces of each message: a long one together, short ones in a row together."""
    grouped: list[list[torch.Tensor]] = []
    for is_short, row in groupby((piece for piece in pieces if len(piece)), lambda piece: piece.nbytes < _SMALL):
        together = [*row]
        grouped += [together] if is_short else [[piece] for piece in together]
    return grouped


def receiving(row: torch.Tensor, pieces: Tensors) -> list[torch.Tensor]:
    """The parts of a flat tensor in which the messages of such pieces arrive."""
    return [*row.split([sum(map(len, message)) for message in messages(pieces)])] if len(row) else []


def _joined(message: Tensors) -> torch.Tensor:
    return message[0] if len(message) == 1 else torch.cat([*message])


def _bytes(piece: torch.Tensor) -> torch.Tensor:
    return piece.view(torch.uint8)
