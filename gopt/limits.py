"""The largest inputs accepted by gopt: constants, only here. An error names the limit, and the value needed.

The environment variable ``GOPT_LIMITS`` sets limits, for a command and all started processes:
``GOPT_LIMITS=PARTS=9000000,RANKS=100000 gopt shard ...``. Nothing raises the limits in ``FIXED``.
"""

from __future__ import annotations

import os

VARIABLE = "GOPT_LIMITS"
"""Variable of the environment with other values: ``NAME=VALUE`` with commas between them."""

# --- documents: manifest, report, index, roles, gopt.toml, headers of values ------------------------------------------

DOCUMENT_BYTES = 64 << 20
"""Of a manifest or a report: 4096 ranks with a dozen states each take 13 MB."""
MANIFEST_BYTES = 1 << 30
"""Of a manifest. Repeated words of ranks count once for the limits of documents: of the 256 MB of 126 layers on 512
ranks, 32 MB remain."""
INDEX_BYTES = 16 << 20
"""Of the index of a checkpoint."""
ROLES_BYTES = 32 << 20
"""Of the roles that a kept source carries."""
CONFIG_BYTES = 64 << 10
"""Of a gopt.toml."""
CONFIG_DOTS = 10_000
"""Dots in a gopt.toml: each may be a table within a table."""
CONFIG_LINE_DOTS = 500
"""Dots in one of its lines: TOML's reader takes time and memory of the square of a key's parts."""
CHECKPOINT_BYTES = 4 << 30
"""Of a checkpoint of ONNX Runtime in one file: a FlatBuffer has at most as many, and it is read into memory."""
SERVERS_BYTES = 8 << 20
"""Of a server map."""
HEADER_BYTES = 32 << 20
"""Of the header of a safetensors file."""
LINE_BYTES = 8 << 20
"""Of a line that ranks tell their launcher, and of all that is not yet told."""
DOCUMENT_VALUES = 3_000_000
"""Values in one document: each takes memory of its own, however few bytes it has in the file. A
manifest of 4096 ranks with a dozen states of three pieces each has 0.9 million; with 126 layers on
512 ranks it has 2.3 million."""
DOCUMENT_TABLES = 1_000_000
"""Tables and lists in one document: an empty one takes as much memory as five numbers. Said manifest has 0.25 million,
one of 65,536 ranks with two states each 0.6 million."""
DOCUMENT_KEYS = 1_500_000
"""Keys in all tables of one document."""
DOCUMENT_WIDE = 16 << 20
"""Of a document with characters beyond U+FFFF: each of its characters takes four bytes in memory."""
DOCUMENT_TEXT = 1 << 20
"""Bytes of one text in a document."""
DOCUMENT_DEPTH = 32
"""Levels of tables and lists inside one another."""
NUMBER_DIGITS = 19
"""Digits of a whole number: what 63 bits hold."""
ELEMENTS = 1 << 63
"""Elements of one tensor, and bytes of one file: below this."""
RANKS = 65_536
"""Ranks of a mesh: those for which one command makes graphs, or weighs them."""
RANK_FILES = 32 << 30
"""Bytes of the graphs of all ranks. Each lists where the shares of all others begin: they grow with the square of the
ranks along an axis: 25 GB for 65,536 along one, 0.8 GB for 64 times 1024."""
SCHEDULE_ACTIONS = 1_000_000
"""Actions in a schedule of pipeline stages, one line of its file each: 512 micro-batches through 4 stages on each of 16
members are 98,304."""
THREADS = 4096
"""Ranks, or trainers and servers, that one process runs: each is a thread with values and sessions of its own."""

# --- messages ---------------------------------------------------------------------------------------------------------

LINE = 960
"""Bytes of one line of an error, a hint or a note, without what it begins with."""
NAME = 120
"""Characters of a name or value from a file in a message."""
REASON = 400
"""Characters of what another library says that stand in a message."""

# --- models -----------------------------------------------------------------------------------------------------------

PARTS = 2_000_000
"""Nodes, values, tensors and attributes of a file, however small it is: protobuf takes 160 bytes for an empty one."""
PART_SHARE = 24
"""Bytes of a file for each further one: they take at most seven times the file's size in memory. A node with names of
ten characters has 50 bytes."""
PART_BYTES = 1024
"""Bytes from which a part is looked into for more of them."""
LIST_ELEMENTS = 1_000_000
"""Numbers in one list of an attribute: each becomes an object of Python's. Values by the million are tensors."""
FUNCTION_NODES = 200_000
"""Nodes of a graph once the model's own functions are written out, however few it has in the file."""
FUNCTION_GROWTH = 8
"""How many times the nodes of the file there may be beyond that."""
UPDATE_VALUES = 1_000_000
"""Values that a search for one gradient goes through, some microseconds each: an update is some tens of nodes, a
Newton-Schulz iteration some hundreds, a whole optimizer in a loop that was written out some ten thousand."""
FUNCTION_DEPTH = 100
"""Functions that call one another in a row."""
CHECKED_BYTES = 1024
"""Bytes up to which a stored value takes part in the check of a model and in shape inference: enough for every shape,
axis and pad; a larger one is an input there."""
FOLDED_ELEMENTS = 1 << 16
"""Elements of a value that an analysis computes from constants: what a file of a few bytes describes may be of any
size, and is not made."""
LARGE_BATCH_BYTES = 4 << 30
"""Of all values of a step with the samples of all ranks, as verify evaluates it once: most are freed on the way."""
DIMENSIONS = 64
"""Dimensions of a tensor: NumPy's own limit."""
NAME_LENGTH = 4096
"""Characters of the name of a value or node: each name stands in many places."""

# --- archives of values -----------------------------------------------------------------------------------------------

ARCHIVE_DIRECTORY = 16 << 20
"""Bytes of the list of members of an .npz file: about 200,000 arrays."""
ARCHIVE_HEADER = 10_000
"""Bytes of the header of an array in it, as NumPy's own reader has it."""
ARCHIVE_FREE = 256 << 20
"""Bytes that the arrays taken from an .npz file may have, however small the file is."""
ARCHIVE_GROWTH = 100
"""How many times the size of the file they may have beyond that."""

# --- reproducers ------------------------------------------------------------------------------------------------------

REPRODUCER_INPUTS = 64
"""Files and folders that a command in a reproducer reads."""
REPRODUCER_FILES = 140_000
"""Files in a reproducer: two for each of 65,536 ranks, and a few."""
REPRODUCER_VALUES = 256 << 20
"""Bytes of values that are drawn in the place of those that a reproducer does not have."""
REPRODUCER_FILE = 1 << 40
"""Bytes of a file of values that a reproducer does not have: it is made without contents, and takes no space."""

# --- other values of the user's ---------------------------------------------------------------------------------------

FIXED = frozenset(
    [
        "CONFIG_LINE_DOTS", "DOCUMENT_DEPTH", "NUMBER_DIGITS", "ELEMENTS", "DIMENSIONS", "ARCHIVE_HEADER", "LINE",
        "NAME", "REASON", "CHECKED_BYTES", "PART_BYTES", "LINE_BYTES",
    ]
)  # fmt: skip
"""Limits of formats and libraries, and sizes at which gopt works in another way: nothing is refused, or nothing can
raise it."""


def value(name: str) -> int:
    """Return what holds of a limit."""
    found = globals()[name]
    assert type(found) is int
    return found


def raisable() -> dict[str, int]:
    """Limits settable by ``GOPT_LIMITS``, with values."""
    found = globals().items()
    return {name: value for name, value in found if name.isupper() and type(value) is int and name not in FIXED}


def hint(name: str, needed: int = 0) -> str:
    """Return the hint of a refusal at a limit: the value to read the same input, ``needed`` or twice the current."""
    told = {**_told, name: max(needed, 2 * raisable()[name])}
    return f"raise the limit: {VARIABLE}={','.join(f'{each}={value}' for each, value in told.items())} gopt ..."


def _set(text: str) -> str:
    """Set limits as ``GOPT_LIMITS`` says; returns what is wrong with it, or nothing."""
    for each in filter(None, text.split(",")):
        name, _, value = each.partition("=")
        if name not in raisable():
            return f"{VARIABLE} names {name!r}, which is no limit that can be set"
        if not (value.isdecimal() and value.isascii() and len(value) <= NUMBER_DIGITS and int(value)):
            return f"{VARIABLE} says {each!r}, which is no NAME=VALUE with a number above 0"
        globals()[name] = _told[name] = int(value)
    return ""


_told: dict[str, int] = {}
WRONG = _set(os.environ.get(VARIABLE, ""))
"""A fault of the variable, which commands refuse; or nothing."""
