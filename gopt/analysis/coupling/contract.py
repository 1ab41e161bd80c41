"""Contractions and reductions: where the sample dimension is kept, and where it is reduced."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import prod

from gopt.analysis.coupling.context import CouplingContext, axis_of
from gopt.analysis.coupling.marks import CouplingKind, Mark, Marks, Relation, Untraceable, changed, division
from gopt.analysis.coupling.pointwise import aligned, by_place, in_batch
from gopt.ir.graph import Node
from gopt.ir.node_kinds import record_of, scale
from gopt.operators.kinds import ARG_EXTREMES, MEANS, SOFTMAXES

Letters = Sequence[Hashable]


def settled(context: CouplingContext, mark: Mark, constant: float = 0.0) -> Mark:
    """Return ``mark`` as a mean if its factor, or the constant last multiplied in, divides by the batch size; else
    unchanged.
    """
    for factor in (constant, mark.factor):
        says = division(factor, context.batch, mark.sizes) if context.batch else None
        if says is not None and says.by_batch:
            if says.by_others:
                return changed(mark, doubt=True)
            return Mark(Relation.MEAN, origin=mark.origin, mixed=mark.mixed, count=mark.count, even=mark.even)
    return mark


def contract(context: CouplingContext, node: Node, operands: Sequence[tuple[str, Letters]], output: Letters) -> Mark:
    """The mark of a sum of products; dimensions that go together have one letter."""
    found: dict[Hashable, Mark] = {}
    factor = 1.0
    divided: int | None = 0
    for name, letters in operands:
        mark = context.samples(name)
        if mark is None:
            continue
        letter = letters[mark.axis]
        first = found.setdefault(letter, mark)
        if (first.outer, first.inner) != (mark.outer, mark.inner):
            raise Untraceable("two operands count the samples of one dimension differently")
        factor *= mark.factor
        divided = None if divided is None or mark.divided is None else divided + mark.divided
    if not found:
        raise Untraceable("random numbers are contracted")
    if len(found) > 1:
        in_batch(context, node)
    mixed = len(found) > 1 or any(mark.mixed for mark in found.values())
    kept = [letter for letter in found if letter in output]
    letter = kept[0] if kept else next(iter(found))
    mark = changed(found[letter], mixed=mixed, factor=factor, divided=divided)
    for name, letters in operands:
        if context.samples(name) is None and letter in letters:
            place = list(letters).index(letter)
            other = context.marks.get(name)
            if other is not None and other.kind is Relation.DRAWN:
                raise Untraceable("random numbers are contracted")
            if not mixed and not context.alike(name, place, mark):
                by_place(context, node, f"{name!r} has a value of its own for every place of the batch")
    if kept:
        return changed(mark, axis=list(output).index(letter))
    if len(found) > 1:
        return Mark(Relation.JOINT, origin=node.outputs[0], mixed=True, even=False)
    return summed(context, node, mark, (mark.outer, mark.inner))


def summed(context: CouplingContext, node: Node, mark: Mark, sizes: Sequence[int]) -> Mark:
    """The mark of a sum over all samples, and ``sizes`` other elements; a mean where it was divided by their number."""
    origin = node.outputs[0]
    context.origins[origin] = node
    count = context.batch * prod(sizes)
    if mark.divided != 0:
        kind = Relation.MEAN if mark.divided == 1 else Relation.JOINT
        return Mark(kind, origin=origin, mixed=mark.mixed, count=count, even=mark.divided == 1)
    total = Mark(Relation.SUM, factor=mark.factor, origin=origin, sizes=tuple(sizes), mixed=mark.mixed, count=count)
    return settled(context, total)


def matmul(context: CouplingContext, node: Node) -> Marks:
    left, right = node.inputs
    m, n = context.rank(left), context.rank(right)
    row: list[Hashable] = ["row"] if m > 1 else []
    column: list[Hashable] = ["column"] if n > 1 else []
    a = [*range(2 - m, 0), *row, "inner"]
    b = [*range(2 - n, 0), "inner", *column]
    front = range(2 - max(m, n), 0)
    return [contract(context, node, [(left, a), (right, b)], [*front, *row, *column])]


def gemm(context: CouplingContext, node: Node) -> Marks:
    a = ("inner", "row") if node.attributes.get("transA", 0) else ("row", "inner")
    b = ("column", "inner") if node.attributes.get("transB", 0) else ("inner", "column")
    left, right, *rest = [name for name in node.inputs if name]
    if context.samples(left) is None and context.samples(right) is None:
        return [aligned(context, node, rest, 2)]
    mark = contract(context, node, [(left, a), (right, b)], ["row", "column"])
    if mark.kind is not Relation.SAMPLES:
        if rest and float(node.attributes.get("beta", 1.0)):
            raise Untraceable("something is added to a sum over samples")
        return [changed(mark, factor=mark.factor * scale(node))]
    for name in rest:
        own = context.samples(name)
        if own is not None and own.axis + 2 - context.rank(name) != mark.axis:
            in_batch(context, node)
        elif own is None and not context.alike(name, mark.axis - 2 + context.rank(name), mark):
            by_place(context, node, f"{name!r} has a value of its own for every place of the batch")
    return [changed(mark, factor=1.0)]


def einsum(context: CouplingContext, node: Node) -> Marks:
    text = str(node.attributes["equation"]).replace(" ", "")
    given, arrow, output = text.partition("->")
    if not arrow or "." in text:
        raise Untraceable("an Einsum with implicit dimensions")
    return [contract(context, node, list(zip(node.inputs, given.split(","))), output)]


def conv(context: CouplingContext, node: Node) -> Marks:
    """Conv, ConvTranspose: samples in front; or samples as the channels that are summed, in a weight's gradient."""
    mark, weight = context.samples(node.inputs[0]), context.samples(node.inputs[1])
    if any(context.marks.get(name) is not None for name in node.inputs[2:]):
        raise Untraceable("a bias of samples")
    if mark is not None and weight is None and mark.axis == 0:
        return [changed(mark, factor=1.0)]
    both = mark is not None and weight is not None and node.is_a("Conv") and int(node.attributes.get("group", 1)) == 1
    if both and mark.axis == weight.axis == 1 and len(node.inputs) == 2:  # type: ignore[union-attr]
        return [contract(context, node, list(zip(node.inputs, ("nc*", "mc*"))), "nm*")]
    raise Untraceable("a convolution of samples in another dimension than the first")


def reduction(context: CouplingContext, node: Node) -> Marks:
    """The Reduce operators, ArgMax and ArgMin."""
    name, out = node.inputs[0], node.outputs[0]
    mark, rank = context.samples(name), context.rank(name)
    if mark is None:
        raise Untraceable("random numbers are reduced")
    axes = [axis_of(node, rank, 0)] if node.is_in(ARG_EXTREMES) else context.axes(node, rank) or []
    if not axes:
        if node.attributes.get("noop_with_empty_axes", 0):
            return [mark]
        axes = list(range(rank))
    linear = node.is_in(MEANS)
    if mark.axis not in axes:
        shift = 0 if node.attributes.get("keepdims", 1) else sum(each < mark.axis for each in axes)
        return [changed(mark, axis=mark.axis - shift, factor=mark.factor if linear else 1.0)]
    shape = context.shape(name)
    sizes = [size for axis, size in enumerate(shape) if axis in axes and axis != mark.axis and isinstance(size, int)]
    context.origins[out] = node
    pieces = record_of(node).pieces
    if pieces == "sum":
        return [summed(context, node, mark if linear else changed(mark, factor=1.0), (*sizes, mark.outer, mark.inner))]
    if pieces in ("max", "min"):
        return [Mark(Relation(pieces), origin=out, mixed=mark.mixed, even=False)]
    average = pieces == "mean" and mark.divided == 0
    count = context.batch * prod(sizes) * mark.outer * mark.inner
    return [Mark(Relation.MEAN if average else Relation.JOINT, origin=out, mixed=mark.mixed, count=count, even=average)]


def along(context: CouplingContext, node: Node) -> Marks:
    """Operators that work along one axis: Softmax, CumSum, TopK, …"""
    name = node.inputs[0]
    mark, rank = context.samples(name), context.rank(name)
    if mark is None:
        raise Untraceable("random numbers alone")
    axes = [axis_of(node, rank, -1)]
    if node.is_a("CumSum"):
        given = context.ints(node.inputs[1])
        if given is None:
            raise Untraceable("the axis is computed")
        axes = [given[0] % rank]
    elif node.is_in(SOFTMAXES) and context.opset < 13:
        axes = list(range(axis_of(node, rank, 1), rank))
    if mark.axis in axes:
        if not mark.mixed:
            in_batch(context, node)
        return [changed(mark, mixed=True, factor=1.0) for _ in node.outputs]
    return [changed(mark, factor=1.0) for _ in node.outputs]


def layer_norm(context: CouplingContext, node: Node) -> Marks:
    """LayerNormalization, RMSNormalization: statistics over the last dimensions."""
    mark, rank = context.samples(node.inputs[0]), context.rank(node.inputs[0])
    if mark is None or any(context.marks.get(name) is not None for name in node.inputs[1:]):
        raise Untraceable("its scale depends on the batch")
    if mark.axis >= axis_of(node, rank, -1):
        statistics(context, node, node.outputs[0])
    return [changed(mark, factor=1.0) for _ in node.outputs]


def statistics(context: CouplingContext, node: Node, value: str) -> None:
    """Record that values of single samples read a value reduced over samples."""
    context.couple(
        CouplingKind.STATISTICS, node,
        f"{value!r} ({node.op_type}) is taken over a rank's own samples, and single samples "
        "depend on it", "--statistics sync takes it over all ranks' samples", value,
    )  # fmt: skip


def batch_norm(context: CouplingContext, node: Node) -> Marks:
    mark = context.samples(node.inputs[0])
    if mark is None or mark.axis != 0:
        raise Untraceable("samples in another dimension than the first")
    if not node.attributes.get("training_mode", 0) and len([name for name in node.outputs if name]) == 1:
        return [changed(mark, factor=1.0)]
    statistics(context, node, node.outputs[0])
    return [changed(mark, factor=1.0), *(Mark(Relation.MEAN, origin=name) for name in node.outputs[1:])]


def in_front(context: CouplingContext, node: Node) -> Marks:
    """Operators whose first dimension is the batch: pools, group and instance norms, fused attention."""
    marks = [context.marks[name] for name in node.inputs if name in context.marks]
    if any(mark.kind is not Relation.SAMPLES or mark.axis != 0 for mark in marks):
        raise Untraceable("samples in another dimension than the first")
    if any((mark.outer, mark.inner) != (marks[0].outer, marks[0].inner) for mark in marks):
        raise Untraceable("operands count their samples differently")
    return [changed(marks[0], factor=1.0, mixed=any(mark.mixed for mark in marks)) for _ in node.outputs]


def loss_operator(context: CouplingContext, node: Node) -> Marks:
    """SoftmaxCrossEntropyLoss, NegativeLogLikelihoodLoss."""
    marks = [context.samples(name) for name in node.inputs[:2]]
    mark = marks[0]
    if mark is None or any(each is None or each.axis != 0 or each.inner != 1 for each in marks):
        raise Untraceable("samples in another dimension than the first")
    reduce = str(node.attributes.get("reduction", "mean"))
    rest = [changed(mark, factor=1.0) for _ in node.outputs[1:]]
    origin = node.outputs[0]
    if reduce == "none":
        return [changed(mark, factor=1.0), *rest]
    context.origins[origin] = node
    if reduce == "sum":
        return [Mark(Relation.SUM, origin=origin, doubt=context.batch == 1), *rest]
    weighted = "ignore_index" in node.attributes or (len(node.inputs) > 2 and bool(node.inputs[2]))
    return [Mark(Relation.WEIGHTED if weighted else Relation.MEAN, origin=origin), *rest]
