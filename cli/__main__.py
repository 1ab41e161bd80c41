"""``python -m gopt.cli``."""

from .main import entry

entry()
