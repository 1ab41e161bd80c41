"""What each opaque operator does to one weight, in standard operators.

Sources of the formulas: ONNX's own operator documents for ``ai.onnx.preview.training``; for ``com.microsoft`` the
kernels of ONNX Runtime training (the CPU ones, and the CUDA ones for inputs that only those read), in words of our
own. Every body is compared with a NumPy formula in ``tests/sources``.
"""

from __future__ import annotations

import math

import numpy as np

from gopt.errors import UnsupportedError
from gopt.sources.body import Body

# --- shared pieces --------------------------------------------------------------------------------------------------


def _power(b: Body, base: str, count: str) -> str:
    """base ** count, taken in float64: 0.999 ** t loses digits in float32."""

    def write() -> str:
        wide = b.const(_float32(float(b.attribute(base))), "float64")
        return b.op("Pow", wide, b.scalar(count, "float64"))

    return write() if base in b.operator.lists else b.shared(f"{base} ** {count}", write)


def _float32(value: float) -> float:
    """The value as an attribute holds it."""
    return float(np.float32(value))


def _correction(b: Body, base: str, count: str, *, guarded: bool) -> str:
    """1 - base ** count; guarded: 1 where the count is not above 0."""

    def write() -> str:
        rest = b.cast(b.op("Sub", b.const(1.0, "float64"), _power(b, base, count)), b.compute, "float64")
        if not guarded:
            return rest
        started = b.op("Greater", b.scalar(count, "int64"), b.const(0, "int64"))
        return b.op("Where", started, rest, b.const(1.0))

    return write() if base in b.operator.lists else b.shared(f"correction {base}", write)


def _rest(b: Body, share: str) -> str:
    """1 - share."""

    def write() -> str:
        return b.op("Sub", b.const(1.0), b.number(share))

    return write() if share in b.operator.lists else b.shared(f"1 - {share}", write)


def _average(b: Body, old: str, new: str, share: str) -> str:
    """share · old + (1 - share) · new."""
    keep, rest = b.number(share), _rest(b, share)
    return b.op("Add", b.op("Mul", keep, old), b.op("Mul", rest, new))


def _average_square(b: Body, old: str, new: str, share: str) -> str:
    """share · old + (1 - share) · new²."""
    keep, rest = b.number(share), _rest(b, share)
    return b.op("Add", b.op("Mul", keep, old), b.op("Mul", b.op("Mul", rest, new), new))


def _finite(b: Body, value: str) -> str:
    return b.op("Not", b.op("Or", b.op("IsInf", value), b.op("IsNaN", value)))


def _gated(b: Body, slot: str, new: str, old: str, dtype: str) -> None:
    """Write a result in its own type; the old value where the node's signal says that nothing is to change."""
    value = b.cast(new, dtype, b.compute)
    if b.has("update_signal"):
        value = b.op("Where", b.scalar("update_signal", "bool"), value, b.formal(old))
    b.result(slot, value)


def _count_up(b: Body) -> None:
    """The update count plus one, unless nothing is to change; its shape is kept."""
    if not b.has("count"):
        return

    def write() -> str:
        more = b.op("Add", "count", b.const(1, "int64"))
        return b.op("Where", b.scalar("update_signal", "bool"), more, "count") if b.has("update_signal") else more

    b.result("new_count", b.shared("new count", write))


def _unscaled(b: Body) -> str:
    """The gradient divided by the loss scale, or by norm / max_norm_clip where the scaled norm is beyond the clip."""
    gradient = b.full("gradient")
    if not b.has("loss_scale") and not b.has("gradient_norm"):
        return gradient

    def write() -> str:
        scale = b.scalar("loss_scale") if b.has("loss_scale") else b.const(1.0)
        if not b.has("gradient_norm"):
            return scale
        norm, most = b.scalar("gradient_norm"), b.number("max_norm_clip")
        beyond = b.op("Greater", norm, b.op("Mul", scale, most))
        return b.op("Where", beyond, b.op("Div", norm, most), scale)

    factor = write() if "max_norm_clip" in b.operator.lists else b.shared("gradient scale", write)
    return b.op("Div", gradient, factor)


def _narrow_copy(b: Body, new: str) -> None:
    """The weight in half precision, for a forward that reads it so."""
    if b.has("narrow_weight"):
        dtype = b.dtype("narrow_weight")
        narrow = b.cast(new, dtype, b.compute)
        signal = (
            b.scalar("update_signal", "bool")
            if b.has("update_signal")
            else b.shared("true", lambda: b.const(True, "bool"))
        )
        # Read even where it is always replaced: a state that its own update does not read cannot be told.
        b.result("new_narrow_weight", b.op("Where", signal, narrow, b.formal("narrow_weight")))


# --- com.microsoft, one weight a node -------------------------------------------------------------------------------


def adam(b: Body) -> None:
    """AdamOptimizer. Mode 0: decay beside the step, both moments corrected. Mode 1: the rate is corrected, and the
    decay acts on the weight after the step."""
    weight, gradient = b.full("weight"), _unscaled(b)
    first = _average(b, b.full("moment_1"), gradient, "alpha")
    second = _average_square(b, b.full("moment_2"), gradient, "beta")
    rate, decay = b.scalar("rate"), b.number("lambda")
    corrected = bool(b.attribute("do_bias_correction"))
    corrections = [_correction(b, name, "count", guarded=True) for name in ("alpha", "beta")] if corrected else []
    mode = int(b.attribute("weight_decay_mode"))
    if mode == 0:
        delta = _adam_delta(b, weight, (first, second), rate, decay, corrections)
    elif mode == 1:
        size = rate
        if corrections:
            size = b.shared(
                "step size", lambda: b.op("Div", b.op("Mul", rate, b.op("Sqrt", corrections[1])), corrections[0])
            )
        below = b.op("Add", b.op("Sqrt", second), b.number("epsilon"))
        step = b.op("Div", b.op("Mul", size, first), below)
        after = b.op("Mul", b.op("Mul", rate, decay), b.op("Sub", weight, step))
        delta = b.op("Sub", b.op("Neg", step), after)
    else:
        raise UnsupportedError(f"AdamOptimizer has weight_decay_mode {mode}: gopt knows 0 and 1")
    new = b.op("Add", weight, delta)
    _gated(b, "new_weight", new, "weight", b.dtype("weight"))
    _gated(b, "new_gradient", delta, "gradient", b.dtype("gradient"))
    _gated(b, "new_moment_1", first, "moment_1", b.dtype("moment_1"))
    _gated(b, "new_moment_2", second, "moment_2", b.dtype("moment_2"))
    _narrow_copy(b, new)
    _count_up(b)


def _adam_delta(b: Body, weight: str, moments: tuple[str, str], rate: str, decay: str, corrections: list[str]) -> str:
    first, second = moments
    if corrections:
        first, second = b.op("Div", first, corrections[0]), b.op("Div", second, corrections[1])
    below = b.op("Add", b.op("Sqrt", second), b.number("epsilon"))
    update = b.op("Add", b.op("Div", first, below), b.op("Mul", decay, weight))
    return b.op("Mul", b.shared("minus rate", lambda: b.op("Neg", rate)), update)


def sgd(b: Body) -> None:
    """SGDOptimizer: weight - rate · gradient."""
    delta = b.op("Mul", b.shared("minus rate", lambda: b.op("Neg", b.scalar("rate"))), b.full("gradient"))
    _gated(b, "new_weight", b.op("Add", b.full("weight"), delta), "weight", b.dtype("weight"))
    if b.operator.op_type == "SGDOptimizer":
        _gated(b, "new_gradient", delta, "gradient", b.dtype("gradient"))
    else:
        _flag(b, "rate")


def _flag(b: Body, like: str) -> None:
    """Whether the weights were updated, in the shape of a scalar input."""

    def write() -> str:
        done = b.scalar("update_signal", "bool") if b.has("update_signal") else b.const(True, "bool")
        return b.op("Reshape", done, b.op("Shape", like))

    b.result("updated_flag", b.shared("flag", write))


# --- com.microsoft, all weights in one node -------------------------------------------------------------------------


def adamw(b: Body) -> None:
    """AdamWOptimizer. The count is that of this update, from 1. Mode 0: decay first, both moments corrected. Mode 1:
    the rate is corrected, decay last and by the plain rate."""
    weight, gradient = b.full("weight"), b.full("gradient")
    first = _average(b, b.full("moment_1"), gradient, "alpha")
    second = _average_square(b, b.full("moment_2"), gradient, "beta")
    rate, decay, epsilon = b.scalar("rate"), b.number("weight_decay"), b.number("epsilon")
    names = ("alpha", "beta") if int(b.attribute("correct_bias")) == 1 else ()
    corrections = [_correction(b, name, "count", guarded=False) for name in names]
    mode = int(b.attribute("adam_mode"))
    if mode == 0:
        kept = b.op("Sub", weight, b.op("Mul", b.op("Mul", weight, rate), decay))
        square = b.op("Div", second, corrections[1]) if corrections else second
        below = b.op("Add", b.op("Sqrt", square), epsilon)
        below = b.op("Mul", corrections[0], below) if corrections else below
        new = b.op("Sub", kept, b.op("Div", b.op("Mul", rate, first), below))
    elif mode == 1:
        size = rate
        if corrections:
            size = b.shared(
                "step size", lambda: b.op("Mul", rate, b.op("Div", b.op("Sqrt", corrections[1]), corrections[0]))
            )
        below = b.op("Add", b.op("Sqrt", second), epsilon)
        moved = b.op("Sub", weight, b.op("Div", b.op("Mul", size, first), below))
        share = b.shared("decay share", lambda: b.op("Mul", rate, decay))
        new = b.op("Sub", moved, b.op("Mul", share, moved))
    else:
        raise UnsupportedError(f"AdamWOptimizer has adam_mode {mode}: gopt knows 0 and 1")
    _gated(b, "new_weight", new, "weight", b.dtype("weight"))
    _gated(b, "new_moment_1", first, "moment_1", b.dtype("moment_1"))
    _gated(b, "new_moment_2", second, "moment_2", b.dtype("moment_2"))
    _flag(b, "count")


def lamb(b: Body) -> None:
    """LambOptimizer: Adam's direction with decay, its length set by the ratio of the norms of weight and direction.

    A direction that is not finite counts as zero and leaves the moments; a new weight that is not finite is not taken.
    """
    weight, gradient = b.full("weight"), _unscaled(b)
    old = b.full("moment_1"), b.full("moment_2")
    first = _average(b, old[0], gradient, "alpha")
    second = _average_square(b, old[1], gradient, "beta")
    plain = (first, second)
    if b.has("count") and int(b.attribute("do_bias_correction")):
        plain = (
            b.op("Div", first, _correction(b, "alpha", "count", guarded=True)),
            b.op("Div", second, _correction(b, "beta", "count", guarded=True)),
        )
    along = b.op("Div", plain[0], b.op("Add", b.op("Sqrt", plain[1]), b.number("epsilon")))
    direction = b.op("Add", b.op("Mul", b.number("lambda"), weight), along)
    narrow = b.dtype("gradient")
    direction = b.cast(b.cast(direction, narrow, b.compute), b.compute, narrow)  # the kernel keeps it so
    good = _finite(b, direction)
    zero = b.shared("zero", lambda: b.const(0.0))
    direction = b.op("Where", good, direction, zero)
    delta = b.op("Mul", b.op("Neg", _trust(b, weight, direction)), direction)
    moved = b.op("Add", weight, delta)
    taken = _finite(b, moved)
    new = b.op("Where", taken, moved, weight)
    _gated(b, "new_weight", new, "weight", b.dtype("weight"))
    _gated(b, "new_gradient", b.op("Where", taken, delta, zero), "gradient", narrow)
    _gated(b, "new_moment_1", b.op("Where", good, first, old[0]), "moment_1", b.dtype("moment_1"))
    _gated(b, "new_moment_2", b.op("Where", good, second, old[1]), "moment_2", b.dtype("moment_2"))
    _narrow_copy(b, new)
    _count_up(b)


def _trust(b: Body, weight: str, direction: str) -> str:
    """rate · ‖weight‖ / ‖direction‖ within its bounds; the plain rate where either norm is zero."""
    rate = b.scalar("rate")
    squares = [b.op("ReduceSumSquare", value, keepdims=0) for value in (weight, direction)]
    zero = b.shared("zero", lambda: b.const(0.0))
    nonzero = [b.op("Not", b.op("Equal", square, zero)) for square in squares]
    ratio = b.op("Sqrt", b.op("Div", *squares))
    for op_type, name in (("Min", "ratio_max"), ("Max", "ratio_min")):
        if math.isfinite(float(b.attribute(name))):
            ratio = b.op(op_type, ratio, b.number(name))
    return b.op("Where", b.op("And", *nonzero), b.op("Mul", rate, ratio), rate)


# --- ai.onnx.preview.training ---------------------------------------------------------------------------------------


def _regularized(b: Body) -> str:
    """The gradient with that of ½ · norm_coefficient · ‖weight‖² added."""
    return b.op("Add", b.op("Mul", b.number("norm_coefficient"), b.full("weight")), b.full("gradient"))


def preview_adam(b: Body) -> None:
    """Adam of onnx: the rate is corrected from the first counted update on; a decay may follow the step."""
    weight, gradient = b.full("weight"), _regularized(b)
    first = _average(b, b.full("moment_1"), gradient, "alpha")
    second = _average_square(b, b.full("moment_2"), gradient, "beta")

    def adjusted() -> str:
        corrections = [b.op("Sub", b.const(1.0, "float64"), _power(b, name, "count")) for name in ("alpha", "beta")]
        factor = b.cast(b.op("Div", b.op("Sqrt", corrections[1]), corrections[0]), b.compute, "float64")
        started = b.op("Greater", b.scalar("count", "int64"), b.const(0, "int64"))
        return b.op("Where", started, b.op("Mul", b.scalar("rate"), factor), b.scalar("rate"))

    size = b.shared("adjusted rate", adjusted)
    below = b.op("Add", b.op("Sqrt", second), b.number("epsilon"))
    moved = b.op("Sub", weight, b.op("Div", b.op("Mul", size, first), below))
    _gated(b, "new_weight", b.op("Mul", _rest(b, "norm_coefficient_post"), moved), "weight", b.dtype("weight"))
    _gated(b, "new_moment_1", first, "moment_1", b.dtype("moment_1"))
    _gated(b, "new_moment_2", second, "moment_2", b.dtype("moment_2"))


def preview_momentum(b: Body) -> None:
    """Momentum of onnx, standard or Nesterov's; beta counts as 1 in update 0."""
    weight, gradient = b.full("weight"), _regularized(b)

    def share() -> str:
        started = b.op("Greater", b.scalar("count", "int64"), b.const(0, "int64"))
        return b.op("Where", started, b.number("beta"), b.const(1.0))

    moment = b.op("Mul", b.number("alpha"), b.full("moment_1"))
    moment = b.op("Add", moment, b.op("Mul", b.shared("share", share), gradient))
    mode = b.attribute("mode")
    if mode == "standard":
        along = moment
    elif mode == "nesterov":
        along = b.op("Add", gradient, b.op("Mul", b.number("alpha"), moment))
    else:
        raise UnsupportedError(f"Momentum has mode {mode!r}: gopt knows 'standard' and 'nesterov'")
    new = b.op("Sub", weight, b.op("Mul", b.scalar("rate"), along))
    _gated(b, "new_weight", new, "weight", b.dtype("weight"))
    _gated(b, "new_moment_1", moment, "moment_1", b.dtype("moment_1"))


def preview_adagrad(b: Body) -> None:
    """Adagrad of onnx: squares are summed, the rate falls by rate / (1 + count · decay_factor)."""
    weight, gradient = b.full("weight"), _regularized(b)

    def falling() -> str:
        below = b.op("Add", b.const(1.0), b.op("Mul", b.scalar("count"), b.number("decay_factor")))
        return b.op("Div", b.scalar("rate"), below)

    total = b.op("Add", b.full("moment_1"), b.op("Mul", gradient, gradient))
    below = b.op("Add", b.op("Sqrt", total), b.number("epsilon"))
    step = b.op("Div", b.op("Mul", b.shared("rate now", falling), gradient), below)
    _gated(b, "new_weight", b.op("Sub", weight, step), "weight", b.dtype("weight"))
    _gated(b, "new_moment_1", total, "moment_1", b.dtype("moment_1"))
