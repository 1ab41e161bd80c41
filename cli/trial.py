"""Runs a command in a separate process, and reports its failure: a crash or a hang ends this process alone."""

from __future__ import annotations

import functools
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from gopt.system.background import die_with_parent
from gopt.system.signals import wakened_by_signals

if TYPE_CHECKING:
    from gopt.offline.reproducer.failure import Failure

_ANSWER = 1 << 20
"""Bytes of an answer that are read at most."""
STDERR = "stderr.txt"


def run_commands(commands: Sequence[Sequence[str]], folder: Path, timeout: float) -> Failure | None:
    """Run commands of gopt one after the other, in a folder, until a failure; None without failure.

    Commands run in a fork of this process, which is quick; output is in ``stdout.txt`` and ``stderr.txt`` of the
    folder. After ``timeout`` seconds the process and the children are killed; the fork dies with this process.
    """
    from gopt.offline.reproducer.failure import Failure

    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    parent, child = os.getpid(), os.fork()
    if child == 0:
        os.close(reader)
        _in_child(commands, folder, writer, parent)
    os.close(writer)
    data = None
    try:
        data = _answer(reader, time.monotonic() + timeout)
    finally:
        if data is None:
            _kill(child)
        os.close(reader)
        status = os.waitpid(child, 0)[1]
    if data is None:
        return Failure(-1, "time-out")
    if not data:
        code = os.waitstatus_to_exitcode(status)
        return Failure(code, "signal" if code < 0 else "result", signal.Signals(-code).name if code < 0 else "")
    failure = json.loads(data)
    return None if failure is None else Failure(**failure)


def _kill(child: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)


def _answer(reader: int, end: float, most: int = _ANSWER) -> bytes | None:
    """The bytes written by the child until it closes its side, at most ``most``; None after a timeout. A signal ends
    the wait: its handler runs, and may raise."""
    data = b""
    with wakened_by_signals() as came:
        while (remaining := end - time.monotonic()) > 0:
            ready = select.select([reader, came], [], [], remaining)[0]
            if came in ready:
                os.read(came, _ANSWER)
            if reader in ready:
                block = os.read(reader, _ANSWER)
                if not block:
                    return data
                data = (data + block)[:most]
    return None


def _in_child(commands: Sequence[Sequence[str]], folder: Path, writer: int, parent: int) -> None:
    code = 70
    try:
        os.setsid()
        die_with_parent(parent)
        os.chdir(folder)
        for number, name in ((0, os.devnull), (1, "stdout.txt"), (2, STDERR)):
            opened = os.open(name, os.O_RDWR | (os.O_CREAT | os.O_TRUNC if number else 0), 0o600)
            os.dup2(opened, number)
            os.close(opened)
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - until the end
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        failure = _first_failure(commands)
        os.write(writer, json.dumps(None if failure is None else asdict(failure)).encode())
        sys.stdout.flush()
        sys.stderr.flush()
        code = 0
    finally:
        os._exit(code)


def _first_failure(commands: Sequence[Sequence[str]]) -> Failure | None:
    from dataclasses import replace

    from . import main, reproducer_option

    for index, command in enumerate(commands):
        with reproducer_option.recording():
            code = main.run(list(command))
            if code:
                return replace(reproducer_option.failure(code), command=index)
    return None


def run_program(words: Sequence[str], folder: Path, timeout: float) -> Failure | None:
    """Run a program other than gopt; its failure is the exit code and the first line on stderr."""
    from gopt.errors import OptionError
    from gopt.offline.reproducer.failure import Failure

    try:
        child = subprocess.Popen(
            words, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            start_new_session=True, preexec_fn=functools.partial(die_with_parent, os.getpid()),
        )  # fmt: skip
    except OSError as error:
        raise OptionError(
            f"{words[0]} cannot be run: {error.strerror}", "name a command of gopt or a program"
        ) from None
    assert child.stderr is not None
    end, output = time.monotonic() + timeout, None
    try:
        output = _answer(child.stderr.fileno(), end)
        if output is not None:
            child.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        output = None
    finally:
        if child.returncode is None:  # late, or a signal has come: a session of its own hears no signal
            _kill(child.pid)
        child.stderr.close()  # not read to its end: a process that left the session may hold it open
        child.wait()
    if output is None:
        return Failure(-1, "time-out")
    lines = output.decode("utf-8", "replace").splitlines()
    return Failure(child.returncode, "program", lines[0] if lines else "") if child.returncode else None
