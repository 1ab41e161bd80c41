"""Values stored outside the model file: external data beside a model, and the files named by ``--state``.

Paths come from the file, so paths are hostile until shown otherwise. A location must be relative, stay in the model's
folder, and pass through no symbolic link below that folder (the folder itself may be reached through links: the user
named it). Hard links are accepted: both names are inside the folder, links reach nothing new, ONNX Runtime accepts
links, and de-duplicating stores and backups make links unasked. Here only sizes are read; bytes are read later
(``file_reads``).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import onnx

from gopt import limits
from gopt.documents import HEADER, parse_json, read_json
from gopt.errors import GoptError, InputError, UnsupportedError
from gopt.ir.tensor import Tensor
from gopt.ir.types import TensorType, nbytes, overflows
from gopt.text.sanitize import show as show
from gopt.text.sanitize import show_path
from gopt.text.suggestions import near_file

SAFETENSORS = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    "C64": "complex64", "F8_E4M3": "float8e4m3fn", "F8_E5M2": "float8e5m2", "F8_E8M0": "float8e8m0",
}  # fmt: skip


INDEX = ".safetensors.index.json"
"""Ending of an index, which says in which file of its folder a tensor is."""


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Puts the file's name before the message of every refusal raised within."""
    try:
        yield
    except GoptError as error:
        raise type(error)(f"{show_path(path)}: {error.message}", *error.hints) from error.__cause__


def regular_size(path: str) -> int:
    """Return the number of bytes of a readable file. Raises InputError for a missing or unreadable file, a folder, a
    device or pipe, and an empty file."""
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise InputError("no such file", *near_file(path)) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise InputError(f"cannot be read: {reason(error)}") from error
    if stat.S_ISDIR(status.st_mode):
        raise InputError("is a folder, not a file")
    if not stat.S_ISREG(status.st_mode):
        raise InputError("is not a regular file")
    if not os.access(path, os.R_OK):
        raise InputError("cannot be read: Permission denied")
    if not status.st_size:
        raise InputError("is empty")
    return status.st_size


def check_dims(dims: tuple[int | str | None, ...], dtype: str, owner: str) -> None:
    """Raises InputError for a negative dimension, and for as many elements as take 2**63 bytes in any type.

    Manifests obey the same rule: gopt reads every folder written by gopt.
    """
    if len(dims) > limits.DIMENSIONS:
        raise InputError(f"{owner} has {len(dims)} dimensions; at most {limits.DIMENSIONS} can be held")
    for size in dims:
        if not isinstance(size, int):
            continue
        if size < 0:
            hint = "an open size is a symbol (dim_param), or none"
            raise InputError(f"{owner} has a negative dimension: {size}", hint)
    if overflows(dims):
        shape = show(list(dims))
        raise InputError(
            f"{owner} overflows: dimensions {shape} of {dtype} are 2**63 bytes or more", "correct the shape"
        )


_DATA_FIELDS = ("float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data")


def data_fields(proto: onnx.TensorProto) -> list[str]:
    """Return the fields of a tensor with values in the model file."""
    names = [name for name in _DATA_FIELDS if len(getattr(proto, name))]
    return [*names, "raw_data"] if proto.HasField("raw_data") else names


def absolute(path: str) -> str:
    """Return a path valid wherever this process goes; the working folder is asked for only if needed."""
    return path if os.path.isabs(path) else os.path.join(os.getcwd(), path)


class DataFolder:
    """The folder of a model, which must contain its external data."""

    def __init__(self, model_path: str) -> None:
        # Joined, never normalised: 'link/../m.onnx' is not 'm.onnx' when 'link' is one.
        self.folder = absolute(os.path.dirname(model_path))
        self._sizes: dict[str, tuple[str, int]] = {}

    def tensor(self, proto: onnx.TensorProto, type: TensorType) -> Tensor:
        """Return a tensor that refers to the external data of an initializer.

        Raises InputError if the file is missing, too short, or not inside the folder, or if offset or length are
        wrong; UnsupportedError for packed 4-bit values.
        """
        owner = f"external data of {show(proto.name)}"
        entries = {entry.key: entry.value for entry in proto.external_data}
        if fields := data_fields(proto):
            raise InputError(f"{owner}: values lie in the model file as well ({fields[0]})")
        path, size = self.find(entries.get("location", ""), owner)
        if type.dtype == "string":
            raise InputError(f"{owner}: strings cannot lie in external data")
        if nbytes(type.dtype, 2) == 1:
            raise UnsupportedError(f"{owner}: packed {type.dtype} values", "store them in the model file")
        offset = _number(entries, "offset", 0, owner)
        length = _number(entries, "length", type.nbytes, owner)
        if length != type.nbytes:
            raise InputError(f"{owner}: its length is {length} bytes, but {type} takes {type.nbytes}")
        if offset + length > size:
            location = show(entries["location"])
            raise InputError(f"{owner}: {location} is too short: {size} bytes, {offset + length} needed")
        return Tensor(type, path=path, offset=offset)

    def find(self, location: str, owner: str) -> tuple[str, int]:
        """The path and size of a file in the folder; raises InputError for a missing file, or one elsewhere."""
        if location not in self._sizes:
            self._sizes[location] = self._inspect(location, owner)
        return self._sizes[location]

    def _inspect(self, location: str, owner: str) -> tuple[str, int]:
        shown = show(location)
        if not isinstance(location, str) or not location or "\0" in location:
            raise InputError(f"{owner}: {shown} is not a file location")
        if os.path.isabs(location) or location[1:2] == ":" or location.startswith("\\"):
            raise InputError(f"{owner}: {shown} is an absolute path; data must lie in the model's folder")
        path, depth, mode, size = self.folder, 0, stat.S_IFDIR, 0
        for part in location.split("/"):
            if part in ("", "."):
                continue
            # Counting is enough: these files were checked to be no links.
            depth += -1 if part == ".." else 1
            if depth < 0:
                raise InputError(f"{owner}: {shown} leaves the model's folder")
            path = os.path.join(path, part)
            try:
                status = os.lstat(path)
            except OSError as error:
                raise InputError(f"{owner}: {shown} cannot be opened: {reason(error)}") from error
            mode, size = status.st_mode, status.st_size
            if stat.S_ISLNK(mode):
                raise InputError(
                    f"{owner}: {shown} goes through a symbolic link ({show(part)})",
                    "put the file itself beside the model, for example with cp -L",
                )
        if not stat.S_ISREG(mode):
            raise InputError(f"{owner}: {shown} is not a regular file")
        if not os.access(path, os.R_OK):
            raise InputError(f"{owner}: {shown} cannot be read: Permission denied")
        return path, size


def load_state(path: str | os.PathLike[str]) -> Mapping[str, Tensor]:
    """State values by name, from a ``.safetensors`` or an ``.npz`` file, an index of safetensors files, or a folder
    with such an index (arrays are read on demand; nothing is unpickled).

    Raises InputError for a missing or damaged file, another kind, or a type unknown to ONNX: for an archive, on reading
    the array.
    """
    name = os.fspath(path)
    if os.path.isdir(name):
        name = _index_in(name)
    if name.endswith(INDEX):
        return _read_shards(name)
    with naming(name):
        size = regular_size(name)
        if name.endswith(".safetensors"):
            return read_safetensors(name, size)
        if name.endswith(".npz"):
            from gopt.ir.npz import Archive

            return Archive(name, size)
        raise InputError("state values come from a .safetensors or an .npz file")


def _index_in(folder: str) -> str:
    """The index of safetensors files in a folder."""
    try:
        indices = sorted(entry for entry in os.listdir(folder) if entry.endswith(INDEX))
    except OSError as error:
        raise InputError(f"{show_path(folder)}: cannot be read: {reason(error)}") from error
    if len(indices) != 1:
        raise InputError(
            f"{show_path(folder)}: is a folder with {len(indices)} files *{INDEX}",
            "name a file of values"
            if indices
            else "state values come from a .safetensors or an .npz file, or an index",
        )
    return os.path.join(folder, indices[0])


def _read_shards(path: str) -> dict[str, Tensor]:
    """The tensors that an index names, in files of the folder of the index."""
    index = read_json(path, HEADER).get("weight_map")
    with naming(path):
        if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
            raise InputError("has no weight_map from names to files")
        folder, shards = DataFolder(path), {}
        for file in dict.fromkeys(index.values()):
            place, size = folder.find(file, "weight_map")
            with naming(file):
                shards[file] = read_safetensors(place, size)
        for name, file in index.items():
            if name not in shards[file]:
                raise InputError(f"{show(file)} has no tensor {show(name)}", "fetch the file again")
        return {name: shards[file][name] for name, file in index.items()}


SafetensorsHeader = Annotated[
    Mapping[str, Any],
    "The header of a safetensors file is one table of entries; the schema checks this outline alone, and the reader "
    "holds each entry against the bytes of the file.",
]


def read_safetensors(path: str, size: int) -> dict[str, Tensor]:
    """The tensors of a file of ``size`` bytes by name, none of them read; raises InputError, inside of ``naming``."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise InputError("is not a safetensors file, or is truncated: its header does not fit")
        if length > limits.HEADER_BYTES:
            most = limits.HEADER_BYTES
            raise InputError(
                f"its header has {length} bytes, at most {most} are read (HEADER_BYTES)",
                limits.hint("HEADER_BYTES", length),
            )
        header = parse_json(file.read(length), HEADER, "its header")
    start = 8 + length
    return {
        name: _safetensor(path, name, entry, start, size) for name, entry in header.items() if name != "__metadata__"
    }


def _safetensor(path: str, name: str, entry: Any, start: int, size: int) -> Tensor:
    try:
        dtype, shape, (begin, end) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise InputError(f"the entry of {show(name)} is malformed") from error
    # a bool is an int in Python, and not a size
    if any(type(number) is not int for number in (*shape, begin, end)):
        raise InputError(f"the entry of {show(name)} is malformed")
    if dtype not in SAFETENSORS:
        raise InputError(f"{show(name)} has the element type {show(dtype)}, which ONNX does not have")
    check_dims(shape, SAFETENSORS[dtype], show(name))
    kind = TensorType(SAFETENSORS[dtype], shape)
    if end - begin != kind.nbytes:
        raise InputError(f"{show(name)}: {end - begin} bytes, but {kind} takes {kind.nbytes}")
    if begin < 0 or start + end > size:
        raise InputError(f"is truncated: the data of {show(name)} ends at byte {start + end} of {size}")
    return Tensor(kind, path=absolute(path), offset=start + begin)


def _number(entries: dict[str, str], key: str, default: int, owner: str) -> int:
    text = entries.get(key, str(default))
    # Only plain ASCII digits: int() would also take '1_000', '+1' and digits of other scripts, or 4300 of them.
    if not (isinstance(text, str) and text.isascii() and text.isdigit() and len(text) < 20):
        raise InputError(f"{owner}: its {key} is {show(text)}, not a number of bytes")
    return int(text)


def reason(error: BaseException) -> str:
    """Return the message of an error on one line."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return " ".join(text.split())
