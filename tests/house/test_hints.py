"""Refusals that a user can see end with what would settle them: the hints of an error say what to do next."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "gopt"
REFUSALS = frozenset({"InputError", "OptionError", "UnsupportedError"})
PACKAGES = (
    "analysis", "frontends", "importers", "parameter_server", "passes", "steps", "tensor_parallel",
    "verification",
)  # fmt: skip


def without_hint(text: str) -> list[str]:
    """Return the refusals of a source that have a message alone."""
    calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    return [
        ast.unparse(call) for call in calls
        if isinstance(call.func, ast.Name) and call.func.id in REFUSALS and len(call.args) == 1
    ]  # fmt: skip


@pytest.mark.parametrize("package", PACKAGES)
def test_every_refusal_has_a_hint(package: str) -> None:
    found = {path.name: without_hint(path.read_text()) for path in sorted((ROOT / package).rglob("*.py"))}
    assert {name: calls for name, calls in found.items() if calls} == {}


def test_finds_a_refusal_without_one() -> None:
    assert without_hint("raise InputError('no')\nraise InputError('no', 'do so')\n") == ["InputError('no')"]
