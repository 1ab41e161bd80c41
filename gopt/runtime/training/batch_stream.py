"""Batches from Python code: a list, a generator, a data loader.

Ranks, as threads of one process, take batches from one iterator in turn."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gopt.errors import InputError
from gopt.ir.types import TensorType
from gopt.runtime.session import Array
from gopt.runtime.training.array_source import Batch, DataEndedError, MicroStep
from gopt.runtime.training.draws import NO_DRAWS, DrawnInputs
from gopt.runtime.training.fitted_arrays import class_of


@dataclass(slots=True)
class BatchStream:
    """The batches of ``values``: element i goes to data rank i modulo the number of data ranks.

    An element is a mapping from input to array, a tuple of arrays in the order of the inputs, or an array where a batch
    is one input; arrays may be PyTorch tensors. An iterable that is no iterator starts anew at its end. ``readers``:
    readers of batches, each noted before the first batch; a middle stage of a pipeline reads none."""

    values: Iterable[Any]
    readers: int = 0
    _iterator: Iterator[Any] | None = None
    _begun: int | None = None
    """The first element that a rank asks for: a resumed run passes over those before."""
    _next: int = 0
    _pending: dict[int, tuple[Any, int]] = field(default_factory=dict)
    """Elements that some reader has not taken yet, and how many have."""
    _turn: threading.Lock = field(default_factory=threading.Lock)

    def note_reader(self) -> None:
        """Count a rank before the first of all the batches of a part."""
        with self._turn:
            self.readers += 1

    def take(self, turn: MicroStep) -> Any:
        """The element of a micro-step. Raises DataEndedError."""
        with self._turn:
            index = turn.place
            if self._begun is None:
                self._begun = turn.place - turn.part
            while self._next <= index:
                value = self._advance()
                if self._next >= self._begun:
                    self._pending[self._next] = value, 0
                self._next += 1
            value, reads = self._pending.pop(index)
            if reads + 1 < self.readers // turn.parts:
                self._pending[index] = value, reads + 1
            return value

    def _advance(self) -> Any:
        for _ in range(2):
            if self._iterator is None:
                self._iterator = _iterated(self.values)
            for value in self._iterator:
                return value
            if self._iterator is self.values or not self._next:
                break
            self._iterator = None
        raise DataEndedError(
            f"the data ended after {self._next} batches",
            "give a list or a data loader, which start anew, or take fewer steps",
        )


@dataclass(slots=True)
class StreamSource:
    """The batches of one rank out of a stream."""

    stream: BatchStream
    types: Mapping[str, TensorType]
    drawn: DrawnInputs = NO_DRAWS
    """Inputs that are drawn where a batch has none."""

    def batch(self, turn: MicroStep) -> Batch:
        fed = [name for name in self.types if name not in self.drawn.draws]
        batch = named(self.stream.take(turn), turn.place, [*self.types], fed)
        arrays = {name: array(value) for name, value in batch.items() if name in self.types}
        return self.drawn.completed(arrays, self.types, turn.number, turn.part)


def named(batch: Any, number: int, *orders: Sequence[str]) -> Mapping[str, Any]:
    """A batch by input: a tuple or list has a value for each input of one of the orders, any other value is the only
    input's. ``number``: the batch's index. Raises InputError."""
    if isinstance(batch, Mapping):
        return batch
    if not isinstance(batch, tuple | list):
        batch = (batch,)
    names = next((order for order in orders if len(order) == len(batch)), None)
    if names is None:
        raise InputError(
            f"batch {number} of the data is a {class_of(batch)} of {len(batch)}, and "
            f"the step takes {', '.join(orders[-1])}",
            "give that many, in this order, or a dictionary: input -> array",
        )
    return dict(zip(names, batch))


def array(value: Any) -> Array | None:
    """An array of a value, for instance a tensor of PyTorch on any device; None of None."""
    if value is None:
        return None
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        if str(value.dtype) == "torch.bfloat16":
            value = value.float()  # NumPy has no such type; the step's own is restored from it without loss
        value = value.numpy()
    return np.asarray(value)


def _iterated(values: Iterable[Any]) -> Iterator[Any]:
    try:
        return iter(values)
    except TypeError:
        raise InputError(
            f"the data is of type {class_of(values)}, and no batches", "give arrays by input, or an iterable of batches"
        ) from None
