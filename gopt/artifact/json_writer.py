"""Manifest and report as text that reads and diffs well."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def pretty_json(document: Mapping[str, Any]) -> str:
    """Stable JSON that reads and diffs well: one line a key, and one line an entry in a list of tables."""
    return _pretty(document) + "\n"


def _pretty(record: Mapping[str, Any]) -> str:
    lines = []
    for key, value in record.items():
        if isinstance(value, dict):
            text = _pretty(value) if any(isinstance(each, list) and each for each in value.values()) else _line(value)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n" + ",\n".join(map(_line, value)) + "\n]"
        else:
            text = _line(value)
        lines.append(f"{_line(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}"


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
