"""A fuzzer of gopt's commands: ``python -m fuzz --minutes 30`` in ``tests``. See ``docs/robustness.md``."""
