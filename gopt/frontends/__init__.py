"""Ways from a model of another tool to a training step."""
