"""Splits the computation of a step among the members of a mesh axis: chooses placements, propagates them through all
phases, and makes each member's local graph."""
