"""Shapes that contradict an operator: what runtimes refuse, and onnx's inference does not."""

from __future__ import annotations

import random

import numpy as np
import onnx
import pytest
from node_models import model_of, started
from onnx import helper
from operator_forms import Case, forms
from other_shapes import other_shape

from gopt.operators.fits import RULES, misfit
from gopt.operators.table import OPERATORS

DATA = ("out of data bounds", "invalid ind", "Invalid position", "divisible by input batch")
"""What a runtime says of numbers, not of shapes."""


def said(op_type: str, case: Case, arrays: list[np.ndarray | None]) -> str:
    """What onnxruntime says of a node that onnx's inference lets pass; '' where it runs, or onnx refuses it."""
    names = [f"x{place}" if array is not None else "" for place, array in enumerate(arrays)]
    node = helper.make_node(op_type, names, [f"y{place}" for place in range(case.results)], **case.attributes)
    values = {name: array for name, array in zip(names, arrays) if array is not None}
    stored = {name: array for name, array in values.items() if array.dtype.kind in "iu" and array.size < 20}
    fed = {name: array for name, array in values.items() if name not in stored}
    model = model_of([node], fed, node.output, opset=case.opset, stored=stored)
    try:
        model = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
        onnx.checker.check_model(model)
    except Exception:  # onnx's have no common base
        return ""
    try:
        started(model.SerializeToString()).run(None, fed)
    except Exception as error:  # the runtime's have no common base
        return str(error)
    return ""


def fault(op_type: str, case: Case, arrays: list[np.ndarray | None]) -> str:
    return misfit(op_type, case.attributes, [None if array is None else array.shape for array in arrays])


@pytest.mark.parametrize("name", OPERATORS)
def test_operands_of_forms_fit(name: str) -> None:
    assert [told for case in forms(name) if (told := fault(name, case, list(case.inputs)))] == []


@pytest.mark.parametrize(
    "name", [*RULES, "Reshape", "Squeeze", "Concat", "Softmax", "ReduceSum", "ReduceMax", "Pad", "Split"]
)
def test_operands_in_other_shapes_that_a_runtime_refuses_do_not_fit(name: str) -> None:
    draw = random.Random(name)
    for case in [each for each in forms(name) if each.runtime]:
        for _ in range(6):
            arrays = list(case.inputs)
            place = draw.choice([place for place, array in enumerate(arrays) if array is not None])
            array = np.asarray(arrays[place])
            arrays[place] = array.reshape(other_shape(draw, array.shape))
            why = said(name, case, arrays)
            told = fault(name, case, arrays)
            numbers = any(word in why for word in DATA) or "num_outputs" in case.attributes or "ReshapeHelper" in why
            assert told or not why or numbers, (case.attributes, [getattr(each, "shape", None) for each in arrays], why)


def test_open_sizes_may_fit() -> None:
    assert not misfit("ScatterND", {}, [(10, 8), ("n", 1), (None, 8)])
    assert misfit("ScatterND", {}, [(2, 5, 8), ("n", 1), (None, 8)])
    assert not misfit("Gemm", {}, [("n", 4), (4, 3), (3,)])
    assert not misfit("Transpose", {"perm": [1, 0]}, [None])
