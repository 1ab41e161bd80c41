"""The verbs of the command line for programs, exported by ``gopt``."""
