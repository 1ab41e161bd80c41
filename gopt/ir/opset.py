"""The version of the standard operators that a model is written for."""

from __future__ import annotations

from onnx import ModelProto


def opset_of(model: ModelProto) -> int:
    """The version of domain ``ai.onnx``; 1 for a model that does not import it, and so has none of its operators."""
    return next((opset.version for opset in model.opset_import if opset.domain in ("", "ai.onnx")), 1)
