"""Batches of a run. Each rank computes its sample indices from the step alone, so a resumed run continues exactly."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from gopt.errors import InputError, OptionError
from gopt.ir.tensor import Tensor
from gopt.ir.types import TensorType, numpy_dtype
from gopt.runtime.host_value import array_dtype
from gopt.runtime.training.array_source import (
    ArraySource,
    Batch,
    DataEndedError,
    Last,
    MicroStep,
    SampleOrder,
    check_rows,
    whole_batches,
)
from gopt.runtime.training.batch_stream import BatchStream, StreamSource
from gopt.runtime.training.draws import NO_DRAWS, DrawnInputs
from gopt.runtime.training.fitted_arrays import cast, check_kind, class_of
from gopt.runtime.training.sample_files import FORMS, StoredSamples, check_samples, on_disk, read_samples
from gopt.runtime.training.sample_rows import FileRows, JoinedRows, SampleFile, Samples
from gopt.system.python_files import module_of, named_module

_YIELD = "let it yield dictionaries: input -> array"


class BatchSource(Protocol):
    """A source of batches."""

    def batch(self, turn: MicroStep) -> Batch:
        """The inputs of one micro-step of one rank."""


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
            batch = next(self._iterator, None)
            if batch is None:
                raise DataEndedError(f"the data ended after {self._next} batches", "yield more, or take fewer --steps")
            if not isinstance(batch, Mapping):
                raise InputError(f"batch {self._next} of the data is of type {class_of(batch)}", _YIELD)
            self._next += 1
            if self._next > turn.turn:  # a resumed run passes over what it has seen
                return self.drawn.completed(batch, self.types, turn.number, turn.part)


def check_data(text: str) -> None:
    """Raise InputError where ``text`` names a file that cannot be read, OptionError where ``text`` names no data at
    all."""
    if on_disk(text):
        check_samples(text)
    else:
        _module_and_name(text)


def open_data(
    data: str | BatchStream, types: Mapping[str, TensorType], order: SampleOrder = SampleOrder(),
    drawn: DrawnInputs = NO_DRAWS,
) -> ArraySource | IterableSource | StreamSource:  # fmt: skip
    """Open samples on disk (``sample_files``), ``module:function``, or batches from Python code. ``drawn``: inputs
    drawn where the data has no values.

    The function takes the index of the part and the number of parts, and yields dictionaries from input to array.
    Raises InputError for arrays that fit no input, OptionError for a missing function."""
    if isinstance(data, str) and on_disk(data):
        samples = read_samples(data, types, drawn.draws, order.axis)
        drawn = replace(drawn, types={**drawn.types, **types})  # at the sizes of the run
        types = {name: type for name, type in types.items() if name in samples}
        for name, type in types.items():
            _check_samples(data, name, type, samples[name].type, order.axis)
        check_rows(data, types, {name: samples[name].type.dims for name in types}, order)
        return ArraySource(types, _samples(types, samples), order, drawn.without(types))
    if order.shuffle is not None or order.last is not Last.CARRY:
        raise OptionError(
            f"--{'last' if order.shuffle is None else 'shuffle'} needs samples on disk, but --data yields batches",
            "shuffle and drop in the function, or name a file or a folder",
        )
    if isinstance(data, str):
        return IterableSource(batch_function(data), types, drawn)
    return StreamSource(data, types, drawn)


def batch_function(text: str) -> Callable[[int, int], Any]:
    """The function that yields batches; raises OptionError for a function that cannot be called with a part and the
    number of parts."""
    function = load_function(text)
    try:
        signature = inspect.signature(function)
    except ValueError:  # of code in C
        return function
    try:
        signature.bind(0, 1)
    except TypeError as error:
        raise OptionError(
            f"{text!r} cannot be called as function(part, parts): {error}",
            "each rank calls it with the number of its part of the data, from 0, and the number of parts",
        ) from error
    return function


def load_function(text: str) -> Callable[..., Any]:
    """The function that ``module:function`` or ``FILE.py:function`` names; the current folder is searched too. Raises
    OptionError."""
    module, name = _module_and_name(text)
    try:
        function = getattr(module_of(Path(module)) if module.endswith(".py") else named_module(module), name)
    except (ImportError, FileNotFoundError, AttributeError) as error:
        raise OptionError(
            f"cannot find {text!r}: {error}", "write FILE.py:function, or module:function with the module on PYTHONPATH"
        ) from error
    if not callable(function):
        raise OptionError(f"{text!r} is not a function", "write module:function")
    loaded: Callable[..., Any] = function
    return loaded


def _module_and_name(text: str) -> tuple[str, str]:
    """The parts of ``module:function``; raises OptionError for a text without a colon."""
    module, colon, name = text.partition(":")
    if not colon:
        raise OptionError(f"cannot read {text!r} as data", f"give {FORMS}")
    return module, name


def _check_samples(path: str, name: str, type: TensorType, stored: TensorType, axis: int) -> None:
    """Raise InputError for an array whose rows cannot be split into batches of a type. No array is read."""
    if stored.dtype != type.dtype:
        check_kind(f"{path}: {name}", type, numpy_dtype(stored.dtype))
    dims, shape = type.dims, stored.dims
    as_samples = bool(dims) and len(shape) == len(dims) and shape[1:] == dims[1:]
    as_batches = shape[1:] == dims and len(shape) == len(dims) + 1
    if shape != dims and not ((as_samples or as_batches) and shape[0]):
        row = "x".join(map(str, dims[1:])) or "one number each"
        hint = whole_batches(dims) if axis else f"give samples of {row}, or {whole_batches(dims)}"
        raise InputError(f"{path}: {name!r} has shape {list(shape)}, its batch is {type}", hint)


def _samples(types: Mapping[str, TensorType], stored: Mapping[str, StoredSamples]) -> dict[str, Samples]:
    """The arrays on disk: arrays of archives, and arrays that are the same in every step, are read now."""
    files: dict[str, SampleFile] = {}

    def rows(name: str, path: str, tensor: Tensor) -> Samples:
        if tensor.external and stored[name].type.dims != types[name].dims:
            file = files.get(tensor.path) or files.setdefault(tensor.path, SampleFile(tensor.path))
            return FileRows(file, tensor, types[name].dtype)
        array = tensor.copied()
        return array if array_dtype(array) == types[name].dtype else cast(f"{path}: {name}", types[name], array)

    def joined(name: str) -> Samples:
        parts = [rows(name, path, tensor) for path, tensor in stored[name].pieces]
        if len(parts) == 1:
            return parts[0]
        if stored[name].type.dims == types[name].dims:  # one batch, the same in every step
            return np.concatenate([np.asarray(part) for part in parts])
        return JoinedRows(tuple(parts))

    return {name: joined(name) for name in types}


def _iterator(batches: Any) -> Iterator[Any]:
    try:
        return iter(batches)
    except TypeError:
        raise InputError(f"the function of --data returns {class_of(batches)}, and no batches", _YIELD) from None
