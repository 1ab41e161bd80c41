"""One way to write a step: an edit of a model in place, and what gopt owes a user who gives it such a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from onnx import ModelProto

Edit = Callable[[ModelProto, Path], dict[str, str] | None]
"""Changes a model, and writes data files into the folder in which it is to lie; returns what became of names."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """An exit code, and words of the error and its hints: the value's name, and what settles it."""

    code: int
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Form:
    """``refusal`` None: the ranks must equal those of the plain file. ``only``: the steps that can be written so, or
    all. ``verified`` False: ``gopt verify`` cannot run the file, and says so with exit code 5. ``gaps``: why gopt
    refuses some of these steps, by name, which it should not."""

    name: str
    edit: Edit
    refusal: Refusal | None = None
    only: tuple[str, ...] = ()
    verified: bool = True
    gaps: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


def refused(code: int, *words: str) -> Refusal:
    return Refusal(code, words)
