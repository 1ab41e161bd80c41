"""Calls of PyTorch of more than a line, by families. PyTorch is an argument, not an import."""
