"""Backward graphs: derivatives come from onnx-ad and are rewritten in the form of frameworks.

onnx-ad carries an axis of seed directions through the backward. A training step has one direction, so the axis has
length 1: ``seed_axis`` removes the axis. ``simplify`` folds constants and merges equal nodes.
"""
