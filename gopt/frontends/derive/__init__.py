"""``gopt derive``: a training step from a forward ONNX model, without a framework."""
