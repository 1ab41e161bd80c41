"""``python -m gopt.cli``."""

from gopt.cli.main import entry

entry()
