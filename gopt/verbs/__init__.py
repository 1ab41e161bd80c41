"""The verbs of the command line for programs; ``gopt`` gives them by the names."""
