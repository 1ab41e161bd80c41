"""Samples on disk: arrays of a file, of a folder of shards, or windows of a file of tokens.

An array may lie in several files. Files other than ``.npz`` are read row by row, as batches need the rows."""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gopt.errors import InputError, OptionError
from gopt.ir.external_data import absolute, load_state, naming, regular_size
from gopt.ir.tensor import Tensor
from gopt.ir.types import TensorType, numpy_dtype
from gopt.text.sanitize import listed, show_path

FILES = (".npz", ".safetensors", ".npy")
"""Suffixes of files of arrays."""
FORMS = "FILE.npz, FILE.safetensors, FILE.npy, a folder of such files, tokens.bin:uint16 or module:function"
_TOKENS = re.compile(r"((?P<path>.+\.bin):(?P<dtype>u?int(8|16|32|64))|(?P<array>.+\.npy))(?P<shifts>:.+)?")
_SHARD = re.compile(r"(?P<name>.+?)[-_.](?P<number>\d+)(-of-\d+)?")


@dataclass(frozen=True, slots=True)
class StoredSamples:
    """An array on disk, in pieces along the first axis; a piece has the path of its file."""

    pieces: tuple[tuple[str, Tensor], ...]

    @property
    def type(self) -> TensorType:
        head = self.pieces[0][1].type
        if len(self.pieces) == 1:
            return head
        return TensorType(head.dtype, (sum(piece.type.dims[0] for _, piece in self.pieces), *head.dims[1:]))


def on_disk(text: str) -> bool:
    """Return whether ``text`` names samples on disk, and no function."""
    return text.endswith(FILES) or _TOKENS.fullmatch(text) is not None or os.path.isdir(text)


def sample_paths(text: str) -> list[str]:
    """The files of samples that ``text`` names. Raises InputError for a folder without any."""
    if os.path.isdir(text):
        return _shards(text)
    match = _TOKENS.fullmatch(text)
    return [text if match is None else match["path"] or match["array"]]


def check_samples(text: str) -> None:
    """Raise InputError where the samples of ``text`` cannot be read. No array is read."""
    for path in sample_paths(text):
        with naming(path):
            regular_size(path)


def read_samples(
    text: str, types: Mapping[str, TensorType], optional: Container[str] = (), axis: int = 0
) -> Mapping[str, StoredSamples]:
    """The arrays that ``text`` names, by input. ``types``: of a batch; ``optional``: inputs that may be missing;
    ``axis``: the dimension of the samples. Raises InputError and OptionError."""
    needed = {name: type for name, type in types.items() if name not in optional}
    if os.path.isdir(text):
        return _joined(text, types, needed)
    match = _TOKENS.fullmatch(text)
    if match is None:
        tensors = load_state(text)
        _refuse_missing(text, tensors, needed)
        return {name: StoredSamples(((text, tensors[name]),)) for name in types if name in tensors}
    types = needed
    if match["array"] is None:
        return _windows(match["path"], _raw(match["path"], match["dtype"]), match["shifts"], types, axis)
    array = _array(match["array"])
    if match["shifts"] is None and (len(types) != 1 or len(array.type.dims) != 1):
        if len(types) == 1:
            return {name: StoredSamples(((text, array),)) for name in types}
        if len(array.type.dims) != 1:
            raise InputError(
                f"{show_path(text)} is one array, and a batch has {listed(sorted(types))}",
                "give a folder with one file per input (its name is the input's), or an .npz file",
            )
    return _windows(match["array"], array, match["shifts"], types, axis)


def _array(path: str) -> Tensor:
    from gopt.ir.npz import read_npy

    with naming(path):
        return read_npy(path, regular_size(path))


def _raw(path: str, dtype: str) -> Tensor:
    """The numbers of a file without a header, little-endian."""
    with naming(path):
        size, width = regular_size(path), numpy_dtype(dtype).itemsize
        if size % width:
            raise InputError(f"has {size} bytes, and numbers of {dtype} take {width} each", "name its type")
        return Tensor(TensorType(dtype, (size // width,)), path=absolute(path))


# --- tokens ---------------------------------------------------------------------------------------------------------


def _windows(
    path: str, tokens: Tensor, shifts: str | None, types: Mapping[str, TensorType], axis: int
) -> Mapping[str, StoredSamples]:
    """Rows of tokens: row i of an input begins at token i times the length of a row, plus the input's shift.

    Raises InputError for inputs that are no rows of tokens, or a file with fewer tokens than a row, OptionError where
    the inputs' shifts are not given."""
    if len(tokens.type.dims) != 1 or np.dtype(numpy_dtype(tokens.type.dtype)).kind not in "iu":
        raise InputError(f"{show_path(path)} is {tokens.type}, and tokens are whole numbers in one row")
    moved = _shifts(path, shifts, types)
    lengths = {type.dims[1] for type in types.values() if len(type.dims) == 2}
    if axis or len(lengths) != 1 or any(len(type.dims) != 2 for type in types.values()):
        shown = ", ".join(f"{name}: {type}" for name, type in types.items())
        raise InputError(
            f"tokens feed inputs of one length, [samples, tokens]; a batch has {shown}",
            "let a function cut the file: --data module:function",
        )
    (length,) = lengths
    rows = (tokens.type.elements - max(moved.values())) // length
    if rows < 1:
        needed = length + max(moved.values())
        raise InputError(f"{show_path(path)} holds {tokens.type.elements} tokens, and one sample takes {needed}")
    kind, width = TensorType(tokens.type.dtype, (rows, length)), numpy_dtype(tokens.type.dtype).itemsize
    return {
        name: StoredSamples(((path, Tensor(kind, path=tokens.path, offset=tokens.offset + shift * width)),))
        for name, shift in moved.items()
    }


def _shifts(path: str, text: str | None, types: Mapping[str, TensorType]) -> dict[str, int]:
    """Input -> the shift of the rows in tokens, of ``:idx=0,targets=1``."""
    example = ",".join(f"{name}={shift}" for shift, name in enumerate(types))
    if text is None:
        if len(types) == 1:
            return dict.fromkeys(types, 0)
        raise OptionError(
            f"--data {path}: a batch has {listed(list(types))}, and it is open which begins how many tokens later",
            f"say it behind the file: :{example}",
        )
    shifts: dict[str, int] = {}
    for part in text[1:].split(","):
        name, _, number = part.partition("=")
        if name not in types or name in shifts or not re.fullmatch(r"\d{1,9}", number):
            raise OptionError(f"cannot read {part!r} in --data {path}{text}", f"write each input once: :{example}")
        shifts[name] = int(number)
    if missing := [name for name in types if name not in shifts]:
        raise OptionError(f"--data {path}{text} says nothing of {listed(missing)}", f"write each input: :{example}")
    return shifts


# --- folders of shards ----------------------------------------------------------------------------------------------


def _shards(folder: str) -> list[str]:
    """The files of a folder, ``part2`` before ``part10``. Raises InputError for a folder without any."""
    try:
        names = [name for name in os.listdir(folder) if name.endswith(FILES) and not name.startswith(".")]
    except OSError as error:
        raise InputError(f"{show_path(folder)} cannot be read: {error.strerror}") from error
    if not names:
        raise InputError(f"{show_path(folder)} holds no samples", f"put files into it: {', '.join(FILES)}")
    return [os.path.join(folder, name) for name in sorted(names, key=_natural)]


def _natural(name: str) -> list[tuple[int, str]]:
    """A sort key for names: numbers count by size."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _joined(folder: str, types: Mapping[str, TensorType], needed: Mapping[str, TensorType]) -> dict[str, StoredSamples]:
    """The arrays of a folder's files, one after another."""
    pieces: dict[str, list[tuple[str, Tensor]]] = {name: [] for name in types}
    names: dict[str, None] = {}
    for path in _shards(folder):
        for name, tensor in _arrays(path, types, needed):
            names[name] = None
            if name in types:
                pieces[name].append((path, tensor))
    _refuse_missing(folder, names, needed)
    for name, parts in pieces.items():
        _check_alike(name, parts)
    return {name: StoredSamples(tuple(parts)) for name, parts in pieces.items() if parts}


def _arrays(
    path: str, types: Mapping[str, TensorType], needed: Mapping[str, TensorType]
) -> Iterator[tuple[str, Tensor]]:
    """The arrays of a shard; an ``.npy`` file's array has the file's name, less the number of the shard."""
    if not path.endswith(".npy"):
        tensors = load_state(path)
        _refuse_missing(path, tensors, needed)
        yield from ((name, tensors[name]) for name in types if name in tensors)
        return
    name = os.path.basename(path).removesuffix(".npy")
    if name not in types and (shard := _SHARD.fullmatch(name)) is not None:
        name = shard["name"]
    yield name, _array(path)


def _check_alike(name: str, parts: Sequence[tuple[str, Tensor]]) -> None:
    """Raise InputError where shards of an array have rows of different types."""
    for path, tensor in parts[1:]:
        reference = parts[0]
        kind, actual = reference[1].type, tensor.type
        if (kind.dtype, kind.dims[1:]) != (actual.dtype, actual.dims[1:]) or not kind.dims or not actual.dims:
            raise InputError(
                f"{name!r} is {kind} in {show_path(reference[0])}, and {actual} in {show_path(path)}",
                "rows of all shards have one type",
            )


def _refuse_missing(path: str, present: Mapping[str, object], types: Mapping[str, TensorType]) -> None:
    missing = next((name for name in types if name not in present), None)
    if missing is not None:
        raise InputError(
            f"{show_path(path)} has no array {missing!r}",
            f"it has {listed(sorted(present), 8)}; rows of {missing!r} are samples, and a batch is {types[missing]}",
        )
