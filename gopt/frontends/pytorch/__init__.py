"""From eager PyTorch training code to a functional step. No other package of gopt imports torch."""
