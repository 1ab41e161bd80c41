"""Products, sums, dropout, and operators equal to a standard operator of another name."""

from __future__ import annotations

from gopt.importers.artifacts.lowering.builder import Builder


def fused_matmul(
    b: Builder, x: str, y: str, *, alpha: float, transA: int, transB: int, transBatchA: int, transBatchB: int
) -> str:
    """alpha · X · Y with the last two axes of either in each other's place; ``transBatch``: the first axis in front of
    the last."""
    x, y = (_turned(b, name, batch, last) for name, batch, last in ((x, transBatchA, transA), (y, transBatchB, transB)))
    product = b.op("MatMul", x, y)
    return product if alpha == 1 else b.op("Mul", product, b.number_like(alpha, b.outputs[0]))


def _turned(b: Builder, x: str, batch: int, last: int) -> str:
    if not batch and not last:
        return x
    order = list(range(b.rank(x)))
    if batch and len(order) > 2:
        order = [*order[1:-1], order[0], order[-1]]
    if last and len(order) > 1:
        order[-2:] = order[:-3:-1]
    return b.op("Transpose", x, perm=order)


def scale(b: Builder, x: str, by: str, *, scale_down: int) -> str:
    """X times a number, or divided by it; the number may have another type."""
    return b.op("Div" if scale_down else "Mul", x, b.cast(by, b.dtype(x), b.dtype(by)))


def div_grad(b: Builder, dy: str, x: str, y: str) -> tuple[str, ...]:
    """dY / B and -dY · A / B², each summed over what was spread out."""
    dx = b.op("Div", dy, y)
    dv = b.op("Neg", b.op("Div", b.op("Mul", dx, x), y))
    return _gathered(b, dx, x, y), _gathered(b, dv, y, x)


def _gathered(b: Builder, gradient: str, operand: str, other_operand: str) -> str:
    mine, theirs = b.dims(operand), b.dims(other_operand)
    rank = max(len(mine), len(theirs))
    wide = [(1,) * (rank - len(shape)) + shape for shape in (mine, theirs)]
    axes = [axis for axis, (size, against) in enumerate(zip(*wide)) if size == 1 and against != 1]
    if not axes and len(mine) == rank:
        return gradient
    return b.op("Reshape", b.reduce("ReduceSum", gradient, axes), b.array(list(mine)))


def reduce_sum(b: Builder, x: str, axes: str, *, keepdims: int, noop_with_empty_axes: int) -> str:
    return b.op("ReduceSum", x, axes, keepdims=keepdims, noop_with_empty_axes=noop_with_empty_axes)


def concat(b: Builder, *parts: str, axis: int) -> tuple[str, ...]:
    """The parts joined, and how long each is."""
    return b.op("Concat", *parts, axis=axis), b.array([b.dims(part)[axis] for part in parts])


def split(b: Builder, x: str, sizes: str, *, axis: int) -> tuple[str, ...]:
    return b.several("Split", x, sizes, results=len(b.outputs), axis=axis)


def identity(b: Builder, x: str) -> str:
    return x


def dropout(b: Builder, x: str, ratio: str = "", mode: str = "", *, seed: int | None) -> tuple[str, ...]:
    """The standard Dropout: the mask of bits is one of truth values, as only its gradient reads it."""
    attributes = {} if seed is None else {"seed": seed}
    return b.several("Dropout", x, ratio, mode, results=2, **attributes)


def dropout_grad(b: Builder, dy: str, mask: str, ratio: str = "", mode: str = "") -> str:
    """dY / (1 - ratio) where the mask is true. The kernel does not look at the mode."""
    share = b.cast(ratio, b.dtype(dy), b.dtype(ratio)) if ratio else b.number_like(0.5, dy)
    return b.op("Where", mask, b.op("Div", dy, b.op("Sub", b.number_like(1, dy), share)), b.number_like(0, dy))
