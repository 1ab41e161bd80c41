"""ONNX Runtime's training artifacts (release 1.19) as one functional step: docs/artifacts.md."""
