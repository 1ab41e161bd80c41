"""CPU tuning: what makes a rank's step faster and changes no bit of its results. The executor asks a ``Tuning``."""
