"""Every line gopt prints goes through here or ``render``, which escape control characters."""

from __future__ import annotations

import codecs
import errno
import io
import json
import os
import re
import select
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import click

from gopt.errors import NoteWarning
from gopt.text.sanitize import clean, line

from .verbosity import Verbosity, verbosity

_WIDE = re.compile(r"[^\x00-\x7f]")
_ODD = re.compile(r"[^\x20-\x7e\n\u00a1-\u024f]")


class _Result(Protocol):
    def to_json(self) -> Any: ...


R = TypeVar("R", bound=_Result)


def print_error(message: str, hints: Sequence[str] = ()) -> None:
    """A line on stderr, and a line for each hint: lines of code keep indents."""
    click.echo(f"gopt: error: {line(message)}", err=True)
    for hint in hints:
        click.echo(f"  hint: {' ' * (len(hint) - len(hint.lstrip(' ')))}{line(hint)}", err=True)


def print_note(text: str) -> None:
    """A note: one line on stderr, unless ``--quiet`` is given."""
    if verbosity() > Verbosity.QUIET:
        click.echo(f"gopt: note: {line(text)}", err=True)


def print_text(text: str, *, newline: bool = True, error: bool = False) -> None:
    """A result of many lines."""
    click.echo(clean(text), nl=newline, err=error)


def print_json(record: Any) -> None:
    """A record as JSON on stdout."""
    print_json_text(safe_json(json.dumps(record, indent=1, ensure_ascii=False)))


def print_result(result: R, as_json: bool, render: Callable[..., object], *more: object) -> None:
    """A record as JSON, or as text by ``render``, with ``more``."""
    if as_json:
        print_json(result.to_json())
    else:
        render(result, *more)


def print_json_text(text: str) -> None:
    """JSON text on stdout, with JSON's own escapes where the terminal has no such characters."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        text = _WIDE.sub(lambda match: json.dumps(match[0])[1:-1], text)
    click.echo(text)


def open_streams() -> None:
    """Make the three streams of this process writable for text.

    Characters missing in a terminal's encoding are shown by ASCII signs or escapes. No file takes the number of a
    closed stream; writing to a closed stdout fails, as on a full disk. Text refused by stderr is lost, and changes
    neither a command's work nor the exit code.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number
    if sys.stdout is None:
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(_Closed()), "utf-8")
    elif isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout = _over(sys.stdout, _Stdout)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the end
    elif isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr = _over(sys.stderr, _Stderr)
    codecs.register_error(PLAIN, _plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=PLAIN)


PLAIN = "gopt.plain"
"""Error handler of streams: what a terminal's encoding has not is written in ASCII."""
_ASCII = {
    "…": "...", "×": "x", "→": "->", "–": "-", "—": "-", "·": ".", "≤": "<=", "≥": ">=",
    "Δ": "delta", "│": "|", "─": "-",
    **dict(zip("▁▂▃▄▅▆▇█", "__..--^^", strict=True)),
}  # fmt: skip


def _plain(error: UnicodeError) -> tuple[str | bytes, int]:
    """gopt's own signs by similar ASCII signs; other characters, such as in names, as escapes."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    signs = error.object[error.start : error.end]
    return "".join(_ASCII.get(sign) or _escape_sequence(sign) for sign in signs), error.end


def _escape_sequence(character: str) -> str:
    """The character as Python writes it in ASCII, such as \\u2026."""
    return character.encode("ascii", "backslashreplace").decode()


class _Waiting(io.FileIO):
    """Waits even if others made a pipe or a terminal nonblocking, so no output is lost."""

    def write(self, data: Any, /) -> int:
        while (written := super().write(data)) is None:
            select.select([], [self], [])
        return written


class _Stdout(_Waiting):
    """Drops output once the reader of a pipe is gone, as behind ``head``: a command keeps its exit code."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return memoryview(data).nbytes


class _Stderr(_Waiting):
    """Drops what cannot be written: no stream is left to say so on."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def _over(stream: io.TextIOWrapper, raw: type[_Waiting]) -> io.TextIOWrapper:
    """The same stream of this process, written to by ``raw``."""
    return io.TextIOWrapper(
        io.BufferedWriter(raw(stream.fileno(), "w", closefd=False)), stream.encoding,
        line_buffering=stream.line_buffering, write_through=stream.write_through,
    )  # fmt: skip


class _Closed(io.RawIOBase):
    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        raise OSError(errno.EBADF, "it is closed")


def flush_stdout() -> OSError | None:
    """Write what is left; the error where stdout takes nothing, and then nothing more is tried."""
    try:
        sys.stdout.flush()
    except OSError as error:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - else the interpreter's end tries again
        return error
    except ValueError:  # closed by the caller
        pass
    return None


def safe_json(text: str) -> str:
    """JSON text with control characters escaped: the same to every parser."""
    return text if text.isascii() else _ODD.sub(lambda match: _escaped(match[0]), text)


def _escaped(character: str) -> str:
    return character if character.isprintable() else json.dumps(character)[1:-1]


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Warnings of libraries, of no use to a user, are dropped; each warning of the user's functions is a note.

    Python's own switches (-W, PYTHONWARNINGS) turn this off."""
    if sys.warnoptions:
        yield
        return
    with warnings.catch_warnings():
        warnings.showwarning = _tell_warning
        yield


def _tell_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    if issubclass(category, NoteWarning):
        print_note(str(message))
    elif verbosity() is Verbosity.VERBOSE or not _of_library(category, filename):
        print_note(f"{Path(filename).name}, line {lineno}: {category.__name__}: {message}")


def _of_library(category: type[Warning], filename: str) -> bool:
    """Return whether a warning is not the user's. An open file is noticed wherever garbage is collected, and generated
    code has no file."""
    generated = filename.startswith("<")
    return generated or category is ResourceWarning or any(Path(filename).is_relative_to(path) for path in _libraries())


def _libraries() -> list[str]:
    import sysconfig

    folders = str(Path(__file__).parent), str(Path(sys.modules["gopt"].__file__ or "").parent)
    paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    packages = {name for name in sys.path if name.endswith(("site-packages", "dist-packages"))}
    return [*folders, *paths, *packages]
