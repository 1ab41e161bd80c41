"""Refuses empty texts as values of arguments and options: a path of no letters would be the current folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click
from click.core import ParameterSource

from gopt.errors import OptionError


@dataclass(frozen=True, slots=True)
class _Refusing:
    """The callback of a parameter, behind the check of its value."""

    then: Callable[[click.Context, click.Parameter, Any], Any] | None

    def __call__(self, context: click.Context, param: click.Parameter, value: Any) -> Any:
        is_set = context.get_parameter_source(param.name or "") is not ParameterSource.DEFAULT
        if is_set and "" in (value if isinstance(value, tuple) else (value,)):
            name = param.opts[-1] if isinstance(param, click.Option) else param.make_metavar(context)
            raise OptionError(f"{name.strip('[]')} is empty", "is a variable of the shell not set?")
        return value if self.then is None else self.then(context, param, value)


def without_empty_values(command: click.Command) -> click.Command:
    """Let a command, or all commands of a group, refuse an empty text where they take a name or a path."""
    for inner in command.commands.values() if isinstance(command, click.Group) else ():
        without_empty_values(inner)
    for param in command.params:
        if isinstance(param.type, click.types.StringParamType | click.Path) and not isinstance(
            param.callback, _Refusing
        ):
            param.callback = _Refusing(param.callback)
    return command
