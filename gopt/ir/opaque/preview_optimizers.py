"""The optimizers of ``ai.onnx.preview.training`` on one weight: the formulas of ONNX's documentation."""

from __future__ import annotations

from gopt.errors import UnsupportedError
from gopt.ir.opaque.body_builder import BodyBuilder
from gopt.ir.opaque.optimizer_math import (
    average,
    average_square,
    gated,
    power,
    remainder,
)


def _regularized(b: BodyBuilder) -> str:
    """The gradient plus the gradient of ½ · norm_coefficient · ‖weight‖²."""
    return b.op("Add", b.op("Mul", b.attribute_value("norm_coefficient"), b.full("weight")), b.full("gradient"))


def adam(b: BodyBuilder) -> None:
    """Adam of onnx: the rate is corrected from the first counted update on; a decay may follow the step."""
    weight, gradient = b.full("weight"), _regularized(b)
    mean = average(b, b.full("moment_1"), gradient, "alpha")
    second = average_square(b, b.full("moment_2"), gradient, "beta")

    def adjusted() -> str:
        corrections = [b.op("Sub", b.const(1.0, "float64"), power(b, name, "count")) for name in ("alpha", "beta")]
        factor = b.cast(b.op("Div", b.op("Sqrt", corrections[1]), corrections[0]), b.compute, "float64")
        started = b.op("Greater", b.scalar("count", "int64"), b.const(0, "int64"))
        return b.op("Where", started, b.op("Mul", b.scalar("rate"), factor), b.scalar("rate"))

    size = b.shared("adjusted rate", adjusted)
    below = b.op("Add", b.op("Sqrt", second), b.attribute_value("epsilon"))
    moved = b.op("Sub", weight, b.op("Div", b.op("Mul", size, mean), below))
    gated(b, "new_weight", b.op("Mul", remainder(b, "norm_coefficient_post"), moved), "weight", b.dtype("weight"))
    gated(b, "new_moment_1", mean, "moment_1", b.dtype("moment_1"))
    gated(b, "new_moment_2", second, "moment_2", b.dtype("moment_2"))


def momentum(b: BodyBuilder) -> None:
    """Momentum of onnx, standard or Nesterov's; beta counts as 1 in update 0."""
    weight, gradient = b.full("weight"), _regularized(b)

    def share() -> str:
        started = b.op("Greater", b.scalar("count", "int64"), b.const(0, "int64"))
        return b.op("Where", started, b.attribute_value("beta"), b.const(1.0))

    moment = b.op("Mul", b.attribute_value("alpha"), b.full("moment_1"))
    moment = b.op("Add", moment, b.op("Mul", b.shared("share", share), gradient))
    mode = b.attribute("mode")
    if mode == "standard":
        along = moment
    elif mode == "nesterov":
        along = b.op("Add", gradient, b.op("Mul", b.attribute_value("alpha"), moment))
    else:
        raise UnsupportedError(f"Momentum has mode {mode!r}", "gopt supports 'standard' and 'nesterov'")
    new = b.op("Sub", weight, b.op("Mul", b.scalar("rate"), along))
    gated(b, "new_weight", new, "weight", b.dtype("weight"))
    gated(b, "new_moment_1", moment, "moment_1", b.dtype("moment_1"))


def adagrad(b: BodyBuilder) -> None:
    """Adagrad of onnx: squares are summed, the rate falls by rate / (1 + count · decay_factor)."""
    weight, gradient = b.full("weight"), _regularized(b)

    def falling() -> str:
        below = b.op("Add", b.const(1.0), b.op("Mul", b.scalar("count"), b.attribute_value("decay_factor")))
        return b.op("Div", b.scalar("rate"), below)

    total = b.op("Add", b.full("moment_1"), b.op("Mul", gradient, gradient))
    below = b.op("Add", b.op("Sqrt", total), b.attribute_value("epsilon"))
    step = b.op("Div", b.op("Mul", b.shared("rate now", falling), gradient), below)
    gated(b, "new_weight", b.op("Sub", weight, step), "weight", b.dtype("weight"))
    gated(b, "new_moment_1", total, "moment_1", b.dtype("moment_1"))
