"""Files of values alone: safetensors, and NumPy archives."""

from __future__ import annotations

import zipfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gopt import documents, limits
from gopt.documents.records import to_document
from gopt.errors import InputError
from gopt.ir.external_data import naming, read_safetensors
from gopt.ir.types import TensorType
from gopt.offline.inspect import NamedValue
from gopt.offline.kinds.candidate import FileCandidate
from gopt.text.notebook import HtmlTable

NEXT = "it holds only values: gopt shard MODEL --state FILE gives them to a step whose inputs have these names"


@dataclass(frozen=True, slots=True)
class ValuesInspection(HtmlTable):
    """Named tensors. ``kind``: ``safetensors`` or ``npz``; ``dtypes``: the number of each; ``metadata``: of a
    safetensors file."""

    file: str
    kind: str
    file_bytes: int
    tensors: tuple[NamedValue, ...]
    dtypes: Mapping[str, int]
    bytes: int
    metadata: Mapping[str, str]
    next: str = NEXT

    def to_json(self) -> dict[str, Any]:
        return {"format": "gopt-inspection/1", "what": "values"} | to_document(self)


def is_safetensors(candidate: FileCandidate) -> bool:
    """Return whether a file begins with the length of a JSON header that fits into the file."""
    head = candidate.head
    return len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= candidate.size - 8


def is_npz(candidate: FileCandidate) -> bool:
    """Return whether a file is a zip archive of arrays."""
    if not candidate.head.startswith(b"PK\x03\x04"):
        return False
    try:
        with zipfile.ZipFile(candidate.path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError):
        return False
    return bool(names) and all(name.endswith(".npy") for name in names)


def inspect_safetensors(candidate: FileCandidate) -> ValuesInspection:
    """The tensors of a file; raises InputError for a damaged file."""
    with naming(str(candidate.path)):
        safetensors = read_safetensors(str(candidate.path), candidate.size)
    with candidate.path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = documents.parse_json(file.read(length), documents.HEADER, "its header")
    entries = header.get("__metadata__")
    metadata = {str(key): str(value) for key, value in entries.items()} if isinstance(entries, dict) else {}
    return _values(candidate, "safetensors", {name: tensor.type for name, tensor in safetensors.items()}, metadata)


def inspect_npz(candidate: FileCandidate) -> ValuesInspection:
    """The arrays of an archive by headers; raises InputError for a damaged file."""
    types = {}
    try:
        with zipfile.ZipFile(candidate.path) as archive:
            for name in archive.namelist()[: limits.RANKS]:
                with archive.open(name) as file:
                    old = np.lib.format.read_magic(file) == (1, 0)
                    read = np.lib.format.read_array_header_1_0 if old else np.lib.format.read_array_header_2_0
                    shape, _, dtype = read(file)
                types[name.removesuffix(".npy")] = TensorType(str(dtype), shape)
    except (zipfile.BadZipFile, ValueError, OSError, EOFError, RuntimeError, NotImplementedError) as error:
        raise InputError(
            f"{candidate.path} is a damaged archive of arrays: {error}", "write it again with numpy.savez"
        ) from None
    return _values(candidate, "npz", types, {})


def _values(
    candidate: FileCandidate, kind: str, types: Mapping[str, TensorType], metadata: Mapping[str, str]
) -> ValuesInspection:
    tensors = tuple(NamedValue(name, type.dtype, type.shape, _nbytes(type)) for name, type in types.items())
    dtypes = Counter(tensor.dtype for tensor in tensors)
    return ValuesInspection(
        candidate.path.name, kind, candidate.size, tensors, dict(dtypes.most_common()),
        sum(tensor.bytes for tensor in tensors), metadata,
    )  # fmt: skip


def _nbytes(type: TensorType) -> int:
    try:
        return type.nbytes
    except KeyError:  # a type of NumPy that ONNX has not
        return int(np.dtype(type.dtype).itemsize * np.prod(type.dims, dtype=np.int64))
