"""Layer and batch normalisation with what their backward keeps.

With x̂ = (X - mean) · r and r = 1 / √(variance + epsilon), and n elements in each mean:
dX = r · (d - mean(d) - x̂ · mean(d · x̂)), d = dY · scale; d scale = Σ dY · x̂; d bias = Σ dY.
"""

from __future__ import annotations

from math import prod

from gopt.importers.artifacts.lowering.builder import Builder


def layer_norm_grad(
    b: Builder, dy: str, x: str, scale: str, mean: str, r: str, *, axis: int, epsilon: float, stash_type: int
) -> tuple[str, ...]:
    hat = b.op("Mul", b.op("Sub", x, mean), r)
    lead, last = _split(b, x, axis)
    d = b.op("Mul", dy, scale)
    inner = b.op("Sub", d, b.reduce("ReduceMean", d, last))
    inner = b.op("Sub", inner, b.op("Mul", hat, b.reduce("ReduceMean", b.op("Mul", d, hat), last)))
    return b.op("Mul", r, inner), _sum(b, b.op("Mul", dy, hat), lead), _sum(b, dy, lead)


def simplified_layer_norm(
    b: Builder, x: str, scale: str, *, axis: int, epsilon: float, stash_type: int
) -> tuple[str, ...]:
    """X · r · scale, r = 1 / √(mean(X²) + epsilon); no mean is taken off."""
    _, last = _split(b, x, axis)
    square = b.reduce("ReduceMean", b.op("Mul", x, x), last)
    r = b.op("Reciprocal", b.op("Sqrt", b.op("Add", square, b.number_like(epsilon, x))))
    return b.op("Mul", b.op("Mul", x, r), scale), r


def simplified_layer_norm_grad(
    b: Builder, dy: str, x: str, scale: str, r: str, *, axis: int, epsilon: float, stash_type: int
) -> tuple[str, ...]:
    """As of a layer norm without mean: dX = r · (d - x̂ · mean(d · x̂)), x̂ = X · r."""
    hat = b.op("Mul", x, r)
    lead, last = _split(b, x, axis)
    d = b.op("Mul", dy, scale)
    inner = b.op("Sub", d, b.op("Mul", hat, b.reduce("ReduceMean", b.op("Mul", d, hat), last)))
    return b.op("Mul", r, inner), _sum(b, b.op("Mul", dy, hat), lead)


def _split(b: Builder, x: str, axis: int) -> tuple[list[int], list[int]]:
    """Axes before ``axis``, and from it on."""
    rank = b.rank(x)
    start = axis % rank
    return list(range(start)), list(range(start, rank))


def _sum(b: Builder, x: str, axes: list[int]) -> str:
    return b.reduce("ReduceSum", x, axes, keepdims=0)


# --- batch normalisation --------------------------------------------------------------------------------------------


def batch_norm(
    b: Builder, x: str, scale: str, bias: str, mean: str, var: str, *, epsilon: float, momentum: float,
    training_mode: int,
) -> tuple[str, ...]:  # fmt: skip
    """Y, new running mean and variance, the batch's mean, and r. The variance is the batch's, divided by n."""
    if not training_mode:
        raise b.refusal("it is in inference mode", "export the forward in training mode")
    axes = _batch_axes(b, x)
    # One number a channel first: what the backward and the running statistics read is of the forward then.
    average = b.reduce("ReduceMean", x, axes, keepdims=0)
    apart = b.op("Sub", x, _wide(b, average, x))
    spread = b.reduce("ReduceMean", b.op("Mul", apart, apart), axes, keepdims=0)
    r = b.op("Reciprocal", b.op("Sqrt", b.op("Add", spread, b.number_like(epsilon, x))))
    y = b.op("Mul", b.op("Mul", apart, _wide(b, r, x)), _wide(b, scale, x))
    keep, rest = b.number_like(momentum, x), b.number_like(1 - momentum, x)
    running = [
        b.op("Add", b.op("Mul", old, keep), b.op("Mul", new, rest)) for old, new in ((mean, average), (var, spread))
    ]
    return b.op("Add", y, _wide(b, bias, x)), *running, average, r


def batch_norm_grad(b: Builder, dy: str, x: str, scale: str, mean: str, r: str, *, epsilon: float) -> tuple[str, ...]:
    """dX = scale · r · (dY - d bias / n - x̂ · d scale / n)."""
    axes = _batch_axes(b, x)
    hat = b.op("Mul", b.op("Sub", x, _wide(b, mean, x)), _wide(b, r, x))
    d_scale = b.reduce("ReduceSum", b.op("Mul", dy, hat), axes, keepdims=0)
    d_bias = b.reduce("ReduceSum", dy, axes, keepdims=0)
    share = b.number_like(1 / prod(b.dims(x, axes)), x)
    means = [_wide(b, b.op("Mul", total, share), x) for total in (d_bias, d_scale)]
    inner = b.op("Sub", b.op("Sub", dy, means[0]), b.op("Mul", hat, means[1]))
    return b.op("Mul", _wide(b, b.op("Mul", scale, r), x), inner), d_scale, d_bias


def _batch_axes(b: Builder, x: str) -> list[int]:
    return [0, *range(2, b.rank(x))]


def _wide(b: Builder, value: str, x: str) -> str:
    """One number a channel, as a shape that spreads over ``x``."""
    return b.op("Unsqueeze", value, b.array(list(range(1, b.rank(x) - 1)))) if b.rank(x) > 2 else value
