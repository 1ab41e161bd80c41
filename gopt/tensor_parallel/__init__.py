"""The computation of a step shared out: placements chosen, propagated through forward, backward and update, made local."""
