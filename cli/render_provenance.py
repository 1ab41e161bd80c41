"""Prints the bytes of files behind every state: ``--explain`` of ``gopt merge`` and ``gopt reshard``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gopt.text.sanitize import listed

from .render import console, table
from .terminal import print_result

if TYPE_CHECKING:
    from gopt.artifact.pieces import Piece
    from gopt.offline.provenance import Provenance

DIGITS = 8
"""Hexadecimal digits of a digest in the table; --json has all of them."""


def explain_bytes(path: str, as_json: bool) -> None:
    """Print the map of a folder or checkpoint as a table, or as JSON."""
    from gopt.offline.provenance import provenance

    from .render_progress import progress

    with progress() as advance:
        advance("reading all bytes")
        result = provenance(path)
    print_result(result, as_json, render_provenance)


def render_provenance(result: Provenance) -> None:
    """A row for each piece, and the states without bytes."""
    out = console()
    rows = [
        (entry.piece.tensor, place(entry.piece), entry.file, entry.offset, entry.nbytes, entry.sha256[:DIGITS])
        for entry in result.pieces
    ]  # fmt: skip
    columns = ("state", "elements", "file", "offset", "bytes", "sha256")
    out.print(table(f"Bytes that make each state of {result.path}", columns, rows, (3, 4)))
    many = len(result.files)
    out.print(f"{many} {'file has the digest' if many == 1 else 'files have the digests'} of {result.document}")
    if result.drawn:
        out.print(f"made of a seed: {listed(result.drawn)}")
    if result.missing:
        out.print(f"note: {len(result.missing)} states have no value: {listed(result.missing)}")


def place(piece: Piece) -> str:
    """The elements of a piece: a range, of a box or of some rows if not of the whole tensor."""
    text = f"{piece.start}:{piece.stop}"
    if piece.box is not None:
        sides = (" ".join(f"{low}:{high}" for low, high in zip(side[::2], side[1::2])) for side in piece.box)
        text += f" of [{', '.join(sides)}]"
    if piece.every is not None:
        text += f" of rows {piece.every[0]}::{piece.every[1]}"
    return text
