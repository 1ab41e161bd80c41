"""Runs a split: trainers push and pull, servers merge and update. Messages are those of ``gopt.runtime.messages``."""
