"""``--unchecked``: take files as they are, of all commands reading folders or checkpoints."""

from __future__ import annotations

import click

COMMANDS = ("diff", "explain", "inspect", "merge", "prove", "report", "reshard", "run", "verify")


def with_unchecked(command: click.Command) -> click.Command:
    """Add ``--unchecked`` to a command reading folders."""
    if command.name in COMMANDS and not any("--unchecked" in param.opts for param in command.params):
        text = "Read files as they are, without comparing them with their digests."
        option = click.Option(["--unchecked"], is_flag=True, expose_value=False, callback=_set, help=text)
        command.params.append(option)
    return command


def _set(context: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        from gopt.artifact.integrity import unchecked

        context.with_resource(unchecked())


def unchecked_arguments() -> list[str]:
    """The option for another process that is to do the same."""
    from gopt.artifact.integrity import is_unchecked

    return ["--unchecked"] if is_unchecked() else []
