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
    """Differences of two JSON records, one leaf a line; entries of a list go by their key, not their place."""
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
        first, second = ({str(each[key]): each for each in side} for side in (a, b))
        for name in dict.fromkeys((*first, *second)):
            inner = f"{path}[{name}]"
            if name not in first or name not in second:
                yield f"{inner} {'added' if name not in first else 'removed'}"
            else:
                yield from diff_json(first[name], second[name], inner)
        if list(first) != list(second) and sorted(first) == sorted(second):
            yield f"{path}: order changed"
    elif isinstance(a, list) and isinstance(b, list) and any(isinstance(each, (dict, list)) for each in (*a, *b)):
        texts = [{json.dumps(each, sort_keys=True) for each in side} for side in (a, b)]
        gone, new = len(texts[0] - texts[1]), len(texts[1] - texts[0])
        yield f"{path}: {gone} of {len(a)} entries gone, {new} of {len(b)} new"
    else:
        yield f"{path}: {_short(a)} -> {_short(b)}"


def _list_key(a: Sequence[Any], b: Sequence[Any]) -> str:
    for key in _KEYS:
        has = all(isinstance(each, dict) and isinstance(each.get(key), (str, int)) for each in (*a, *b))
        if has and all(len({str(each[key]) for each in side}) == len(side) for side in (a, b)):
            return key
    return ""


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
