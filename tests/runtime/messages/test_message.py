"""Messages as bytes, and as they lie in a mailbox."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from gopt.errors import InvariantError, OptionError
from gopt.runtime.memory import bits
from gopt.runtime.messages.mailbox import Mailbox
from gopt.runtime.messages.message import NOTE_BYTES, ArraySpec, Header, Kind, Message, decode, encode
from gopt.runtime.messages.roster import Roster, Settings

ARRAYS = [
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.array([1.5, -2], np.float16),
    np.array([1.5, -2, np.nan], ml_dtypes.bfloat16),
    np.array([0.5], ml_dtypes.float8_e4m3fn),
    np.array([True, False, True]),
    np.array([1 + 2j], np.complex64),
    np.array(7, np.int64),
    np.zeros((0, 4), np.float64),
    np.zeros((3, 0, 2), np.uint8),
]


def same(first, second):
    assert [(each.dtype, each.shape) for each in first] == [(each.dtype, each.shape) for each in second]
    assert [each.tobytes() for each in first] == [each.tobytes() for each in second]


@pytest.mark.parametrize("count", [0, 1, len(ARRAYS)])
def test_a_message_comes_back(count):
    note = {"plan": "ß", "list": [1, None, 2.5]}
    message = Message(Kind.PUSH_ROWS, 3, -1, 1 << 40, tuple(ARRAYS[:count]), note)
    header, arrays, _ = decode(encode(message.header, message.arrays))
    assert header == message.header and header.note == note
    same(arrays, message.arrays)
    assert all(array.flags.aligned and array.flags.writeable for array in arrays)


def test_a_header_alone_comes_back():
    header = Message(Kind.PUSH, 0, 1, 2, tuple(ARRAYS)).header
    assert decode(encode(header, None, 7)) == (header, None, 7)
    assert header.nbytes == sum(array.nbytes for array in ARRAYS)
    assert str(header) == "PUSH of key 1 in round 2"


def test_what_cannot_travel_is_refused():
    with pytest.raises(InvariantError, match="string"):
        ArraySpec.of(np.array(["a"], object))
    for note, said in ((object(), "not JSON"), ("a" * NOTE_BYTES, "are the most")):
        with pytest.raises(InvariantError, match=said):
            encode(Header(Kind.HELLO, 0, 0, 0, note=note), None)


def test_bits_are_a_view():
    for array in ARRAYS:
        kept = array.copy()
        assert bits(kept).nbytes == array.nbytes
        if array.size:
            bits(kept)[...] = 0
            assert not kept.tobytes().strip(b"\0")


def test_roles_and_processes_fit():
    roster = Roster.of(["trainer 0", "server 0", "server 1"], [0, 0, 1])
    assert roster.local(0) == [0, 1] and roster.describe(2) == "server 1 (endpoint 2, process 1)"
    assert "and 2 more" in Roster.of([f"trainer {n}" for n in range(10)]).describe_all(range(10))
    with pytest.raises(OptionError, match="process 1 has no role"):
        Roster.of(["a", "b"], [0, 2])
    with pytest.raises(OptionError, match="2 roles stand on 1 processes"):
        Roster.of(["a", "b"], [0])
    with pytest.raises(OptionError, match="bad limits"):
        Settings(messages=0)


def test_a_mailbox_takes_in_until_it_is_full():
    mailbox = Mailbox(Settings(messages=3, bytes=100))
    small, large = (Header(Kind.PUSH, 0, 0, 0, (ArraySpec("uint8", (size,)),)) for size in (1, 1000))
    mailbox.place(small)
    assert mailbox.admits()
    mailbox.place(large)
    assert not mailbox.admits()  # by its bytes: one may be larger than the limit
    for _ in range(2):
        mailbox.take(0)
    for _ in range(3):
        assert mailbox.admits()
        mailbox.place(small)
    assert not mailbox.admits()


def test_messages_of_one_source_do_not_overtake():
    mailbox = Mailbox(Settings())
    slots = [mailbox.place(Header(Kind.PUSH, source, number, 0)) for source in (0, 1) for number in (0, 1)]
    slots[0].left = 1
    assert [(head.source, head.key) for head in mailbox.heads()] == [(1, 0)]
    slots[0].left = 0
    assert [(head.source, head.key) for head in mailbox.heads()] == [(0, 0), (1, 0)]
    assert [mailbox.take(0).key, mailbox.take(0).key, mailbox.take(1).key] == [0, 1, 0]


def test_what_has_not_come_whole_from_a_lost_one_is_forgotten():
    mailbox = Mailbox(Settings())
    slots = [mailbox.place(Header(Kind.PUSH, source, number, 0)) for number in range(3) for source in (0, 1)]
    slots[2].left = 1
    mailbox.drop(0)
    assert [mailbox.take(0).key, [head.source for head in mailbox.heads()]] == [0, [1]]


def test_memory_must_fit():
    mailbox, header = Mailbox(Settings()), Header(Kind.VALUES, 0, 0, 0, (ArraySpec("float32", (2, 2)),))
    mailbox.allocate = lambda _: [np.zeros((4,), np.float32)]
    with pytest.raises(InvariantError, match=r"brings float32\[2, 2\]; the memory for it is float32\[4\]"):
        mailbox.place(header)
    target = np.zeros((2, 2), np.float32)
    mailbox.allocate = lambda _: [target]
    mailbox.place(header, [np.ones((2, 2), np.float32)])
    assert mailbox.take(0).arrays[0] is target and target.all()
