"""Chains of 2 to 4 operators, as ONNX Runtime rewrites them for gopt, held against onnx's reference evaluator."""
