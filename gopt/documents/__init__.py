"""Reads every JSON and TOML document; nothing else in gopt parses documents.

A document is a regular file of bounded size, depth and number of values; numbers fit in 64 bits, keys in a table are
unique, and the document fits its schema (``gopt/schemas``). So a read document has the schema's keys and types.
Refusals are InputErrors naming the file and the key: ``manifest.json: ranks[3].state[0].input: ... ``.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gopt import limits
from gopt.documents.prescan import check_prescan
from gopt.documents.schema import VALUE, first_error
from gopt.errors import InputError, RunError
from gopt.system.garbage import gc_paused
from gopt.text.sanitize import show
from gopt.text.suggestions import near_file


@dataclass(frozen=True, slots=True)
class DocumentKind:
    """A kind of document: name in messages, schema, limit of bytes, version of the format."""

    what: str
    schema: str
    limit: str
    version: int = 1

    @property
    def most(self) -> int:
        """The limit of bytes."""
        return limits.value(self.limit)


MANIFEST = DocumentKind("a manifest", "manifest", "DOCUMENT_BYTES")
REPORT = DocumentKind("a report", "report", "DOCUMENT_BYTES", 2)
INDEX = DocumentKind("an index of a checkpoint", "index", "INDEX_BYTES")
ROLES = DocumentKind("a map of roles", "roles", "ROLES_BYTES")
TORCH = DocumentKind("a record of PyTorch's states", "torch", "ROLES_BYTES")
CONFIG = DocumentKind("a configuration", "config", "CONFIG_BYTES")
HEADER = DocumentKind("a header of values", "header", "HEADER_BYTES")
SERVERS = DocumentKind("a server map", "servers", "SERVERS_BYTES")
GOLDEN = DocumentKind("a list of goldens", "golden", "CONFIG_BYTES")
REPRODUCER = DocumentKind("a reproducer", "reproducer", "DOCUMENT_BYTES")
RANK_MESSAGE = DocumentKind("a message of a rank to its launcher", "rank_message", "LINE_BYTES")
RECORD = DocumentKind("a record of a run", "record", "DOCUMENT_BYTES")
TRACE = DocumentKind("a trace", "trace", "DOCUMENT_BYTES")
RELATION = DocumentKind("a relation", "relation", "DOCUMENT_BYTES")
DEVICE = DocumentKind("a device", "device", "CONFIG_BYTES")
VERIFICATION = DocumentKind("a result of gopt verify", "verification", "DOCUMENT_BYTES")

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_WIDE = re.compile(rb"[\xf0-\xf4]")
_FORMATS = re.compile(r"^gopt-[a-z]+/\d+$")


def read_json(path: str | os.PathLike[str], kind: DocumentKind) -> dict[str, Any]:
    """Read a JSON file of a kind and check it; raises InputError."""
    return parse_json(read_bytes(path, kind.limit), kind, os.fspath(path))


def parse_json(data: bytes | str, kind: DocumentKind, name: str) -> dict[str, Any]:
    """Parse JSON text of a kind and check it; ``name`` is the file in messages. Raises InputError."""
    data = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    if len(data) > kind.most:
        raise InputError(
            f"{name} is too long: {len(data)} bytes, {kind.what} has at most {kind.most} ({kind.limit})",
            *_raised(kind.limit, len(data)),
        )
    check_prescan(data, name)
    surrogates = _SURROGATE.search(data) is not None
    if len(data) > limits.DOCUMENT_WIDE and (surrogates or _WIDE.search(data)):
        raise InputError(
            f"{name} is too long: {len(data)} bytes; one with characters beyond U+FFFF has at most "
            f"{limits.DOCUMENT_WIDE} (DOCUMENT_WIDE)",
            limits.hint("DOCUMENT_WIDE", len(data)),
        )
    floats: list[float] = []
    number, table = functools.partial(_number, floats), functools.partial(_unique, name)
    with gc_paused():
        try:
            text = data.decode("utf-8")
            del data
            result = json.loads(text, object_pairs_hook=table, parse_float=number, parse_constant=_constant)
        except UnicodeDecodeError as error:
            raise InputError(f"{name} is not JSON: byte {error.start} is not UTF-8") from None
        except (ValueError, RecursionError) as error:
            raise InputError(f"{name} is not JSON: {error}") from None
        del text
        if surrogates:
            _check_text(result, name)
        _check_schema(result, kind, name, bool(floats))
    record: dict[str, Any] = result
    return record


def read_toml(path: str | os.PathLike[str], kind: DocumentKind) -> dict[str, Any]:
    """Read a TOML file of a kind and check it; raises InputError."""
    import tomllib

    name, data = os.fspath(path), read_bytes(path, kind.limit)
    _check_dots(data, name)
    try:
        result = tomllib.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is not TOML: byte {error.start} is not UTF-8", "save the file as UTF-8") from None
    except RecursionError:
        raise InputError(f"{name} is nested more than {limits.DOCUMENT_DEPTH} levels deep") from None
    except ValueError as error:
        raise InputError(f"{name} is not TOML: {error}") from None
    _check_plain(result, name)
    _check_schema(result, kind, name, True)
    return result


def _check_dots(data: bytes, name: str) -> None:
    """Refuse keys of very many parts."""
    if data.count(b".") > limits.CONFIG_DOTS:
        raise InputError(
            f"{name} has more than {limits.CONFIG_DOTS} dots (CONFIG_DOTS)",
            "write keys as tables, not with dots",
            limits.hint("CONFIG_DOTS", data.count(b".")),
        )
    for number, part in enumerate(data.split(b"\n"), 1):
        if part.count(b".") > limits.CONFIG_LINE_DOTS:
            raise InputError(f"{name}: line {number} has more than {limits.CONFIG_LINE_DOTS} dots (CONFIG_LINE_DOTS)")


def read_bytes(path: str | os.PathLike[str], limit: int | str) -> bytes:
    """The bytes of a regular file of at most so many, or as many as a limit says; never blocks, also for a pipe. Raises
    InputError."""
    name, most = os.fspath(path), limit if isinstance(limit, int) else limits.value(limit)
    try:
        number = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"there is no file {name}", *near_file(name)) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise InputError(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        status = os.fstat(number)
        if not stat.S_ISREG(status.st_mode):
            what = "is a folder, not a file" if stat.S_ISDIR(status.st_mode) else "is not a regular file"
            raise InputError(f"{name} {what}")
        if status.st_size > most:
            raise InputError(
                f"{name} is too long: {status.st_size} bytes, at most {most} are read",
                *_raised(limit, status.st_size),
            )
        with open(number, "rb", closefd=False) as file:
            data = file.read(most + 1)
    except OSError as error:
        raise InputError(f"{name} cannot be read: {error.strerror}") from None
    finally:
        os.close(number)
    if len(data) > most:  # it grew, or the system does not know its size
        raise InputError(f"{name} is too long: at most {most} bytes are read")
    return data


def _raised(limit: int | str, needed: int) -> list[str]:
    """The hint for raising a named limit."""
    return [limits.hint(limit, needed)] if limit in limits.raisable() and isinstance(limit, str) else []


def _check_schema(document: Any, kind: DocumentKind, name: str, floats: bool) -> None:
    """Refuse a document that does not fit its schema; ``floats``: whether it contains floats."""
    wrong = first_error(kind.schema, document)
    if wrong is None and floats:
        wrong = first_error(kind.schema, _split(document))
    if wrong is None:
        return
    position, where = wrong.place, document
    for key in position:
        where = where[key]
    if (
        isinstance(document, dict)
        and "format" in document
        and (position in ([], ["format"]) or _is_other(document["format"], kind))
    ):
        _check_format(document["format"], kind, name)
    raise InputError(
        f"{name}: {_told(position)}{wrong.message.replace(VALUE, show(where))}", *filter(None, [wrong.hint])
    )


def key_path(path: Sequence[str | int]) -> str:
    """``["ranks", 3, "state"]`` -> ``ranks[3].state``."""
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
    return text


def as_run_error(error: InputError) -> RunError:
    """The same refusal for a document of a checkpoint, read by a run."""
    return RunError(error.message, *error.hints)


def _told(path: Sequence[str | int]) -> str:
    """The path of a key as the beginning of a message."""
    shown = [key if isinstance(key, int) or key.isidentifier() else show(key) for key in path]
    return f"{key_path(shown)}: " if path else ""


def _is_other(format_text: Any, kind: DocumentKind) -> bool:
    """Return whether a format is another version of the kind's."""
    return isinstance(format_text, str) and format_text.startswith(f"gopt-{kind.schema}/")


def _check_format(format_text: Any, kind: DocumentKind, name: str) -> None:
    wanted = f"gopt-{kind.schema}/{kind.version}"
    if isinstance(format_text, str) and format_text != wanted and _FORMATS.match(format_text):
        again = "another version of gopt wrote it: write the folder again with this one"
        hint = again if format_text.startswith(f"gopt-{kind.schema}/") else "it is another file"
        raise InputError(f"{name} is not {kind.what} (format {wanted}): its format is {show(format_text)}", hint)


def _unique(name: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys: set[str] = set()
        for key, _ in pairs:
            if key in keys:
                raise InputError(f"{name}: the key {show(key)} occurs twice in one table")
            keys.add(key)
    return result


def _number(large: list[float], text: str) -> float:
    value = float(text)
    if not large:
        large.append(value)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def _constant(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")


def _walk(document: Any) -> Iterator[tuple[list[str | int], Any]]:
    """Every value with the path of its key."""
    stack: list[tuple[list[str | int], Any]] = [([], document)]
    while stack:
        position, value = stack.pop()
        yield position, value
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        stack += [([*position, key], item) for key, item in items]


def _check_text(document: Any, name: str) -> None:
    for position, value in _walk(document):
        keys = value if isinstance(value, dict) else [value] if isinstance(value, str) else []
        for text in keys:
            try:
                text.encode()
            except UnicodeEncodeError:
                raise InputError(f"{name}: {_told(position)}{show(text)} is an unpaired surrogate") from None


def _check_plain(document: Any, name: str) -> None:
    """Refuse TOML values unknown to JSON, and apply the limits checked for JSON before parsing."""
    for position, value in _walk(document):
        if len(position) > limits.DOCUMENT_DEPTH:
            raise InputError(f"{name} is nested more than {limits.DOCUMENT_DEPTH} levels deep")
        if not isinstance(value, dict | list | str | bool | int | float):
            raise InputError(f"{name}: {_told(position)}a date or a time is not allowed here")
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"{name}: {_told(position)}{value} is not allowed here")
        if isinstance(value, int) and abs(value) >= limits.ELEMENTS:
            raise InputError(f"{name}: {_told(position)}a number of more than 63 bits")


def _split(part: Any) -> Any:
    """A copy without whole floats: a schema takes 4.0 for an integer, unlike readers."""
    if isinstance(part, dict):
        return {key: _split(item) for key, item in part.items()}
    if isinstance(part, list):
        return [_split(item) for item in part]
    if isinstance(part, float) and part.is_integer():
        return 0.5 if 0 <= part <= 1 else math.copysign(1.5, part)
    return part


def safe_name(text: str) -> bool:
    """Return whether a text is the name of a file without a path."""
    return bool(text) and text not in (".", "..") and not set(text) & set("/\\\0") and len(text.encode()) <= 255
