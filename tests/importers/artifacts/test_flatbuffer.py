"""Tables of a FlatBuffer, and offsets that point out of it."""

from __future__ import annotations

import struct

import flatbuffers
import pytest
from flatbuffers import number_types

from gopt.importers.artifacts.flatbuffer import Fields


def table() -> bytes:
    """Field 0: the number 7, 1: a text, 2: three bytes, 3: [5, 6]; 4 is not stored."""
    b = flatbuffers.Builder(0)
    text, raw = b.CreateString("name"), b.CreateByteVector(b"abc")
    b.StartVector(4, 2, 4)
    b.PrependInt32(6)
    b.PrependInt32(5)
    numbers = b.EndVector()
    b.StartObject(5)
    b.PrependInt32Slot(0, 7, 0)
    for field, place in ((1, text), (2, raw), (3, numbers)):
        b.PrependUOffsetTRelativeSlot(field, place, 0)
    b.Finish(b.EndObject())
    return bytes(b.Output())


def test_fields_by_number():
    data = table()
    root = Fields.root(data)
    assert root.number(0, number_types.Int32Flags) == 7
    assert root.number(4, number_types.Int32Flags, 3) == 3
    assert (root.text(1), root.text(4)) == ("name", "")
    byte_range = root.byte_range(2)
    assert byte_range is not None and data[byte_range.start : byte_range.start + byte_range.length] == b"abc"
    assert root.numbers(3, number_types.Int32Flags) == [5, 6]
    assert root.byte_range(4) is None and root.table(4) is None and list(root.tables(4)) == []


def test_lists_that_do_not_fit_are_refused():
    data = table()
    at = Fields.root(data).byte_range(2).start - 4
    bad = data[:at] + struct.pack("<I", 1 << 30) + data[at + 4 :]
    with pytest.raises(ValueError, match="does not fit"):
        Fields.root(bad).byte_range(2)
    with pytest.raises(ValueError, match="does not fit"):
        list(Fields.root(bad).tables(2))
    with pytest.raises(ValueError, match="a table at byte"):
        Fields.root(struct.pack("<I", 1 << 20) + data[4:])
