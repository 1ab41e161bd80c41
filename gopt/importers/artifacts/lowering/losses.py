"""Softmax cross entropy and the gradient. Classes are along axis 1, labels have no such axis."""

from __future__ import annotations

from gopt.importers.artifacts.lowering.builder import Builder


def cross_entropy(
    b: Builder, scores: str, labels: str, weights: str = "", ignored: str = "", *, reduction: str, output_type: int
) -> tuple[str, ...]:
    """Loss and log probabilities; the label that does not count is an input of the operator."""
    inputs = [scores, labels, weights] if weights else [scores, labels]
    attributes = {"ignore_index": b.integer(ignored)} if ignored else {}
    return b.several("SoftmaxCrossEntropyLoss", *inputs, results=2, reduction=reduction, **attributes)


def cross_entropy_grad(
    b: Builder, dy: str, log_prob: str, labels: str, weights: str = "", *, reduction: str, ignore_index: int | None
) -> str:
    """(exp(log_prob) - 1 at the label) · dY · weight of the label / count: the sum of weights that count for ``mean``,
    else 1."""
    wide = b.op("Sub", b.op("Exp", log_prob), _one_hot(b, log_prob, labels))
    counts = None
    if ignore_index is not None:
        counts = b.op("Not", b.op("Equal", labels, b.array(ignore_index, b.dtype(labels))))
        labels = b.op("Where", counts, labels, b.array(0, b.dtype(labels)))
    share = _share(b, log_prob, labels, weights, counts)
    scale = dy
    if reduction == "mean":
        total = b.reduce("ReduceSum", share, list(range(b.rank(log_prob) - 1)), keepdims=0) if share else ""
        total = total or b.cast(b.op("Size", labels), b.dtype(log_prob))
        scale = b.op("Div", dy, total)
    factor = b.op("Mul", share, scale) if share else scale
    if share or reduction == "none":
        factor = b.op("Unsqueeze", factor, b.array([1]))
    return b.op("Mul", wide, factor)


def _one_hot(b: Builder, log_prob: str, labels: str) -> str:
    classes = b.dims(log_prob, [1])[0]
    trailing = b.rank(log_prob) - 2
    numbers = b.op("Range", b.array(0), b.array(classes), b.array(1))
    if trailing:
        numbers = b.op("Unsqueeze", numbers, b.array(list(range(1, trailing + 1))))
    positions = b.op("Unsqueeze", b.cast(labels, "int64"), b.array([1]))
    return b.cast(b.op("Equal", positions, numbers), b.dtype(log_prob))


def _share(b: Builder, log_prob: str, labels: str, weights: str, counts: str | None) -> str:
    """How much each label counts; '' where all count alike."""
    if weights:
        share = b.op("Gather", weights, labels)
        return share if counts is None else b.op("Where", counts, share, b.number_like(0, log_prob))
    return "" if counts is None else b.cast(counts, b.dtype(log_prob))


def cross_entropy_internal_grad(
    b: Builder, dy: str, log_prob: str, labels: str, weights: str = "", ignored: str = "", bias: str = "", *,
    reduction: str, output_type: int,
) -> str:  # fmt: skip
    """The same where the label that does not count is an input; ``bias`` is added to the gradient."""
    index = b.integer(ignored) if ignored else None
    gradient = cross_entropy_grad(b, dy, log_prob, labels, weights, reduction=reduction, ignore_index=index)
    return b.op("Add", gradient, bias) if bias else gradient
