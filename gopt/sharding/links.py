"""Which dimensions of an operator's operands and results are split together: one rule per operator family.

A *link* is one index of an operator: a dimension of some operands, and of the results or summed away in them. To split
an operator is to split one link: each member computes its part of the index with the operator itself. Links are read
in both directions: what operands give, and what a result asks of operands. Types are logical: those of whole values.
An operator without a rule has no links: members compute it whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np

from gopt.analysis.operators import ELEMENTWISE
from gopt.ir.types import FLOATS, TensorType
from gopt.sharding.placements import REPLICATED, Partial, Placement, Shard


@dataclass(frozen=True, slots=True)
class Operator:
    """A node as rules see it. ``operands``, ``results``: logical types, None where absent; ``constant``: the value of
    an operand where the graph holds one."""

    op_type: str
    attributes: Mapping[str, Any]
    operands: tuple[TensorType | None, ...]
    results: tuple[TensorType | None, ...]
    constant: Callable[[int], np.ndarray | None]

    def rank(self, place: int) -> int:
        """Dimensions of an operand; 0 where it is absent."""
        type = self.operands[place] if place < len(self.operands) else None
        return len(type.dims) if type is not None else 0

    def size(self, place: int, dim: int) -> int:
        """Elements of an operand's dimension."""
        type = self.operands[place]
        assert type is not None
        return type.dims[dim]


@dataclass(frozen=True, slots=True)
class Slot:
    """An operand or a result, by its place."""

    place: int
    result: bool = False


@dataclass(frozen=True, slots=True)
class Link:
    """One index of an operator: the dimension of each operand and result that it is, None where a value has none.

    ``reduce``: how members' results become the whole one, where results do not have the index. ``masked``: indices of
    another operand choose along it, so that a member takes what it has and gives zeros for the rest.
    """

    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]
    reduce: str = ""
    masked: bool = False


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to split an operator along an axis: how operands must be placed, and how results are then."""

    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    masked: bool = False


Rule = Callable[[Operator, Slot, Shard], Iterator[Strategy]]


def strategies(operator: Operator, slot: Slot, shard: Shard) -> list[Strategy]:
    """The ways to split an operator of which one operand or result is sharded so; none where it has no such link."""
    rule = RULES.get(operator.op_type)
    types = (*operator.operands, *operator.results)
    if rule is None or not all(type is None or type.static for type in types):
        return []
    return list(rule(operator, slot, shard))


# --- links ------------------------------------------------------------------------------------------------------------


def linked(links: Callable[[Operator], Iterator[Link]]) -> Rule:
    """The rule of an operator whose links keep the sizes of their parts."""

    def rule(operator: Operator, slot: Slot, shard: Shard) -> Iterator[Strategy]:
        for link in links(operator):
            row = link.results if slot.result else link.operands
            if slot.place >= len(row) or row[slot.place] != shard.dim:
                continue
            if link.reduce == "mean" and len(set(shard.sizes)) > 1:
                continue  # a mean of unequal parts' means is not the mean
            if link.masked and shard.runs > 1:
                continue
            made: Placement = Partial(link.reduce) if link.reduce else REPLICATED
            yield Strategy(
                tuple(_along(shard, dim, REPLICATED) for dim in link.operands),
                tuple(_along(shard, dim, made) for dim in link.results),
                link.masked,
            )

    return rule


def _along(shard: Shard, dim: int | None, other: Placement) -> Placement:
    return other if dim is None else Shard(dim, shard.sizes, shard.runs)


def _aligned(operator: Operator, place: int, dim: int, rank: int) -> int | None:
    """The dimension of an operand that broadcasts into dimension ``dim`` of ``rank``; None where it has one element."""
    type = operator.operands[place]
    if type is None:
        return None
    own = dim - (rank - len(type.dims))
    return own if own >= 0 and type.dims[own] != 1 else None


def _result_rank(operator: Operator) -> int:
    type = operator.results[0]
    return len(type.dims) if type is not None else 0


def _results(operator: Operator, dim: int | None) -> tuple[int | None, ...]:
    return tuple(None if type is None else dim for type in operator.results)


def elementwise(operator: Operator) -> Iterator[Link]:
    """Each dimension of the result, with those of operands that are not broadcast along it."""
    rank = _result_rank(operator)
    places = range(len(operator.operands))
    if operator.op_type in ("Clip", "CastLike"):
        places = range(1)  # bounds have one element; the other gives its type alone
    for dim in range(rank):
        row = [_aligned(operator, place, dim, rank) for place in places]
        yield Link((*row, *[None] * (len(operator.operands) - len(row))), _results(operator, dim))


def matmul(operator: Operator) -> Iterator[Link]:
    """Rows, columns, samples; and the contracted index, over which members' products are summed."""
    a, b = operator.rank(0), operator.rank(1)
    if a < 2 or b < 2:
        return
    rank = _result_rank(operator)
    for dim in range(rank - 2):
        yield Link((_aligned(operator, 0, dim, rank), _aligned(operator, 1, dim, rank)), (dim,))
    yield Link((a - 2, None), (rank - 2,))
    yield Link((None, b - 1), (rank - 1,))
    yield Link((a - 1, b - 2), (None,), "sum")


def gemm(operator: Operator) -> Iterator[Link]:
    """As a product; the contracted index only where nothing is added, which each member would add."""
    row_a, row_b = (1 if operator.attributes.get(name, 0) else 0 for name in ("transA", "transB"))
    added = len(operator.operands) > 2 and operator.operands[2] is not None
    rest = len(operator.operands) > 2

    def link(a: int | None, b: int | None, out: int | None) -> Link:
        row: tuple[int | None, ...] = (a, b)
        if rest:
            row += (_aligned(operator, 2, out, 2) if out is not None and added else None,)
        return Link(row, (out,), "" if out is not None else "sum")

    yield link(row_a, None, 0)
    yield link(None, 1 - row_b, 1)
    if not added:
        yield link(1 - row_a, row_b, None)


def einsum(operator: Operator) -> Iterator[Link]:
    """Each letter of the equation."""
    left, arrow, right = str(operator.attributes["equation"]).replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow or "." in left or any(len(set(term)) < len(term) for term in terms):
        return
    for letter in dict.fromkeys(left.replace(",", "")):
        row = tuple(term.index(letter) if letter in term else None for term in terms)
        kept = letter in right
        yield Link(row, (right.index(letter) if kept else None,), "" if kept else "sum")


REDUCTIONS = {
    "ReduceSum": "sum", "ReduceSumSquare": "sum", "ReduceL1": "sum", "ReduceMean": "mean", "ReduceMax": "max",
    "ReduceMin": "min",
}  # fmt: skip


def axes_of(operator: Operator) -> tuple[int, ...] | None:
    """The axes that a reduction, a Squeeze or the like acts on; None where they are not known."""
    rank = operator.rank(0)
    if "axes" in operator.attributes:
        given: Sequence[int] = operator.attributes["axes"]
    elif len(operator.operands) > 1 and operator.operands[1] is not None:
        value = operator.constant(1)
        if value is None:
            return None
        given = value.reshape(-1).tolist()
    else:
        given = () if operator.attributes.get("noop_with_empty_axes", 0) else range(rank)
    if not list(given) and not operator.attributes.get("noop_with_empty_axes", 0):
        given = range(rank)
    return tuple(sorted(axis % rank for axis in given)) if rank else ()


def reduction(operator: Operator) -> Iterator[Link]:
    """Kept dimensions stay; what is reduced away is reduced over members too."""
    axes = axes_of(operator)
    if axes is None:
        return
    keep = operator.attributes.get("keepdims", 1)
    rest: tuple[None, ...] = (None,) * (len(operator.operands) - 1)
    for dim in range(operator.rank(0)):
        if dim not in axes:
            out = dim if keep else dim - sum(axis < dim for axis in axes)
            yield Link((dim, *rest), (out,))
        elif op := REDUCTIONS.get(operator.op_type, ""):
            type = operator.operands[0]
            if op != "mean" or (type is not None and type.dtype in FLOATS):
                yield Link((dim, *rest), (None,), op)


def transpose(operator: Operator) -> Iterator[Link]:
    rank = operator.rank(0)
    perm = operator.attributes.get("perm") or list(reversed(range(rank)))
    for out, dim in enumerate(perm):
        yield Link((dim,), (out,))


def expand(operator: Operator) -> Iterator[Link]:
    """Dimensions that are there stay; new ones are made by each member in its own length."""
    rank = _result_rank(operator)
    for dim in range(rank):
        yield Link((_aligned(operator, 0, dim, rank), None), (dim,))


def beside(*axes: str, default: int = -1) -> Callable[[Operator], Iterator[Link]]:
    """All dimensions but the one along which the operator acts, named by an attribute."""

    def links(operator: Operator) -> Iterator[Link]:
        rank = operator.rank(0)
        axis = next((operator.attributes[name] for name in axes if name in operator.attributes), default) % max(rank, 1)
        rest: tuple[None, ...] = (None,) * (len(operator.operands) - 1)
        for dim in range(rank):
            if dim != axis:
                yield Link((dim, *rest), _results(operator, dim))

    return links


def in_front(operator: Operator) -> Iterator[Link]:
    """A normalisation over the last dimensions: those in front of them. Scale and offset are whole."""
    rank = operator.rank(0)
    axis = operator.attributes.get("axis", -1) % max(rank, 1)
    rest: tuple[None, ...] = (None,) * (len(operator.operands) - 1)
    for dim in range(axis):
        yield Link((dim, *rest), _results(operator, dim))


def gather(operator: Operator) -> Iterator[Link]:
    """Other dimensions of the data, dimensions of the indices, and the one that indices choose from."""
    rank, count = operator.rank(0), operator.rank(1)
    axis = operator.attributes.get("axis", 0) % max(rank, 1)
    for dim in range(rank):
        if dim != axis:
            yield Link((dim, None), (dim if dim < axis else dim + count - 1,))
    for dim in range(count):
        yield Link((None, dim), (axis + dim,))
    yield Link((axis, None), (None,), "sum", masked=True)


def gather_elements(operator: Operator) -> Iterator[Link]:
    axis = operator.attributes.get("axis", 0) % max(operator.rank(0), 1)
    for dim in range(operator.rank(0)):
        if dim != axis and operator.size(0, dim) == operator.size(1, dim):
            yield Link((dim, dim), (dim,))
    yield Link((axis, None), (None,), "sum", masked=True)


def scatter_elements(operator: Operator) -> Iterator[Link]:
    """Other dimensions, all of them cut alike; and the one that indices choose from, where others' updates are left."""
    axis = operator.attributes.get("axis", 0) % max(operator.rank(0), 1)
    for dim in range(operator.rank(0)):
        if dim != axis and operator.size(0, dim) == operator.size(1, dim):
            yield Link((dim, dim, dim), (dim,))
    yield Link((axis, None, None), (axis,), masked=True)


def scatter_nd(operator: Operator) -> Iterator[Link]:
    """Dimensions that no index chooses from; and the first, where one index chooses from it alone."""
    rank, count = operator.rank(0), operator.rank(1)
    chosen = operator.size(1, count - 1)
    for dim in range(chosen, rank):
        yield Link((dim, None, dim - chosen + count - 1), (dim,))
    if chosen == 1:
        yield Link((0, None, None), (0,), masked=True)


def concat(operator: Operator) -> Iterator[Link]:
    axis = operator.attributes["axis"] % max(operator.rank(0), 1)
    for dim in range(operator.rank(0)):
        if dim != axis:
            yield Link((dim,) * len(operator.operands), (dim,))


def sliced(operator: Operator) -> Iterator[Link]:
    """Dimensions of which nothing is cut off."""
    before, after = operator.operands[0], operator.results[0]
    steps = operator.constant(4) if len(operator.operands) > 4 else np.ones(1, np.int64)
    if before is None or after is None or steps is None or (steps < 1).any():
        return
    rest: tuple[None, ...] = (None,) * (len(operator.operands) - 1)
    for dim, (old, new) in enumerate(zip(before.dims, after.dims)):
        if old == new:
            yield Link((dim, *rest), (dim,))


def first_dims(count: int) -> Callable[[Operator], Iterator[Link]]:
    """The first dimensions alone: samples, or samples and channels of a pooling."""

    def links(operator: Operator) -> Iterator[Link]:
        rest: tuple[None, ...] = (None,) * (len(operator.operands) - 1)
        for dim in range(min(count, operator.rank(0))):
            yield Link((dim, *rest), _results(operator, dim))

    return links


def convolution(operator: Operator) -> Iterator[Link]:
    """Samples, channels of the result, channels of the operand; the last without a bias, which each would add."""
    if operator.attributes.get("group", 1) != 1:
        yield Link((0, *[None] * (len(operator.operands) - 1)), (0,))
        return
    bias = len(operator.operands) > 2 and operator.operands[2] is not None
    rest = len(operator.operands) > 2
    made, read = (1, 0) if operator.op_type == "ConvTranspose" else (0, 1)
    yield Link((0, None, None)[: 2 + rest], (0,))
    yield Link((None, made, 0 if bias else None)[: 2 + rest], (1,))
    if not bias:
        yield Link((1, read, None)[: 2 + rest], (None,), "sum")


# --- operators that change the parts ----------------------------------------------------------------------------------


def reshaped(shard: Shard, before: Sequence[int], after: Sequence[int]) -> Shard | None:
    """The same elements of a tensor in another shape; None where they are no parts of a dimension there.

    Seen flat, a member has ``sizes`` of each of ``pre`` runs, in units of ``post`` elements; so it has in the new
    shape, where a dimension begins and ends with those runs.
    """
    run, post = sum(shard.sizes), prod(before[shard.dim + 1 :])
    pre = prod(before[: shard.dim]) * shard.runs
    if not prod(before):
        return None
    for dim, (outer, size) in enumerate(zip(accumulate((1, *after), lambda a, b: a * b), after)):
        inner = prod(after[dim + 1 :])
        if pre % outer or size % (pre // outer):
            continue
        runs = pre // outer
        if size // runs * inner != run * post or any(each * post % inner for each in shard.sizes):
            continue
        return Shard(dim, tuple(each * post // inner for each in shard.sizes), runs)
    return None


def reshape(operator: Operator, slot: Slot, shard: Shard) -> Iterator[Strategy]:
    """Dimensions that are split and joined: Reshape, Flatten, Squeeze, Unsqueeze."""
    before, after = operator.operands[0], operator.results[0]
    if before is None or after is None or slot.place:
        return
    rest: tuple[Placement, ...] = (REPLICATED,) * (len(operator.operands) - 1)
    if slot.result:
        other = reshaped(shard, after.dims, before.dims)
        if other is not None and reshaped(other, before.dims, after.dims) == shard:
            yield Strategy((other, *rest), (shard,))
    elif (made := reshaped(shard, before.dims, after.dims)) is not None:
        yield Strategy((shard, *rest), (made,))


def split(operator: Operator, slot: Slot, shard: Shard) -> Iterator[Strategy]:
    """Equal pieces of a dimension: as many runs of it go into each."""
    yield from linked(beside("axis", default=0))(operator, slot, shard)
    axis = operator.attributes.get("axis", 0) % max(operator.rank(0), 1)
    pieces = [type.dims[axis] for type in operator.results if type is not None]
    count = len(operator.results)
    if shard.dim != axis or len(pieces) < count or len(set(pieces)) > 1:
        return
    whole = Shard(axis, shard.sizes, shard.runs * count) if slot.result else shard
    if whole.runs % count == 0:
        rest: tuple[Placement, ...] = (REPLICATED,) * (len(operator.operands) - 1)
        yield Strategy((whole, *rest), (Shard(axis, whole.sizes, whole.runs // count),) * count)


def joined(operator: Operator, slot: Slot, shard: Shard) -> Iterator[Strategy]:
    """Equal pieces joined along the dimension that is sharded: the inverse of a split."""
    yield from linked(concat)(operator, slot, shard)
    axis, count = operator.attributes["axis"] % max(operator.rank(0), 1), len(operator.operands)
    pieces = {type.dims[axis] for type in operator.operands if type is not None}
    if shard.dim != axis or len(pieces) > 1:
        return
    runs = shard.runs if slot.result else shard.runs * count
    if runs % count == 0:
        piece = Shard(axis, shard.sizes, runs // count)
        yield Strategy((piece,) * count, (Shard(axis, shard.sizes, runs),))


RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, linked(elementwise)),
    **dict.fromkeys([*REDUCTIONS, "ReduceL2", "ReduceProd", "ReduceLogSum", "ReduceLogSumExp"], linked(reduction)),
    **dict.fromkeys(["Reshape", "Flatten", "Squeeze", "Unsqueeze"], reshape),
    **dict.fromkeys(["Softmax", "LogSoftmax", "Hardmax", "CumSum"], linked(beside("axis"))),
    **dict.fromkeys(["LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"], linked(in_front)),
    **dict.fromkeys(["MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool", "LpPool"], linked(first_dims(2))),
    **dict.fromkeys(["Conv", "ConvTranspose"], linked(convolution)),
    "MatMul": linked(matmul),
    "Gemm": linked(gemm),
    "Einsum": linked(einsum),
    "Transpose": linked(transpose),
    "Expand": linked(expand),
    "Gather": linked(gather),
    "GatherElements": linked(gather_elements),
    "ScatterElements": linked(scatter_elements),
    "ScatterND": linked(scatter_nd),
    "Slice": linked(sliced),
    "Pad": linked(sliced),
    "Split": split,
    "Concat": joined,
}  # fmt: skip
"""Operator of ONNX -> how it is split. To split another family is to add a row."""
