"""A step as a model with ``training_info``, ONNX's own form of a training step."""
