"""Options proposed by hints, with all affected names, and the same for ``gopt.toml``."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Mapping, Sequence

MOST = 8
"""Names that a sentence spells out."""
_WIDE = 800
"""Characters of names in one line: what a line of an error holds."""
_DIVIDES = frozenset(",=")
"""Characters between names in an option: no name there can have them."""


def states_option(pairs: Mapping[str, str]) -> str:
    """``--states m=m_new,v=v_new``; ``pairs``: input -> output, at least one."""
    return " ".join(f"--states {_quoted(part)}" for part in _parts([f"{old}={new}" for old, new in pairs.items()]))


def batch_option(names: Collection[str]) -> str:
    """``--batch x,mask``; at least one name."""
    return " ".join(f"--batch {_quoted(part)}" for part in _parts(list(names)))


def states_hints(pairs: Mapping[str, str], noun: str = "pair", option: str = "states") -> list[str]:
    """Hints with ``pairs``, input -> output, for ``--states`` (or another option) and for ``gopt.toml``.

    Pairs too long for one line are shared out among several."""
    if not pairs:
        return []
    hints = []
    if not any(_DIVIDES & set(name) for name in (*pairs, *pairs.values())):
        parts = _parts([f"{old}={new}" for old, new in pairs.items()])
        begin = f"name the {noun}{'s' * (len(pairs) > 1)}:"
        hints = [f"{begin if part is parts[0] else 'and'} --{option} {_quoted(part)}" for part in parts]
    lines = [
        f"{json.dumps(old, ensure_ascii=False)} = {json.dumps(new, ensure_ascii=False)}" for old, new in pairs.items()
    ]
    table = ", ".join(lines)
    under = "or in gopt.toml, under" if hints else "write in gopt.toml, under"
    if len(table) <= _WIDE:
        return [*hints, f"{under} [roles]: {option} = {{{table}}}"]
    if hints:
        return [*hints, f"{under} [roles.{option}], a line for each {noun}: {lines[0]}"]
    return [f"{under} [roles.{option}]: {line}" for line in lines]


def leave_out(outputs: Sequence[str]) -> str:
    """The hint to leave shown outputs out of a step."""
    shown = ", ".join(outputs[:MOST]) + (f" and {len(outputs) - MOST} more" if len(outputs) > MOST else "")
    return f"if {'they are' if len(outputs) > 1 else 'it is'} only shown, leave {shown} out of the step"


def batch_hint(names: Collection[str]) -> str:
    """The hint that inputs are fed in each step."""
    return f"if {'they are' if len(names) > 1 else 'it is'} fed, say {batch_option(names)}"


def others(count: int, what: str) -> str:
    """`` (and 3 other states)``; nothing where there is no other."""
    return f" (and {count} other {what}{'s' * (count > 1)})" if count else ""


def _parts(words: Sequence[str]) -> list[str]:
    """Words with commas between, as many in each part as fit."""
    parts: list[str] = []
    for word in words:
        if parts and len(parts[-1]) + len(word) < _WIDE:
            parts[-1] += f",{word}"
        else:
            parts.append(word)
    return parts


def _quoted(text: str) -> str:
    """A word as a shell reads it."""
    return shlex.quote(text)
