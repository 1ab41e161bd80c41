"""The losses that can be added to a forward model, one record each, with PyTorch's formulas and defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from gopt.errors import OptionError
from gopt.frontends.derive.functions import call
from gopt.ir.types import TensorType, dtype_code, numpy_dtype
from gopt.text.sanitize import show

LOSS = "loss"


@dataclass(frozen=True, slots=True)
class LossNames:
    """Names of the target (an input) and the loss; ``inner``: the prefix of names between."""

    target: str
    loss: str
    inner: str


@dataclass(frozen=True, slots=True)
class Criterion:
    """The options of a loss beside operands; None if not set.

    ``class_axis``: the dimension of the classes. ``ignore_index``: the label of samples that do not count.
    ``label_smoothing``: the share of the target common to all classes.
    """

    class_axis: int | None = None
    ignore_index: int | None = None
    label_smoothing: float | None = None


@dataclass(frozen=True, slots=True)
class AttachedLoss:
    """A loss of a prediction: nodes, the type of the second operand (an input), and the loss's type. The loss of a
    narrow prediction is computed in float32, as in torch.autocast: half precision overflows, and ONNX Runtime adds no
    rows in half precision."""

    nodes: list[NodeProto]
    target: TensorType
    loss: TensorType


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss. ``target``: the usual name of the input with the target. ``attach`` takes the prediction, its type, the
    names of target and loss, and a criterion. ``options``: the criterion's fields read by the loss. ``inverse``: the
    operator applied by the loss itself, on the operator's operand in place of a prediction."""

    target: str
    attach: Callable[[str, TensorType, LossNames, Criterion], AttachedLoss]
    options: tuple[str, ...] = ()
    inverse: str = ""


_MSE = """mse (prediction, target) => (loss)
{
  wide = Cast <to: int = WIDE> (prediction)
  wide_target = Cast <to: int = WIDE> (target)
  apart = Sub (wide, wide_target)
  square = Mul (apart, apart)
  loss = ReduceMean <keepdims: int = 0> (square)
}"""
"""The mean over elements of (prediction - target)²."""

_BINARY_CROSS_ENTROPY = """binary_cross_entropy (logits, target) => (loss)
{
  wide = Cast <to: int = WIDE> (logits)
  wide_target = Cast <to: int = WIDE> (target)
  above = Softplus (wide)
  agreed = Mul (wide, wide_target)
  each = Sub (above, agreed)
  loss = ReduceMean <keepdims: int = 0> (each)
}"""
"""The mean over elements of -t log sigmoid(x) - (1 - t) log sigmoid(-x)."""

_PICK = """
  at = Constant <value: tensor = @at> ()
  first = Constant <value: tensor = @first> ()
  beyond = Constant <value: tensor = @classes> ()
  wide = Cast <to: int = WIDE> (logits)
  logs = LogSoftmax <axis: int = AXIS> (wide)
  negative = Less (LABEL, first)
  index = Where (negative, beyond, LABEL)
  places = Unsqueeze (index, at)
  picked = GatherElements <axis: int = AXIS> (logs, places)"""
"""log softmax(logits)[label]. A negative label, which would count from the last class, becomes one that no runtime
takes."""
_HIDE = """
  ignored = Constant <value: tensor = @ignored> ()
  hidden = Equal (label, ignored)
  known = Where (hidden, first, label)"""
_SMOOTH = """
  share = Constant <value: tensor = @share> ()
  rest = Constant <value: tensor = @rest> ()
  spread = ReduceMean <keepdims: int = 1> (logs, at)
  kept = Mul (rest, picked)
  added = Mul (share, spread)
  smooth = Add (kept, added)"""
_MEAN = """
  mean = ReduceMean <keepdims: int = 0> (EACH)
  loss = Neg (mean)"""
_MEAN_OF_COUNTED = """
  flat = Squeeze (EACH, at)
  void = Constant <value: tensor = @void> ()
  counted = Where (hidden, void, flat)
  total = ReduceSum <keepdims: int = 0> (counted)
  seen = Not (hidden)
  ones = Cast <to: int = WIDE> (seen)
  count = ReduceSum <keepdims: int = 0> (ones)
  mean = Div (total, count)
  loss = Neg (mean)"""


def _cross_entropy(logits: str, kind: TensorType, names: LossNames, criterion: Criterion) -> AttachedLoss:
    """The mean over samples of -log softmax(logits)[label]."""
    axis = _class_axis(logits, kind, criterion.class_axis)
    ignores, share = criterion.ignore_index is not None, criterion.label_smoothing or 0.0
    pick, hide = _PICK.replace("LABEL", "known" if ignores else "label"), _HIDE if ignores else ""
    constants, rest = pick.split("\n  beyond", 1)
    body = f"{constants}{hide}\n  beyond{rest}{_SMOOTH if share else ''}{_MEAN_OF_COUNTED if ignores else _MEAN}"
    wide, dtype = _wide(kind), numpy_dtype(_wide(kind).dtype)
    words = {"AXIS": axis, "EACH": "smooth" if share else "picked", "WIDE": dtype_code(wide.dtype)}
    for word, value in words.items():
        body = body.replace(word, str(value))
    numbers: dict[str, np.ndarray] = {
        "at": np.array([axis], np.int64), "first": np.array(0, np.int64),
        "classes": np.array(kind.dims[axis], np.int64),
    }  # fmt: skip
    if ignores:
        numbers |= {"ignored": np.array(criterion.ignore_index, np.int64), "void": np.array(0, dtype)}
    if share:
        numbers |= {"share": np.array(share, dtype), "rest": np.array(1 - share, dtype)}
    text = f"cross_entropy <{', '.join(numbers)}> (logits, label) => (loss)\n{{{body}\n}}"
    nodes = call(text, [logits, names.target], [names.loss], numbers, names.inner)
    return AttachedLoss(nodes, TensorType("int64", kind.dims[:axis] + kind.dims[axis + 1 :]), wide)


def _wide(kind: TensorType) -> TensorType:
    """The type of the loss of a prediction."""
    return TensorType("float64" if kind.dtype == "float64" else "float32", ())


def _class_axis(logits: str, kind: TensorType, axis: int | None) -> int:
    rank = len(kind.dims)
    if rank < 2:
        raise OptionError(
            f"{show(logits)} is {kind}: cross-entropy needs logits of samples by classes",
            "name another output with --prediction",
        )
    if axis is None and rank > 2:
        raise OptionError(
            f"{show(logits)} is {kind}: any of its dimensions may be the classes",
            "--class-axis -1 for tokens (batch, length, classes), --class-axis 1 for images (batch, classes, ...)",
        )
    axis = 1 if axis is None else axis
    if not -rank <= axis < rank:
        raise OptionError(f"--class-axis {axis}: {show(logits)} is {kind}", f"give a number below {rank}")
    return axis % rank


def _by_element(text: str) -> Callable[[str, TensorType, LossNames, Criterion], AttachedLoss]:
    """A loss with a target of the prediction's type."""

    def attach(prediction: str, kind: TensorType, names: LossNames, criterion: Criterion) -> AttachedLoss:
        wide = _wide(kind)
        typed = text.replace("WIDE", str(dtype_code(wide.dtype)))
        nodes = call(typed, [prediction, names.target], [names.loss], {}, names.inner)
        return AttachedLoss(nodes, TensorType(kind.dtype, kind.dims), wide)

    return attach


LOSSES: Mapping[str, Loss] = {
    "cross-entropy": Loss(
        "label", _cross_entropy, ("class_axis", "ignore_index", "label_smoothing"), inverse="Softmax"
    ),
    "binary-cross-entropy": Loss("target", _by_element(_BINARY_CROSS_ENTROPY), inverse="Sigmoid"),
    "mse": Loss("target", _by_element(_MSE)),
}
"""By the name that ``--loss`` takes."""
