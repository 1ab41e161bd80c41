"""Batches of a run. Each rank computes the indices of its samples from the step alone, so a resumed run continues
exactly."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from gopt.errors import InputError, OptionError
from gopt.ir.external_data import load_state, naming, regular_size
from gopt.ir.tensor import Tensor
from gopt.ir.types import TensorType, numpy_dtype
from gopt.runtime.host_value import array_dtype
from gopt.runtime.session import Array
from gopt.runtime.training.draws import NO_DRAWS, DrawnInputs
from gopt.runtime.training.sample_rows import FileRows, SampleFile, Samples
from gopt.sanitize import listed

Batch = dict[str, Array]
FILES = (".npz", ".safetensors")
"""Suffixes of files of samples; any other data is a function."""
_YIELD = "let it yield dictionaries: input -> array"
_LISTED = 8
"""Names of arrays that a hint lists."""


@dataclass(frozen=True, slots=True)
class MicroStep:
    """Index of a micro-step from the start of training, and the data rank that reads it.

    ``ahead``: by how many batches the data is ahead of ``number`` x ``parts``, after steps with other ``parts``.
    """

    number: int
    part: int
    parts: int
    ahead: int = 0

    @property
    def place(self) -> int:
        """The index of its batch among those of all parts."""
        return self.number * self.parts + self.part + self.ahead

    @property
    def turn(self) -> int:
        """How many batches its part has had before, rounded up where the others' had more than it has now."""
        return self.number + -(-self.ahead // self.parts)


class DataEndedError(InputError):
    """There is no batch for this micro-step, nor for a later one."""


class BatchSource(Protocol):
    """A source of batches."""

    def batch(self, turn: MicroStep) -> Batch:
        """The inputs of one micro-step of one rank."""


@dataclass(slots=True)
class ArraySource:
    """Arrays whose first axis counts samples or whole batches, or that are the same in every step."""

    types: Mapping[str, TensorType]
    arrays: Mapping[str, Samples]
    shuffle: int | None = None
    """Seed of an order that changes in every pass over the samples; None: stored order."""
    once: bool = False
    """Whether the data ends with its samples; else they are dealt out again."""
    drawn: DrawnInputs = NO_DRAWS
    """Inputs of which there are no arrays."""
    _orders: dict[tuple[int, int], Array] = field(default_factory=dict)

    @property
    def batches(self) -> int | None:
        """Whole batches in one pass; None where every array is the same in every step."""
        counts = [
            len(self.arrays[name]) // _taken(type.dims, self.arrays[name].shape)
            for name, type in self.types.items() if self.arrays[name].shape != type.dims
        ]  # fmt: skip
        return min(counts, default=None)

    def batch(self, turn: MicroStep) -> Batch:
        """The batch of a micro-step. Raises DataEndedError where samples are used once, and too few are left."""
        if self.once and self.batches is not None and turn.place >= self.batches:
            raise DataEndedError(f"the data has {self.batches} batches")
        return {name: self._take(name, turn) for name in self.types} | self.drawn.batch(turn.number, turn.part)

    def _take(self, name: str, turn: MicroStep) -> Array:
        array, dims = self.arrays[name], self.types[name].dims
        if isinstance(array, np.ndarray) and array.shape == dims:
            return array
        size = _taken(dims, array.shape)
        place = turn.place * size
        rows = self._rows(place, size, len(array))
        return np.ascontiguousarray(array[rows]).reshape(dims)

    def _rows(self, place: int, size: int, count: int) -> Array:
        turns, rows = np.divmod(np.arange(place, place + size), count)
        if self.shuffle is None:
            return rows
        return np.concatenate([self._order(each, count)[rows[turns == each]] for each in np.unique(turns).tolist()])

    def _order(self, turn: int, count: int) -> Array:
        """The order in which a pass uses the rows. Some orders are kept: a batch may end one pass and begin the
        next."""
        key = turn, count
        if key not in self._orders:
            made = np.random.default_rng([self.shuffle or 0, turn]).permutation(count)
            self._orders = dict([*[*self._orders.items()][-3:], (key, made)])
        return self._orders[key]


@dataclass(slots=True)
class IterableSource:
    """Batches that a function of the user yields; each rank has its own iterator."""

    make: Callable[..., Iterator[Mapping[str, Any]]]
    types: Mapping[str, TensorType]
    drawn: DrawnInputs = NO_DRAWS
    """Inputs that are drawn where a batch has none."""
    _iterator: Iterator[Mapping[str, Any]] | None = None
    _next: int = 0

    def batch(self, turn: MicroStep) -> Batch:
        if self._iterator is None:
            self._iterator = _iterator(self.make(turn.part, turn.parts))
        while True:
            given = next(self._iterator, None)
            if given is None:
                raise DataEndedError(f"the data ended after {self._next} batches", "yield more, or take fewer --steps")
            if not isinstance(given, Mapping):
                raise InputError(f"batch {self._next} of the data is of type {_class_of(given)}", _YIELD)
            self._next += 1
            if self._next > turn.turn:  # a resumed run passes over what it has seen
                own = {
                    name: _fitted(name, type, given.get(name)) for name, type in self.types.items()
                    if name in given or name not in self.drawn.draws
                }  # fmt: skip
                return own | self.drawn.batch(turn.number, turn.part, own)


def check_data(text: str) -> None:
    """Raise InputError where ``text`` names a file that cannot be read, OptionError where it names no data at all."""
    if text.endswith(FILES):
        with naming(text):
            regular_size(text)
    else:
        _module_and_name(text)


def open_data(
    text: str, types: Mapping[str, TensorType], shuffle: int | None, drawn: DrawnInputs = NO_DRAWS, *,
    once: bool = False,
) -> ArraySource | IterableSource:  # fmt: skip
    """Read ``FILE.npz``, ``FILE.safetensors`` or ``module:function``. ``once``: the samples of a file are used once.
    ``drawn``: inputs that are drawn where the data has none.

    The function takes the index of the part and the number of parts, and yields dictionaries from input to array.
    Raises InputError for arrays that fit no input, OptionError for a function that cannot be found.
    """
    if text.endswith(FILES):
        held = load_state(text)
        missing = [name for name in types if name not in held and name not in drawn.draws]
        types = {name: type for name, type in types.items() if name in held or name in missing}
        if missing:
            raise InputError(
                f"{text} has no array {missing[0]!r}",
                f"it has {_listed(held)}; rows of {missing[0]!r} are samples, and a batch is {types[missing[0]]}",
            )
        for name, type in types.items():
            _check_samples(text, name, type, held[name].type)
        _check_rows(text, types, {name: held[name].type.dims for name in types}, shuffle is not None)
        return ArraySource(types, _samples(text, types, held), shuffle, once, drawn.without(types))
    if shuffle is not None:
        raise OptionError(
            "--shuffle needs a file of samples, but --data names a function",
            "shuffle in the function, or name a .npz file",
        )
    return IterableSource(load_function(text), types, drawn)


Shape = tuple[int, ...]


def _taken(dims: Shape, shape: Shape) -> int:
    """How many rows of an array a batch takes: more than one where rows are samples."""
    sampled = bool(dims) and len(shape) == len(dims) and shape[1:] == dims[1:] and shape[0] != dims[0]
    return dims[0] if sampled else 1


def _check_rows(path: str, types: Mapping[str, TensorType], shapes: Mapping[str, Shape], shuffled: bool) -> None:
    """Raise InputError where inputs would no longer belong together: arrays for unequal numbers of batches, or rows
    that a shuffle would order differently. No array is read."""
    first: tuple[str, int, int] | None = None
    for name, type in types.items():
        if shapes[name] != type.dims:  # else it is the same in every step
            rows, size = shapes[name][0], _taken(type.dims, shapes[name])
            first = first or (name, rows, size)
            what = f"{path}: {first[0]!r} has {_rows(*first[1:])}, {name!r} has {_rows(rows, size)}"
            if first[1] * size != rows * first[2]:
                raise InputError(
                    f"{what}: their rows would no longer belong together", "give equally many samples of each"
                )
            if shuffled and first[2] != size:
                raise InputError(f"{what}: one shuffle cannot order both", "leave --shuffle out")


def _rows(rows: int, size: int) -> str:
    return f"{rows} rows, {size} a batch"


def load_function(text: str) -> Callable[..., Any]:
    """The function that ``module:function`` names; the current folder is searched too. Raises OptionError."""
    module, name = _module_and_name(text)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise OptionError(
            f"cannot find {text!r}: {error}", "write module:function, with the module on PYTHONPATH"
        ) from error
    if not callable(function):
        raise OptionError(f"{text!r} is not a function", "write module:function")
    found: Callable[..., Any] = function
    return found


def _module_and_name(text: str) -> tuple[str, str]:
    """The parts of ``module:function``; raises OptionError for a text without a colon."""
    module, colon, name = text.partition(":")
    if not colon:
        raise OptionError(f"cannot read {text!r} as data", "give FILE.npz, FILE.safetensors or module:function")
    return module, name


def _listed(names: Iterable[str]) -> str:
    return listed(sorted(names), _LISTED)


def _check_samples(path: str, name: str, type: TensorType, held: TensorType) -> None:
    """Raise InputError for an array whose rows cannot be split into batches of a type. No array is read."""
    if held.dtype != type.dtype:
        _check_kind(f"{path}: {name}", type, numpy_dtype(held.dtype))
    dims, shape = type.dims, held.dims
    as_samples = bool(dims) and len(shape) == len(dims) and shape[1:] == dims[1:]
    as_batches = shape[1:] == dims and len(shape) == len(dims) + 1
    if shape != dims and not ((as_samples or as_batches) and shape[0]):
        row = "x".join(map(str, dims[1:])) or "one number each"
        raise InputError(f"{path}: {name!r} has shape {list(shape)}, its batch is {type}", f"give samples of {row}")


def _samples(path: str, types: Mapping[str, TensorType], held: Mapping[str, Tensor]) -> dict[str, Samples]:
    """The arrays of a file: those of an archive, and those that are the same in every step, are read now."""
    files = {tensor.path: SampleFile(tensor.path) for name in types if (tensor := held[name]).external}
    found: dict[str, Samples] = {}
    for name, type in types.items():
        tensor = held[name]
        if tensor.external and tensor.type.dims != type.dims:
            found[name] = FileRows(files[tensor.path], tensor, type.dtype)
        else:
            array = tensor.copied()
            found[name] = array if array_dtype(array) == type.dtype else _cast(f"{path}: {name}", type, array)
    return found


def _iterator(made: Any) -> Iterator[Any]:
    try:
        return iter(made)
    except TypeError:
        raise InputError(f"the function of --data returns {_class_of(made)}, and no batches", _YIELD) from None


def _class_of(value: Any) -> str:
    return type(value).__name__


def _fitted(name: str, type: TensorType, value: Any) -> Array:
    if value is None:
        raise InputError(f"the data has no {name!r}", f"yield dictionaries with an array {name!r} of {type}")
    array = np.asarray(value)
    if array.shape != type.dims:
        raise InputError(
            f"the data's {name!r} has shape {list(array.shape)}, the step takes {type}", "yield batches of that shape"
        )
    return array if array_dtype(array) == type.dtype else _cast(name, type, array)


def _cast(what: str, type: TensorType, array: Array) -> Array:
    """Convert an array to the type's width. Raises InputError for another kind of number."""
    _check_kind(what, type, array.dtype)
    return array.astype(numpy_dtype(type.dtype))


def _check_kind(what: str, type: TensorType, held: np.dtype[Any]) -> None:
    kinds = {"b": "b", "i": "i", "u": "i", "f": "f", "V": "f"}
    if kinds.get(held.kind) != kinds.get(numpy_dtype(type.dtype).kind):
        raise InputError(
            f"{what} is {held}, the step takes {type}", "convert it: gopt changes the width of numbers alone"
        )
