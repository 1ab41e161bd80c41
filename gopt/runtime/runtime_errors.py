"""Shortens ONNX Runtime's message about a failed node to one line: the node and the reason."""

from __future__ import annotations

import re

from gopt.errors import RunError

_NODE = re.compile(r"while running (\w+) node\. Name:'([^']*)' Status Message: (.*)", re.DOTALL)
_PLACE = re.compile(r"\S+\.(?:cc|cu|cuh|h|hpp):\d+ (?:[^()]*::[^()]*\([^()]*\)(?: const)? )?")
"""Source position and function of the runtime in which it failed."""
_INDEX = re.compile(r"idx=(-?\d+) must be within the inclusive range \[(-?\d+),(-?\d+)\]")
MAX_TEXT = 200
"""Characters of a reason."""


def node_error(error: Exception) -> RunError:
    """The RunError for an error of ONNX Runtime during a run."""
    text = " ".join(_PLACE.sub("", str(error)).split()) or type(error).__name__
    node = _NODE.search(text)
    if node is None:
        return RunError(f"ONNX Runtime failed: {_short(text)}")
    where = "ONNX Runtime failed: " + (f"{node[1]} {node[2]!r}" if node[2] else node[1])
    if index := _INDEX.search(node[3]):
        return RunError(
            f"{where}: index {index[1]} is out of range, {index[2]} to {index[3]}",
            "is a label, a token or a position in the data too large for the model?",
        )
    return RunError(f"{where}: {_short(node[3])}")


def _short(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 1].rstrip()}…"
