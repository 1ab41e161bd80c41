"""Training steps with a known truth: the generator, an oracle that shares no code with gopt, and a judge.

``python -m steps_gen`` from ``tests/`` makes fresh steps and prints how many were right, refused or wrong.
"""
