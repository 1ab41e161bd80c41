"""Messages between roles: point to point, beside the collectives. Knows nothing of graphs or parameter servers."""
