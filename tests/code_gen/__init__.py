"""Training code drawn at random, exported, and held against the same code run by PyTorch on other batches."""
