"""The safetensors format: the length of the header, the header, and the tensors one behind the other.

The package safetensors (0.8) writes its own temporary file and renames it without a sync, a failed write has no errno,
and a digest would read the file again. docs/disk.md promises more.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from gopt.ir.external_data import SAFETENSORS
from gopt.ir.types import TensorType

_CODES = {dtype: code for code, dtype in SAFETENSORS.items()}


def safetensors_chunks(types: Mapping[str, TensorType], arrays: Iterable[np.ndarray]) -> Iterator[Any]:
    """The bytes of a file, in pieces; ``arrays`` in the order of ``types``, asked for one after the other."""
    header: dict[str, Any] = {}
    offset = 0
    for name, type in types.items():
        header[name] = {
            "dtype": _CODES[type.dtype], "shape": list(type.dims), "data_offsets": [offset, offset + type.nbytes]
        }  # fmt: skip
        offset += type.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for array in arrays:
        yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
