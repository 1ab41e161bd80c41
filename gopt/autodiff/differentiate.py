"""Reverse-mode derivatives of a scalar in a model, by onnx-ad."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from gopt.autodiff.bfloat16 import as_bfloat16, as_float64, uses
from gopt.autodiff.cuts import Cut, find_cuts, join, without
from gopt.autodiff.operators import between, names_of, types_of
from gopt.autodiff.refusals import refuse
from gopt.autodiff.rewrites import expand, rewrite
from gopt.autodiff.sequences import split_without_sequences
from gopt.errors import OptionError, UnsupportedError
from gopt.ir.free_names import FreeNames, free_prefix
from gopt.ir.model_file import refill
from gopt.text.sanitize import listed, show

_WORD = re.compile(r"[A-Z]\w+")
"""An operator in a message: onnx-ad names it first."""
GRADIENT = ".grad"
"""The gradient of ``W`` is the value ``W.grad``, where that name is free."""


@dataclass(frozen=True, slots=True)
class Differentiated:
    """A model with the backward. ``gradients``: input -> gradient, of the input's shape; ``unread``: inputs without
    influence on the scalar, or with stepwise influence; ``seeds``: values with an axis of seed directions at the end,
    where the backward begins: of the scalar, and of operators differentiated by gopt."""

    model: ModelProto
    gradients: dict[str, str]
    unread: tuple[str, ...]
    seeds: tuple[str, ...]


def differentiate(model: ModelProto, scalar: str, inputs: Sequence[str], scale: str = "") -> Differentiated:
    """Append the derivatives of the output ``scalar`` by ``inputs``, each an input of the model without a value.

    ``scale``: a scalar value of the model, a factor of all derivatives. Raises UnsupportedError for an operator without
    a derivative, OptionError without onnx-ad.
    """
    # onnx-ad folds a value that is stored as a constant, though it is an input too: its gradient would be zero.
    stored = {tensor.name for tensor in model.graph.initializer} & set(inputs)
    assert not stored, stored
    names = names_of(model)
    prefix = free_prefix("adj_", names)
    model = rewrite(split_without_sequences(expand(model)), scalar, inputs, free_prefix("as_", names))
    types = types_of(model)
    refuse(model, scalar, inputs, types)
    cuts = find_cuts(model, scalar, inputs, types, free_prefix("cut_", names))
    backward = _reverse(without(model, cuts), scalar, inputs, cuts, prefix)
    while dead := _without_path(backward, [cut.result for cut in cuts if cut.outputs], prefix):
        cuts = [cut for cut in cuts if cut.result not in dead]
        backward = _reverse(without(model, cuts), scalar, inputs, cuts, prefix)
    seeds = (f"{prefix}{scalar}", *join(backward, cuts, prefix))
    _remove_seed(backward, seeds[0], scale)
    return _with_gradients(backward, inputs, prefix, seeds)


def _reverse(model: ModelProto, scalar: str, inputs: Sequence[str], cuts: Sequence[Cut], prefix: str) -> ModelProto:
    """Return the model with the backward from onnx-ad."""
    try:
        import onnx_ad
    except ModuleNotFoundError as error:
        if error.name != "onnx_ad":
            raise
        raise OptionError("derivatives need onnx-ad", "pip install 'gopt[derive]'") from None
    # The scalar comes first: onnx-ad reads the number of directions off the first seed.
    outputs = [scalar, *(name for cut in cuts for name in cut.outputs.values())]
    by = [*inputs, *(cut.result for cut in cuts if cut.outputs)]
    narrow = uses(model, TensorProto.BFLOAT16)
    try:
        backward: ModelProto = onnx_ad.reverse(
            as_float64(model) if narrow else model, inputs=by, outputs=outputs, prefix=prefix, layout="onnx"
        )
    except onnx_ad.UnsupportedOperator as error:
        raise UnsupportedError(
            f"onnx-ad cannot differentiate this model: {show(str(error))}{_where(model, scalar, inputs, str(error))}",
            "--freeze the parameters behind that operator, or replace it in the model",
        ) from None
    return as_bfloat16(backward) if narrow else backward


def _where(model: ModelProto, scalar: str, inputs: Sequence[str], message: str) -> str:
    """Return a clause naming the first operator between ``inputs`` and ``scalar`` without a known result shape, or the
    operators of the kind named by onnx-ad; '' if none."""
    types = types_of(model)
    behind, ahead = between(model, inputs, scalar, types)
    words, names = _WORD.findall(message), list[str]()
    for node in model.graph.node:
        if behind.isdisjoint(node.input) or ahead.isdisjoint(node.output):
            continue
        for name in node.output:
            if name in behind and name in ahead and (name not in types or types[name].shape is None):
                return f"; onnx infers no shape for the result of {node.op_type} {show(name)}"
        if node.op_type in words[:1]:
            names.append(show(node.output[0]))
    return f": {listed(names)}" if names else ""


def _without_path(model: ModelProto, names: Sequence[str], prefix: str) -> set[str]:
    """Return the ``names`` with zeros as derivative, because no path leads to the scalar."""
    producers = {name: node for node in model.graph.node for name in node.output}
    return {name for name in names if producers[producers[f"{prefix}{name}"].input[0]].op_type == "ConstantOfShape"}


def _remove_seed(model: ModelProto, seed: str, scale: str) -> None:
    """Fix the seed: one direction, of length one or of the given scale."""
    graph = model.graph
    inputs = [value for value in graph.input if value.name != seed]
    kind = next(value for value in graph.input if value.name == seed).type.tensor_type.elem_type
    refill(graph.input, inputs)
    if not scale:
        one = np.ones(1, helper.tensor_dtype_to_np_dtype(kind))
        graph.initializer.append(numpy_helper.from_array(one, seed))
        return
    shape = f"{seed}.shape"
    graph.initializer.append(numpy_helper.from_array(np.ones(1, np.int64), shape))
    refill(
        graph.node,
        [
            helper.make_node("Cast", [scale], [f"{seed}.cast"], to=kind),
            helper.make_node("Reshape", [f"{seed}.cast", shape], [seed]),
            *graph.node,
        ],
    )


def _with_gradients(model: ModelProto, inputs: Sequence[str], prefix: str, seeds: tuple[str, ...]) -> Differentiated:
    """Derivatives without the axis of directions, as values and no longer as outputs."""
    graph = model.graph
    adjoints = {f"{prefix}{name}" for name in inputs}
    refill(graph.output, [value for value in graph.output if value.name not in adjoints])
    last = f"{prefix}.last_axis"
    graph.initializer.append(numpy_helper.from_array(np.array([-1], np.int64), last))
    unread, gradients, names = _without_path(model, inputs, prefix), {}, FreeNames(names_of(model))
    for name in inputs:
        if name not in unread:
            gradients[name] = names.take(f"{name}{GRADIENT}")
            graph.node.append(helper.make_node("Squeeze", [f"{prefix}{name}", last], [gradients[name]]))
    return Differentiated(model, gradients, tuple(name for name in inputs if name in unread), seeds)
