"""Sizes and digests of the files of a folder: taken while gopt writes them, compared before gopt reads them.

The manifest of an output folder, or of a folder of checkpoints, lists the files beside; the index of a checkpoint lists
the files of ranks. Both documents end in a seal, the digest of the bytes in front. So any changed bit is noticed.
``gopt seal`` accepts edited files, ``unchecked`` reads edited files once.
"""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from gopt.artifact.json_writer import appended, appended_table, without_end
from gopt.documents.records import Count, Digest, key, to_document
from gopt.errors import InputError, NoteWarning
from gopt.system.files import digest_of, reason
from gopt.system.hashed import HashedFile, create_hashed

SEAL = "seal"
_MANY = 1 << 26
"""Bytes of files together from which on several of them are read at once."""
_SEALED = re.compile(rb',\n"seal": "([0-9a-f]{64})"\n}\n\Z')
_TAIL = 80
"""Bytes of a document's end that hold its seal."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """The size and the SHA-256 of a file."""

    nbytes: Count = field(metadata=key("bytes"))
    """The file has this many bytes."""
    sha256: Digest
    """The digest is the SHA-256 of the content of the file, in hexadecimal digits."""

    @classmethod
    def of(cls, data: bytes) -> FileEntry:
        """The entry of a file with this content."""
        return cls(len(data), hashlib.sha256(data).hexdigest())

    @classmethod
    def of_file(cls, path: Path) -> FileEntry:
        """The entry of a file, read in blocks. Raises OSError."""
        return cls(path.stat().st_size, digest_of(path).hex())


class Inventory:
    """The files of a folder in the making, with the entries of finished files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, FileEntry] = {}

    @contextmanager
    def create(self, name: str) -> Iterator[HashedFile]:
        """A new file of the folder to write; raises OSError."""
        with create_hashed(self.folder / name) as file:
            yield file
        self.files[name] = FileEntry(file.nbytes, file.sha256)


class _Setting:
    blocks = 0
    """How many blocks are open, in all threads: in whatever order they end, files are compared behind the last."""


@contextmanager
def unchecked() -> Iterator[None]:
    """Read folders and checkpoints in the block without comparing their files with their digests.

    >>> with gopt.unchecked():
    ...     gopt.inspect(gopt.shard("fixtures/mlp_sgd.onnx", 2)).ranks
    2
    """
    _Setting.blocks += 1
    try:
        yield
    finally:
        _Setting.blocks -= 1


def is_unchecked() -> bool:
    """Return whether files are read without a comparison."""
    return _Setting.blocks > 0


def accept_hints(folder: str | os.PathLike[str]) -> tuple[str, str]:
    """Hints for going on with a folder with a changed file."""
    return f"if you have edited it: gopt seal {os.fspath(folder)}", "--unchecked takes files as they are, once"


def check_files(folder: Path, files: Mapping[str, FileEntry] | None, names: Collection[str] | None = None) -> None:
    """Raise InputError, naming the file, for a file unlike its entry; ``names``: for these alone.

    Missing files are left to the reader. ``files`` is None in the folder of an older gopt: a note says so.
    """
    if is_unchecked():
        return
    if files is None:
        message = f"{folder} has no digests: an older gopt wrote it. gopt seal {folder} adds them"
        warnings.warn(NoteWarning(message), stacklevel=2)
        return
    wanted = [name for name in (files if names is None else names) if name in files and (folder / name).is_file()]
    several = len(wanted) > 1 and sum(files[name].nbytes for name in wanted) > _MANY
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1) if several else 1) as pool:
        faults = (pool.map if several else map)(lambda name: fault_of(folder / name, files[name]), wanted)
        for name, fault in zip(wanted, faults):
            if fault:
                raise InputError(f"{folder / name} {fault}", *accept_hints(folder))


def fault_of(path: Path, entry: FileEntry) -> str:
    """The difference of a file from the entry, as the rest of a sentence; empty if equal. Raises InputError for an
    unreadable file."""
    try:
        size = path.stat().st_size
        if size == entry.nbytes and digest_of(path).hex() == entry.sha256:
            return ""
    except OSError as error:
        raise InputError(f"{path} cannot be read: {reason(error)}", "let this user read it") from error
    sizes = "" if size == entry.nbytes else f" ({size} bytes instead of {entry.nbytes})"
    return f"is not what gopt wrote: it was edited or damaged{sizes}"


def sealed(text: str, files: Mapping[str, FileEntry] | None = None) -> str:
    """The text of a document with ``files``, if any, and the seal as last keys."""
    if files is not None:
        text = appended_table(text, "files", {name: to_document(entry) for name, entry in files.items()})
    return appended(text, SEAL, hashlib.sha256(without_end(text).encode()).hexdigest())


def check_seal(data: bytes, name: str, seal: str | None, folder: Path) -> None:
    """Raise InputError for a document changed after sealing; ``name``: of the file; ``seal``: the value of this key."""
    if seal is None or is_unchecked():
        return
    match = _SEALED.search(data[-2 * _TAIL :])
    if match is not None:
        body = memoryview(data)[: len(data) - len(match[0])]
        if hashlib.sha256(body).hexdigest() == seal == match[1].decode():
            return
    raise InputError(f"{name} is not what gopt wrote: it was edited or damaged", *accept_hints(folder))
