"""ONNX functions written as text, and the expansion into nodes."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnx.parser
from onnx import FunctionProto, NodeProto, numpy_helper

from gopt.ir.opaque.inline import inline_call

OPSET = 20
"""The operator set in which functions are written, and to which older forward models are converted."""


@functools.cache
def function(text: str) -> FunctionProto:
    """Parse the function ``text``: ``NAME <ATTRIBUTES> (INPUTS) => (OUTPUTS) { NODES }``."""
    return onnx.parser.parse_function(f'<domain: "gopt.derive", opset_import: ["" : {OPSET}]>\n{text}')


def call(
    text: str, inputs: Sequence[str], outputs: Sequence[str], attributes: Mapping[str, np.ndarray], prefix: str
) -> list[NodeProto]:
    """The nodes of one call; values inside are named ``prefix.NAME``. Values of ``attributes`` are tensors."""
    body = function(text)
    missing = set(body.attribute) - set(attributes)
    assert not missing and len(body.input) == len(inputs) and len(body.output) == len(outputs), (body.name, missing)
    attributes_of = {name: numpy_helper.from_array(attributes[name]) for name in body.attribute}
    return inline_call(body, onnx.helper.make_node(body.name, inputs, outputs, **attributes_of), prefix)
