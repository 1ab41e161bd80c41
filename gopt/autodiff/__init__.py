"""Backward graphs: derivatives come from onnx-ad; what it writes is brought into the form that frameworks write.

onnx-ad carries an axis of seed directions through the backward. A training step has one direction, so that the axis has
one element: ``seed_axis`` takes it away. ``simplify`` folds constants and merges equal nodes.
"""
