"""Start values of tables outside any file: each row is drawn from a seed, the tensor's name and the row's number.

A row is the same on every server, and in whatever order rows are made. Bits come from NumPy's Philox, a counter-based
generator: row i of a tensor has separate counters. The rest is addition, multiplication, division and square roots of
doubles, so every machine gets the same numbers."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from gopt.errors import OptionError
from gopt.records.tables import Ids, TableLayout
from gopt.text.sanitize import show

Values = npt.NDArray[np.float64]
GAP = 32
"""Most rows between two wanted ones that are drawn and dropped: that is cheaper than a jump."""
CHUNK = 1 << 22
"""Elements that are made at a time."""
_TEXT = re.compile(r"\s*([a-z]+)\s*(?:\(([^()]*)\))?\s*(?:@\s*seed\s*=\s*([0-9]{1,18}))?\s*")
_HINT = "write normal(MEAN,STD), uniform(LOW,HIGH), constant(VALUE) or zeros; @seed=N may follow"


class RowDraw(StrEnum):
    """Kinds of start values."""

    NORMAL = "normal"
    """Normal with a mean and a standard deviation."""
    UNIFORM = "uniform"
    """Uniform between two numbers."""
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True)
class RowInit:
    """Initializer of a tensor's rows; ``first`` and ``second``: mean and deviation, or the bounds, or the value."""

    draw: RowDraw
    first: float
    second: float = 0.0
    seed: int = 0

    @classmethod
    def parse(cls, text: str) -> RowInit:
        """Read ``normal(0,0.02)@seed=7``; raises OptionError on anything else."""
        match = _TEXT.fullmatch(text)
        word, inside, seed = match.groups() if match else ("", None, None)
        arguments = [] if inside is None else inside.split(",")
        if word == "zeros" and inside is None:
            word, arguments = "constant", ["0"]
        counts = {"normal": 2, "uniform": 2, "constant": 1}
        try:
            numbers = [float(item) for item in arguments]
        except ValueError:
            numbers = []
        if counts.get(word) != len(numbers) or not all(map(math.isfinite, numbers)):
            raise OptionError(f"cannot read as the first values of rows: {show(text)}", _HINT)
        mean, second = (*numbers, 0.0)[:2]
        result = cls(RowDraw(word), mean, second, int(seed or 0))
        if result.draw is RowDraw.NORMAL and result.second < 0:
            raise OptionError(
                f"cannot read as the first values of rows: {show(text)}: the deviation is negative", _HINT
            )
        if result.draw is RowDraw.UNIFORM and result.second < result.first:
            raise OptionError(
                f"cannot read as the first values of rows: {show(text)}: the lower bound exceeds the upper one", _HINT
            )
        return result

    def __str__(self) -> str:
        """The text for ``parse``."""
        if self.draw is RowDraw.CONSTANT:
            return f"constant({self.first!r})"
        return f"{self.draw.value}({self.first!r},{self.second!r})@seed={self.seed}"

    def rows(self, tensor: str, ids: Ids, width: int) -> Values:
        """Return rows of a tensor, each of ``width`` elements; ``ids``: the row numbers, in ascending order."""
        if self.draw is RowDraw.CONSTANT:
            return np.full((ids.size, width), self.first)
        unit = (self._bits(tensor, ids, width) >> np.uint64(12)).astype(np.float64)
        unit = (unit + 0.5) * 2.0**-52
        if self.draw is RowDraw.UNIFORM:
            return self.first + (self.second - self.first) * unit
        return self.first + self.second * normal_quantile(unit)

    def part(self, tensor: str, layout: TableLayout, server: int, dtype: np.dtype) -> np.ndarray:
        """Return a server's rows and columns of a tensor at the start, flattened."""
        ids, columns = np.asarray(layout.row_ids(server), np.int64), layout.columns(server)
        result = np.empty((ids.size, len(columns)), dtype)
        step = max(1, CHUNK // max(layout.width, 1))
        for start in range(0, ids.size, step):
            rows = self.rows(tensor, ids[start : start + step], layout.width)
            result[start : start + step] = rows[:, columns.start : columns.stop]
        return result.reshape(-1)

    def _bits(self, tensor: str, ids: Ids, width: int) -> npt.NDArray[np.uint64]:
        """Return 64 random bits for each element."""
        blocks = -(-width // 4)  # a counter gives four numbers
        digest = hashlib.sha256(f"{self.seed}:{tensor}".encode()).digest()
        source = np.random.Philox(key=int.from_bytes(digest[:16], "little"), counter=0)
        result = np.empty((ids.size, width), np.uint64)
        position = 0
        cuts = [0, *(np.flatnonzero(np.diff(ids) > GAP) + 1).tolist(), ids.size]
        for start, stop in pairwise(cuts):
            if start == stop:
                continue
            begin, last = int(ids[start]), int(ids[stop - 1])
            source.advance(begin * blocks - position)
            position = (last + 1) * blocks
            drawn = source.random_raw((last + 1 - begin) * blocks * 4).reshape(-1, blocks * 4)
            result[start:stop] = drawn[ids[start:stop] - begin, :width]
        return result


def normal_quantile(unit: Values) -> Values:
    """Return the inverse of the normal distribution function: Wichura's algorithm AS 241, PPND16."""
    result = np.empty_like(unit)
    centred = unit - 0.5
    middle = np.abs(centred) <= 0.425
    q = centred[middle]
    result[middle] = q * _ratio(0.180625 - q * q, _A, _B)
    tail = np.sqrt(-_log(np.minimum(unit[~middle], 1.0 - unit[~middle])))
    near = tail <= 5.0
    out = np.where(near, _ratio(tail - 1.6, _C, _D), _ratio(tail - 5.0, _E, _F))
    result[~middle] = np.where(centred[~middle] < 0, -out, out)
    return result


def _log(x: Values) -> Values:
    """Return the natural logarithm, as a series. Results of libraries differ between machines in the last bit."""
    mantissa, exponent = np.frexp(x)
    low = mantissa < math.sqrt(0.5)
    mantissa, exponent = np.where(low, mantissa * 2.0, mantissa), exponent - low
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    square, total = ratio * ratio, np.zeros_like(ratio)
    for power in range(23, 0, -2):
        total = total * square + 1.0 / power
    return exponent * 0.6931471805599453 + 2.0 * ratio * total


def _ratio(x: Values, over: Sequence[float], under: Sequence[float]) -> Values:
    top, bottom = np.full_like(x, over[-1]), np.full_like(x, under[-1])
    for a, b in zip(over[-2::-1], under[-2::-1], strict=True):
        top, bottom = top * x + a, bottom * x + b
    return top / bottom


_A = (
    3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3, 1.3731693765509461125e4,
    4.5921953931549871457e4, 6.7265770927008700853e4, 3.3430575583588128105e4, 2.5090809287301226727e3,
)  # fmt: skip
_B = (
    1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3,
    2.1213794301586595867e4, 3.9307895800092710610e4, 2.8729085735721942674e4, 5.2264952788528545610e3,
)  # fmt: skip
_C = (
    1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0, 3.64784832476320460504e0,
    1.27045825245236838258e0, 2.41780725177450611770e-1, 2.27238449892691845833e-2, 7.74545014278341407640e-4,
)  # fmt: skip
_D = (
    1.0, 2.05319162663775882187e0, 1.67638483018380384940e0, 6.89767334985100004550e-1,
    1.48103976427480074590e-1, 1.51986665636164571966e-2, 5.47593808499534494600e-4, 1.05075007164441684324e-9,
)  # fmt: skip
_E = (
    6.65790464350110377720e0, 5.46378491116411436990e0, 1.78482653991729133580e0, 2.96560571828504891230e-1,
    2.65321895265761230930e-2, 1.24266094738807843860e-3, 2.71155556874348757815e-5, 2.01033439929228813265e-7,
)  # fmt: skip
_F = (
    1.0, 5.99832206555887937690e-1, 1.36929880922735805310e-1, 1.48753612908506148525e-2,
    7.86869131145613259100e-4, 1.84631831751005468180e-5, 1.42151175831644588870e-7, 2.04426310338993978564e-15,
)  # fmt: skip
