"""From a training step to a model of its forward alone: what ``gopt merge --inference`` writes."""
