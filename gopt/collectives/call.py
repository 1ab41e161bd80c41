"""One use of a collective: operands and attributes, read and typed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

import numpy.typing as npt

from gopt.errors import InputError

Array: TypeAlias = npt.NDArray[Any]
Type: TypeAlias = tuple[str, tuple[int, ...]]
"""Dtype as in the manifest (``float16``), and shape."""
PartialType: TypeAlias = tuple[str, tuple[int | str | None, ...] | None]
"""The same where dimensions, or all of the shape, may be unknown."""
Results: TypeAlias = list[list[Array] | None]
"""Outputs of every member in group order; None where a member's outputs are undefined."""


class CallKind(Enum):
    """Type of an attribute; the value is ONNX's name."""

    INT = "INT"
    STRING = "STRING"
    INTS = "INTS"
    STRINGS = "STRINGS"


@dataclass(frozen=True, slots=True)
class Attribute:
    """One attribute: neither required nor with a default means part of a form of the record."""

    name: str
    kind: CallKind
    doc: str
    required: bool = False
    default: Any = None
    choices: tuple[str, ...] = ()

    def read(self, op: str, value: Any) -> Any:
        """The value as int, str or a tuple; raises InputError for another type."""
        one = int if self.kind in (CallKind.INT, CallKind.INTS) else str
        many = self.kind in (CallKind.INTS, CallKind.STRINGS)
        items = value if many else [value]
        if not isinstance(items, (list, tuple)) or not all(isinstance(item, one) for item in items):
            raise InputError(f"{op}: attribute {self.name} is not of type {self.kind.value}: {value!r:.80}")
        if self.choices and value not in self.choices:
            raise InputError(f"{op}: {self.name} is {value!r}", f"it may be {', '.join(self.choices)}")
        return tuple(value) if many else value


@dataclass(frozen=True, slots=True)
class Call:
    """One use of a collective, attributes read and defaults filled in; ``size`` and ``index`` None: unknown."""

    op: str
    attributes: Mapping[str, Any]
    inputs: tuple[PartialType, ...]
    size: int | None = None
    index: int | None = None

    @property
    def dtype(self) -> str:
        """Element type of all transfers."""
        return self.inputs[0][0] if self.inputs else str(self.attributes["dtype"])

    @property
    def members(self) -> int:
        """Size of the group; must be known."""
        assert self.size is not None
        return self.size

    @property
    def place(self) -> int:
        """Index in the group; must be known."""
        assert self.index is not None
        return self.index

    def has(self, name: str) -> bool:
        return name in self.attributes

    def __getitem__(self, name: str) -> Any:
        return self.attributes[name]
