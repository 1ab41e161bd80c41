"""Mutations of JSON documents and of TOML."""

from __future__ import annotations

import json
import random
from typing import Any

_VALUES = (
    None, True, False, 0, 1, -1, 2**31, 2**63, 10**400, 1.5, 1e308, float("nan"), float("inf"), "", "x", "../x",
    "\x1b[31m",     "\ud800", "n" * 5000, [], {}, [[]], {"": 0}, [0] * 2000,
)  # fmt: skip


def damaged_json(record: Any, dice: random.Random) -> str:
    """A document with one to three values or keys replaced, removed, doubled or moved; or with damage to its text."""
    for _ in range(dice.choice((1, 1, 2, 3))):
        _edit(record, dice)
    text = json.dumps(record)
    what = dice.random()
    if what < 0.05:
        text = "[" * 100_000 + text
    elif what < 0.1:
        text = text.replace("{", '{"mesh": 1, "mesh": 2, ', 1)
    elif what < 0.15:
        text = text[: dice.randrange(len(text) + 1)]
    return text


def _edit(record: Any, dice: random.Random) -> None:
    places: list[tuple[Any, Any]] = []
    stack = [record]
    while stack:
        top = stack.pop()
        items = list(top.items()) if isinstance(top, dict) else list(enumerate(top)) if isinstance(top, list) else []
        places += [(top, key) for key, _ in items]
        stack += [value for _, value in items]
    if not places:
        return
    holder, key = dice.choice(places)
    what = dice.choice(("set", "set", "remove", "other", "rename"))
    if what == "remove":
        del holder[key]
    elif what == "other":
        other, at = dice.choice(places)
        if at in other if isinstance(other, dict) else at < len(other):
            holder[key] = json.loads(json.dumps(other[at]))
    elif what == "rename" and isinstance(holder, dict):
        holder[dice.choice(("x", "", "mesh", "states"))] = holder.pop(key)
    else:
        holder[key] = dice.choice(_VALUES)


def damaged_toml(text: str, dice: random.Random) -> str:
    """A configuration with lines removed, doubled, or with other values."""
    lines = text.splitlines()
    for _ in range(dice.choice((1, 2, 3))):
        place = dice.randrange(len(lines))
        what = dice.choice(("remove", "double", "value", "value", "key", "bytes"))
        if what == "remove" and len(lines) > 1:
            del lines[place]
        elif what == "double":
            lines.insert(place, lines[place])
        elif what == "key":
            lines[place] = lines[place].replace(dice.choice("abdeops"), dice.choice(("x", "é", ".", '"')), 1)
        elif what == "bytes":
            lines[place] += dice.choice(("\0", "'", "=", "\x1b[31m", "é" * 9, "#", "[" * 3000))
        elif "=" in lines[place]:
            values = (
                "0",
                "-1",
                "true",
                "1e999",
                "nan",
                "inf",
                "[]",
                "{}",
                '""',
                "9" * 40,
                "1979-05-27",
                "[1, 'x']",
                "'gopt'",
            )
            lines[place] = f"{lines[place].partition('=')[0]}= {dice.choice(values)}"
    return "\n".join(lines)
