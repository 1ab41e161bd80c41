"""BatchNormalization and Dropout of a forward model: kept in inference form, with a note, or expanded for training.

onnx-ad differentiates neither in training mode. Expanded into elementary operators, both need no rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, helper

from gopt.autodiff.operators import bodies
from gopt.autodiff.rewrites import constants_of
from gopt.errors import UnsupportedError
from gopt.frontends.derive.forward_model import ForwardModel
from gopt.frontends.derive.functions import call
from gopt.frontends.derive.options import DeriveOptions, Norms
from gopt.ir.free_names import FreeNames
from gopt.ir.model_file import refill
from gopt.ir.type_proto import read_type, value_info
from gopt.ir.types import TensorType, dtype_code, numpy_dtype
from gopt.operators.table import operator
from gopt.text.sanitize import show

DRAW = "draw_"
"""Inputs of uniform random numbers in [0, 1), as ``gopt export`` names them."""

_NORMALIZE = """batch_norm <axes, channel, eps, one, momentum, unbiased>
(x, scale, bias, mean, var) => (y, new_mean, new_var)
{
  a = Constant <value: tensor = @axes> ()
  shape = Constant <value: tensor = @channel> ()
  e = Constant <value: tensor = @eps> ()
  kept = Constant <value: tensor = @momentum> ()
  whole = Constant <value: tensor = @one> ()
  rest = Sub (whole, kept)
  n = Constant <value: tensor = @unbiased> ()
  m = ReduceMean <keepdims: int = 1> (x, a)
  centred = Sub (x, m)
  square = Mul (centred, centred)
  v = ReduceMean <keepdims: int = 1> (square, a)
  below = Add (v, e)
  root = Sqrt (below)
  normal = Div (centred, root)
  s = Reshape (scale, shape)
  b = Reshape (bias, shape)
  scaled = Mul (normal, s)
  y = Add (scaled, b)
  flat = Constant <value_ints: ints = [-1]> ()
  batch_mean = Reshape (m, flat)
  biased = Reshape (v, flat)
  batch_var = Mul (biased, n)
  old_mean = Mul (kept, mean)
  add_mean = Mul (rest, batch_mean)
  new_mean = Add (old_mean, add_mean)
  old_var = Mul (kept, var)
  add_var = Mul (rest, batch_var)
  new_var = Add (old_var, add_var)
}"""
"""Over batch and space, with the biased variance; running statistics take it times ``unbiased``."""

_DROP = """dropout <ratio, factor> (x, draw) => (y, keep)
{
  r = Constant <value: tensor = @ratio> ()
  f = Constant <value: tensor = @factor> ()
  keep = GreaterOrEqual (draw, r)
  as_float = CastLike (keep, x)
  mask = Mul (as_float, f)
  y = Mul (x, mask)
}"""


@dataclass(frozen=True, slots=True)
class TrainingMode:
    """The expanded operators. ``statistics``: running statistic -> new value. ``draws``: inputs of random numbers.
    ``notes``: remarks on operators kept in inference form."""

    statistics: dict[str, str]
    draws: tuple[str, ...]
    notes: tuple[str, ...]


def write_out(model: ModelProto, forward: ForwardModel, options: DeriveOptions, free: FreeNames) -> TrainingMode:
    """Expand the operators of the model in place. Raises UnsupportedError for a Dropout whose ratio is computed."""
    _refuse_in_bodies(model, options)
    types, inner, constants = _types(model), free.prefix("train"), constants_of(model)
    statistics: dict[str, str] = {}
    draws: list[str] = []
    inference = {"BatchNormalization": 0, "Dropout": 0}
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        if node.domain in ("", "ai.onnx") and node.op_type in inference:
            kind = types.get(node.input[0], TensorType("undefined", None))
            if node.op_type == "BatchNormalization":
                wanted = _updates(node, options)
                new = _BatchNorm(node, types, forward, options).written(statistics, free, inner) if wanted else [node]
            else:
                ratio, active = _dropout(node, forward, constants)
                wanted = options.dropout is Norms.TRAIN or active
                drops = wanted and ratio
                new = list(_dropped(model, node, kind, ratio, draws, free, inner) if drops else _same(node, free))
            inference[node.op_type] += not wanted
            nodes += new
        else:
            nodes.append(node)
    refill(model.graph.node, nodes)
    notes = []
    if inference["BatchNormalization"]:
        notes.append(
            f"{inference['BatchNormalization']} BatchNormalization in inference form: running statistics are constants "
            "(--batchnorm train normalizes by the batch and updates them)"
        )
    if inference["Dropout"]:
        notes.append(f"{inference['Dropout']} Dropout in inference form: nothing is dropped (--dropout train drops)")
    return TrainingMode(statistics, tuple(draws), tuple(notes))


def _refuse_in_bodies(model: ModelProto, options: DeriveOptions) -> None:
    """Raise UnsupportedError for an operator to be trained standing in the body of an If, a Loop or a Scan."""
    wanted = {
        "BatchNormalization": ("batchnorm", options.batchnorm is Norms.TRAIN),
        "Dropout": ("dropout", options.dropout is Norms.TRAIN),
    }
    for body in bodies(model.graph.node):
        for node in body.node:
            option, trained = wanted.get(node.op_type, ("", False))
            if trained:
                raise UnsupportedError(
                    f"{node.op_type} {show(node.output[0])} is in the body of control flow: it cannot be trained",
                    f"--{option} keep",
                )


def _types(model: ModelProto) -> dict[str, TensorType]:
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    return {value.name: read_type(value.type) for value in (*inferred.input, *inferred.value_info, *inferred.output)}


def _number(node: NodeProto, name: str, default: float) -> float:
    return next((helper.get_attribute_value(attr) for attr in node.attribute if attr.name == name), default)


def updated_statistics(forward: ForwardModel, options: DeriveOptions) -> set[str]:
    """Stored running statistics a step updates: states, not constants."""
    nodes = [node for node in forward.model.graph.node if _updates(node, options)]
    names = {node.input[slot] for node in nodes for slot in operator(node.op_type).running}
    return names & set(forward.stored)


def _updates(node: NodeProto, options: DeriveOptions) -> bool:
    """Return whether a BatchNormalization normalizes by the batch: the options say so, or the file."""
    return options.batchnorm is Norms.TRAIN or bool(_number(node, "training_mode", 0))


@dataclass(frozen=True, slots=True)
class _BatchNorm:
    """A BatchNormalization with normalisation by the batch."""

    node: NodeProto
    types: Mapping[str, TensorType]
    forward: ForwardModel
    options: DeriveOptions

    def written(self, statistics: dict[str, str], free: FreeNames, inner: str) -> list[NodeProto]:
        """The nodes; the new values of the statistics are added to ``statistics``."""
        node, kind = self.node, self.types.get(self.node.input[0], TensorType("undefined", None))
        if not kind.static or len(kind.dims) < 2:
            raise UnsupportedError(
                f"BatchNormalization {show(node.output[0])} reads a value of unknown shape", "export with fixed shapes"
            )
        mean, var = node.input[3:5]
        self._check(statistics, kind.elements // kind.dims[1])
        statistics[mean], statistics[var] = (free.take(f"{name}_out") for name in (mean, var))
        wide = self.forward.stored[mean].type.dtype
        operands, before = list(node.input), []
        for index in range(3):
            name = operands[index]
            if name in self.types and self.types[name].dtype != wide:
                operands[index] = free.take(f"{inner}.{node.output[0]}.wide{index}")
                before.append(helper.make_node("Cast", [name], [operands[index]], to=dtype_code(wide)))
        narrow = kind.dtype != wide
        result = free.take(f"{inner}.{node.output[0]}.wide") if narrow else node.output[0]
        body = call(
            _NORMALIZE, operands, [result, statistics[mean], statistics[var]], self._numbers(kind, wide),
            f"{inner}.{node.output[0]}",
        )  # fmt: skip
        after = [helper.make_node("Cast", [result], [node.output[0]], to=dtype_code(kind.dtype))] if narrow else []
        for shown, name in zip(node.output[1:], (mean, var)):
            if shown:
                after.append(helper.make_node("Identity", [statistics[name]], [shown]))
        return [*before, *body, *after]

    def _check(self, statistics: Mapping[str, str], count: int) -> None:
        """Raise UnsupportedError for statistics unfit as states. ``count``: the elements of a channel."""
        mean, var = self.node.input[3:5]
        for name in (mean, var):
            if name not in self.forward.stored:
                raise UnsupportedError(
                    f"running statistic {show(name)} cannot be updated: it is an input of the model, or computed",
                    "store it in the model as an initializer", "or normalize by it: training_mode 0, --batchnorm keep",
                )  # fmt: skip
            if name in statistics or mean == var:
                raise UnsupportedError(
                    f"running statistic {show(name)} cannot be updated: it stands for two of them",
                    "store one for each operator", "or normalize by it: training_mode 0, --batchnorm keep",
                )  # fmt: skip
        if self._unbiased and count < 2:
            raise UnsupportedError(
                f"running statistic {show(mean)} cannot be updated: each channel has one element in a batch",
                "--batchnorm keep",
            )

    @property
    def _unbiased(self) -> bool:
        """PyTorch's running variance is the unbiased one; the standard's, of an operator in training mode, is not."""
        return self.options.batchnorm is Norms.TRAIN

    def _numbers(self, kind: TensorType, wide: str) -> dict[str, np.ndarray]:
        dims, dtype = kind.dims, numpy_dtype(wide)
        count = kind.elements // dims[1]
        return {
            "axes": np.array([axis for axis in range(len(dims)) if axis != 1], np.int64),
            "channel": np.array([1, dims[1], *[1] * (len(dims) - 2)], np.int64),
            "eps": np.array(_number(self.node, "epsilon", 1e-5), dtype),
            "one": np.array(1, dtype),
            "momentum": np.array(_number(self.node, "momentum", 0.9), dtype),
            "unbiased": np.array(count / (count - 1) if self._unbiased else 1, dtype),
        }


def _dropout(node: NodeProto, forward: ForwardModel, constants: Mapping[str, np.ndarray]) -> tuple[float, bool]:
    """The ratio of a Dropout, and the training mode in the file; raises UnsupportedError if either is computed or an
    input. ``constants``: initializers and Constant nodes."""
    operands = [*node.input[1:], "", ""][:2]
    values = []
    for name, default, what in zip(operands, (0.5, False), ("ratio", "mode")):
        if name in forward.stored:
            values.append(np.asarray(forward.stored[name].numpy()).reshape(-1)[0])
        elif name in constants:
            values.append(constants[name].reshape(-1)[0])
        elif name:
            raise UnsupportedError(
                f"the {what} of Dropout {show(node.output[0])} is {show(name)}, an input of the model or computed",
                "store its ratio and mode in the model",
            )
        else:
            values.append(default)
    return float(values[0]), bool(values[1])


def _same(node: NodeProto, free: FreeNames) -> Iterator[NodeProto]:
    """Nothing is dropped, and the mask is true."""
    yield helper.make_node("Identity", [node.input[0]], [node.output[0]], name=node.name)
    if len(node.output) > 1 and node.output[1]:
        shape, true = free.take(f"{node.output[1]}.shape"), onnx.numpy_helper.from_array(np.array([True]))
        yield helper.make_node("Shape", [node.input[0]], [shape])
        yield helper.make_node("ConstantOfShape", [shape], [node.output[1]], value=true)


def _dropped(
    model: ModelProto, node: NodeProto, kind: TensorType, ratio: float, draws: list[str], free: FreeNames, inner: str
) -> Iterator[NodeProto]:
    if not kind.static or not 0 < ratio < 1:
        raise UnsupportedError(
            f"Dropout {show(node.output[0])} drops {ratio:g} of {kind}", "give it a ratio below 1 and a fixed shape"
        )
    draw = free.take(f"{DRAW}{len(draws)}")
    draws.append(draw)
    model.graph.input.append(value_info(draw, TensorType("float32", kind.dims)))
    numbers = {"ratio": np.array(ratio, np.float32), "factor": np.array(1 / (1 - ratio), numpy_dtype(kind.dtype))}
    mask = (len(node.output) > 1 and node.output[1]) or free.take(f"{inner}.{node.output[0]}.keep")
    yield from call(_DROP, [node.input[0], draw], [node.output[0], mask], numbers, f"{inner}.{node.output[0]}")


def add_outputs(model: ModelProto, mode: TrainingMode) -> None:
    """Add new statistics as outputs, so that simplification keeps them."""
    types = {value.name: value for value in model.graph.input}
    for name, updated in mode.statistics.items():
        info = deepcopy(types[name])
        info.name = updated
        model.graph.output.append(info)
