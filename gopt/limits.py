"""What gopt takes at most of any input: constants, and nowhere else. The refusal names the limit that it met."""

from __future__ import annotations

# --- models -----------------------------------------------------------------------------------------------------------

FUNCTION_NODES = 200_000
"""Nodes of a graph once the model's own functions are written out."""
FUNCTION_DEPTH = 100
"""Functions that call one another in a row."""
CHECKED_BYTES = 1024
"""Bytes up to which a stored value takes part in the check of a model and in shape inference: enough for every shape,
axis and pad; a larger one is an input there."""
DIMENSIONS = 64
"""Dimensions of a tensor: NumPy's own limit."""
NAME_LENGTH = 4096
"""Characters of the name of a value or node: each name stands in many places."""

REASON = 400
"""Characters of what another library says that stand in a message."""

RANKS = 65_536
"""Ranks of a mesh for which one command works."""

# --- archives of values -----------------------------------------------------------------------------------------------

ARCHIVE_DIRECTORY = 16 << 20
"""Bytes of the list of members of an .npz file: about 200,000 arrays."""
ARCHIVE_HEADER = 10_000
"""Bytes of the header of an array in it, as NumPy's own reader has it."""
ARCHIVE_FREE = 256 << 20
"""Bytes that the arrays taken from an .npz file may have, however small the file is."""
ARCHIVE_GROWTH = 100
"""How many times the size of the file they may have beyond that."""
