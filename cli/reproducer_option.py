"""``--reproducer FILE``: the remains of a failing command, so that others can repeat the failure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gopt.text.sanitize import line

from .command_line import COMMANDS, Recorder

if TYPE_CHECKING:
    from gopt.offline.reproducer.failure import Failure


@dataclass(slots=True)
class _Run:
    """The running command: requested reproducer, context, and failure."""

    path: Path | None = None
    values: bool = False
    context: click.Context | None = None
    error: tuple[BaseException, int] | None = None
    """The error that ended it, and its exit code."""
    message: str = ""


class _Setting:
    run = _Run()


@contextmanager
def recording() -> Iterator[None]:
    """Begin without a request, and restore the state before: tests run many commands, also nested."""
    before, _Setting.run = _Setting.run, _Run()
    try:
        yield
    finally:
        _Setting.run = before


def with_reproducer(command: click.Command) -> click.Command:
    """Add ``--reproducer`` and ``--reproducer-values`` to a command or group, if missing."""
    if command.name in {*COMMANDS, "group"} and not any("--reproducer" in param.opts for param in command.params):
        command.params += [
            click.Option(
                ["--reproducer"], metavar="FILE", expose_value=False, callback=_path,
                help="Where the command fails, write the graph without values, the options and the failure into FILE.",
            ),
            click.Option(
                ["--reproducer-values"], is_flag=True, expose_value=False, callback=_values,
                help="Keep stored values in the reproducer, too.",
            ),
        ]  # fmt: skip
    return command


def _path(context: click.Context, param: click.Parameter, value: str | None) -> None:
    _Setting.run.context = context
    if value is not None:
        _Setting.run.path = Path(value)


def _values(context: click.Context, param: click.Parameter, value: bool) -> None:
    _Setting.run.values = _Setting.run.values or value


def tell_failure(error: BaseException, code: int) -> None:
    """Note the error ending the command with ``code``."""
    _Setting.run.error = error, code


def tell_result(message: str) -> None:
    """Note in one line why a command ending normally ends with another code than 0."""
    _Setting.run.message = message


def failure(code: int) -> Failure:
    """How the command has failed that ended with ``code``."""
    from gopt.offline.reproducer.failure import Failure, failure_of

    error = _Setting.run.error
    return Failure(code, "result", _Setting.run.message) if error is None else failure_of(*error)


def save_failure(code: int) -> int:
    """Write the requested reproducer of a failed command; never raises, and reports problems.

    Returns the exit code: of the command, or of a signal during the write.
    """
    run = _Setting.run
    if code == 0 or code >= 128:
        return code
    if run.path is None:
        if run.values:
            _note("--reproducer-values needs --reproducer FILE: no reproducer was written")
        return code
    from gopt.errors import StoppedError
    from gopt.system.signals import raise_on_signals

    try:
        with raise_on_signals():
            _save(run, run.path, failure(code))
    except (KeyboardInterrupt, StoppedError) as error:
        _note("interrupted while the reproducer was written")
        return error.exit_code if isinstance(error, StoppedError) else 130
    except Exception as error:  # the command's own failure and exit code stand, whatever happens here
        why = getattr(error, "message", None) or getattr(error, "strerror", None) or error or type(error).__name__
        hints = "".join(f": {hint}" for hint in getattr(error, "hints", ())[:1])
        _note(f"the reproducer could not be written: {why}{hints}")
    else:
        _note(f"the reproducer is {run.path}: gopt reproduce {run.path} runs the command again")
    return code


def _note(text: str) -> None:
    """Also with --quiet: it was asked for."""
    click.echo(f"gopt: note: {line(text)}", err=True)


def _save(run: _Run, path: Path, failed: Failure) -> None:
    from gopt.errors import OptionError
    from gopt.offline.reproducer import archive, inputs
    from gopt.offline.reproducer.record import FailureEntry, Input, Reproducer, versions

    context = run.context
    if context is None or context.command.name not in COMMANDS or failed.kind == "UsageError":
        raise OptionError("the command line itself was refused")
    recorder = Recorder()
    recorder.add(context)
    files, entries, message = [], [], failed.message
    for source, configuration in recorder.inputs:
        kind = inputs.kind_of(source, configuration)
        contents = inputs.contents(source, kind, run.values)
        files.append(contents)
        name = source.absolute().name
        entries.append(Input(name=name, kind=kind, files={content.name: content.nbytes for content in contents}))
        message = message.replace(str(source), name)
    record = Reproducer(
        command=context.command.name, arguments=tuple(recorder.arguments), inputs=tuple(entries), values=run.values,
        left_out=tuple(recorder.left_out), versions=versions(),
        failure=FailureEntry(exit_code=failed.exit_code, kind=failed.kind, message=message, where=failed.where),
    )  # fmt: skip
    archive.write(path, record, files)
