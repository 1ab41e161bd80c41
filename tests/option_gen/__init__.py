"""Fixtures sharded with options drawn at random, all of them together, and the ranks held against the source."""
