"""Other ways to write one training step in an ONNX file, and a judge of what gopt makes of each."""
