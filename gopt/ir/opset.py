"""The version of the standard operators a model is written for."""

from __future__ import annotations

from onnx import ModelProto


def opset_of(model: ModelProto) -> int:
    """Return the version of domain ``ai.onnx``; 1 for a model without the import, which then has no such operator."""
    return next((opset.version for opset in model.opset_import if opset.domain in ("", "ai.onnx")), 1)
