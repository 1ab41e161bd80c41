"""Inputs of random numbers: the distribution of each, in the metadata of a step and in manifests."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from enum import Enum

from gopt.documents.records import OPTIONAL


class Distribution(Enum):
    """The kind of random numbers."""

    NORMAL = "normal"
    UNIFORM = "uniform"
    """From ``low``, included, to ``high``, excluded."""
    INTEGERS = "integers"
    """Each from ``low``, included, to ``high``, excluded, alike."""
    BERNOULLI = "bernoulli"
    """1, or true, with the probability ``p``, else 0."""
    PERMUTATION = "permutation"
    """The integers from 0 up to the length of the last dimension, each once along it."""


_INTEGERS = re.compile(r"(u?)int(8|16|32|64)")
_FLOATS = ("float16", "bfloat16", "float32", "float64")
_OF_FLOATS = frozenset({Distribution.NORMAL, Distribution.UNIFORM})
_OF_INTEGERS = frozenset({Distribution.INTEGERS, Distribution.PERMUTATION})


@dataclass(frozen=True, slots=True)
class Draw:
    """The distribution an input of random numbers is drawn from."""

    distribution: Distribution
    """The numbers are drawn from this distribution: normal, uniform from low to high, integers from low to high,
    bernoulli (1 or true with probability p), or permutation (the integers below the length of the last dimension, each
    once along it)."""
    mean: float = field(default=0.0, metadata=OPTIONAL)
    """The mean of a normal distribution; 0 if the key is absent."""
    std: float = field(default=1.0, metadata=OPTIONAL)
    """The standard deviation of a normal distribution; 1 if the key is absent."""
    low: float = field(default=0.0, metadata=OPTIONAL)
    """The least number of a uniform distribution, or the least integer; 0 if the key is absent."""
    high: float = field(default=1.0, metadata=OPTIONAL)
    """The bound that all numbers of a uniform distribution, or all integers, are below; 1 if the key is absent."""
    p: float = field(default=0.5, metadata=OPTIONAL)
    """The probability of 1 or true; 0.5 if the key is absent."""

    def __str__(self) -> str:
        kind = self.distribution
        if kind is Distribution.NORMAL:
            return f"normal({self.mean:g}, {self.std:g})"
        if kind in (Distribution.UNIFORM, Distribution.INTEGERS):
            return f"{kind.value} [{_short(self.low)}, {_short(self.high)})"
        return f"bernoulli({self.p:g})" if kind is Distribution.BERNOULLI else kind.value

    def fault(self, dtype: str, scalar: bool) -> str | None:
        """Why an input of a ``dtype`` cannot have this distribution, or None. ``scalar``: whether without
        dimensions."""
        kind = self.distribution
        whole = _INTEGERS.fullmatch(dtype)
        if not all(map(math.isfinite, (self.mean, self.std, self.low, self.high, self.p))):
            return "its bounds are not finite"
        if kind in _OF_FLOATS and dtype not in _FLOATS:
            return f"it holds {dtype}, not floats"
        if kind in _OF_INTEGERS and whole is None:
            return f"it holds {dtype}, not integers"
        if kind is Distribution.BERNOULLI and whole is None and dtype not in (*_FLOATS, "bool"):
            return f"it holds {dtype}, not numbers"
        if kind is Distribution.NORMAL and self.std < 0:
            return f"its deviation is {self.std:g}"
        if kind in (Distribution.UNIFORM, Distribution.INTEGERS) and not self.low < self.high:
            return "its range is empty"
        if kind is Distribution.INTEGERS and whole is not None and not self._fits(*whole.groups()):
            return f"its bounds are not whole numbers of {dtype}"
        if kind is Distribution.BERNOULLI and not 0 <= self.p <= 1:
            return f"its probability is {self.p:g}"
        return "it has no dimension" if kind is Distribution.PERMUTATION and scalar else None

    def _fits(self, unsigned: str, bits: str) -> bool:
        """Return whether the integers are whole numbers of a width."""
        least, bound = (0, 2.0 ** int(bits)) if unsigned else (-(2.0 ** (int(bits) - 1)), 2.0 ** (int(bits) - 1))
        whole = float(self.low).is_integer() and float(self.high).is_integer()
        return whole and least <= self.low and self.high <= bound


def _short(bound: float) -> str:
    return str(int(bound)) if float(bound).is_integer() else f"{bound:g}"
