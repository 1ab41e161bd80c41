"""``python -m gopt``, and ``torchrun … -m gopt``."""

from gopt.cli.start import entry

if __name__ == "__main__":
    entry()
