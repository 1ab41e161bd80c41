"""The variants of every standard operator whose derivatives are compared with difference quotients.

A case is a text of nodes that make ``y`` from float64 inputs. Operators of one input whose schema says no more need no
text: ``UNARY`` lists the numbers that they take.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from onnx import defs

EXACT, SINGLE, RUNTIME = "exact", "single", "runtime"
"""By onnx's evaluator in float64; by it, and it computes some of the operator in float32; by ONNX Runtime in float32,
where the evaluator lacks the variant or is wrong."""
OLDEST = 20
"""The operator set to which older models are converted."""
RUNTIMES = 26
"""The newest operator set that ONNX Runtime supports."""
NEWEST = 28
"""The operator set up to which every operator has a case. Raise it with the cases of a newer onnx."""


@dataclass(frozen=True)
class Draw:
    """Random numbers of a shape between two bounds, which differ from each other."""

    shape: tuple[int, ...]
    low: float = -2.0
    high: float = 2.0

    def numbers(self, seed: str) -> np.ndarray:
        random = np.random.default_rng(zlib.crc32(seed.encode()))
        count = int(np.prod(self.shape))
        share = (random.permutation(count) + random.uniform(0.25, 0.75, count)) / max(count, 1)
        return (self.low + (self.high - self.low) * share).reshape(self.shape)


@dataclass(frozen=True)
class Case:
    """One variant. ``by``: the inputs that are differentiated by. ``refused``: a pattern in the message of a refusal.
    ``how``: EXACT, SINGLE or RUNTIME. ``since``, ``until``: operator sets."""

    operator: str
    variant: str
    text: str
    by: tuple[str, ...]
    values: dict[str, Draw | np.ndarray] = field(hash=False, compare=False)
    since: int = OLDEST
    refused: str = ""
    how: str = "exact"
    until: int = 1000

    @property
    def label(self) -> str:
        return f"{self.operator}-{self.variant}"

    def arrays(self) -> dict[str, np.ndarray]:
        return {
            name: each.numbers(f"{self.label}{name}") if isinstance(each, Draw) else each
            for name, each in self.values.items()
        }

    @property
    def versions(self) -> list[int]:
        """The operator sets in which the operator has a form of its own, from the newest."""
        forms = {each.since_version for each in HISTORY[self.operator]}
        oldest, newest = (
            max(self.since, OLDEST),
            RUNTIMES if self.how == RUNTIME else min(NEWEST, defs.onnx_opset_version()),
        )
        forms = {each for each in (*forms, oldest) if oldest <= each <= self.until}
        return sorted({min(each, newest) for each in forms}, reverse=True)


def _history() -> dict[str, list[defs.OpSchema]]:
    found: dict[str, list[defs.OpSchema]] = {}
    for schema in defs.get_all_schemas_with_history():
        if schema.domain == "" and schema.since_version <= NEWEST:
            found.setdefault(schema.name, []).append(schema)
    return found


HISTORY = _history()
"""Every operator of the standard domain up to NEWEST -> its schemas."""

CASES: list[Case] = []


def add(
    operator: str,
    text: str,
    by: str,
    variant: str = "",
    refused: str = "",
    since: int = 0,
    until: int = 1000,
    how: str = EXACT,
    **values: Draw | np.ndarray | tuple[int, ...] | Sequence[int],
) -> None:
    """Add a case. A tuple stands for random numbers of that shape, a list for whole numbers."""
    if operator not in HISTORY:
        return  # an older onnx
    made: dict[str, Draw | np.ndarray] = {}
    for name, each in values.items():
        if isinstance(each, tuple):
            each = Draw(each)
        made[name] = np.array(each, np.int64) if isinstance(each, list | int) else each
    first = min(schema.since_version for schema in HISTORY[operator])
    CASES.append(
        Case(operator, variant or "plain", text, tuple(by.split()), made, max(since, first), refused, how, until)
    )


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float64)


NO_FLOATS = frozenset(
    {
        "ImageDecoder",
        "RegexFullMatch",
        "SequenceEmpty",
        "StringConcat",
        "StringNormalizer",
        "StringSplit",
        "TfIdfVectorizer",
    }
)
"""Operators whose operands are not floating-point numbers: no derivative can go through them."""
DEPRECATED = frozenset({"Scatter", "Upsample"})
"""Operators that are in no operator set from OLDEST on."""
