"""The computation of a step split among members: placements chosen, propagated through all phases, made local."""
