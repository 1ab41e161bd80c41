"""Batches of samples on disk. Each rank computes its sample indices from the step alone, so a resumed run continues
exactly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from gopt.errors import InputError
from gopt.ir.types import TensorType
from gopt.runtime.session import Array
from gopt.runtime.training.draws import NO_DRAWS, DrawnInputs
from gopt.runtime.training.sample_rows import Samples
from gopt.text.sanitize import show_path

Batch = dict[str, Array]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MicroStep:
    """Index of a micro-step from the start of training, and the data rank that reads its batch.

    ``ahead``: by how many batches the data is ahead of ``number`` x ``parts``, after steps with other ``parts``.
    """

    number: int
    part: int
    parts: int
    ahead: int = 0

    @property
    def place(self) -> int:
        """The index of this batch among the batches of all parts."""
        return self.number * self.parts + self.part + self.ahead

    @property
    def turn(self) -> int:
        """The number of batches before this one in the same part; its share of ``ahead`` is rounded up."""
        return self.number + -(-self.ahead // self.parts)


class DataEndedError(InputError):
    """No batch is left for this micro-step or a later one."""


class Last(StrEnum):
    """The fate of samples at the end of a pass that fill no step: filled up by the next pass, dropped, or filled up by
    the first samples of the same pass."""

    CARRY = "carry"
    DROP = "drop"
    PAD = "pad"


@dataclass(frozen=True, slots=True)
class RowCounts:
    """The number of rows of the data, and of a batch."""

    count: int
    size: int

    @classmethod
    def of(cls, types: Mapping[str, TensorType], shapes: Mapping[str, Shape]) -> RowCounts | None:
        """Return the counts of arrays with these shapes; None where every array is the same in every step."""
        moving = (name for name, type in types.items() if shapes[name] != type.dims)
        return next((cls(shapes[name][0], taken(types[name].dims, shapes[name])) for name in moving), None)


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """How samples are dealt out.

    ``shuffle``: the seed of an order that changes in every pass; None: the stored order. ``once``: the data ends with
    its samples; else the samples are dealt out again. ``times``: micro-steps of a step. ``size``: samples of a batch,
    where the run chose a number. ``axis``: the dimension of the samples in a batch."""

    shuffle: int | None = None
    last: Last = Last.CARRY
    once: bool = False
    times: int = 1
    size: int | None = None
    axis: int = 0

    def steps(self, counts: RowCounts, parts: int, passes: int = 1) -> int:
        """Steps in which ``parts`` data ranks read so many passes: the last step counts whole where no samples are
        dropped. Raises InputError where all would be dropped."""
        step = counts.size * parts * self.times
        if self.last is Last.DROP and counts.count < step:
            raise InputError(
                f"a step takes {step} samples, and there are {counts.count}", "give more, or leave out --last"
            )
        if self.last is Last.CARRY:
            return -(-counts.count * passes // step)
        return passes * (counts.count // step if self.last is Last.DROP else -(-counts.count // step))

    def note(self, counts: RowCounts | None, parts: int) -> str:
        """A note where a step takes more samples than there are; else ''."""
        step = 0 if counts is None else counts.size * parts * self.times
        if counts is None or step <= counts.count:
            return ""
        return f"the data has {counts.count} samples, and a step takes {step}: some are used more than once in a step"


@dataclass(slots=True)
class ArraySource:
    """Arrays whose first axis counts samples or whole batches, or that are the same in every step."""

    types: Mapping[str, TensorType]
    arrays: Mapping[str, Samples]
    order: SampleOrder = SampleOrder()
    drawn: DrawnInputs = NO_DRAWS
    """Inputs without arrays."""
    _orders: dict[tuple[int, int], Array] = field(default_factory=dict)

    @property
    def held(self) -> RowCounts | None:
        return RowCounts.of(self.types, {name: self.arrays[name].shape for name in self.types})

    @property
    def batches(self) -> int | None:
        """Whole batches in one pass; None where every array is the same in every step."""
        return None if self.held is None else self.held.count // self.held.size

    def batch(self, turn: MicroStep) -> Batch:
        """The batch of a micro-step. Raises DataEndedError where samples are used once, and too few are left."""
        if self.order.once and self.batches is not None and turn.place >= self.batches:
            raise DataEndedError(f"the data has {self.batches} batches")
        return {name: self._take(name, turn) for name in self.types} | self.drawn.batch(turn.number, turn.part)

    def _take(self, name: str, turn: MicroStep) -> Array:
        array, dims = self.arrays[name], self.types[name].dims
        if isinstance(array, np.ndarray) and array.shape == dims:
            return array
        size = taken(dims, array.shape)
        return np.ascontiguousarray(array[self._rows(turn, size, len(array))]).reshape(dims)

    def _rows(self, turn: MicroStep, size: int, count: int) -> Array:
        """The rows of a batch of ``size`` of ``count`` rows."""
        begun, batch = 0, turn.place
        if self.order.last is not Last.CARRY:
            steps = self.order.steps(RowCounts(count, size), turn.parts)
            begun, batch = divmod(batch, steps * self.order.times * turn.parts)
        turns, rows = np.divmod(np.arange(batch * size, (batch + 1) * size), count)
        if self.order.last is not Last.CARRY:
            turns = np.full_like(turns, begun)
        if self.order.shuffle is None:
            return rows
        return np.concatenate(
            [self._order(number, count)[rows[turns == number]] for number in np.unique(turns).tolist()]
        )

    def _order(self, turn: int, count: int) -> Array:
        """The order of the rows in a pass. Some orders stay in memory: a batch may end one pass and begin the next."""
        key = turn, count
        if key not in self._orders:
            permutation = np.random.default_rng([self.order.shuffle or 0, turn]).permutation(count)
            self._orders = dict([*[*self._orders.items()][-3:], (key, permutation)])
        return self._orders[key]


def taken(dims: Shape, shape: Shape) -> int:
    """The number of rows of an array in a batch: above 1 where rows are samples."""
    sampled = bool(dims) and len(shape) == len(dims) and shape[1:] == dims[1:] and shape[0] != dims[0]
    return dims[0] if sampled else 1


def check_rows(path: str, types: Mapping[str, TensorType], shapes: Mapping[str, Shape], order: SampleOrder) -> None:
    """Raise InputError where inputs would no longer belong together: arrays for unequal numbers of batches, or rows
    that a shuffle would order differently. No array is read."""
    reference: tuple[str, int, int] | None = None
    for name, type in types.items():
        if shapes[name] != type.dims:  # else it is the same in every step
            rows, size = shapes[name][0], taken(type.dims, shapes[name])
            reference = reference or (name, rows, size)
            what = f"{show_path(path)}: {reference[0]!r} has {_rows(*reference[1:])}, {name!r} has {_rows(rows, size)}"
            if reference[1] * size != rows * reference[2]:
                raise InputError(
                    f"{what}: their rows would no longer belong together", "give equally many samples of each"
                )
            if order.shuffle is not None and reference[2] != size:
                raise InputError(f"{what}: one shuffle cannot order both", "leave --shuffle out")
            if order.shuffle is not None and order.axis and size > 1:
                raise InputError(
                    f"{show_path(path)}: the rows of {name!r} are places in time, and --shuffle would mix them up",
                    f"{whole_batches(type.dims)}, or leave --shuffle out",
                )


def whole_batches(dims: Shape) -> str:
    """Advice on data without samples along dimension 0."""
    return f"stack whole batches along an axis in front, [batches, {', '.join(map(str, dims))}]"


def _rows(rows: int, size: int) -> str:
    return f"{rows} rows, {size} a batch"
