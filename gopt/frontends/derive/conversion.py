"""Errors of onnx's version converter: mended where they are known, refused where results differ.

The converter forgets that older operators resize without half pixels, and that an older Hardmax flattens its operand.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from onnx import ModelProto, helper

from gopt.errors import GoptError, UnsupportedError
from gopt.ir.nodes import nested
from gopt.ir.opset import opset_of
from gopt.ir.types import TensorType, numpy_dtype
from gopt.runtime.runtime_errors import node_error
from gopt.runtime.session import SessionCache
from gopt.sanitize import show

_HALF_PIXELS = 11
"""The operator set from which on Resize has half pixels by default."""
_SEED = 20
_TOLERANCE = {"float16": 3e-2, "bfloat16": 2e-1}
"""Share of the largest element by which a result may differ; 1e-3 in other types."""


def mend_resizes(before: ModelProto, after: ModelProto) -> None:
    """Let each Resize of a converted model, in place, take the elements that it took before."""
    if opset_of(before) >= _HALF_PIXELS:
        return
    old = [node for node in nested(before.graph.node) if node.op_type in ("Upsample", "Resize")]
    new = [node for node in nested(after.graph.node) if node.op_type == "Resize"]
    for node in new if len(old) == len(new) else ():  # the converter gives values other names
        kept = [each for each in node.attribute if each.name == "mode"]
        del node.attribute[:]
        node.attribute.extend(kept)
        node.attribute.append(helper.make_attribute("coordinate_transformation_mode", "asymmetric"))
        node.attribute.append(helper.make_attribute("nearest_mode", "floor"))


def check_conversion(
    before: ModelProto, after: ModelProto, stored: Mapping[str, np.ndarray], inputs: Mapping[str, TensorType]
) -> None:
    """Raise UnsupportedError where a converted model computes something else than before, on one batch.

    Both models read all stored values as inputs; ``inputs``: the others, with fixed sizes. Where ONNX Runtime does not
    run one of them, nothing is compared.
    """
    random = np.random.default_rng(_SEED)
    feeds = {**stored, **{name: _drawn(kind, random) for name, kind in inputs.items()}}
    try:
        first, second = _run(before, feeds), _run(after, feeds)
        wrong = next((name for name, value in first.items() if not _near(value, second.get(name))), None)
        if wrong is None or not _near(first[wrong], _run(before, feeds)[wrong]):  # it draws random numbers
            return
    except (GoptError, ValueError, TypeError):
        return
    old, new = opset_of(before), opset_of(after)
    raise UnsupportedError(
        f"onnx converts the model from operator set {old} to {new} with other results: {show(wrong)} differs",
        f"export it for operator set {new}",
    )


def _drawn(kind: TensorType, random: np.random.Generator) -> np.ndarray:
    """Whole numbers are zeros, which every table has."""
    dtype = numpy_dtype(kind.dtype)
    return random.standard_normal(kind.dims).astype(dtype) if "float" in kind.dtype else np.zeros(kind.dims, dtype)


def _run(model: ModelProto, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = SessionCache().get(model.SerializeToString())
    read = {each.name for each in session.get_inputs()}
    try:
        results = session.run(None, {name: value for name, value in feeds.items() if name in read})
    except MemoryError:
        raise
    except Exception as error:  # the runtime's have no common base
        raise node_error(error) from error
    return dict(zip([each.name for each in session.get_outputs()], map(np.asarray, results)))


def _near(first: np.ndarray, second: np.ndarray | None) -> bool:
    if second is None or first.dtype.kind not in "fiub":
        return True
    if first.shape != second.shape:
        return False
    one, two = first.astype(np.float64), second.astype(np.float64)
    finite = np.isfinite(one)
    most = np.abs(one[finite]).max(initial=0) * _TOLERANCE.get(str(first.dtype), 1e-3) + 1e-5
    return bool((finite == np.isfinite(two)).all() and (np.abs(one[finite] - two[finite]) <= most).all())
