"""Mutations of files as bytes, for whatever kind they are."""

from __future__ import annotations

import random

_WORDS = (
    b"",
    b"\0",
    b"\xff" * 8,
    b"\xff\xff\xff\x7f",
    b"{",
    b"[" * 2000,
    b"1e999",
    b"-1",
    b"9" * 400,
    b"null",
    b'"',
    b"\n",
)


def damaged(data: bytes, dice: random.Random) -> bytes:
    """The bytes with some flipped, cut out, put in, doubled or moved."""
    held = bytearray(data)
    for _ in range(dice.choice((1, 1, 2, 8))):
        place = dice.randrange(len(held) + 1)
        length = min(dice.choice((1, 1, 4, 16, 256)), len(held) - place)
        what = dice.choice(("flip", "cut", "put", "double", "end", "set"))
        if what == "end":
            del held[place:]
        elif what == "cut":
            del held[place : place + length]
        elif what == "put":
            held[place:place] = dice.choice(_WORDS)
        elif what == "double":
            held[place:place] = held[place : place + length]
        elif what == "set":
            held[place : place + length] = bytes(dice.randrange(256) for _ in range(length))
        elif place < len(held):
            held[place] ^= 1 << dice.randrange(8)
    return bytes(held)
