"""The optimizers of ``com.microsoft`` on one weight, in standard operators.

Sources of the formulas: the kernels of ONNX Runtime training (CPU, and CUDA for inputs read by CUDA kernels alone), in
our own words. Every body is compared with a NumPy formula in ``tests/ir/opaque``.
"""

from __future__ import annotations

import math

from gopt.errors import UnsupportedError
from gopt.ir.opaque.body_builder import BodyBuilder
from gopt.ir.opaque.optimizer_math import (
    average,
    average_square,
    correction,
    count_up,
    finite,
    gated,
    low_precision_copy,
    unscaled,
)

# --- com.microsoft, one weight a node -------------------------------------------------------------------------------


def adam(b: BodyBuilder) -> None:
    """AdamOptimizer. Mode 0: decay beside the step, both moments corrected. Mode 1: the rate is corrected, and the
    decay acts on the weight after the step."""
    weight, gradient = b.full("weight"), unscaled(b)
    mean = average(b, b.full("moment_1"), gradient, "alpha")
    second = average_square(b, b.full("moment_2"), gradient, "beta")
    rate, decay = b.scalar("rate"), b.attribute_value("lambda")
    corrected = bool(b.attribute("do_bias_correction"))
    corrections = [correction(b, name, "count", guarded=True) for name in ("alpha", "beta")] if corrected else []
    mode = int(b.attribute("weight_decay_mode"))
    if mode == 0:
        delta = _adam_delta(b, weight, (mean, second), rate, decay, corrections)
    elif mode == 1:
        size = rate
        if corrections:
            size = b.shared(
                "step size", lambda: b.op("Div", b.op("Mul", rate, b.op("Sqrt", corrections[1])), corrections[0])
            )
        below = b.op("Add", b.op("Sqrt", second), b.attribute_value("epsilon"))
        step = b.op("Div", b.op("Mul", size, mean), below)
        after = b.op("Mul", b.op("Mul", rate, decay), b.op("Sub", weight, step))
        delta = b.op("Sub", b.op("Neg", step), after)
    else:
        raise UnsupportedError(f"AdamOptimizer has weight_decay_mode {mode}", "gopt supports 0 and 1")
    new = b.op("Add", weight, delta)
    gated(b, "new_weight", new, "weight", b.dtype("weight"))
    gated(b, "new_gradient", delta, "gradient", b.dtype("gradient"))
    gated(b, "new_moment_1", mean, "moment_1", b.dtype("moment_1"))
    gated(b, "new_moment_2", second, "moment_2", b.dtype("moment_2"))
    low_precision_copy(b, new)
    count_up(b)


def _adam_delta(
    b: BodyBuilder, weight: str, moments: tuple[str, str], rate: str, decay: str, corrections: list[str]
) -> str:
    mean, second = moments
    if corrections:
        mean, second = b.op("Div", mean, corrections[0]), b.op("Div", second, corrections[1])
    below = b.op("Add", b.op("Sqrt", second), b.attribute_value("epsilon"))
    update = b.op("Add", b.op("Div", mean, below), b.op("Mul", decay, weight))
    return b.op("Mul", b.shared("minus rate", lambda: b.op("Neg", rate)), update)


def sgd(b: BodyBuilder) -> None:
    """SGDOptimizer: weight - rate · gradient."""
    delta = b.op("Mul", b.shared("minus rate", lambda: b.op("Neg", b.scalar("rate"))), b.full("gradient"))
    gated(b, "new_weight", b.op("Add", b.full("weight"), delta), "weight", b.dtype("weight"))
    if b.operator.op_type == "SGDOptimizer":
        gated(b, "new_gradient", delta, "gradient", b.dtype("gradient"))
    else:
        _flag(b, "rate")


def _flag(b: BodyBuilder, like: str) -> None:
    """Emit a flag for updated weights, in the shape of a scalar input."""

    def write() -> str:
        done = b.scalar("update_signal", "bool") if b.has("update_signal") else b.const(True, "bool")
        return b.op("Reshape", done, b.op("Shape", like))

    b.result("updated_flag", b.shared("flag", write))


# --- com.microsoft, all weights in one node -------------------------------------------------------------------------


def adamw(b: BodyBuilder) -> None:
    """AdamWOptimizer. The count is this update's, from 1. Mode 0: decay first, both moments corrected. Mode 1:
    the rate is corrected, decay last and by the plain rate."""
    weight, gradient = b.full("weight"), b.full("gradient")
    mean = average(b, b.full("moment_1"), gradient, "alpha")
    second = average_square(b, b.full("moment_2"), gradient, "beta")
    rate, decay, epsilon = b.scalar("rate"), b.attribute_value("weight_decay"), b.attribute_value("epsilon")
    names = ("alpha", "beta") if int(b.attribute("correct_bias")) == 1 else ()
    corrections = [correction(b, name, "count", guarded=False) for name in names]
    mode = int(b.attribute("adam_mode"))
    if mode == 0:
        decayed = b.op("Sub", weight, b.op("Mul", b.op("Mul", weight, rate), decay))
        square = b.op("Div", second, corrections[1]) if corrections else second
        below = b.op("Add", b.op("Sqrt", square), epsilon)
        below = b.op("Mul", corrections[0], below) if corrections else below
        new = b.op("Sub", decayed, b.op("Div", b.op("Mul", rate, mean), below))
    elif mode == 1:
        size = rate
        if corrections:
            size = b.shared(
                "step size", lambda: b.op("Mul", rate, b.op("Div", b.op("Sqrt", corrections[1]), corrections[0]))
            )
        below = b.op("Add", b.op("Sqrt", second), epsilon)
        moved = b.op("Sub", weight, b.op("Div", b.op("Mul", size, mean), below))
        share = b.shared("decay share", lambda: b.op("Mul", rate, decay))
        new = b.op("Sub", moved, b.op("Mul", share, moved))
    else:
        raise UnsupportedError(f"AdamWOptimizer has adam_mode {mode}", "gopt supports 0 and 1")
    gated(b, "new_weight", new, "weight", b.dtype("weight"))
    gated(b, "new_moment_1", mean, "moment_1", b.dtype("moment_1"))
    gated(b, "new_moment_2", second, "moment_2", b.dtype("moment_2"))
    _flag(b, "count")


def lamb(b: BodyBuilder) -> None:
    """LambOptimizer: Adam's direction with decay, its length set by the ratio of the norms of weight and direction.

    A direction that is not finite counts as zero and leaves the moments; a new weight that is not finite is not taken.
    """
    weight, gradient = b.full("weight"), unscaled(b)
    old = b.full("moment_1"), b.full("moment_2")
    mean = average(b, old[0], gradient, "alpha")
    second = average_square(b, old[1], gradient, "beta")
    plain = (mean, second)
    if b.has("count") and int(b.attribute("do_bias_correction")):
        plain = (
            b.op("Div", mean, correction(b, "alpha", "count", guarded=True)),
            b.op("Div", second, correction(b, "beta", "count", guarded=True)),
        )
    along = b.op("Div", plain[0], b.op("Add", b.op("Sqrt", plain[1]), b.attribute_value("epsilon")))
    direction = b.op("Add", b.op("Mul", b.attribute_value("lambda"), weight), along)
    narrow = b.dtype("gradient")
    direction = b.cast(b.cast(direction, narrow, b.compute), b.compute, narrow)  # the kernel keeps it so
    good = finite(b, direction)
    zero = b.shared("zero", lambda: b.const(0.0))
    direction = b.op("Where", good, direction, zero)
    delta = b.op("Mul", b.op("Neg", _trust(b, weight, direction)), direction)
    moved = b.op("Add", weight, delta)
    is_finite = finite(b, moved)
    new = b.op("Where", is_finite, moved, weight)
    gated(b, "new_weight", new, "weight", b.dtype("weight"))
    gated(b, "new_gradient", b.op("Where", is_finite, delta, zero), "gradient", narrow)
    gated(b, "new_moment_1", b.op("Where", good, mean, old[0]), "moment_1", b.dtype("moment_1"))
    gated(b, "new_moment_2", b.op("Where", good, second, old[1]), "moment_2", b.dtype("moment_2"))
    low_precision_copy(b, new)
    count_up(b)


def _trust(b: BodyBuilder, weight: str, direction: str) -> str:
    """rate · ‖weight‖ / ‖direction‖ within its bounds; the plain rate where either norm is zero."""
    rate = b.scalar("rate")
    squares = [b.op("ReduceSumSquare", value, keepdims=0) for value in (weight, direction)]
    zero = b.shared("zero", lambda: b.const(0.0))
    nonzero = [b.op("Not", b.op("Equal", square, zero)) for square in squares]
    ratio = b.op("Sqrt", b.op("Div", *squares))
    for op_type, name in (("Min", "ratio_max"), ("Max", "ratio_min")):
        if math.isfinite(float(b.attribute(name))):
            ratio = b.op(op_type, ratio, b.attribute_value(name))
    return b.op("Where", b.op("And", *nonzero), b.op("Mul", rate, ratio), rate)
