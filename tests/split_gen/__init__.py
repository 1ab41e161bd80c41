"""Splits between trainers and servers, run by a simulator that shares no code with gopt, against their source."""
