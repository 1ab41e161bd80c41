"""Every command, in every form of its output, with a stdout or a stderr that takes nothing.

``python tests/system/streams.py [all|some|launched]``. A shot is right where stdout that takes nothing is an
error (5) with one line on stderr, unless nothing was to be printed; where a pipe that nobody reads and a stderr that
takes nothing change neither the exit code nor what the other stream gets; and where no traceback is printed.
Commands run in forks of one process that has everything imported; those that start processes run as they are.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import every
from gopt.cli.main import main as command
from gopt.cli.start import entry

UNFLUSHED = 120
"""Exit code of Python where it cannot write what is left."""
LIMIT = 60
"""Seconds that no command takes."""
_VARIES = re.compile(rb"[0-9.e+-]+|[^\x00-\x7f]+|\s+")
"""What differs from run to run: times, sparklines, and the widths of columns."""


_CHANCE = re.compile(rb"gopt: note: updates by which pushes were late:.*\n")
"""What trainers without rounds may say, or not."""


def _none() -> int:
    return -1


def _full() -> int:
    return os.open("/dev/full", os.O_WRONLY)


def _unread() -> int:
    read, write = os.pipe()
    os.close(read)
    return write


def _ended() -> int:
    """A terminal that is gone."""
    main, end = os.openpty()
    os.close(main)
    return end


ENDS: dict[str, Callable[[], int]] = {"full": _full, "closed": _none, "unread": _unread, "gone": _ended}
"""Where output goes: a full disk, nowhere (``>&-``), a pipe that nobody reads, a terminal that is gone."""


@dataclass(frozen=True)
class Ended:
    """How a command ended, and what it printed."""

    code: int
    out: bytes
    err: bytes


def run(
    words: Sequence[str], home: Path, end: str = "", streams: Sequence[int] = (),
    before: Callable[[], object] = lambda: None,
) -> Ended:  # fmt: skip
    """A command whose ``streams`` are replaced by one of ``ENDS``; in a fork of this process, ``before`` it there."""
    kept = [os.open(tempfile.gettempdir(), os.O_TMPFILE | os.O_RDWR) for _ in range(2)]
    child = os.fork()
    if not child:
        signal.alarm(LIMIT)
        os._exit(_live(words, home, kept, end, streams, before))
    _, status = os.waitpid(child, 0)
    out, err = (os.pread(number, 1 << 24, 0) for number in kept)
    for number in kept:
        os.close(number)
    return Ended(os.waitstatus_to_exitcode(status), out, err)


def _live(
    words: Sequence[str], home: Path, kept: Sequence[int], end: str, streams: Sequence[int],
    before: Callable[[], object],
) -> int:  # fmt: skip
    """Become the command; returns its exit code, as its interpreter would."""
    os.chdir(home)
    for stream, number in enumerate(kept, 1):
        os.dup2(number, stream)
    os.closerange(3, 256)
    for stream in streams:
        number = ENDS[end]()
        if number < 0:
            os.close(stream)
        else:
            os.dup2(number, stream)
            os.close(number)
    for stream, name, buffering in ((1, "stdout", -1), (2, "stderr", 1)):  # as Python makes them
        shut = stream in streams and end == "closed"
        text = None if shut else open(stream, "w", buffering, closefd=False, errors="backslashreplace")  # noqa: SIM115
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", getattr(sys, name))
    sys.argv = ["gopt", *words]
    try:
        before()
    except BaseException:  # no fault of the command
        os._exit(99)
    if _starts(words):
        os.execv(sys.executable, [sys.executable, "-P", "-m", "gopt.cli", *words])
    try:
        entry()
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
        code = 1
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return UNFLUSHED
    return code if isinstance(code, int) else 1


def _starts(words: Sequence[str]) -> bool:
    return "--launch" in words or "--engine" in words


def judge(usual: Ended, now: Ended, end: str, streams: Sequence[int]) -> list[str]:
    """What is wrong."""
    wrong = []
    if b"Traceback" in now.err or b"Exception ignored" in now.err or b"defect" in now.err or now.code == 70:
        wrong.append("a traceback")
    lost = 1 in streams and end != "unread" and bool(usual.out)
    if now.code != (5 if lost and usual.code in (0, 1, 4) else usual.code):
        wrong.append(f"exit code {now.code}")
    if 2 not in streams:
        errors = now.err.count(b"gopt: error: ") - usual.err.count(b"gopt: error: ")
        if errors != lost or (not lost and _same(now.err) != _same(usual.err)):
            wrong.append(f"stderr has {now.err[-300:]!r}")
    if 1 not in streams and _same(now.out) != _same(usual.out):
        wrong.append(f"stdout has {now.out[-300:]!r} instead of {usual.out[-300:]!r}")
    return wrong


def _same(text: bytes) -> bytes:
    return _VARIES.sub(b" ", _CHANCE.sub(b"", text))


SHOTS = tuple((end, streams) for end in ENDS for streams in ((1,), (2,), (1, 2)))
"""Every end at every stream."""


def shots(words: Sequence[str], home: Path, chosen: Sequence[tuple[str, Sequence[int]]] = SHOTS) -> list[str]:
    """What was wrong after each of the shots."""
    usual, wrong = run(words, home), []
    for end, streams in chosen:
        found = judge(usual, run(words, home, end, streams), end, streams)
        wrong += [f"gopt {' '.join(words)}: {end} {streams}: {each}" for each in found]
    return wrong


def main(kind: str = "all") -> int:
    """``all`` shots at all forms; ``some``: one at one form of a third of the commands; those that are ``launched``."""
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.modules["llvmlite"] = None  # type: ignore[assignment]
    made, found, listed = 0, [f"not in the table: {name}" for name in sorted(every.missing())], list(every.forms())
    if kind == "some":
        listed = every.one_form_each()[::3]
    if kind == "launched":
        listed = [text.split() for text in every.LAUNCHED.values()]
    home = Path(tempfile.mkdtemp(prefix="gopt.streams."))
    try:
        warm([] if kind == "launched" else listed, home)
        for turn, words in enumerate(listed):
            chosen = SHOTS[turn % len(SHOTS) :][:1] if kind == "some" else SHOTS
            found += shots(words, home, chosen)
            made += len(chosen)
    finally:
        shutil.rmtree(home)
    print(json.dumps({"commands": len(listed), "shots": made, "broken": found}))
    return 1 if found else 0


def warm(commands: Sequence[Sequence[str]], home: Path) -> None:
    """Put into ``home`` what commands read, and import what they import; all runs in a fork, for the threads of a
    library would be missed by later ones."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.chdir(home)
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        every.prepare(home)
        for words in commands:
            command(list(words))
        os.write(write, "\n".join(sys.modules).encode()[: 1 << 20])
        os._exit(0)
    os.close(write)
    with open(read, encoding="utf-8") as file:
        names = file.read().split("\n")
    os.waitpid(child, 0)
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
