"""Errors of onnx's version converter and inference: known errors are mended, different results refused.

The converter forgets that older operators resize without half pixels, and that an older Hardmax flattens its operand.
Before operator set 22, inference counts a last window of a pool that ONNX Runtime leaves out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, helper

from gopt.errors import GoptError, UnsupportedError
from gopt.frontends.derive.same_forward import near
from gopt.ir.model_file import refill
from gopt.ir.nodes import nested
from gopt.ir.opset import opset_of
from gopt.ir.types import TensorType, numpy_dtype
from gopt.operators.kinds import POOLS, RESIZES
from gopt.runtime.runtime_errors import node_error
from gopt.runtime.session import SessionCache
from gopt.runtime.windows import window
from gopt.text.sanitize import show

_HALF_PIXELS = 11
"""The operator set from which on Resize has half pixels by default."""
_SEED = 20
_TOLERANCE = {"float16": 3e-2, "bfloat16": 2e-1}
"""Share of the largest element by which a result may differ; 1e-3 in other types."""


def mend_resizes(before: ModelProto, after: ModelProto) -> None:
    """Let each Resize of a converted model, in place, take the same elements as before."""
    if opset_of(before) >= _HALF_PIXELS:
        return
    old = [node for node in nested(before.graph.node) if node.op_type in RESIZES]
    new = [node for node in nested(after.graph.node) if node.op_type == "Resize"]
    for node in new if len(old) == len(new) else ():  # the converter gives values other names
        refill(node.attribute, [attribute for attribute in node.attribute if attribute.name == "mode"])
        node.attribute.append(helper.make_attribute("coordinate_transformation_mode", "asymmetric"))
        node.attribute.append(helper.make_attribute("nearest_mode", "floor"))


def mend_pools(model: ModelProto, whole: Callable[[], ModelProto]) -> None:
    """Write ``ceil_mode`` of pools, in place, as pads if a window would begin behind the input.

    Later shapes depend on the pool: a single pool is mended at a time, from the first. ``whole``: returns the model
    with the constants.
    """
    pools = [node for node in model.graph.node if node.op_type in POOLS and _attributes(node).get("ceil_mode")]
    while pools:
        graph = onnx.shape_inference.infer_shapes(whole(), data_prop=True).graph
        infos = (*graph.input, *graph.value_info, *graph.output)
        shapes = {info.name: [dim.dim_value for dim in info.type.tensor_type.shape.dim] for info in infos}
        while pools and not _mended(pools[0], shapes):
            del pools[0]


def _mended(node: NodeProto, shapes: Mapping[str, list[int]]) -> bool:
    """Give a pool pads instead of ``ceil_mode`` if its inferred result has a window too many; returns whether
    mended."""
    attributes, sizes, pooled = _attributes(node), shapes.get(node.input[0], ())[2:], shapes.get(node.output[0], ())[2:]
    if attributes.get("auto_pad", b"NOTSET") != b"NOTSET" or not sizes or not all((*sizes, *pooled)):
        return False
    kernel = attributes["kernel_shape"]
    strides, dilations, pads = (attributes.get(name) for name in ("strides", "dilations", "pads"))
    slide = window(sizes, kernel, strides, dilations, pads, None, ceil=True)
    if len(slide.out) != len(pooled) or list(slide.out) == list(pooled):
        return False
    axes = zip(slide.out, slide.strides, slide.reach, sizes, slide.begin)
    ends = [max((count - 1) * step + reach - size - begin, 0) for count, step, reach, size, begin in axes]
    declared = (pads or [0] * 2 * len(kernel))[len(kernel) :]
    counted = attributes.get("count_include_pad") and any(end > before for end, before in zip(ends, declared))
    if counted or any(end >= size for end, size in zip(ends, kernel)):
        raise UnsupportedError(
            f"{node.op_type} {show(node.output[0])} has a window by ceil_mode that ONNX Runtime leaves out",
            "export it for operator set 22 or later, or without ceil_mode",
        )
    rest = [attribute for attribute in node.attribute if attribute.name not in ("ceil_mode", "pads")]
    refill(node.attribute, [*rest, helper.make_attribute("pads", [*slide.begin, *ends])])
    return True


def _attributes(node: NodeProto) -> dict[str, Any]:
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def check_conversion(
    before: ModelProto, after: ModelProto, stored: Mapping[str, np.ndarray], inputs: Mapping[str, TensorType]
) -> None:
    """Raise UnsupportedError for a converted model with other results than before, on a batch.

    Both models read all stored values as inputs; ``inputs``: the others, with fixed sizes. Nothing is compared if ONNX
    Runtime fails on either.
    """
    random = np.random.default_rng(_SEED)
    feeds = {**stored, **{name: _drawn(kind, random) for name, kind in inputs.items()}}
    try:
        results, second = _run(before, feeds), _run(after, feeds)
        wrong = next((name for name, value in results.items() if not _near(value, second.get(name))), None)
        if wrong is None or not _near(results[wrong], _run(before, feeds)[wrong]):  # it draws random numbers
            return
    except (GoptError, ValueError, TypeError):
        return
    old, new = opset_of(before), opset_of(after)
    raise UnsupportedError(
        f"onnx converts the model from operator set {old} to {new} with other results: {show(wrong)} differs",
        f"export it for operator set {new}",
    )


def _drawn(kind: TensorType, random: np.random.Generator) -> np.ndarray:
    """Whole numbers are zeros, valid for every table."""
    dtype = numpy_dtype(kind.dtype)
    return random.standard_normal(kind.dims).astype(dtype) if "float" in kind.dtype else np.zeros(kind.dims, dtype)


def _run(model: ModelProto, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = SessionCache().get(model.SerializeToString())
    read = {name.name for name in session.get_inputs()}
    try:
        results = session.run(None, {name: value for name, value in feeds.items() if name in read})
    except MemoryError:
        raise
    except Exception as error:  # the runtime's have no common base
        raise node_error(error) from error
    return dict(zip([output.name for output in session.get_outputs()], map(np.asarray, results)))


def _near(expected: np.ndarray, second: np.ndarray | None) -> bool:
    if second is None or expected.dtype.kind not in "fiub":
        return True
    return near(expected, second, _TOLERANCE.get(str(expected.dtype), 1e-3), 1e-5)
