"""What gopt takes at most of any input: constants, and nowhere else. The refusal names the limit that it met."""

from __future__ import annotations

# --- documents: manifest, report, index, roles, gopt.toml, headers of values ------------------------------------------

DOCUMENT_BYTES = 64 << 20
"""Of a manifest or a report: that of 4096 ranks with a dozen states each takes 13 MB."""
INDEX_BYTES = 16 << 20
"""Of the index of a checkpoint."""
ROLES_BYTES = 32 << 20
"""Of the roles that a kept source carries."""
CONFIG_BYTES = 1 << 20
"""Of a gopt.toml."""
HEADER_BYTES = 32 << 20
"""Of the header of a safetensors file."""
LINE_BYTES = 8 << 20
"""Of a line that ranks tell their launcher, and of all that is not yet told."""
DOCUMENT_VALUES = 4_000_000
"""Values in one document: each takes memory of its own, however few bytes it has in the file."""
DOCUMENT_DEPTH = 32
"""Levels of tables and lists inside one another."""
NUMBER_DIGITS = 19
"""Digits of a whole number: what 63 bits hold."""
ELEMENTS = 1 << 63
"""Elements of one tensor, and bytes of one file: below this."""
RANKS = 1 << 20
"""Ranks of a mesh."""

# --- messages ---------------------------------------------------------------------------------------------------------

LINE = 960
"""Bytes of one line of an error, a hint or a note, without what it begins with."""
NAME = 120
"""Characters of a name or value from a file in a message."""
