"""Puts a record into the template: one HTML file with styles, scripts and data, without any network request.

The content security policy allows the page's own scripts by their digests, and no request at all.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
import math
from importlib import resources
from typing import Any

from gopt.offline.html_report.record import ReportPage

GENERATOR = "gopt report"
"""The page's generator: by it ``--force`` knows a page that gopt wrote."""
HEAD = (
    f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="generator" content="{GENERATOR}">'
)
"""How every page begins."""
_LIBRARY = "chart.umd.min.js"
_SCRIPTS = ("format", "elements", "theme", "charts", "timeline", "operators", "sections", "main")
"""The page's own scripts, in order: they are one script in the page."""
_ESCAPES = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026", 0x2028: "\\u2028", 0x2029: "\\u2029"}


def page_text(record: ReportPage) -> str:
    """The whole page."""
    policy = "; ".join((
        "default-src 'none'", "style-src 'unsafe-inline'", "img-src data:", "base-uri 'none'", "form-action 'none'",
        f"script-src {_digest(_library())} {_digest(_scripts())}",
    ))  # fmt: skip
    title = html.escape(f"{record.heading.file} · {record.folder} · gopt report")
    parts = {
        "HEAD": HEAD, "POLICY": policy, "TITLE": title, "STYLE": _read("style.css"), "DATA": data_block(record),
        "LIBRARY": _library(), "SCRIPTS": _scripts(),
    }  # fmt: skip
    pieces = _read("page.html").split("%%")
    return "".join(parts[piece] if number % 2 else piece for number, piece in enumerate(pieces))


def data_block(record: ReportPage) -> str:
    """The record as JSON for a script element, whatever its names: without ``<``, ``>`` or ``&``."""
    text = json.dumps(finite(record.to_json()), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.translate(_ESCAPES).encode("utf-8", "backslashreplace").decode()


def finite(value: Any) -> Any:
    """A document with null for numbers that are not finite."""
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _digest(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


@functools.cache
def _scripts() -> str:
    return '"use strict";\n' + "".join(_read(f"{name}.js") for name in _SCRIPTS)


@functools.cache
def _library() -> str:
    return _read(_LIBRARY)


@functools.cache
def _read(name: str) -> str:
    return resources.files("gopt").joinpath("offline", "html_report", "page", name).read_text(encoding="utf-8")
