"""How much a command prints: one setting of the process, read where something is printed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import click


class Verbosity(IntEnum):
    """How much a command prints beside the output of ``--json``, ``--text`` and ``--explain``."""

    QUIET = 0
    """Errors alone."""
    NORMAL = 1
    """Results, notes and progress."""
    VERBOSE = 2
    """Each phase with its seconds, and warnings of libraries, too."""


class _Setting:
    value = Verbosity.NORMAL


def verbosity() -> Verbosity:
    """The setting of the command that runs."""
    return _Setting.value


def set_verbosity(value: Verbosity) -> None:
    """Set it until ``restored`` ends."""
    _Setting.value = value


@contextmanager
def restored() -> Iterator[None]:
    """Give the setting its default in the block and the former value afterwards: tests run many commands."""
    before, _Setting.value = _Setting.value, Verbosity.NORMAL
    try:
        yield
    finally:
        _Setting.value = before


def verbosity_arguments() -> list[str]:
    """The options giving another process the same setting."""
    return {Verbosity.QUIET: ["--quiet"], Verbosity.VERBOSE: ["--verbose"]}.get(verbosity(), [])


def with_verbosity(command: click.Command) -> click.Command:
    """Add ``-q`` and ``-v`` to a command, or to a group and all commands, if missing."""
    for inner in command.commands.values() if isinstance(command, click.Group) else ():
        with_verbosity(inner)
    if not any("--quiet" in param.opts for param in command.params):
        command.params += [
            _option("-q", "--quiet", Verbosity.QUIET, "Print errors only."),
            _option("-v", "--verbose", Verbosity.VERBOSE, "Print each phase with its seconds."),
        ]
    return command


def _option(short: str, long: str, value: Verbosity, text: str) -> click.Option:
    def apply(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
        if wanted:
            if verbosity() not in (Verbosity.NORMAL, value):
                raise click.UsageError("--quiet cannot be combined with --verbose: take one of them", ctx)
            set_verbosity(value)

    return click.Option([short, long], is_flag=True, expose_value=False, callback=apply, help=text)
