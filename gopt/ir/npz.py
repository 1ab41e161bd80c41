"""Arrays of an ``.npz`` or ``.npy`` file: headers are read first, arrays on demand.

A compressed archive can be a thousand times larger inside, so nothing is decompressed before the type is known, and the
sum of decompressed bytes is bounded. Nothing is unpickled.
"""

from __future__ import annotations

import io
import os
import struct
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO

import numpy as np
import onnx

from gopt import limits
from gopt.errors import InputError
from gopt.ir.external_data import absolute, naming, reason, show
from gopt.ir.tensor import Tensor
from gopt.ir.types import TensorType, dtype_name

_END, _END64 = b"PK\x05\x06", b"PK\x06\x06"
_CHUNK = 1 << 20
_PARSING = threading.Lock()
"""NumPy parses a header by ``ast``, which fails now and then in CPython 3.11 where two threads do so at once."""
_PLAIN = "write it with numpy.savez, or use .safetensors, which is read piece by piece"


class Archive(Mapping[str, Tensor]):
    """The arrays of an archive by name: the list of members has the names; headers and values are read on demand.

    Every read may raise InputError for a damaged file, a type unknown to ONNX, or a limit.
    """

    def __init__(self, path: str, size: int) -> None:
        self._path, self._where = path, absolute(path)
        self._budget = _SizeBudget(size)
        self._made: dict[str, Tensor] = {}
        self._members: dict[str, zipfile.ZipInfo] = {}
        with _reading(""):
            check_directory(path, size)
            self._archive = zipfile.ZipFile(path)
        for entry in self._archive.infolist():
            name = entry.filename.removesuffix(".npy")
            if name in self._members:
                raise InputError(f"{show(name)} is in it twice")
            self._members[name] = entry

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._made:
            entry = self._members[name]
            with naming(self._path), _reading(name):
                header = _Header.read(name, self._archive, entry)
            read = _reader(self._path, self._where, name, entry, header, self._budget)
            self._made[name] = Tensor(header.type, reader=read)
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in self._members

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)


def read_npy(path: str, size: int) -> Tensor:
    """The array of an ``.npy`` file of ``size`` bytes, read on demand; raises InputError, inside of ``naming``."""
    name = os.path.basename(path)
    with _reading("", ".npy"), open(path, "rb") as file:
        header = _Header(name, file)
    if size != header.nbytes + header.type.nbytes:
        raise InputError(f"holds {size - header.nbytes} bytes, but {header.type} takes {header.type.nbytes}")
    if (header.fortran and len(header.type.dims) > 1) or header.dtype.str.startswith(">"):
        raise InputError("is stored column by column, or in big-endian order", "write numpy.ascontiguousarray(array)")
    return Tensor(header.type, path=absolute(path), offset=header.nbytes)


@contextmanager
def _reading(name: str, kind: str = ".npz") -> Iterator[None]:
    try:
        yield
    except (InputError, MemoryError):
        raise
    except Exception as error:  # on damaged bytes zipfile, zlib and NumPy raise a dozen types, tokenize's own included
        raise _damaged(name, error, kind) from error


def _damaged(name: str, error: Exception, kind: str) -> InputError:
    where = f" at {show(name)}" if name else ""
    return InputError(f"is not an {kind} file, or is damaged{where}: {reason(error)}")


def check_directory(path: str | os.PathLike[str], size: int, members: str = "arrays") -> None:
    """Raise InputError for a list of members, read at once by zipfile, beyond the limit."""
    with open(path, "rb") as file:
        file.seek(max(0, size - (1 << 16) - 22))
        tail = file.read()
    end = tail.rfind(_END)
    if end < 0 or len(tail) < end + 22:
        return  # zipfile's message names the fault
    (listed,) = struct.unpack_from("<L", tail, end + 12)
    place64 = tail.rfind(_END64, 0, end)
    if listed == 0xFFFFFFFF and place64 >= 0 and len(tail) >= place64 + 48:
        (listed,) = struct.unpack_from("<Q", tail, place64 + 40)
    if min(listed, size) > limits.ARCHIVE_DIRECTORY:
        most = limits.ARCHIVE_DIRECTORY
        raise InputError(
            f"its list of {members} is {listed} bytes long; at most {most} are read (ARCHIVE_DIRECTORY)",
            limits.hint("ARCHIVE_DIRECTORY", min(listed, size)),
        )


class _SizeBudget:
    """Number of bytes still readable from an archive."""

    def __init__(self, size: int) -> None:
        self.most = max(limits.ARCHIVE_FREE, limits.ARCHIVE_GROWTH * size)
        self.taken = 0

    def take(self, name: str, nbytes: int) -> None:
        """Raise InputError for an array beyond the archive's budget."""
        if self.taken + nbytes > self.most:
            raise InputError(
                f"{show(name)} takes {nbytes} bytes, and arrays of a file of this size may take {self.most} in all "
                f"(ARCHIVE_FREE, or ARCHIVE_GROWTH = {limits.ARCHIVE_GROWTH} times its bytes)",
                _PLAIN,
                limits.hint("ARCHIVE_FREE", self.taken + nbytes),
            )
        self.taken += nbytes


class _Header:
    """The header in front of an array's values."""

    def __init__(self, name: str, file: IO[bytes]) -> None:
        start = file.read(8)
        version = start[6:8]
        if start[:6] != np.lib.format.MAGIC_PREFIX or version not in (b"\x01\x00", b"\x02\x00"):
            raise InputError(f"{show(name)} is not a NumPy array of version 1 or 2")
        head = file.read(2 if version == b"\x01\x00" else 4)
        length = int.from_bytes(head, "little")
        if length > limits.ARCHIVE_HEADER:
            most = limits.ARCHIVE_HEADER
            raise InputError(f"the header of {show(name)} is {length} bytes long; at most {most} are read")
        text = io.BytesIO(head + file.read(length))
        read = np.lib.format.read_array_header_1_0 if len(head) == 2 else np.lib.format.read_array_header_2_0
        with _PARSING:
            shape, self.fortran, self.dtype = read(text)
        self.nbytes = 8 + len(head) + length
        self.type = _type(name, self.dtype, shape)

    @classmethod
    def read(cls, name: str, archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> _Header:
        """The header of a member; InputError where the member is not as long as header and values are."""
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise InputError(f"{show(name)} is compressed in a way that NumPy never writes", _PLAIN)
        with archive.open(entry) as file:
            header = cls(name, file)
        if entry.file_size != header.nbytes + header.type.nbytes:
            nbytes = entry.file_size - header.nbytes
            raise InputError(f"{show(name)} holds {nbytes} bytes, but {header.type} takes {header.type.nbytes}")
        return header


def _type(name: str, dtype: np.dtype, shape: tuple[int, ...]) -> TensorType:
    from gopt.ir.external_data import check_dims

    if dtype.hasobject:
        raise ValueError("Object arrays cannot be loaded: they may run code")
    try:
        word = dtype_name(onnx.helper.np_dtype_to_tensor_dtype(dtype.newbyteorder("=")))
    except (KeyError, ValueError):
        word = "undefined"
    if word in ("undefined", "string"):
        raise InputError(
            f"{show(name)} has the NumPy type {dtype}, which is not a number to ONNX",
            ".npz cannot hold bfloat16 and float8; use .safetensors for them",
        )
    dims = tuple(int(size) for size in shape)
    check_dims(dims, word, show(name))
    return TensorType(word, dims)


def _reader(
    path: str, where: str, name: str, entry: zipfile.ZipInfo, header: _Header, budget: _SizeBudget
) -> Callable[[], np.ndarray]:
    def read() -> np.ndarray:
        with naming(path):
            budget.take(name, header.type.nbytes)
            with _reading(name), zipfile.ZipFile(where) as archive, archive.open(entry) as file:
                return _values(file, header)

    return read


def _values(file: IO[bytes], header: _Header) -> np.ndarray:
    """The values behind a header, in the machine's own order of bytes."""
    file.read(header.nbytes)
    flat = np.empty(header.type.elements, header.dtype)
    memory, offset = flat.view(np.uint8), 0
    while offset < len(memory):
        chunk = file.read(min(_CHUNK, len(memory) - offset))
        if not chunk:
            raise ValueError(f"it ends {len(memory) - offset} bytes early")
        memory[offset : offset + len(chunk)] = np.frombuffer(chunk, np.uint8)
        offset += len(chunk)
    shape = header.type.dims
    array = flat.reshape(shape[::-1]).T if header.fortran else flat.reshape(shape)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
