"""The collectives of ``gopt.comm`` on a process group of PyTorch. Starting a call returns a function that waits for it.

All values of a call travel as a single tensor. Halves are summed in float32 and rounded once; a mean is a divided sum;
a NaN is a maximum and a minimum. NCCL's calls have equal parts, so shorter shards are padded. Gloo scatters and gathers
slowly (a ReduceScatter as an AllReduce): on the host parts travel as messages, unpadded, from where they lie, and each
member combines a part."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from gopt.collectives.layout import lengths, parse_shapes, resized, total_elements
from gopt.ir.types import numpy_dtype
from gopt.runtime.pytorch.group_call import GroupCall, Tensors
from gopt.runtime.pytorch.host_exchange import cut_pieces, exchange, receiving
from gopt.runtime.pytorch.tensors import torch_dtype

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
    wide = _widened(elements, how)
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
        return _narrowed(value, how, dtype)

    return finish


def _widened(elements: torch.Tensor, how: str) -> torch.Tensor:
    """Elements in the type in which they are combined."""
    if elements.dtype is torch.uint64:
        return _ordered(elements.view(torch.int64)) if how in ("max", "min") else elements.view(torch.int64)
    return elements.to(_WIDE.get(elements.dtype, elements.dtype))


def _narrowed(value: torch.Tensor, how: str, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of ``_widened``."""
    if dtype is torch.uint64:
        return (_ordered(value) if how in ("max", "min") else value).view(dtype)
    return value.to(dtype)


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
    shape: Shape
    pieces: Tensors
    if "cuts" in call.attributes:
        counts, pieces = lengths(call.attributes["cuts"]), call.inputs
        shape = (counts[call.index],)
    else:
        pieces = call.inputs[0].split([*call.attributes["sizes"]], call.attributes["axis"])
        counts = [piece.numel() for piece in pieces]
        shape = (*pieces[call.index].shape,)
    if call.device.type == "cpu":
        return _combined_parts(call, cut_pieces(pieces, counts), shape)
    rows = padded(flat(pieces).split(counts))

    def start(elements: torch.Tensor, operation: Any) -> tuple[Any, torch.Tensor]:
        result = elements.new_empty(rows.shape[1])
        return _reduce_scatter(result, elements.view(-1), operation, call.group, async_op=True), result

    finish = _reduction(call, rows, start)
    return lambda: [finish()[: math.prod(shape)].view(shape)]


def _combined_parts(call: GroupCall, parts: Sequence[Tensors], shape: Shape) -> Finish:
    """As ``_reduce_scatter_of``: this member gets a part of all members, and combines from first to last."""
    how, mine, place = call.attributes["reduce"], parts[call.index], call.index
    combine: Callable[..., torch.Tensor] = {"max": torch.maximum, "min": torch.minimum}.get(how, torch.add)
    if len(parts) == 1:
        return lambda: [flat(call.inputs).view(shape)]
    empty = call.inputs[0].new_empty
    arriving = [empty(0 if index == place else math.prod(shape)) for index in range(len(parts))]
    """Each in memory of its own: the result keeps but one."""
    finish = exchange(call, parts, [receiving(row, mine) for row in arriving])

    def results() -> list[torch.Tensor]:
        finish()
        rows = [row if index == place else _widened(row, how) for index, row in enumerate(arriving)]
        total, start = rows[1 if place == 0 else 0], 0
        for piece in mine:
            span = slice(start, start + len(piece))
            operands = [_widened(piece, how) if index == place else row[span] for index, row in enumerate(rows)]
            functools.reduce(functools.partial(combine, out=total[span]), operands)
            start = span.stop
        if how == "mean":
            total = total.div_(len(parts)) if total.is_floating_point() else total / len(parts)
        return [_narrowed(total, how, call.inputs[0].dtype).view(shape)]

    return results


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

    def joined(parts: list[torch.Tensor]) -> list[torch.Tensor]:
        return parts if "cuts" in attributes else [torch.cat(parts, attributes["axis"])]

    mine = shard.contiguous().view(-1)
    if call.device.type == "cpu":
        return _joined_parts(call, mine, counts, lambda elements: joined(unpacked(elements, shapes)))
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
        return joined(unpacked(elements, shapes))

    return results


def _joined_parts(
    call: GroupCall, mine: torch.Tensor, counts: Sequence[int], results: Callable[[torch.Tensor], list[torch.Tensor]]
) -> Finish:
    """As ``_all_gather_of``: each member sends a part to all others."""
    elements = mine.new_empty(sum(counts))
    parts = elements.split([*counts])
    parts[call.index].copy_(mine)  # a later segment may overwrite a state that the shard views
    finish = exchange(call, [[parts[call.index]]] * len(parts), [[part] for part in parts])

    def gathered() -> list[torch.Tensor]:
        finish()
        return results(elements)

    return gathered


def _all_to_all(call: GroupCall) -> Finish:
    attributes = call.attributes
    out, into = attributes["split_axis"], attributes["concat_axis"]
    pieces = call.inputs[0].split([*attributes["split_sizes"]], out)
    base = pieces[call.index].shape
    shapes = [resized(base, into, size) for size in attributes["concat_sizes"]]
    finish = _exchanged(call, flat(pieces), [piece.numel() for piece in pieces], [math.prod(shape) for shape in shapes])
    return lambda: [torch.cat(unpacked(finish(), shapes), into)]


def _exchanged(
    call: GroupCall, sent: torch.Tensor, sizes: Sequence[int], counts: Sequence[int]
) -> Callable[[], torch.Tensor]:
    """Start to send each member ``sizes`` elements, and to get ``counts`` of each. Returns a function to wait for the
    elements, member by member."""
    width = sent.element_size()
    got = sent.new_empty(sum(counts))
    work = dist.all_to_all_single(
        _as_bytes(got), _as_bytes(sent), [count * width for count in counts],
        [size * width for size in sizes], call.group, async_op=True,
    )  # fmt: skip

    def finish() -> torch.Tensor:
        work.wait()
        return got

    return finish


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
