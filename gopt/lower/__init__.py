"""From the rank-independent program to each rank: phases, rank graphs, assertions."""
