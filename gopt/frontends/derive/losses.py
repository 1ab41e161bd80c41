"""The losses that can be added to a forward model, one record each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from gopt.errors import OptionError
from gopt.frontends.derive.functions import call
from gopt.ir.types import TensorType
from gopt.sanitize import show

LOSS = "loss"


@dataclass(frozen=True, slots=True)
class Names:
    """Names of the target, an input, and of the loss; ``inner``: the prefix of names of values between them."""

    target: str
    loss: str
    inner: str


@dataclass(frozen=True, slots=True)
class Attachment:
    """A loss of a prediction: its nodes, and the type of its second operand, an input."""

    nodes: list[NodeProto]
    target: TensorType


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss. ``target``: the usual name of the input with the target. ``attach`` takes the prediction, its type, the
    names of target and loss, and the axis of classes or None."""

    target: str
    attach: Callable[[str, TensorType, Names, int | None], Attachment]


_CROSS_ENTROPY = """cross_entropy <axis, at> (logits, label) => (loss)
{
  where = Constant <value: tensor = @at> ()
  logs = LogSoftmax <axis: int = @axis> (logits)
  index = Unsqueeze (label, where)
  picked = GatherElements <axis: int = @axis> (logs, index)
  mean = ReduceMean <keepdims: int = 0> (picked)
  loss = Neg (mean)
}"""
"""The mean over samples of -log softmax(logits)[label]."""

_MSE = """mse (prediction, target) => (loss)
{
  apart = Sub (prediction, target)
  square = Mul (apart, apart)
  loss = ReduceMean <keepdims: int = 0> (square)
}"""
"""The mean over elements of (prediction - target)²."""


def _cross_entropy(logits: str, kind: TensorType, names: Names, axis: int | None) -> Attachment:
    rank = len(kind.dims)
    if rank < 2:
        raise OptionError(
            f"{show(logits)} is {kind}: cross-entropy needs logits of samples by classes",
            "name another output with --prediction",
        )
    if axis is None and rank > 2:
        raise OptionError(
            f"{show(logits)} is {kind}: it is ambiguous which of its dimensions is that of the classes",
            "--class-axis -1 for tokens (batch, length, classes), --class-axis 1 for images (batch, classes, ...)",
        )
    axis = 1 if axis is None else axis
    if not -rank <= axis < rank:
        raise OptionError(f"--class-axis {axis}: {show(logits)} is {kind}", f"give a number below {rank}")
    axis %= rank
    text = _CROSS_ENTROPY.replace("<axis, at>", "<at>").replace("@axis", str(axis))
    nodes = call(text, [logits, names.target], [names.loss], {"at": np.array([axis], np.int64)}, names.inner)
    return Attachment(nodes, TensorType("int64", kind.dims[:axis] + kind.dims[axis + 1 :]))


def _mse(prediction: str, kind: TensorType, names: Names, axis: int | None) -> Attachment:
    if axis is not None:
        raise OptionError("--class-axis: mse has no classes", "leave it out")
    return Attachment(
        call(_MSE, [prediction, names.target], [names.loss], {}, names.inner), TensorType(kind.dtype, kind.dims)
    )


LOSSES: Mapping[str, Loss] = {"cross-entropy": Loss("label", _cross_entropy), "mse": Loss("target", _mse)}
"""By the name that ``--loss`` takes."""
