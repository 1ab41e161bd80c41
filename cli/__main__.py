"""``python -m gopt.cli``."""

from .start import entry

entry()
