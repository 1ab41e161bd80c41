"""CPU tuning: makes a rank's step faster without changing a bit of its results. The executor calls a ``Tuning``."""
