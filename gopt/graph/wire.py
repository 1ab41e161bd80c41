"""How many parts a file has, counted on its bytes before protobuf makes an object of each.

An empty node has two bytes in the file and over a hundred in memory: some megabytes would become gigabytes.
"""

from __future__ import annotations

from gopt import limits
from gopt.errors import InputError

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_INSIDE = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node"},
    "function": {7: "node"},
    "node": {5: "attribute"},
    "attribute": {6: "graph", 11: "graph"},
}
"""Message -> its fields that may hold a graph, by number in onnx.proto."""


def check_parts(data: bytes) -> None:
    """Raise InputError for a model of more than PARTS nodes, values, tensors and attributes.

    A part of less than PART_BYTES counts as one, whatever it holds. Damaged bytes are left to protobuf.
    """
    if len(data) > 2 * limits.PARTS:  # else there is no room for so many
        _count(data)


def _count(data: bytes) -> None:
    parts = 0
    stack = [("model", 0, len(data))]
    while stack:
        message, at, end = stack.pop()
        inside = _INSIDE[message]
        while at < end:
            tag, at = _varint(data, at)
            kind = tag & 7
            if kind == _BYTES:
                size, at = _varint(data, at)
                parts += 1
                if parts > limits.PARTS:
                    raise InputError(f"holds more than {limits.PARTS} nodes, values and attributes (PARTS)")
                if size >= limits.PART_BYTES and tag >> 3 in inside:
                    stack.append((inside[tag >> 3], at, min(at + size, end)))
                at += size
            elif kind == _VARINT:
                _, at = _varint(data, at)
            elif kind in (_FIXED32, _FIXED64):
                at += 4 if kind == _FIXED32 else 8
            else:
                break


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number that begins at ``at``, and where it ends; 0 behind the end of the bytes."""
    if at < len(data) and data[at] < 128:
        return data[at], at + 1
    value = shift = 0
    while at < len(data):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            break
    return 0, len(data)
