"""Reverse-mode derivatives of a scalar in a model, by onnx-ad."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, helper, numpy_helper

from gopt.errors import OptionError, UnsupportedError
from gopt.sanitize import show

GRADIENT = ".grad"
"""The gradient of ``W`` is the value ``W.grad``."""
_PREFIX = "adj_"


@dataclass(frozen=True, slots=True)
class Differentiated:
    """A model with its backward. ``gradients``: input -> the value that is the gradient, of the input's shape;
    ``unread``: inputs on which the scalar does not depend, or in steps alone; ``seed``: the value of shape [1]
    with which the backward begins."""

    model: ModelProto
    gradients: dict[str, str]
    unread: tuple[str, ...]
    seed: str


def differentiate(model: ModelProto, scalar: str, inputs: Sequence[str], scale: str = "") -> Differentiated:
    """Append the derivatives of the output ``scalar`` by ``inputs``, each an input of the model without a value.

    ``scale``: a scalar value of the model by which all derivatives are multiplied. Raises UnsupportedError for an
    operator that onnx-ad cannot differentiate, OptionError where onnx-ad is not installed.
    """
    try:
        import onnx_ad
    except ModuleNotFoundError as error:
        if error.name != "onnx_ad":
            raise
        raise OptionError("derivatives need onnx-ad", "pip install 'gopt[derive]'") from None
    # onnx-ad folds a value that is stored as a constant, though it is an input too: its gradient would be zero.
    stored = {each.name for each in model.graph.initializer} & set(inputs)
    assert not stored, stored
    _refuse_weights(model, set(inputs))
    try:
        made = onnx_ad.reverse(model, inputs=list(inputs), outputs=[scalar], prefix=_PREFIX, layout="onnx")
    except onnx_ad.UnsupportedOperator as error:
        raise UnsupportedError(
            f"onnx-ad cannot differentiate this model: {show(str(error))}",
            "--freeze the parameters behind that operator, or replace it in the model",
        ) from None
    except ValueError as error:  # a name that it needs is taken
        raise UnsupportedError(f"onnx-ad refuses this model: {show(str(error))}", "rename that value") from None
    _remove_seed(made, f"{_PREFIX}{scalar}", scale)
    return _with_gradients(made, inputs, f"{_PREFIX}{scalar}")


def _refuse_weights(model: ModelProto, inputs: set[str]) -> None:
    """Refuse by name what onnx-ad refuses without one: weights of convolutions in groups, and of transposed ones."""
    for node in model.graph.node:
        if node.op_type not in ("Conv", "ConvTranspose") or node.input[1] not in inputs:
            continue
        groups = next((each.i for each in node.attribute if each.name == "group"), 1)
        if groups > 1 or node.op_type == "ConvTranspose":
            kind = f"Conv in {groups} groups" if node.op_type == "Conv" else "ConvTranspose"
            raise UnsupportedError(
                f"{show(node.input[1])} is the weight of a {kind} ({show(node.output[0])}), which onnx-ad cannot "
                "differentiate by it",
                f"--freeze {node.input[1]}",
            )


def _remove_seed(model: ModelProto, seed: str, scale: str) -> None:
    """One direction, of length one or of the given scale: the seed is no input any more."""
    graph = model.graph
    kept = [each for each in graph.input if each.name != seed]
    kind = next(each for each in graph.input if each.name == seed).type.tensor_type.elem_type
    del graph.input[:]
    graph.input.extend(kept)
    if not scale:
        one = np.ones(1, helper.tensor_dtype_to_np_dtype(kind))
        graph.initializer.append(numpy_helper.from_array(one, seed))
        return
    shape = f"{seed}.shape"
    graph.initializer.append(numpy_helper.from_array(np.ones(1, np.int64), shape))
    nodes = [
        helper.make_node("Cast", [scale], [f"{seed}.cast"], to=kind),
        helper.make_node("Reshape", [f"{seed}.cast", shape], [seed]),
        *graph.node,
    ]
    del graph.node[:]
    graph.node.extend(nodes)


def _with_gradients(model: ModelProto, inputs: Sequence[str], seed: str) -> Differentiated:
    """Derivatives without the axis of directions, as values and no longer as outputs."""
    graph = model.graph
    made = {f"{_PREFIX}{name}" for name in inputs}
    kept = [each for each in graph.output if each.name not in made]
    del graph.output[:]
    graph.output.extend(kept)
    last = f"{_PREFIX}.last_axis"
    graph.initializer.append(numpy_helper.from_array(np.array([-1], np.int64), last))
    producers = {name: node for node in graph.node for name in node.output}
    gradients, unread = {}, []
    for name in inputs:
        if producers[producers[f"{_PREFIX}{name}"].input[0]].op_type == "ConstantOfShape":  # zeros, and no path
            unread.append(name)
            continue
        gradients[name] = f"{name}{GRADIENT}"
        graph.node.append(helper.make_node("Squeeze", [f"{_PREFIX}{name}", last], [gradients[name]]))
    return Differentiated(model, gradients, tuple(unread), seed)
