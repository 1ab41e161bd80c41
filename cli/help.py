"""``gopt help``: the help of a command, and short pages on topics."""

from __future__ import annotations

from pathlib import Path

import click

from .terminal import print_text

TOPICS = Path(__file__).with_name("topics")
"""The folder of the pages, a text each; they are in the wheel."""


def topics() -> list[str]:
    """The names of the pages."""
    return sorted(path.stem for path in TOPICS.glob("*.txt"))


@click.command("help")
@click.argument("name", required=False, metavar="[COMMAND|TOPIC]")
@click.pass_context
def command(context: click.Context, name: str | None) -> None:
    """Show what gopt does, what a command does, with its options and an example, or a short page on a topic.

    Topics: errors, mesh, optimizers, roles, steps.

    \b
    Example:
      gopt help
      gopt help shard
      gopt help roles
    """
    from .main import check_command, group

    top = context.find_root()
    if name is None:
        click.echo(top.get_help())
        click.echo(f"\nTopics of gopt help: {', '.join(topics())}")
        return
    if name in topics():
        print_text((TOPICS / f"{name}.txt").read_text(encoding="utf-8"), newline=False)
        return
    check_command(name, top, topics())
    subcommand = group.get_command(top, name)
    assert subcommand is not None  # every name in COMMANDS has a module
    click.echo(subcommand.get_help(click.Context(subcommand, parent=top, info_name=name)))
