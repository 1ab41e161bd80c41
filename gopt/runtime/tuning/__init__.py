"""CPU tuning: makes a rank's step faster without changing a bit of the results. The executor calls a ``Tuning``."""
