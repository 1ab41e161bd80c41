"""A command line in parts: names of inputs and outputs, parts left out of a reproducer, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gopt.errors import InputError
from gopt.text.sanitize import show

if TYPE_CHECKING:
    from gopt.offline.reproducer.record import Argument, Reproducer

INPUTS = {"model", "path", "paths", "folder", "a", "b", "eval"}
"""Arguments that name a model or a folder."""
CONFIGURATIONS = {"config", "relation", "server_map"}
OUTPUTS = {
    "output", "certificate", "print_dir", "checkpoint", "log", "trace", "state_dict", "dcp", "record", "tensorboard",
}  # fmt: skip
LEFT_OUT = {"check", "state", "data", "replay", "eval_data", "calibrate"}
"""Options whose files are values or code of the user: they are in no reproducer."""
NAMES_OR_FILES = {"schedule", "device"}
"""Options with a known name, which a reproducer has, or a file of the user."""
COMMANDS = ("shard", "split", "prove", "verify", "run", "plan", "inspect", "explain", "diff", "merge", "reshard")
"""Commands that a reproducer may hold: they read models and folders, and run no code of the user."""
_OWN = {"reproducer", "reproducer_values", "quiet", "verbose"}


class Recorder:
    """The arguments of a command as parts, and the inputs they name, in order."""

    def __init__(self) -> None:
        self.inputs: list[tuple[Path, bool]] = []
        """The path of each input, and whether it is a configuration."""
        self.arguments: list[Argument] = []
        self.left_out: list[str] = []

    def add(self, context: click.Context) -> None:
        """Take what stands on the command line of a context; defaults are left to the command."""
        from gopt.offline.reproducer.record import Argument

        for param in context.command.params:
            name, value = param.name or "", context.params.get(param.name or "")
            is_typed = context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
            if name in _OWN or value is None or not is_typed:
                continue
            option = param.opts[0] if isinstance(param, click.Option) else ""
            if name in LEFT_OUT or (name in NAMES_OR_FILES and Path(str(value)).is_file()):
                self.left_out.append(option)
            elif getattr(param, "is_flag", False):
                self.arguments += [Argument(option=option)] if value else []
            else:
                values = value if isinstance(value, tuple) else (value,)
                self.arguments += [self._argument(name, option, value) for value in values]

    def _argument(self, name: str, option: str, value: Any) -> Argument:
        from gopt.offline.reproducer.record import Argument

        if name in INPUTS | CONFIGURATIONS:
            self.inputs.append((Path(value), name in CONFIGURATIONS))
            return Argument(option=option, input=len(self.inputs) - 1)
        if name in OUTPUTS:
            return Argument(option=option, output=_last(value))
        return Argument(option=option, text=str(value))


def _last(path: str) -> str:
    return Path(path).absolute().name or "output"


def rebuilt(
    record: Reproducer, find: Callable[[str], click.Command], inputs: Callable[[int], Path], output: Path
) -> list[str]:
    """The command line of a reproducer; ``find`` gives a command, ``inputs`` a path, outputs lie in ``output``.

    Raises InputError for a command or option no reproducer has: such a file may come from anybody.
    """
    if record.command not in COMMANDS:
        raise InputError(f"a reproducer has no command {show(record.command)}")
    params = list(_options(find(record.command)))
    words = [record.command]
    for argument in record.arguments:
        words += _words(argument, params, inputs, output)
    return words


def _options(command: click.Command) -> Iterator[tuple[str, str, bool]]:
    """Option, name and whether it is a flag, of every parameter; an argument has no option."""
    for param in command.params:
        if isinstance(param, click.Option):
            yield param.opts[0], param.name or "", bool(param.is_flag)
        else:
            yield "", param.name or "", False


def _words(
    argument: Argument, params: Sequence[tuple[str, str, bool]], inputs: Callable[[int], Path], output: Path
) -> list[str]:
    named = argument.input is not None
    target = next(
        (
            (name, flag) for option, name, flag in params
            if option == argument.option and (option or (name in INPUTS) is named)
        ),
        None,
    )  # fmt: skip
    shown = show(argument.option or "an argument")
    if target is None or target[0] in LEFT_OUT | _OWN:
        raise InputError(f"a reproducer has no {shown} for this command")
    name, flag = target
    form = (argument.text is not None, argument.input is not None, argument.output is not None)
    wanted = (False, name in INPUTS | CONFIGURATIONS, name in OUTPUTS)
    if form != ((not any(wanted) and not flag), *wanted[1:]):
        raise InputError(f"{shown} has no value of its kind")
    option = [argument.option] if argument.option else []
    if argument.input is not None:
        return [*option, str(inputs(argument.input))]
    if argument.output is not None:
        return [*option, str(output / argument.output)]
    if argument.text is None:
        return option
    if not argument.option and argument.text.startswith("-"):
        raise InputError(f"{show(argument.text)} is an option, not a name")
    return [f"{argument.option}={argument.text}"] if argument.option.startswith("--") else [*option, argument.text]
