"""Stories of trainers and servers: the server of each piece of a parameter, and the message with the piece."""

from __future__ import annotations

from collections.abc import Iterator

from gopt.artifact.server_entries import KeyEntry
from gopt.collectives.layout import ITEM_BYTES
from gopt.offline.explain.folder_index import FolderIndex
from gopt.offline.explain.story import Fact
from gopt.text.amounts import format_bytes


def key_story(index: FolderIndex, name: str) -> Iterator[Fact]:
    """A key by name, or all keys of a parameter."""
    plan = index.manifest.parameter_server
    if plan is None:
        return
    state = index.parameter(name) if name in index.states else index.updated.get(name)
    for key in plan.keys:
        if key.name == name:
            yield Fact("key", _told(key), tuple(piece.tensor for piece in key.pieces))
            pieces = [f"{piece.tensor}[{piece.start}:{piece.stop}]" for piece in key.pieces]
            yield Fact("pieces", ", ".join(pieces[:6]) + (f" and {len(pieces) - 6} more" if len(pieces) > 6 else ""))
        elif state is not None:
            for piece in key.pieces:
                if piece.tensor == state.tensor:
                    text = f"elements {piece.start} to {piece.stop - 1}: {_told(key)}"
                    yield Fact("key", text, (key.name,))


def _told(key: KeyEntry) -> str:
    where = "every server" if key.server is None else f"server {key.server}"
    size = format_bytes(key.elements * ITEM_BYTES[key.wire])
    pushed = "pushed and pulled" if key.gradient and key.outputs else "pushed" if key.gradient else "pulled"
    return f"{key.name} on {where}, {pushed} in message {key.bucket}, {size} of {key.wire}"


def table_story(index: FolderIndex, name: str) -> Iterator[Fact]:
    """Explain a table with rows on servers, by its parameter."""
    plan = index.manifest.parameter_server
    for table in () if plan is None else plan.tables:
        if name in (table.parameter, *table.inputs, *table.outputs, *table.gradients):
            servers = ", ".join(map(str, table.servers))
            rows = f"{table.rows} rows of {table.width} {table.dtype}"
            text = f"{table.parameter}: {rows} on servers {servers} by {table.layout}"
            yield Fact("table", text, (table.parameter,))
            yield Fact("travels", "trainers pull the rows that they look up and push their gradients, by row number")
