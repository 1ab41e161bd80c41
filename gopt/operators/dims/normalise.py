"""Dimensions of normalisations over channels, pooling and losses: operands are (samples, channels, places ...)."""

from __future__ import annotations

from collections.abc import Iterator

from gopt.operators.dims.link import DimFactor, Index, OperatorUse, all_results, given_of, kept, made_of


def pool(operator: OperatorUse) -> Iterator[DimFactor]:
    """Samples and channels; nothing if indices are requested, which count through the whole operand."""
    if len(operator.results) > 1 and operator.results[1] is not None:
        return
    for dim in range(min(2, operator.rank(0))):
        yield DimFactor((dim,), (dim,), filled=dim == 1)


def batch_normalization(operator: OperatorUse) -> Iterator[DimFactor]:
    """Channels with all statistics; samples and places only if no statistics are computed."""
    if operator.opset < 9 or operator.rank(0) < 2:
        return
    training = operator.attributes.get("training_mode", 0) if operator.opset >= 14 else len(operator.results) > 1
    yield DimFactor((1, 0, 0, 0, 0), made_of(operator, 1, 0, 0, 0, 0))
    if not training:
        for dim in range(operator.rank(0)):
            if dim != 1:
                yield DimFactor((dim, None, None, None, None), made_of(operator, dim, None, None, None, None))


def instance_normalization(operator: OperatorUse) -> Iterator[DimFactor]:
    """Samples; channels."""
    yield DimFactor((0, None, None), (0,))
    yield DimFactor((1, 0, 0), (1,))


def group_normalization(operator: OperatorUse) -> Iterator[DimFactor]:
    """Samples; channels by whole groups. Before operator set 21 scale and offset have one element for each group."""
    channels, groups = operator.size(0, 1), int(operator.attributes["num_groups"])
    unit = channels // groups
    scale = Index(0, unit if operator.opset >= 21 else 1)
    yield DimFactor((0, None, None), (0,), filled=True)
    yield DimFactor((Index(1, unit), scale, scale), (Index(1, unit),), filled=True)


def mean_variance(operator: OperatorUse) -> Iterator[DimFactor]:
    """Dimensions not normalised over."""
    rank = operator.rank(0)
    axes = [axis % rank for axis in operator.attributes.get("axes", (0, 2, 3))]
    return kept(operator, [dim for dim in range(rank) if dim not in axes])


def across_channels(operator: OperatorUse) -> Iterator[DimFactor]:
    """LRN: samples and places; channels meet their neighbours."""
    return kept(operator, [dim for dim in range(operator.rank(0)) if dim != 1])


def loss(operator: OperatorUse) -> Iterator[DimFactor]:
    """Samples and places of scores and labels; the second result has the samples and places of scores.

    A mean leaves out ignored labels: with weights or a label to ignore, members' means are not the mean.
    """
    scores, reduce = operator.rank(0), operator.attributes.get("reduction", "mean")
    filled = operator.op_type == "SoftmaxCrossEntropyLoss"
    weighed = operator.has(2) or "ignore_index" in operator.attributes
    if reduce == "mean" and weighed:
        return
    for dim in range(scores):
        if dim != 1:
            label = dim - (dim > 1)
            results = made_of(operator, label if reduce == "none" else None, dim)
            pieces = "" if reduce == "none" else reduce
            yield DimFactor(given_of(operator, dim, label, None), results, pieces, filled=filled)


def depth_space(operator: OperatorUse) -> Iterator[DimFactor]:
    """DepthToSpace and SpaceToDepth: samples, rows and columns of blocks, channels of what has fewer."""
    block, to_space = operator.attributes["blocksize"], operator.op_type == "DepthToSpace"
    by_channel = to_space and operator.attributes.get("mode", "DCR") == "CRD"
    many = Index(1, block * block) if by_channel else Index(1, 1, block * block)

    def link(deep: int | Index, wide: int | Index) -> DimFactor:
        return DimFactor((deep,), (wide,)) if to_space else DimFactor((wide,), (deep,))

    yield link(0, 0)
    yield link(many, 1)
    yield link(2, Index(2, block))
    yield link(3, Index(3, block))


def resize(operator: OperatorUse) -> Iterator[DimFactor]:
    """Unresized dimensions, and dimensions with places repeated a whole number of times, without region of interest or
    ratio policy."""
    mode = operator.attributes.get("coordinate_transformation_mode", "half_pixel")
    if mode == "tf_crop_and_resize" or operator.attributes.get("keep_aspect_ratio_policy", "stretch") != "stretch":
        return
    before, after, operand = operator.dims(0), operator.made(), 1 if operator.opset < 11 else 2
    axes = [axis % len(before) for axis in operator.attributes.get("axes", range(len(before)))]
    factors = {dim: new / max(old, 1) for dim, (old, new) in enumerate(zip(before, after))}
    if operator.has(operand) and operator.dims(operand) != (0,):
        scales = operator.constant(operand)
        if scales is None:
            return
        factors |= dict(zip(axes, scales.tolist()))
    for dim, (old, new) in enumerate(zip(before, after)):
        if old == new and factors[dim] == 1.0:
            yield DimFactor((dim, *[None] * (len(operator.operands) - 1)), all_results(operator, dim))
        elif old and new > old and new % old == 0 and factors[dim] == new // old and _repeats(operator):
            many = Index(dim, new // old)
            yield DimFactor((dim, *[None] * (len(operator.operands) - 1)), all_results(operator, many), filled=True)


def _repeats(operator: OperatorUse) -> bool:
    """Return whether a Resize by a whole number repeats each place equally often, in order."""
    attributes = operator.attributes
    if attributes.get("mode", "nearest") != "nearest":
        return False
    if operator.opset < 11:
        return True
    where = attributes.get("coordinate_transformation_mode", "half_pixel")
    how = attributes.get("nearest_mode", "round_prefer_floor")
    halves = where in ("half_pixel", "pytorch_half_pixel") and how in ("round_prefer_floor", "round_prefer_ceil")
    return halves or (where == "asymmetric" and how == "floor")
