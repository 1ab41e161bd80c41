"""Shape and cost rules of the collectives. The rules check their operands; unknown sizes stay unknown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

from gopt.collectives.call import Call, PartialType
from gopt.collectives.layout import ITEM_BYTES, format_shape, parse_shapes, total_elements
from gopt.errors import InputError, UnsupportedError

Shape: TypeAlias = tuple[int | str | None, ...] | None


def same(call: Call) -> list[PartialType]:
    """Outputs like the inputs."""
    return list(call.inputs)


def nothing(call: Call) -> list[PartialType]:
    return []


def stated(call: Call) -> list[PartialType]:
    """Return the types in the attribute ``shapes``, with the call's dtype."""
    shapes = parse_shapes(call["shapes"])
    if not shapes:
        raise InputError(f"{call.op}: shapes is empty")
    return [(call.dtype, shape) for shape in shapes]


def broadcast(call: Call) -> list[PartialType]:
    """As stated; the root's inputs must agree, and other members have no inputs."""
    result = stated(call)
    is_root = bool(call.inputs) if call.index is None else call.index == call["root"]
    if is_root != bool(call.inputs):
        raise InputError(f"{call.op}: only the root, member {call['root']}, has inputs: wrong on member {call.index}")
    if is_root and len(call.inputs) != len(result):
        raise InputError(f"{call.op}: {len(call.inputs)} inputs for {len(result)} shapes")
    for (_, actual), (_, shape) in zip(call.inputs, result, strict=False):
        if shape is not None and not _agrees(actual, shape):
            raise InputError(f"{call.op}: an input of shape {actual} where shapes says {shape}")
    return result


def reduce_scatter(call: Call) -> list[PartialType]:
    """A member's elements of the flat bucket (rank 1), or the member's slice of the axis."""
    if call.has("axis"):
        shape = _sliced(call)
        return [(call.dtype, _with(shape, call["axis"], _own(call, call["sizes"])))]
    lengths = _lengths(call)
    counts = [_elements(shape) for _, shape in call.inputs]
    if None not in counts and sum(filter(None, counts)) != sum(lengths):
        raise InputError(f"{call.op}: cuts end at {sum(lengths)}, the bucket at {sum(filter(None, counts))}")
    return [(call.dtype, (_own(call, lengths),))]


def all_gather(call: Call) -> list[PartialType]:
    """The bucket cut up as stated, or the slices joined along the axis."""
    if call.has("axis"):
        total = _total(call, "sizes")
        _match(call, call["axis"], _own(call, call["sizes"]))
        return [(call.dtype, _with(_shape(call), call["axis"], total))]
    result, lengths = stated(call), _lengths(call)
    elements = total_elements(parse_shapes(call["shapes"]))
    if elements != sum(lengths):
        raise InputError(f"{call.op}: cuts end at {sum(lengths)}, the shapes hold {elements}")
    if not _agrees(_shape(call), (_own(call, lengths),)):
        raise InputError(
            f"{call.op}: the shard of member {call.index} has shape {_shape(call)}, and its cuts say another"
        )
    return result


def all_to_all(call: Call) -> list[PartialType]:
    """Split by all along one axis, joined along another: split axis sizes[index], concat axis the sum."""
    shape = _exchanged(call)
    shape = _with(shape, call["split_axis"], _own(call, call["split_sizes"]))
    return [(call.dtype, _with(shape, call["concat_axis"], _total(call, "concat_sizes")))]


def exchanged(call: Call) -> list[PartialType]:
    """Payload of an AllToAll: the members' inputs joined along the concat axis."""
    return [(call.dtype, _with(_exchanged(call), call["concat_axis"], _total(call, "concat_sizes")))]


def ring(call: Call, nbytes: int) -> int:
    """The (n-1)/n·B bytes of one round."""
    return _rounded((call.members - 1) * nbytes, call.members)


def ring_twice(call: Call, nbytes: int) -> int:
    """The 2(n-1)/n·B bytes of a round that reduces and a round that gathers."""
    return _rounded(2 * (call.members - 1) * nbytes, call.members)


def all_but_own(call: Call, nbytes: int) -> int:
    """B less the member's own shard."""
    if call.has("cuts"):
        return nbytes - _lengths(call)[call.place] * ITEM_BYTES[call.dtype]
    return nbytes - _part(nbytes, call["sizes"], call.place)


def exchange(call: Call, nbytes: int) -> int:
    """The member's input less the kept piece."""
    part = _part(nbytes, call["concat_sizes"], call.place)
    return part - _part(part, call["split_sizes"], call.place)


def everything(call: Call, nbytes: int) -> int:
    return nbytes


def free(call: Call, nbytes: int) -> int:
    return 0


def _rounded(numerator: int, denominator: int) -> int:
    """Nearest integer of a fraction, halves up."""
    return (2 * numerator + denominator) // (2 * denominator)


def _part(nbytes: int, sizes: Sequence[int], index: int) -> int:
    # Exact: the bytes are a multiple of the axis's length, or the axis is empty and so are they.
    return nbytes * sizes[index] // sum(sizes) if nbytes else 0


def _shape(call: Call) -> Shape:
    return call.inputs[0][1]


def _elements(shape: Shape) -> int | None:
    sizes = [] if shape is None else [size for size in shape if isinstance(size, int)]
    return None if shape is None or len(sizes) < len(shape) else math.prod(sizes)


def _agrees(shape: Shape, wanted: tuple[int | str | None, ...]) -> bool:
    """Return whether two shapes may be the same, as far as both are known."""
    if shape is None:
        return True
    pairs = zip(shape, wanted, strict=False)
    return len(shape) == len(wanted) and all(
        a == b or not isinstance(a, int) or not isinstance(b, int) for a, b in pairs
    )


def _with(shape: Shape, axis: int, size: int | None) -> Shape:
    return None if shape is None else (*shape[:axis], size, *shape[axis + 1 :])


def _own(call: Call, sizes: Sequence[int]) -> int | None:
    """The member's entry; without an index known only for equal entries."""
    if call.index is not None:
        return sizes[call.index]
    return sizes[0] if len(set(sizes)) == 1 else None


def _lengths(call: Call) -> list[int]:
    """Elements of each member's shard of a bucket, from checked cuts."""
    cuts = call["cuts"]
    if len(cuts) < 2 or (call.size is not None and len(cuts) != call.size + 1):
        raise InputError(f"{call.op}: {len(cuts)} cuts for {call.size or 'some'} members, which need one more")
    lengths = [stop - start for start, stop in pairwise(cuts)]
    if cuts[0] != 0 or min(lengths) < 0:
        raise InputError(f"{call.op}: cuts start at 0 and never fall, not {format_shape(cuts):.80}")
    return lengths


def _total(call: Call, name: str) -> int:
    """Length of an axis, from checked sizes."""
    sizes = call[name]
    if not sizes or (call.size is not None and len(sizes) != call.size):
        raise InputError(f"{call.op}: {len(sizes)} {name} for {call.size or 'some'} members")
    if min(sizes) < 0:
        raise InputError(f"{call.op}: a negative entry in {name}: {format_shape(sizes):.80}")
    return int(sum(sizes))


def _match(call: Call, axis: int, size: int | None) -> None:
    """Refuse a missing axis, or an axis of another length than ``size``."""
    shape = _shape(call)
    if axis < 0 or (shape is not None and axis >= len(shape)):
        raise InputError(f"{call.op}: the input of shape {shape} has no axis {axis}")
    result = None if shape is None else shape[axis]
    if isinstance(result, int) and size is not None and result != size:
        raise InputError(f"{call.op}: axis {axis} of the input has length {result}, the sizes say {size}")


def _sliced(call: Call) -> Shape:
    """Shape of a ReduceScatter's only input, with a checked axis."""
    if len(call.inputs) != 1:
        raise InputError(f"{call.op} along an axis takes one input, not {len(call.inputs)}")
    _match(call, call["axis"], _total(call, "sizes"))
    return _shape(call)


def _exchanged(call: Call) -> Shape:
    """Shape of an AllToAll's input, both axes checked."""
    if call["split_axis"] == call["concat_axis"]:
        raise UnsupportedError(f"{call.op}: split_axis and concat_axis are both {call['split_axis']}")
    _total(call, "concat_sizes")
    if len(call["concat_sizes"]) != len(call["split_sizes"]):
        raise InputError(f"{call.op}: split_sizes and concat_sizes are not of equal length")
    _match(call, call["split_axis"], _total(call, "split_sizes"))
    _match(call, call["concat_axis"], _own(call, call["concat_sizes"]))
    return _shape(call)
