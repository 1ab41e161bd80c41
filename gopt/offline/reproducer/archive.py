"""The file of a reproducer: an archive with ``reproducer.json`` and the files of each input in a separate folder."""

from __future__ import annotations

import json
import os
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from google.protobuf.message import DecodeError  # type: ignore[import-untyped,unused-ignore]
from onnx import ModelProto

from gopt import documents, limits
from gopt.artifact.states_file import STATES_FILE
from gopt.documents.records import from_document, to_document
from gopt.errors import InputError, OptionError
from gopt.ir.external_data import naming, reason, regular_size, show
from gopt.ir.model_file import parse_model
from gopt.ir.npz import check_directory
from gopt.ir.wire_format import check_parts
from gopt.offline.reproducer.inputs import VALUES_FILE, Content
from gopt.offline.reproducer.record import FORMAT, Input, Reproducer
from gopt.offline.reproducer.values import fill_values, is_external, write_external
from gopt.system.paths import real_path
from gopt.system.staging import staged_file

RECORD_FILE = "reproducer.json"
_TIME = (1980, 1, 1, 0, 0, 0)
_BLOCK = 1 << 20
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_AS_WRITTEN = "give a file that gopt COMMAND --reproducer FILE wrote"


def folder_of(index: int) -> str:
    """The folder of an input, in the archive and unpacked."""
    return f"input_{index}"


def write(path: Path, reproducer: Reproducer, files: Sequence[Sequence[Content]]) -> None:
    """Write a reproducer, whole or not at all; ``files``: of each input.

    The same command and inputs give the same bytes. Raises OptionError where something else than a reproducer has the
    name, OSError, InputError.
    """
    target = real_path(path)
    exists = os.path.lexists(target)
    if exists and not is_reproducer(target):
        raise OptionError(f"{path} exists already, and is not a reproducer", "choose another name")
    text = json.dumps(to_document(reproducer), indent=1, ensure_ascii=False)
    with staged_file(target) as staged:
        with staged.open() as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            _add(archive, RECORD_FILE, Content(RECORD_FILE, text.encode()))
            for index, contents in enumerate(files):
                for content in contents:
                    _add(archive, f"{folder_of(index)}/{content.name}", content)
        staged.commit_over() if exists else staged.commit()


def _add(archive: zipfile.ZipFile, name: str, content: Content) -> None:
    entry = zipfile.ZipInfo(name, _TIME)
    # Values are stored as they are: they hardly shrink, and all zeros would look like an archive made to harm.
    entry.compress_type = zipfile.ZIP_STORED if content.ranges else zipfile.ZIP_DEFLATED
    entry.external_attr = 0o644 << 16
    entry.file_size = content.nbytes
    with archive.open(entry, "w", force_zip64=content.nbytes >= 1 << 31) as member:
        for block in content.blocks():
            member.write(block)


def is_reproducer(path: Path) -> bool:
    """Return whether a regular file is a reproducer: another reproducer may replace the file."""
    try:
        read(path)
    except (InputError, OSError):
        return False
    return not path.is_symlink()


def read(path: Path) -> Reproducer:
    """The record of a reproducer; raises InputError."""
    with _opened(path) as archive:
        return _record(archive, path)


def unpack(path: Path, folder: Path) -> Reproducer:
    """Write the inputs of a reproducer into a folder, ``input_N/NAME``; missing values are drawn.

    Raises InputError for a damaged or harmful file, and OSError."""
    with _opened(path) as archive:
        record = _record(archive, path)
        for index, entry in enumerate(record.inputs):
            destination = folder / folder_of(index)
            destination.mkdir()
            if entry.kind == "folder":
                (destination / entry.name).mkdir()
            for name, size in entry.files.items():
                target = destination / entry.name / name if entry.kind == "folder" else destination / name
                _extract(archive, f"{folder_of(index)}/{name}", size, target)
            if not record.values:
                for name in entry.files:
                    _complete(destination / entry.name if entry.kind == "folder" else destination, name)
    return record


def input_path(folder: Path, record: Reproducer, index: int) -> Path:
    """Where ``unpack`` has put an input."""
    return folder / folder_of(index) / record.inputs[index].name


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    with naming(os.fspath(path)):
        size = regular_size(os.fspath(path))
        try:
            check_directory(path, size, "files")
            with zipfile.ZipFile(path) as archive:
                _check_members(archive, size)
                yield archive
        except (OSError, MemoryError):
            raise
        except InputError as error:
            raise InputError(error.message, *(error.hints or (_AS_WRITTEN,))) from error
        except Exception as error:  # on damaged bytes zipfile and zlib raise a dozen types
            raise InputError(f"is not a reproducer, or is damaged: {reason(error)}", _AS_WRITTEN) from error


def _check_members(archive: zipfile.ZipFile, size: int) -> None:
    """Raise InputError for members that are too many or too large, or stored in a form that gopt never writes."""
    members = archive.infolist()
    most = max(limits.ARCHIVE_FREE, limits.ARCHIVE_GROWTH * size)
    total = sum(entry.file_size for entry in members)
    if total > most:
        raise InputError(
            f"its files take {total} bytes, and a file of this size may hold {most} (ARCHIVE_FREE, ARCHIVE_GROWTH)",
            limits.hint("ARCHIVE_FREE", total),
        )
    if len(members) > limits.REPRODUCER_FILES:
        most = limits.REPRODUCER_FILES
        raise InputError(
            f"it holds {len(members)} files, at most {most} are read (REPRODUCER_FILES)",
            limits.hint("REPRODUCER_FILES", len(members)),
        )
    twice = next((name for name, count in Counter(entry.filename for entry in members).items() if count > 1), None)
    if twice is not None:
        raise InputError(f"file {show(twice)} is in it twice")
    if any(entry.compress_type not in _METHODS or entry.flag_bits & 1 for entry in members):
        raise InputError("its files are compressed or encrypted in a way that gopt never writes")


def _record(archive: zipfile.ZipFile, path: Path) -> Reproducer:
    names = {entry.filename: entry.file_size for entry in archive.infolist()}
    if RECORD_FILE not in names:
        raise InputError(f"is not a reproducer: it has no {RECORD_FILE}")
    if (size := names.pop(RECORD_FILE)) > limits.DOCUMENT_BYTES:
        raise InputError(
            f"{RECORD_FILE} has more than {limits.DOCUMENT_BYTES} bytes (DOCUMENT_BYTES)",
            limits.hint("DOCUMENT_BYTES", size),
        )
    document = documents.parse_json(archive.read(RECORD_FILE), documents.REPRODUCER, RECORD_FILE)
    record = from_document(Reproducer, document)
    assert record.format == FORMAT
    if len(record.inputs) > limits.REPRODUCER_INPUTS:
        raise InputError(
            f"it has {len(record.inputs)} inputs, at most {limits.REPRODUCER_INPUTS} (REPRODUCER_INPUTS)",
            limits.hint("REPRODUCER_INPUTS", len(record.inputs)),
        )
    listed = {}
    for index, source in enumerate(record.inputs):
        _check_names(source)
        listed.update({f"{folder_of(index)}/{name}": size for name, size in source.files.items()})
    if listed != names:
        odd = sorted(listed.items() ^ names.items())[0][0]
        raise InputError(f"{show(odd)} is not as {RECORD_FILE} lists it")
    for argument in record.arguments:
        if argument.input is not None and argument.input >= len(record.inputs):
            raise InputError(f"an argument names input {argument.input}, and there are {len(record.inputs)}")
        if argument.output is not None and not documents.safe_name(argument.output):
            raise InputError(f"{show(argument.output)} is not the name of an output")
    return record


def _check_names(entry: Input) -> None:
    for name in (entry.name, *entry.files):
        if not documents.safe_name(name) or name.startswith("-"):
            raise InputError(f"{show(name)} is not the name of a file")
    expected = {entry.name, VALUES_FILE} if entry.kind == "model" else {entry.name}
    if entry.kind != "folder" and not set(entry.files) <= expected:
        raise InputError(f"input {show(entry.name)} has other files than its own")


def _extract(archive: zipfile.ZipFile, name: str, size: int, target: Path) -> None:
    """Write one member; raises InputError for a member of another length than stated."""
    with archive.open(name) as source, target.open("xb") as file:
        while size:
            block = source.read(min(size, _BLOCK))
            if not block:
                raise InputError(f"{show(name)} is shorter than its entry says")
            size -= len(block)
            file.write(block)
        if source.read(1):
            raise InputError(f"{show(name)} is longer than its entry says")


def _complete(folder: Path, name: str) -> None:
    """Draw the missing values of a model, and make the file of external values."""
    if not name.endswith(".onnx"):
        return
    path = folder / name
    data = path.read_bytes()
    try:
        check_parts(data)
        model = parse_model(data)
    except DecodeError:
        return  # a damaged model is a way to fail
    if fill_values(model):
        path.write_bytes(model.SerializeToString(deterministic=True))
    for where in {_location(model)} & {VALUES_FILE, STATES_FILE}:
        write_external(model, folder / where)


def _location(model: ModelProto) -> str:
    """The file of the first external value; gopt writes all into one file."""
    for tensor in filter(is_external, model.graph.initializer):
        return next((entry.value for entry in tensor.external_data if entry.key == "location"), "")
    return ""
