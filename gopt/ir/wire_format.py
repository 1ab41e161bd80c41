"""Protobuf's wire format: counts the parts of a file before protobuf makes an object of each, and writes fields.

An empty node has two bytes in the file and over a hundred in memory: some megabytes would become gigabytes.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable
from contextlib import suppress

from gopt import limits
from gopt.errors import InputError

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_NESTED = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: "tensor", 11: "value", 12: "value", 13: "value"},
    "function": {7: "node", 11: "attribute", 12: "value"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 14: "type", 15: "type"},
    "tensor": {},
    "value": {2: "type"},
    "type": {1: "dense", 4: "sequence", 5: "map", 8: "dense", 9: "sequence"},
    "dense": {2: "shape"},
    "sequence": {1: "type"},
    "map": {2: "type"},
    "shape": {},
}
"""Message -> its fields that may hold many parts, by number in onnx.proto."""
_LISTS = {("attribute", 7): 4, ("attribute", 8): 0, ("tensor", 1): 0}
"""Packed lists that become Python's: the bytes of an element, or 0 where it ends with a byte below 128."""
_CONTINUED = bytes(range(128, 256))
GRAPH, NODE = 0x3A, 0x0A
"""Tags of the graph in a model, and of a node in a graph."""
_INPUT, _OUTPUT, _NAME = 0x0A, 0x12, 0x1A
"""Tags of the first fields of a node."""
SHORT_END = 1024
"""Bytes behind the names of a node up to which they are kept, to find the same in other nodes."""
_NAMES = (bytes((_INPUT,)), bytes((_OUTPUT,)))
_TEXTS = (*_NAMES, bytes((_NAME,)))


def check_parts(data: bytes) -> None:
    """Raise InputError for a model of more nodes, values, tensors and attributes than PARTS and PART_SHARE allow, and
    for a list of more than LIST_ELEMENTS in an attribute or as the shape of a stored tensor.

    A part of less than PART_BYTES counts once, whatever the content. Damaged bytes are left to protobuf.
    """
    if len(data) > min(2 * limits.PARTS, limits.LIST_ELEMENTS):  # else there is no room for so many
        with suppress(IndexError):
            _count(data)


def _count(data: bytes) -> None:
    """Count every field of the visited messages, whatever the type. Raises IndexError at the end of damaged bytes."""
    parts, most, large = 0, max(limits.PARTS, len(data) // limits.PART_SHARE), limits.PART_BYTES
    stack = [("model", 0, len(data))]
    while stack:
        message, at, end = stack.pop()
        inside = _NESTED[message]
        while at < end:
            parts += 1
            if parts > most:
                raise InputError(
                    f"holds more than {most} nodes, values and attributes (PARTS)", limits.hint("PARTS", len(data) // 2)
                )
            tag, size = data[at], 0
            at += 1
            if tag > 127:
                tag, at = _varint(data, at - 1)
            kind = tag & 7
            if kind == _BYTES:
                size = data[at]
                at += 1
                if size > 127:
                    size, at = _varint(data, at - 1)
                    if size >= large:
                        if (step := _LISTS.get((message, tag >> 3))) is not None:
                            _check_list(data, at, min(at + size, end), step)
                        elif tag >> 3 in inside:
                            stack.append((inside[tag >> 3], at, min(at + size, end)))
                at += size
            elif kind == _VARINT:
                if data[at] < 128:
                    at += 1
                else:
                    _, at = _varint(data, at)
            elif kind in (_FIXED32, _FIXED64):
                at += 4 if kind == _FIXED32 else 8
            else:
                break


def _check_list(data: bytes, at: int, end: int, step: int) -> None:
    if end - at <= limits.LIST_ELEMENTS * max(step, 1):
        return
    count = (end - at) // step if step else len(data[at:end].translate(None, _CONTINUED))
    if count > limits.LIST_ELEMENTS:
        most = limits.LIST_ELEMENTS
        raise InputError(
            f"holds a list of {count} numbers; at most {most} are read (LIST_ELEMENTS)",
            limits.hint("LIST_ELEMENTS", count),
        )


def encoded_nodes(model: bytes) -> list[bytes]:
    """Return the serialized nodes of a model parseable by protobuf, in order; none if the graph is not a single field
    of the file."""
    graphs = _fields(model, 0, len(model), GRAPH)
    return [model[at:end] for at, end in _fields(model, *graphs[0], NODE)] if len(graphs) == 1 else []


def _fields(data: bytes, at: int, end: int, wanted: int) -> list[tuple[int, int]]:
    """Return where the submessages with a tag begin and end in the message between ``at`` and ``end``; nothing where
    the message has fixed numbers or tags of more than a byte."""
    return [(inner, stop) for tag, _, inner, stop in split_fields(data, at, end) if tag == wanted]


def split_fields(data: bytes, at: int, end: int) -> list[tuple[int, int, int, int]]:
    """Return the fields of the message between ``at`` and ``end``: tag, begin, begin of the submessage, and end.

    Nothing where the message has fixed numbers or tags of more than a byte, or is cut short."""
    fields: list[tuple[int, int, int, int]] = []
    try:
        while at < end:
            begun, tag, size = at, data[at], data[at + 1]
            at += 2
            if size > 127:
                size, at = _varint(data, at - 1)
            if tag > 127 or tag & 7 not in (_BYTES, _VARINT):
                return []
            inner = at
            if tag & 7 == _BYTES:  # ``size`` is the value of a varint
                at += size
            fields.append((tag, begun, inner, at))
    except IndexError:
        return []
    return fields if at == end else []


def split_node(node: bytes, texts: dict[bytes, str]) -> tuple[list[str], list[str], str, bytes]:
    """Return inputs, outputs and name of a serialized node, and the bytes behind: all other fields.

    The bytes are empty for a node to be read otherwise, or with a long rest: a stored tensor. ``texts`` holds each name
    once, by its bytes: readers of a value share the decoded name.
    """
    inputs: list[str] = []
    outputs: list[str] = []
    at, name = 0, ""
    try:
        while node[at] == _INPUT and (size := node[at + 1]) < 128:
            start, at = at + 2, at + 2 + size
            text = node[start:at]
            inputs.append(texts.get(text) or texts.setdefault(text, text.decode()))
        while node[at] == _OUTPUT and (size := node[at + 1]) < 128:
            start, at = at + 2, at + 2 + size
            text = node[start:at]
            outputs.append(texts.setdefault(text, text.decode()))  # new, as a rule
        if node[at] == _NAME and node[at + 1] < 128:
            end = at + 2 + node[at + 1]
            name = node[at + 2 : end].decode()
            at = end
        short = node[at] > _NAME and len(node) - at <= SHORT_END
        return inputs, outputs, name, node[at:] if short else b""
    except (IndexError, UnicodeDecodeError):
        return inputs, outputs, name, b""


def field(number: int, data: bytes) -> bytes:
    """Return a serialized message as a field of another message; ``number`` is below 16."""
    return head(number, len(data)) + data


@functools.lru_cache(1024)
def head(number: int, size: int) -> bytes:
    """Return the tag and length that precede a submessage of ``size`` bytes."""
    data = bytearray((number << 3 | _BYTES,))
    while size > 127:
        data.append(size & 127 | 128)
        size >>= 7
    data.append(size)
    return bytes(data)


def renamed(node: bytes, inputs: Iterable[str], outputs: Iterable[str]) -> bytes:
    """Return a serialized node with these inputs and outputs as first fields; the same bytes if equal."""
    text = "".join(
        [f"\x0a{chr(len(name))}{name}" for name in inputs] + [f"\x12{chr(len(name))}{name}" for name in outputs]
    )
    if text.isascii():  # no length of more than a byte neither
        head = text.encode()
    else:
        names = [field(1, name.encode()) for name in inputs] + [field(2, name.encode()) for name in outputs]
        head = b"".join(names)
    if node.startswith(head) and node[len(head) : len(head) + 1] not in _NAMES:
        return node
    return head + _behind(node, _NAMES)


def behind_names(node: bytes) -> bytes:
    """Return the end of a serialized node, behind inputs, outputs and name as first fields."""
    return _behind(node, _TEXTS)


def _behind(node: bytes, tags: Container[bytes]) -> bytes:
    """Return the rest of a serialized node, behind first fields with one of the tags."""
    end = 0
    while node[end : end + 1] in tags:
        size, behind = _varint(node, end + 1)
        end = behind + size
    return node[end:]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number at ``at``, and its end; 0 behind the end of the bytes."""
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
