"""The command line. The only place where an error becomes an exit code (contract section 3)."""

from __future__ import annotations

import errno
import functools
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from importlib import import_module
from itertools import pairwise
from typing import Any

import click

from gopt import limits
from gopt.errors import GoptError, OptionError, StoppedError
from gopt.text.sanitize import show
from gopt.text.suggestions import did_you_mean

from .annotations import code_of, is_asked, print_annotation
from .elsewhere import meant_by
from .empty_values import without_empty_values
from .reproducer_option import recording, save_failure, tell_failure, with_reproducer
from .standard_streams import with_standard_streams
from .terminal import flush_stdout, print_error, quiet_libraries
from .unchecked_option import with_unchecked
from .verbosity import restored, with_verbosity

COMMANDS = {
    "export": "Make a training step from a PyTorch model, checked against eager PyTorch.",
    "init": "Write a file with a factory to fill in, for gopt export.",
    "import": "Make a training step from a folder of ONNX Runtime's training artifacts.",
    "derive": "Make a training step from a forward ONNX model, with checked gradients.",
    "shard": "Write one runnable graph per rank, with a manifest and a report.",
    "split": "Write graphs of trainers and servers: a parameter server.",
    "prove": "Prove all ranks equal to the source, for all values, without running them.",
    "verify": "Run the source and all ranks and compare every state, loss and metric.",
    "run": "Train with the ranks of an output folder: threads, or MPI processes.",
    "plan": "Compare every stage, partition and bucket size without writing anything.",
    "inspect": "Show what a model or an output folder is.",
    "explain": "Show what became of one operator, state, parameter or bucket of an output folder.",
    "report": "Write one HTML page of an output folder: memory, traffic, timeline, operators, proof.",
    "diff": "Compare two models or two output folders by structure.",
    "golden": "Keep what gopt makes of models as short texts, and check them in CI.",
    "merge": "Put ranks or a checkpoint back together as one model.",
    "load-state": "Put values of a state dict into a training step.",
    "seal": "Take the files of a folder as they are: write their digests anew.",
    "reshard": "Make other ranks from the values that ranks or a checkpoint hold.",
    "reproduce": "Run the command of a reproducer again, and say whether it fails in the same way.",
    "reduce": "Make a smaller model on which a command fails in the same way.",
    "passes": "List every pass with its options and defaults.",
    "demo": "Write a sample step and data: a first step to shard, verify and train.",
    "doctor": "Show versions and what is missing: MPI, GPUs, PyTorch, and how to get it.",
    "help": "Show the help of a command, or a page on a topic.",
}


@functools.cache
def _command(name: str) -> click.Command:
    """A command with the common options, made once because each option wraps the command."""
    command = import_module(f"gopt.cli.{name.replace('-', '_')}").command
    assert isinstance(command, click.Command)
    return with_standard_streams(without_empty_values(with_unchecked(with_reproducer(with_verbosity(command)))))


class Commands(click.Group):
    """Commands imported on call, so help is quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        return _command(name) if name in COMMANDS else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and not args[0].startswith("-"):
            check_command(args[0], ctx)
        return super().resolve_command(ctx, args)


def check_command(name: str, ctx: click.Context, names: Sequence[str] = ()) -> None:
    """Raise UsageError, with the nearest name, where there is no such command. ``names``: other possible names."""
    if name in COMMANDS:
        return
    hint = did_you_mean(name, [*COMMANDS, *names]) or f"there are {', '.join([*COMMANDS, *names])}"
    raise click.UsageError(f"no command is called {name!r}: {hint}", ctx)


def _version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from gopt import __version__

        click.echo(f"gopt {__version__}")
        ctx.exit()


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version.")
@click.option("--debug", is_flag=True, help="Show a traceback with an error.")
def group(debug: bool) -> None:
    """Shard a training step on disk, one graph per rank, and prove the ranks equal to it.

    \b
    Example:
      gopt shard step.onnx --ranks 8
      gopt verify step.ranks
    """


without_empty_values(with_reproducer(with_verbosity(group)))


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    with restored(), recording():
        return save_failure(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: list[str]) -> int:
    """As ``main``, within ``recording``, which then knows how the command has failed."""
    debug = "--debug" in arguments
    try:
        with quiet_libraries() if not debug else nullcontext():
            if limits.WRONG:
                raise OptionError(limits.WRONG, f"write {limits.VARIABLE}=PARTS=4000000,RANKS=100000")
            result = group.main(arguments, prog_name="gopt", standalone_mode=False)
        if (error := flush_stdout()) is not None:
            return _unwritten(error)
        return result if isinstance(result, int) else 0
    except click.exceptions.Abort:
        return _fail("interrupted", (), 130)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else "", err=True)
        return 2
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        message, hints = _of_usage(error, arguments)
        tell_failure(click.UsageError(message), 2)
        help_of = context.command_path if context is not None else "gopt"
        if is_asked(arguments):
            print_annotation(message, code_of(error))
        return _fail(message, (*hints, f"see {help_of} --help"), 2)
    except KeyboardInterrupt:
        return _fail("interrupted", (), 130)
    except MemoryError as error:
        if not debug:  # with the frames goes what took the memory: there must be some to say so
            error.__traceback__ = error.__context__ = error.__cause__ = None
        return explain_error(error, debug)
    except Exception as error:
        if isinstance(error, OSError) and (broken := flush_stdout()) is not None:
            return _unwritten(broken)
        if is_asked(arguments):
            print_annotation("\n".join([str(error), *getattr(error, "hints", ())]), code_of(error))
        return explain_error(error, debug)
    except StoppedError as error:
        return explain_error(error, debug)


def _of_usage(error: click.ClickException, arguments: list[str]) -> tuple[str, tuple[str, ...]]:
    """The message and the hints for an error in the arguments; of names like an unknown option's, the nearest."""
    if isinstance(error, click.NoSuchOption):
        meant = meant_by(error.option_name, error.ctx.command if error.ctx else None, error.possibilities or ())
        return f"there is no option {error.option_name}", (meant,) if meant else ()
    message = error.format_message()
    if isinstance(error, click.UsageError) and error.ctx is not None and message.startswith("Got unexpected extra"):
        return message, tuple(
            f"{before} takes no value"
            for before, after in pairwise(arguments)
            if before in _switches(error.ctx.command) and not after.startswith("-") and f"({after}" in message
        )
    return message, ()


def _switches(command: click.Command) -> set[str]:
    """The names of options taking no value."""
    options = (param for param in command.params if isinstance(param, click.Option) and (param.is_flag or param.count))
    return {name for option in options for name in (*option.opts, *option.secondary_opts)}


def _unwritten(error: OSError) -> int:
    return _fail(f"cannot write the output: stdout: {error.strerror}", (), 5)


def exit_code(error: Exception | StoppedError) -> int:
    """The exit code of an error."""
    if isinstance(error, OSError) and error.errno is not None:
        return 3 if error.errno == errno.ENAMETOOLONG or _unreadable(error) else 5
    if isinstance(error, GoptError | StoppedError):
        return error.exit_code
    return 5 if isinstance(error, MemoryError) else 70


def _unreadable(error: OSError) -> bool:
    """Return whether an error concerns reading a file or folder; errors of writing explain themselves."""
    if error.errno != errno.EACCES or not isinstance(error.filename, str | bytes):
        return False
    try:
        os.stat(error.filename)
    except OSError as stopped:
        return stopped.errno == errno.EACCES
    return not os.access(error.filename, os.R_OK)


def explain_error(error: Exception | StoppedError, debug: bool) -> int:
    """Print on stderr why a command failed; returns its exit code."""
    tell_failure(error, exit_code(error))
    if debug:
        import traceback

        traceback.print_exc()
    if isinstance(error, GoptError | StoppedError):
        return _fail(error.message, error.hints, error.exit_code)
    if isinstance(error, MemoryError):
        return _fail("out of memory", (), exit_code(error))
    if isinstance(error, OSError) and error.errno is not None:
        return _fail(_of_system(error), (), exit_code(error))
    return _fail(
        f"a defect of gopt: {type(error).__name__}: {error}",
        ("please report it; gopt --debug COMMAND shows the traceback",), 70,
    )  # fmt: skip


def _of_system(error: OSError) -> str:
    """The system's message and the file it is about."""
    why = error.strerror or str(error)
    paths = [show(os.fsdecode(path)) for path in (error.filename, error.filename2) if isinstance(path, str | bytes)]
    if _unreadable(error):
        return f"{paths[0]} cannot be read: {why}"
    if not paths and error.errno == errno.ENOENT:
        return "the folder that this command runs in is gone"
    if not paths and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EBADF):
        return f"cannot write the output: {why}"
    return f"{' -> '.join(paths)}: {why}" if paths else f"the system refused: {why}"


def _fail(message: str, hints: tuple[str, ...], code: int) -> int:
    """One line, then hints; always on stderr."""
    print_error(message, hints)
    return code


def leave(code: int) -> None:
    """End this process; at once where ranks are left behind that hang or compute: the interpreter cannot end around
    native code running in a thread, and would abort."""
    import threading

    if not any(thread.name.startswith("rank ") for thread in threading.enumerate()):
        sys.exit(code)
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
