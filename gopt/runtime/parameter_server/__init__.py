"""Runs a split: trainers push and pull, servers merge and update. ``gopt.runtime.messages`` has the messages."""
