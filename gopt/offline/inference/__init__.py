"""From a training step to a model of the forward alone, as ``gopt merge --inference`` writes."""
