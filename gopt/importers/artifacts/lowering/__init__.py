"""Operators of ONNX Runtime training in standard ones: ``table`` has a record for each."""
