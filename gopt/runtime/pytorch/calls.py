"""The collectives of ``gopt.comm`` on a process group of PyTorch. Starting a call returns a function that waits for it.

All values of a call travel as a single tensor. Halves are summed in float32 and rounded once; a mean is a divided sum;
a NaN is a maximum and a minimum. PyTorch's calls have equal parts, so shorter shards are padded."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from gopt.collectives.layout import lengths, parse_shapes, resized, total_elements
from gopt.ir.types import numpy_dtype
from gopt.runtime.pytorch.tensors import torch_dtype

Tensors: TypeAlias = Sequence[torch.Tensor]
Finish: TypeAlias = Callable[[], list[torch.Tensor]]
Shape: TypeAlias = tuple[int, ...]

_HALVES = (torch.float16, torch.bfloat16)
_WIDE = {
    **dict.fromkeys(_HALVES, torch.float32), torch.bool: torch.uint8,
    **dict.fromkeys((torch.int16, torch.uint16, torch.uint32), torch.int64),
}  # fmt: skip
"""Type -> the type in which its elements are combined."""
_OPERATIONS = {
    "sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN,
}  # fmt: skip
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class GroupCall:
    """A rank's side of a call. ``members``: the ranks of the group, in group order; ``device``: of tensors
    that it makes."""

    attributes: Any
    inputs: Tensors
    group: Any
    members: tuple[int, ...]
    rank: int
    device: torch.device
    sent: list[tuple[Any, torch.Tensor]] = field(default_factory=list)
    """Sends on their way, with the memory that they read."""

    @property
    def index(self) -> int:
        """The place of this rank in the group."""
        return self.members.index(self.rank)


def flat(tensors: Tensors) -> torch.Tensor:
    """The elements of tensors, tensor by tensor, in new memory."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unpacked(elements: torch.Tensor, shapes: Sequence[Shape]) -> list[torch.Tensor]:
    """The inverse of ``flat``, over the same memory."""
    parts = elements.split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes)]


def padded(parts: Tensors) -> torch.Tensor:
    """Flat parts as the rows of a tensor, as long as the longest part."""
    longest = max(len(part) for part in parts)
    rows = parts[0].new_zeros((len(parts), longest))
    for row, part in zip(rows, parts):
        row[: len(part)] = part
    return rows


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor to be moved: every type travels."""
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor.reshape(1).view(torch.uint8)


# --- reductions -------------------------------------------------------------------------------------------------------


def _reduction(
    call: GroupCall, elements: torch.Tensor, start: Callable[..., tuple[Any, torch.Tensor]]
) -> Callable[[], Any]:
    """Start a reduction of flat elements: ``start`` gets the elements and the operation, and gives the work and the
    memory of the result. Returns a function to wait for the result, of the elements' type."""
    how, dtype = call.attributes["reduce"], elements.dtype
    wide = elements.to(_WIDE.get(dtype, dtype))
    if dtype is torch.uint64:
        wide = _ordered(elements.view(torch.int64)) if how in ("max", "min") else elements.view(torch.int64)
    marks = None
    if how in ("max", "min") and wide.is_floating_point():
        marks = start(wide.isnan().to(torch.float32), dist.ReduceOp.MAX)
    work, result = start(wide, _OPERATIONS[how])

    def finish() -> torch.Tensor:
        work.wait()
        value = result
        if how == "mean":
            value = value / len(call.members)
        if marks is not None:
            marks[0].wait()
            value = value.masked_fill(marks[1] > 0, math.nan)
        if dtype is torch.uint64:
            return (_ordered(value) if how in ("max", "min") else value).view(dtype)
        return value.to(dtype)

    return finish


def _ordered(bits: torch.Tensor) -> torch.Tensor:
    """Unsigned numbers as signed ones in the same order, and back."""
    return bits ^ torch.iinfo(torch.int64).min


def _all_reduce(call: GroupCall) -> Finish:
    def start(elements: torch.Tensor, operation: Any) -> tuple[Any, torch.Tensor]:
        return dist.all_reduce(elements, operation, call.group, async_op=True), elements

    finish = _reduction(call, flat(call.inputs), start)
    return lambda: unpacked(finish(), [value.shape for value in call.inputs])


def _reduce(call: GroupCall) -> Finish:
    root = call.members[call.attributes["root"]]

    def start(elements: torch.Tensor, operation: Any) -> tuple[Any, torch.Tensor]:
        return dist.reduce(elements, root, operation, call.group, async_op=True), elements

    finish = _reduction(call, flat(call.inputs), start)

    def results() -> list[torch.Tensor]:
        elements = finish()
        return unpacked(elements, [value.shape for value in call.inputs]) if call.rank == root else []

    return results


def _reduce_scatter_of(call: GroupCall) -> Finish:
    if "cuts" in call.attributes:
        counts = lengths(call.attributes["cuts"])
        parts: Tensors = flat(call.inputs).split(counts)
        shape: Shape = (counts[call.index],)
    else:
        pieces = call.inputs[0].split([*call.attributes["sizes"]], call.attributes["axis"])
        parts, shape = [piece.reshape(-1) for piece in pieces], pieces[call.index].shape
    rows = padded(parts)

    def start(elements: torch.Tensor, operation: Any) -> tuple[Any, torch.Tensor]:
        result = elements.new_empty(rows.shape[1])
        return _reduce_scatter(result, elements.view(-1), operation, call.group, async_op=True), result

    finish = _reduction(call, rows, start)
    return lambda: [finish()[: math.prod(shape)].view(shape)]


# --- moves ------------------------------------------------------------------------------------------------------------


def _broadcast(call: GroupCall) -> Finish:
    shapes, root = parse_shapes(call.attributes["shapes"]), call.members[call.attributes["root"]]
    dtype = torch_dtype(numpy_dtype(call.attributes["dtype"]))
    empty = torch.empty(total_elements(shapes), dtype=dtype, device=call.device)
    elements = flat(call.inputs) if call.rank == root else empty
    work = dist.broadcast(_as_bytes(elements), root, call.group, async_op=True)
    return lambda: _waited(work, lambda: unpacked(elements, shapes))


def _all_gather_of(call: GroupCall) -> Finish:
    shard, attributes = call.inputs[0], call.attributes
    if "cuts" in attributes:
        counts, shapes = lengths(attributes["cuts"]), parse_shapes(attributes["shapes"])
    else:
        shapes = [resized(shard.shape, attributes["axis"], size) for size in attributes["sizes"]]
        counts = [math.prod(shape) for shape in shapes]
    mine = shard.reshape(-1)
    longest = max(counts)
    if len(mine) < longest:
        mine = torch.cat([mine, mine.new_zeros(longest - len(mine))])
    rows = mine.new_empty(len(counts) * longest)
    work = _all_gather(_as_bytes(rows), _as_bytes(mine), call.group, async_op=True)

    def results() -> list[torch.Tensor]:
        work.wait()
        starts = [0, *accumulate(counts)]
        if all(start == place * longest for place, (start, count) in enumerate(zip(starts, counts)) if count):
            elements = rows[: starts[-1]]  # short shards are the last ones: padding is behind all elements
        else:
            elements = torch.cat([row[:count] for row, count in zip(rows.view(len(counts), -1), counts)])
        parts = unpacked(elements, shapes)
        return parts if "cuts" in attributes else [torch.cat(parts, attributes["axis"])]

    return results


def _all_to_all(call: GroupCall) -> Finish:
    attributes = call.attributes
    out, into = attributes["split_axis"], attributes["concat_axis"]
    pieces = call.inputs[0].split([*attributes["split_sizes"]], out)
    base = pieces[call.index].shape
    shapes = [resized(base, into, size) for size in attributes["concat_sizes"]]
    sent, width = flat(pieces), pieces[0].element_size()
    got = sent.new_empty(total_elements(shapes))
    work = dist.all_to_all_single(
        _as_bytes(got), _as_bytes(sent), [math.prod(shape) * width for shape in shapes],
        [piece.numel() * width for piece in pieces], call.group, async_op=True,
    )  # fmt: skip
    return lambda: _waited(work, lambda: [torch.cat(unpacked(got, shapes), into)])


def _send(call: GroupCall) -> Finish:
    """The rank goes on before the receiver comes: with pipeline stages both may be about to send."""
    elements = _as_bytes(flat(call.inputs))
    call.sent[:] = [item for item in call.sent if not item[0].is_completed()]
    call.sent.append((dist.isend(elements, call.attributes["peer"], call.group, call.attributes["tag"]), elements))
    return lambda: []


def _recv(call: GroupCall) -> Finish:
    shapes, dtype = parse_shapes(call.attributes["shapes"]), torch_dtype(numpy_dtype(call.attributes["dtype"]))
    elements = torch.empty(total_elements(shapes), dtype=dtype, device=call.device)
    work = dist.irecv(_as_bytes(elements), call.attributes["peer"], call.group, call.attributes["tag"])
    return lambda: _waited(work, lambda: unpacked(elements, shapes))


def _waited(work: Any, results: Finish) -> list[torch.Tensor]:
    work.wait()
    return results()


START: dict[str, Callable[[GroupCall], Finish]] = {
    "AllReduce": _all_reduce, "Reduce": _reduce, "Broadcast": _broadcast, "ReduceScatter": _reduce_scatter_of,
    "AllGather": _all_gather_of, "AllToAll": _all_to_all, "Send": _send, "Recv": _recv,
}  # fmt: skip
"""Collective -> the function that starts it."""
