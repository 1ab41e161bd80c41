"""JSON for other programs: NaN and infinities become null."""

from __future__ import annotations

import functools
import json
import math
from typing import Any

from .terminal import safe_json


def strict_json(record: Any, indent: int | None = None) -> str:
    """A record as JSON every parser reads; NaN and infinities are null."""
    encoder = _encoder(indent)
    try:
        return safe_json(encoder.encode(record))
    except ValueError:
        return safe_json(encoder.encode(_finite(record)))


@functools.cache
def _encoder(indent: int | None) -> json.JSONEncoder:
    """Made once: ``gopt run`` writes a line in every step."""
    return json.JSONEncoder(indent=indent, ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
