"""The parts of a command's input files and folders that a reproducer keeps.

Of a model its graph, and the values that it refers to if they are asked for; of an output folder what gopt wrote into
it; a configuration as it is. No other file is opened.
"""

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
    """A file to be kept: its bytes, or the ranges of other files that it is made of."""

    name: str
    data: bytes = b""
    ranges: tuple[tuple[Path, int, int], ...] = ()

    @property
    def nbytes(self) -> int:
        return len(self.data) + sum(size for _, _, size in self.ranges)

    def blocks(self) -> Iterator[bytes]:
        """The content, a block at a time; raises OSError, InputError for a file that has become shorter."""
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
    """Return the files that are kept of an input. Raises InputError for an unreadable one, OSError."""
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
    kept = [Content(path.name, model.SerializeToString(deterministic=True))]
    return [*kept, Content(VALUES_FILE, ranges=tuple(moved))] if moved and values else kept


def _parse(data: bytes, path: Path, values: bool) -> ModelProto | None:
    """The model, or None for a file that is none; it is kept only where values may be."""
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
    """The bytes of a document; of a manifest without the digests of values that others take the place of.

    A damaged manifest stays as it is, because that may be what fails.
    """
    if name == MANIFEST_FILE:
        with suppress(InputError):
            manifest, _ = parse_manifest(data, name)
            if manifest != manifest.bare:
                return manifest.bare.text().encode()
    return data


def _folder(path: Path, values: bool) -> list[Content]:
    """The files of an output folder that gopt wrote, in the order of their names; links are left out."""
    kept = []
    for each in sorted(path.iterdir()):
        if not is_regular_file(each):
            continue
        if each.name in _DOCUMENTS:
            data = documents.read_bytes(each, "DOCUMENT_BYTES")
            kept.append(Content(each.name, data if values else _without_digests(each.name, data)))
        elif each.name == SOURCE_FILE or _RANK.fullmatch(each.name):
            data = documents.read_bytes(each, _MODEL_BYTES)
            model = _parse(data, each, values)
            if model is not None and not values:
                leave_out_values(model)
                data = model.SerializeToString(deterministic=True)
            kept.append(Content(each.name, data))
        elif each.name == STATES_FILE and values:
            kept.append(Content(each.name, ranges=((each, 0, each.stat().st_size),)))
    if not kept and holds_step(path):
        raise InputError(
            f"{path} holds training artifacts, which a reproducer does not take",
            f"gopt import {path} -o step.onnx makes a model of them",
        )
    if not kept:
        raise InputError(
            f"{path} holds nothing that gopt shard or gopt split wrote", "give a model, or an output folder"
        )
    return kept
