"""Laws of operators that slide along dimensions of places: convolutions, pools, their gradients.

A rank with some places, and the places beside as far as the operator reads, computes some places of the result. A rank
with some positions of the kernel, or of a spread operand, computes some of the terms. ``gopt.operators.dims.windows``
says how an operator slides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import numpy as np

from gopt.ir.graph import Node
from gopt.ir.types import numpy_dtype
from gopt.operators.dims.link import OperatorUse
from gopt.operators.dims.windows import Sliding, mean_counts, paddings, plain_mean, slices, sliding
from gopt.operators.kinds import CONVOLUTIONS, POOLS
from gopt.verification.proof import move_laws, place_laws, sum_laws
from gopt.verification.proof.attributes import frozen
from gopt.verification.proof.constants import Arrays, taken
from gopt.verification.proof.forms import CONCAT, FLAT, LOWEST, PERMUTED, TAKE, VIEW, Shape, elements
from gopt.verification.proof.masks import LARGEST_DIMENSION
from gopt.verification.proof.selections import Runs, Selection, inside, joined, length, positions

if TYPE_CHECKING:
    from gopt.verification.proof.operators import NodeReader

PAD = "Pad"
SLICE = "Slice"
MEAN = "AveragePool"
SLIDING = CONVOLUTIONS | POOLS | {PAD, SLICE}
WINDOWED = SLIDING | {place_laws.SCATTER}
"""Operators with some of the terms for some positions of an operand."""
SPREADING = "ConvTranspose"
BORDERS = {"MaxPool": LOWEST}
"""Operator -> the number beside the places; zeros by default."""
ZERO = "zero"
_SLID = frozenset({"pads", "auto_pad", "kernel_shape", "strides", "dilations", "ceil_mode", "output_padding",
                   "starts", "ends", "axes"})  # fmt: skip
"""Attributes that ``Sliding`` tells."""
Run = tuple[int, int]


@dataclass(frozen=True, slots=True)
class PlacesRead:
    """Ranges of each dimension of a whole value; positions below zero or beyond the last have the value ``border``."""

    whole: int
    ranges: tuple[Runs, ...]
    border: str = ""

    def run(self, dim: int) -> Run | None:
        """The single range of a dimension; None for several."""
        return self.ranges[dim][0] if len(self.ranges[dim]) == 1 else None


def window(reader: NodeReader, number: int) -> PlacesRead | None:
    """The places behind a part, a row of parts and borders, or a permuted one; None for an open number of places."""
    expressions = reader.expressions
    box = expressions.box(number)
    whole, selection = box or (number, (None,) * len(expressions.shape(number) or ()))
    op, attributes, operands, shape = expressions.all[whole]
    result: PlacesRead | None = None
    if whole >= expressions.of_ranks and op == CONCAT:
        result = _row(reader, operands, cast(int, attributes))
    elif whole >= expressions.of_ranks and op == PERMUTED:
        perm, inner = cast(tuple[int, ...], attributes), window(reader, operands[0])
        if inner is not None:
            moved = move_laws.permuted(reader, inner.whole, perm)
            result = replace(inner, whole=moved, ranges=tuple(inner.ranges[dim] for dim in perm))
    elif op == VIEW and operands[0] >= expressions.of_ranks:
        result = _viewed(reader, operands[0], shape)
    if result is None and elements(shape) is not None:
        result = PlacesRead(whole, tuple(((0, size),) for size in cast(tuple[int, ...], shape)))
    if result is None:
        return None
    ranges = tuple(inside(runs, chosen) or () for runs, chosen in zip(result.ranges, selection))
    return replace(result, ranges=ranges) if all(ranges) else None


def _viewed(reader: NodeReader, number: int, shape: Shape) -> PlacesRead | None:
    """A window in a shape with dimensions of length 1 elsewhere."""
    expressions, inner = reader.expressions, window(reader, number)
    if inner is None or inner.whole == number:
        return None
    before, sizes = expressions.shape(number) or (), expressions.shape(inner.whole) or ()
    dims = [dim for dim, size in enumerate(before) if size != 1]
    after = [dim for dim, size in enumerate(shape or ()) if size != 1]
    if [before[dim] for dim in dims] != [(shape or ())[dim] for dim in after]:
        return None
    if any(sizes[dim] != 1 for dim in range(len(before)) if dim not in dims):
        return None
    moved = dict(zip(after, dims))
    whole = expressions.view(
        inner.whole, tuple(sizes[moved[dim]] if dim in moved else 1 for dim in range(len(shape or ())))
    )
    ranges = tuple(inner.ranges[moved[dim]] if dim in moved else ((0, 1),) for dim in range(len(shape or ())))
    return replace(inner, whole=whole, ranges=ranges)


def _row(reader: NodeReader, numbers: Sequence[int], axis: int) -> PlacesRead | None:
    """Neighbouring places in a row, borders in front and behind."""
    borders = [_border(reader, number) for number in numbers]
    parts = [window(reader, number) for number, border in zip(numbers, borders) if not border]
    kinds = {border for border in borders if border} | {part.border for part in parts if part and part.border}
    lead = parts[0] if parts else None
    if lead is None or len(kinds) > 1:
        return None
    runs: list[Run] = []
    for part in parts:
        if part is None or part.whole != lead.whole or _beside(part.ranges, axis) != _beside(lead.ranges, axis):
            return None
        runs += part.ranges[axis]
    size = int((reader.expressions.shape(lead.whole) or ())[axis] or 0)
    lengths = [int((reader.expressions.shape(number) or ())[axis] or 0) for number in numbers]
    begin = next(at for at, border in enumerate(borders) if not border)
    last = next(at for at in reversed(range(len(borders))) if not borders[at])
    front, behind = sum(lengths[:begin]), sum(lengths[last + 1 :])
    (start, _), (_, stop) = runs[0], runs[-1]
    if any(borders[begin:last]) or (front and start > 0) or (behind and stop < size):
        return None
    row = joined([(start - front, start), *runs, (stop, stop + behind)])
    ranges = (*lead.ranges[:axis], row, *lead.ranges[axis + 1 :])
    return PlacesRead(lead.whole, ranges, kinds.pop() if kinds else "")


def _beside(ranges: tuple[Runs, ...], axis: int) -> tuple[Runs, ...]:
    return ranges[:axis] + ranges[axis + 1 :]


def _border(reader: NodeReader, number: int) -> str:
    """Zero or the lowest number, for a value with the number in every element."""
    op, _, operands, _ = reader.expressions.all[number]
    if reader.expressions.uniform(number) == 0:
        return ZERO
    if op in (VIEW, TAKE) or (op == FLAT and len(set(operands)) == 1):
        return _border(reader, operands[0])
    value = reader.table.single(number)
    return LOWEST if op == LOWEST or (value is not None and bool(np.isneginf(np.float64(value)))) else ""


# --- results on whole values ---


def transposed(reader: NodeReader, node: Node, operands: Sequence[int], arrays: Arrays, shape: Shape) -> int | None:
    """Places of a transposed convolution without pads; a bias is added apart."""
    expressions, made = reader.expressions, tuple(map(int, shape or ()))  # type: ignore[arg-type]
    if shape is None or not reader.floating(node):
        return None
    if len(operands) > 2:
        (number,) = reader.results(Node(node.op_type, node.inputs[:2], node.outputs, attributes=node.attributes),
                                   operands[:2], [shape])  # fmt: skip
        bias = expressions.view(operands[2], (*(expressions.shape(operands[2]) or ()), *[1] * (len(made) - 2)))
        return expressions.elementwise(expressions.added, [number, bias])
    pads = list(node.attributes.get("pads") or ())
    if not any(pads):
        return sum_laws.of_groups(reader, node, operands, shape, transposed=True)
    if node.attributes.get("auto_pad", "NOTSET") != "NOTSET" or "output_shape" in node.attributes:
        return None
    front, behind = pads[: len(pads) // 2], pads[len(pads) // 2 :]
    sizes = (*made[:2], *(size + before + after for size, before, after in zip(made[2:], front, behind)))
    attributes = {**node.attributes, "pads": [0] * len(pads)}
    (number,) = reader.results(Node(node.op_type, node.inputs, node.outputs, attributes=attributes), operands, [sizes])
    spots = [((start, start + size),) for start, size in zip(front, made[2:])]
    return expressions.take(number, (None, None, *spots))


def mean(reader: NodeReader, node: Node, operands: Sequence[int], arrays: Arrays, shape: Shape) -> int | None:
    """A mean that leaves out padding: the mean with zeros for the padding, times a constant."""
    use, attributes = reader.use(node, operands, [shape]), {**node.attributes, "count_include_pad": 1}
    if use is None or node.attributes.get("count_include_pad", 0):
        return None
    counts = mean_counts(use)
    if counts is None or not np.isfinite(counts).all() or bool((counts == 1).all()):
        return None
    (number,) = reader.results(Node(node.op_type, node.inputs, node.outputs, attributes=attributes), operands, [shape])
    selection: Selection = (None,) * len(counts.shape)
    if (box := reader.expressions.box(number)) is not None and (origin := reader.table.origins.get(box[0])) is not None:
        expression = reader.expressions.all[box[0]]
        source = reader.use(origin[1], expression.operands, [expression.shape])
        whole, chosen = None if source is None else mean_counts(source), (None, None, *box[1][2:])
        if whole is not None and np.array_equal(taken(whole, chosen), counts):
            counts, selection = whole, chosen
    factor = reader.expressions.from_array(counts.astype(numpy_dtype(reader.type_of(node).dtype)))
    pair = [number, reader.expressions.take(factor, selection)]
    return reader.expressions.elementwise(lambda values: reader.expressions.product(values, (1, 1)), pair)


def results(reader: NodeReader, node: Node, operands: Sequence[int], shapes: Sequence[Shape]) -> list[int] | None:
    """The results of an operator on a window or on parts: places of the whole results, or some of the terms."""
    if reader.expressions.sealed and node.op_type == place_laws.SCATTER and len(operands) == 3:
        return place_laws.scattered(reader, node, operands, shapes)
    if not reader.expressions.sealed or node.op_type not in SLIDING or not operands:
        return None
    read = window(reader, operands[0])
    readers = [] if read is None else reader.expressions.readers(node.op_type, read.whole)
    expected = (frozen(node), 0), tuple(operands)
    if any(reader.expressions.all[number][1:3] == expected for number in readers):
        return None
    use = reader.use(node, operands, shapes) if readers else None
    if read is None or use is None:
        return None
    candidate: list[int] | None = None
    for number in readers:
        origin = reader.table.origins.get(number)
        if origin is None or not _alike(origin[1], node):
            continue
        dims = _sliding_dims(reader, use, origin[1], number)
        law = _Law(reader, node, operands, shapes, use, read, origin[1], number, dims)
        result = law.spread() if node.op_type == SPREADING else law.slid()
        if result is not None and reader.core(result[0]) < reader.expressions.of_ranks:
            return result
        candidate = candidate or result
    return candidate


def _sliding_dims(reader: NodeReader, use: OperatorUse, model: Node, number: int) -> frozenset[int]:
    """The dimensions that a node, or the source's operator ``number``, slides along."""
    if model.op_type not in (PAD, SLICE):
        return frozenset(range(2, use.rank(0)))
    expression = reader.expressions.all[number]
    source = reader.use(model, expression.operands, [expression.shape]) or use
    pairs = enumerate(zip(_slides(use), _slides(source)))
    return frozenset(dim for dim, pair in pairs if not all(slide is not None and slide.still for slide in pair))


def _alike(node: Node, model: Node) -> bool:
    """Return whether two nodes have the same attributes, sliding apart."""
    return frozen(node, _SLID) == frozen(model, _SLID)


@dataclass(slots=True)
class _Law:
    """A node on a rank, and a node of the source that slides over the whole value."""

    reader: NodeReader
    node: Node
    operands: Sequence[int]
    shapes: Sequence[Shape]
    use: OperatorUse
    read: PlacesRead
    model: Node
    number: int
    dims: frozenset[int]
    """The dimensions that the operator slides along."""

    def slid(self) -> list[int] | None:
        """Places of the results; for a part of the kernel, some of the terms."""
        expressions = self.reader.expressions
        whole, rest = self._whole(), self._rest()
        kernel = expressions.box(rest[0]) if self.node.is_in(CONVOLUTIONS) else None
        cut = list(kernel[1]) if kernel is not None else []
        if kernel is not None:
            rest = [expressions.take(kernel[0], (*cut[:2], *[None] * (len(cut) - 2))), *rest[1:]]
        source = None if whole is None else self._source(whole, rest)
        if whole is None or source is None:
            return None
        chosen: list[Runs | None] = [None] * len(self.read.ranges)
        terms: list[tuple[int, int, Runs]] = []
        changed = False
        totals, parts = list(_slides(source)), list(_slides(self.use))
        starts: dict[int, Run] = {}
        for dim, (total, local) in enumerate(zip(totals, parts)):
            if total is None or local is None:
                if dim in self.dims:
                    return None
                continue
            if dim not in self.dims:
                continue
            part = cut[dim] if cut else None
            at = self._first(dim, total, local, part)
            if at is None:
                return None
            changed |= total != local or part is not None
            starts[dim] = at, at + local.made
            if part is None:
                chosen[dim] = None if (at, local.made) == (0, total.made) else ((at, at + local.made),)
            else:
                terms.append((dim, total.kernel, part))
        if not changed or (terms and len(rest) > 1):
            return None
        sizes = [source.made(index) for index in range(len(self.shapes))]
        numbers = self.reader.results(self._node, [whole, *rest], sizes)
        try:
            for dim, size, runs in terms:
                numbers[0] = expressions.parted(numbers[0], self.reader.core(numbers[0]), (None, dim), size, runs)
        except ValueError:
            return None
        results = [expressions.take(number, tuple(chosen)) for number in numbers]
        if len(results) == 1:
            return results
        moved, *rest_moved = [dim for dim, (total, local) in enumerate(zip(totals, parts)) if total != local]
        run = self.read.run(moved)
        if run is None or rest_moved or self.model.attributes.get("storage_order", 0):
            return None
        counted = place_laws.of_part(self.reader, results[1], totals, moved, run, starts[moved])
        return None if counted is None else [results[0], counted]

    def _rest(self) -> list[int]:
        """The operands behind the first; of an operator with bounds as operands, the source's."""
        if self.node.op_type in (PAD, SLICE):
            return list(self.reader.expressions.all[self.number].operands[1:])
        return list(self.operands[1:])

    def _whole(self) -> int | None:
        """The whole value in the dimensions that the operator slides along."""
        shape = self.reader.expressions.shape(self.read.whole) or ()
        selection: list[Runs | None] = [None] * len(shape)
        for dim, size in enumerate(shape):
            runs = self.read.ranges[dim]
            if dim not in self.dims:
                if runs[0][0] < 0 or runs[-1][1] > int(size or 0):
                    return None
                selection[dim] = runs
            elif self.read.run(dim) is None:
                return None
        return self.reader.expressions.take(self.read.whole, tuple(selection))

    def _source(self, whole: int, rest: Sequence[int]) -> OperatorUse | None:
        """The operator on whole values, for rules of dimensions."""
        result = self.reader.expressions.shape(self.number) or ()
        shapes = [None if shape is None else tuple(new if dim in self.dims else old
                  for dim, (old, new) in enumerate(zip(shape, result))) for shape in self.shapes]  # fmt: skip
        return self.reader.use(self._node, [whole, *rest], shapes)

    @property
    def _node(self) -> Node:
        """The node as the source has it, in place of the rank's."""
        return Node(self.node.op_type, self.node.inputs, self.node.outputs, attributes=self.model.attributes)

    def _first(self, dim: int, total: Sliding, local: Sliding, part: Runs | None) -> int | None:
        """The start of the rank's places in the whole result; None for another border or other places to read.

        ``part``: of the kernel, for some of the terms of all places."""
        run, size = self.read.run(dim), total.length
        if run is None or (local.stride, local.dilation) != (total.stride, total.dilation):
            return None
        low, high = local.read(0, local.made)
        if (low < 0 and run[0] > 0) or (high > local.length and run[1] < size):
            return None
        if (run[0] < 0 or run[1] > size) and self.read.border != BORDERS.get(self.node.op_type, ZERO):
            return None
        if self.node.op_type in POOLS and local != total and not self._counted(total, local):
            return None
        shift = run[0] - local.pad + total.pad
        if part is None:
            at, rest = divmod(shift, total.stride)
            return at if local.kernel == total.kernel and not rest and 0 <= at <= total.made - local.made else None
        alike = len(part) == 1 and local.kernel == length(part, 0) and local.made == total.made
        return 0 if alike and shift == part[0][0] * total.dilation else None

    def _counted(self, total: Sliding, local: Sliding) -> bool:
        """Return whether means are of equally many numbers."""
        return self.node.op_type != MEAN or all(plain_mean(self.use, slide) for slide in (total, local))

    def spread(self) -> list[int] | None:
        """Some of the terms of a transposed convolution, at all places with a term."""
        expressions = self.reader.expressions
        whole = self._whole()
        source = None if whole is None or len(self.operands) > 2 else self._source(whole, self.operands[1:])
        if whole is None or source is None:
            return None
        terms: list[tuple[int, int, Runs]] = []
        begin: list[int] = [0] * len(self.read.ranges)
        slides: dict[int, Sliding] = {}
        for dim, (total, local) in enumerate(zip(_slides(source), _slides(self.use))):
            if total is None or local is None:
                if dim in self.dims:
                    return None
                continue
            run = self.read.run(dim)
            alike = (local.stride, local.dilation, local.kernel) == (total.stride, total.dilation, total.kernel)
            if run is None or run[0] < 0 or run[1] > total.made or not alike:
                return None
            slides[dim] = total
            begin[dim] = run[0] * total.stride
            if total.pad or local.pad or begin[dim] + local.length > total.length:
                return None
            if max(total.length, total.made * total.kernel) > LARGEST_DIMENSION:
                return None
            if run != (0, total.made):
                terms.append((dim, total.made, (run,)))
        sizes, result = source.made(), self.use.made()
        if not terms and result == sizes:
            return None
        (number,) = self.reader.results(self._node, [whole, *self.operands[1:]], [sizes])
        core = self.reader.core(number)
        expressions.reaches[core] = _Spread(slides)
        try:
            for dim, size, runs in terms:
                number = expressions.parted(number, core, (dim, None), size, runs)
        except ValueError:
            return None
        spots = [((start, start + count),) for start, count in zip(begin, result)]
        return [expressions.take(number, (None, None, *spots[2:]))]


def _slides(use: OperatorUse) -> Iterator[Sliding | None]:
    """The sliding of an operator along each dimension; None for no sliding, or an unknown one."""
    added = paddings(use) if use.op_type == PAD else None
    rows = slices(use) if use.op_type == SLICE else None
    for dim in range(use.rank(0)):
        size, result = use.size(0, dim), use.made()[dim]
        if use.op_type == PAD:
            yield None if added is None else Sliding(1, 1, 1, *added[dim], size, result)
        elif use.op_type == SLICE:
            start, step = (rows or {}).get(dim, (0, 1))
            yield None if rows is None else Sliding(1, step, 1, -start, 0, size, result)
        else:
            yield sliding(use, dim) if dim >= 2 else None


@dataclass(frozen=True, slots=True)
class _Spread:
    """The reach of positions of a transposed convolution; ``slides``: of each dimension."""

    slides: Mapping[int, Sliding]

    def __call__(self, label: object, selection: Selection) -> Runs | None:
        """The positions of an index that reach selected places; None for another index."""
        dim = cast(tuple[int | None, ...], label)[0]
        slide = self.slides.get(dim) if dim is not None else None
        if slide is None or dim is None:
            return None
        runs = selection[dim]
        ranges = np.zeros(slide.length, bool)
        ranges[positions(((0, slide.length),) if runs is None else runs)] = True
        reached = np.arange(slide.made)[:, None] * slide.stride - slide.pad + np.arange(slide.kernel) * slide.dilation
        inside_whole = (reached >= 0) & (reached < slide.length)
        hits = (ranges[np.where(inside_whole, reached, 0)] & inside_whole).any(1)
        return joined((at, at + 1) for at in np.flatnonzero(hits).tolist())
