"""From eager PyTorch training code to a functional step. torch is imported by nothing else in gopt."""
