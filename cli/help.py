"""``gopt help``: the help of a command."""

from __future__ import annotations

import click


@click.command("help")
@click.argument("name", required=False, metavar="[COMMAND]")
@click.pass_context
def command(context: click.Context, name: str | None) -> None:
    """Show what gopt does, or what a command does, with its options and an example.

    \b
    Example:
      gopt help
      gopt help shard
    """
    from .main import check_command, group

    top = context.find_root()
    if name is None:
        click.echo(top.get_help())
        return
    check_command(name, top)
    found = group.get_command(top, name)
    assert found is not None  # every name in COMMANDS has a module
    click.echo(found.get_help(click.Context(found, parent=top, info_name=name)))
