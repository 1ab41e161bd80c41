"""The parts of a command's input files and folders in a reproducer.

Of a model the graph, and the external values if requested; of an output folder gopt's files; a configuration unchanged.
No other file is opened."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError  # type: ignore[import-untyped,unused-ignore]
from onnx import ModelProto

from gopt import documents
from gopt.artifact.manifest import MANIFEST_FILE
from gopt.artifact.manifest_check import parse_manifest
from gopt.artifact.report_record import REPORT_FILE
from gopt.artifact.serialize import SOURCE_FILE
from gopt.artifact.states_file import STATES_FILE
from gopt.errors import InputError
from gopt.importers.load import holds_step
from gopt.ir.external_data import DataFolder
from gopt.ir.model_file import parse_model
from gopt.ir.wire_format import check_parts
from gopt.offline.reproducer.values import leave_out_values, move_external
from gopt.system.files import is_regular_file

VALUES_FILE = "values.bin"
"""External values of a model, in a reproducer and beside its unpacked model."""
_MODEL_BYTES = 2**31 - 1
_BLOCK = 1 << 20
_RANK = re.compile(r"((rank|server)_\d{4,}|trainer)(\.\w+)?\.onnx")
_DOCUMENTS = (MANIFEST_FILE, REPORT_FILE)


@dataclass(frozen=True, slots=True)
class Content:
    """A file to be kept: the bytes, or the ranges of other files."""

    name: str
    data: bytes = b""
    ranges: tuple[tuple[Path, int, int], ...] = ()

    @property
    def nbytes(self) -> int:
        return len(self.data) + sum(size for _, _, size in self.ranges)

    def blocks(self) -> Iterator[bytes]:
        """The content, a block at a time; raises OSError, InputError for a shortened file."""
        if self.data:
            yield self.data
        for path, offset, size in self.ranges:
            with path.open("rb") as file:
                file.seek(offset)
                while size:
                    block = file.read(min(size, _BLOCK))
                    if not block:
                        raise InputError(f"{path} has become shorter", "let nothing write it while gopt reads it")
                    size -= len(block)
                    yield block


def kind_of(path: Path, configuration: bool) -> str:
    """``configuration``, ``folder`` or ``model``."""
    return "configuration" if configuration else "folder" if path.is_dir() else "model"


def contents(path: Path, kind: str, values: bool) -> list[Content]:
    """Return the kept files of an input. Raises InputError for an unreadable input, OSError."""
    if kind == "configuration":
        return [Content(path.name, documents.read_bytes(path, "SERVERS_BYTES"))]
    if kind == "folder":
        return _folder(path, values)
    if not path.exists():
        return []
    data = documents.read_bytes(path, _MODEL_BYTES)
    model = _parse(data, path, values)
    if model is None:
        return [Content(path.name, data)]
    moved = move_external(model, DataFolder(str(path)), VALUES_FILE)
    if not values:
        leave_out_values(model)
    files = [Content(path.name, model.SerializeToString(deterministic=True))]
    return [*files, Content(VALUES_FILE, ranges=tuple(moved))] if moved and values else files


def _parse(data: bytes, path: Path, values: bool) -> ModelProto | None:
    """The model, or None for another file; such a file is kept only where values may be."""
    try:
        check_parts(data)
        model: ModelProto | None = parse_model(data)
    except (DecodeError, InputError):
        model = None
    if model is not None and model.HasField("graph"):
        return model
    if not values:
        raise InputError(
            f"{path} is not an ONNX model, so its values cannot be told from the rest",
            "--reproducer-values keeps the file as it is",
        )
    return None


def _without_digests(name: str, data: bytes) -> bytes:
    """The bytes of a document; of a manifest without the digests of replaced values.

    A damaged manifest stays unchanged, because the damage may be the failure."""
    if name == MANIFEST_FILE:
        with suppress(InputError):
            manifest, _ = parse_manifest(data, name)
            if manifest != manifest.bare:
                return manifest.bare.text().encode()
    return data


def _folder(path: Path, values: bool) -> list[Content]:
    """The files written by gopt in an output folder, in the order of names; links are left out."""
    files = []
    for file in sorted(path.iterdir()):
        if not is_regular_file(file):
            continue
        if file.name in _DOCUMENTS:
            data = documents.read_bytes(file, "DOCUMENT_BYTES")
            files.append(Content(file.name, data if values else _without_digests(file.name, data)))
        elif file.name == SOURCE_FILE or _RANK.fullmatch(file.name):
            data = documents.read_bytes(file, _MODEL_BYTES)
            model = _parse(data, file, values)
            if model is not None and not values:
                leave_out_values(model)
                data = model.SerializeToString(deterministic=True)
            files.append(Content(file.name, data))
        elif file.name == STATES_FILE and values:
            files.append(Content(file.name, ranges=((file, 0, file.stat().st_size),)))
    if not files and holds_step(path):
        raise InputError(
            f"{path} holds training artifacts, which a reproducer does not take",
            f"gopt import {path} -o step.onnx makes a model of them",
        )
    if not files:
        raise InputError(
            f"{path} holds nothing that gopt shard or gopt split wrote", "give a model, or an output folder"
        )
    return files
