"""Two JSON records, compared leaf by leaf."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

_KEYS = ("tensor", "input", "rank", "op", "name")
"""Keys that distinguish the entries of a list; the first that does is used."""
_LONG = ("removed_ops", "removed_vars", "added_ops", "added_vars")
"""Lists of a report that are as long as the graph, and that the ranks' own lines explain: counted, not listed."""


def diff_json(a: Any, b: Any, path: str = "") -> Iterable[str]:
    """Differences of two JSON records, one leaf a line; entries of a list are matched by key, not by position."""
    if a == b:
        return
    if isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys((*a, *b)):
            inner = f"{path}.{key}" if path else key
            if key not in a or key not in b:
                yield f"{inner} {'added' if key not in a else 'removed'}: {_short(b[key] if key in b else a[key])}"
            else:
                yield from diff_json(a[key], b[key], inner)
    elif isinstance(a, list) and isinstance(b, list) and path not in _LONG and (key := _list_key(a, b)):
        entries_a, entries_b = ({str(entry[key]): entry for entry in side} for side in (a, b))
        for name in dict.fromkeys((*entries_a, *entries_b)):
            inner = f"{path}[{name}]"
            if name not in entries_a or name not in entries_b:
                yield f"{inner} {'added' if name not in entries_a else 'removed'}"
            else:
                yield from diff_json(entries_a[name], entries_b[name], inner)
        if list(entries_a) != list(entries_b) and sorted(entries_a) == sorted(entries_b):
            yield f"{path}: order changed"
    elif isinstance(a, list) and isinstance(b, list) and any(isinstance(entry, (dict, list)) for entry in (*a, *b)):
        texts = [{json.dumps(entry, sort_keys=True) for entry in side} for side in (a, b)]
        gone, new = len(texts[0] - texts[1]), len(texts[1] - texts[0])
        yield f"{path}: {gone} of {len(a)} entries gone, {new} of {len(b)} new"
    else:
        yield f"{path}: {_short(a)} -> {_short(b)}"


def _list_key(a: Sequence[Any], b: Sequence[Any]) -> str:
    for key in _KEYS:
        has = all(isinstance(entry, dict) and isinstance(entry.get(key), (str, int)) for entry in (*a, *b))
        if has and all(len({str(entry[key]) for entry in side}) == len(side) for side in (a, b)):
            return key
    return ""


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
