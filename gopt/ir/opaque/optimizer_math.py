"""Arithmetic shared by the bodies of several optimizers."""

from __future__ import annotations

import numpy as np

from gopt.ir.opaque.body_builder import BodyBuilder


def power(b: BodyBuilder, base: str, count: str) -> str:
    """base ** count, computed in float64: 0.999 ** t loses digits in float32."""

    def write() -> str:
        wide = b.const(float32(float(b.attribute(base))), "float64")
        return b.op("Pow", wide, b.scalar(count, "float64"))

    return write() if base in b.operator.lists else b.shared(f"{base} ** {count}", write)


def float32(value: float) -> float:
    """The value rounded to float32, the type of attributes."""
    return float(np.float32(value))


def correction(b: BodyBuilder, base: str, count: str, *, guarded: bool) -> str:
    """1 - base ** count; guarded: 1 where the count is not above 0."""

    def write() -> str:
        rest = b.cast(b.op("Sub", b.const(1.0, "float64"), power(b, base, count)), b.compute, "float64")
        if not guarded:
            return rest
        started = b.op("Greater", b.scalar(count, "int64"), b.const(0, "int64"))
        return b.op("Where", started, rest, b.const(1.0))

    return write() if base in b.operator.lists else b.shared(f"correction {base}", write)


def remainder(b: BodyBuilder, share: str) -> str:
    """1 - share."""

    def write() -> str:
        return b.op("Sub", b.const(1.0), b.attribute_value(share))

    return write() if share in b.operator.lists else b.shared(f"1 - {share}", write)


def average(b: BodyBuilder, old: str, new: str, share: str) -> str:
    """share · old + (1 - share) · new."""
    keep, rest = b.attribute_value(share), remainder(b, share)
    return b.op("Add", b.op("Mul", keep, old), b.op("Mul", rest, new))


def average_square(b: BodyBuilder, old: str, new: str, share: str) -> str:
    """share · old + (1 - share) · new²."""
    keep, rest = b.attribute_value(share), remainder(b, share)
    return b.op("Add", b.op("Mul", keep, old), b.op("Mul", b.op("Mul", rest, new), new))


def finite(b: BodyBuilder, value: str) -> str:
    return b.op("Not", b.op("Or", b.op("IsInf", value), b.op("IsNaN", value)))


def gated(b: BodyBuilder, slot: str, new: str, old: str, dtype: str) -> None:
    """Write a result in its own type; the old value if the node's update signal is false."""
    value = b.cast(new, dtype, b.compute)
    if b.has("update_signal"):
        value = b.op("Where", b.scalar("update_signal", "bool"), value, b.formal(old))
    b.result(slot, value)


def count_up(b: BodyBuilder) -> None:
    """The update count plus one, unless the update signal is false; its shape is kept."""
    if not b.has("count"):
        return

    def write() -> str:
        more = b.op("Add", "count", b.const(1, "int64"))
        return b.op("Where", b.scalar("update_signal", "bool"), more, "count") if b.has("update_signal") else more

    b.result("new_count", b.shared("new count", write))


def unscaled(b: BodyBuilder) -> str:
    """The gradient divided by the loss scale, or by norm / max_norm_clip where the scaled norm is beyond the clip."""
    gradient = b.full("gradient")
    if not b.has("loss_scale") and not b.has("gradient_norm"):
        return gradient

    def write() -> str:
        scale = b.scalar("loss_scale") if b.has("loss_scale") else b.const(1.0)
        if not b.has("gradient_norm"):
            return scale
        norm, most = b.scalar("gradient_norm"), b.attribute_value("max_norm_clip")
        beyond = b.op("Greater", norm, b.op("Mul", scale, most))
        return b.op("Where", beyond, b.op("Div", norm, most), scale)

    factor = write() if "max_norm_clip" in b.operator.lists else b.shared("gradient scale", write)
    return b.op("Div", gradient, factor)


def low_precision_copy(b: BodyBuilder, new: str) -> None:
    """Return the weight in half precision, for forwards with half precision."""
    if b.has("narrow_weight"):
        dtype = b.dtype("narrow_weight")
        narrow = b.cast(new, dtype, b.compute)
        signal = (
            b.scalar("update_signal", "bool")
            if b.has("update_signal")
            else b.shared("true", lambda: b.const(True, "bool"))
        )
        # Read it even if it is always replaced: a state that its own update does not read cannot be recognised.
        b.result("new_narrow_weight", b.op("Where", signal, narrow, b.formal("narrow_weight")))
