"""``-`` as a model is standard input; ``-o -`` prints what would be written as text on standard output."""

from __future__ import annotations

import functools
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from gopt.errors import OptionError

from .verbosity import Verbosity, set_verbosity

STREAM = "-"
_MODELS = {"model", "path", "a", "b"}
"""Arguments that name a model."""
_PRINTED = "gopt.printed"
"""Key of a context: the path of what is printed at the end."""


def with_standard_streams(command: click.Command) -> click.Command:
    """Let a command read a model from standard input, and a command writing a model or ranks print the text."""
    for param in command.params:
        if isinstance(param, click.Argument) and param.name in _MODELS and param.nargs == 1:
            _before(param, _spooled)
        elif isinstance(param, click.Option) and param.name == "output" and command.callback is not None:
            _before(param, _printed_later)
            command.callback = _with_text(command.callback)
    return command


def _before(param: click.Parameter, convert: Callable[[click.Context, Any], Any]) -> None:
    """Let a function change the value of a parameter before the parameter's own callback."""
    then = param.callback

    def call(context: click.Context, of: click.Parameter, value: Any) -> Any:
        replaced = convert(context, value) if value == STREAM else value
        return replaced if then is None else then(context, of, replaced)

    param.callback = call


def _folder(context: click.Context) -> Path:
    """A folder that is removed when the command has ended."""
    return Path(context.with_resource(tempfile.TemporaryDirectory(prefix="gopt-stream-")))


def _spooled(context: click.Context, _: Any) -> str:
    """The path of a file with what standard input holds: models are read more than once, and in parts."""
    if sys.stdin.isatty():
        raise OptionError("- reads a model from standard input, which is a terminal", "send a model: cat M | gopt … -")
    path = _folder(context) / "stdin.onnx"
    with path.open("wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
    return str(path)


def _printed_later(context: click.Context, _: Any) -> str:
    path = _folder(context) / "stdout.onnx"
    context.meta[_PRINTED] = path
    return str(path)


def _with_text(callback: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(callback)
    def call(*args: Any, **named: Any) -> Any:
        path = click.get_current_context().meta.get(_PRINTED)
        if path is None:
            return callback(*args, **named)
        if named.get("as_json"):
            raise OptionError("--json cannot be combined with -o -: both print on standard output", "take one of them")
        set_verbosity(Verbosity.QUIET)  # tables would stand in front of the text
        code = callback(*args, **named)
        if not code and path.exists():
            from gopt.analysis.role_map import RoleMap

            from .inspect import print_text_of

            print_text_of(path, RoleMap())
        return code

    return call
