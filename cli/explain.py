"""``gopt explain``: what became of a step, or of one name."""

from __future__ import annotations

import click

from .terminal import print_result


@click.command("explain")
@click.argument("folder", metavar="DIR", type=click.Path(readable=False))
@click.argument("name", metavar="[NAME]", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON.")
def command(folder: str, name: str | None, as_json: bool) -> None:
    """Show what became of one operator, value, state, parameter, bucket, key or table of an output folder.

    Without NAME it shows what --auto chose and why, and what each pass did. With NAME the facts are the source, the
    part of each rank, the bucket and the calls with this value, the reason of its removal or addition, and its
    replacement. For an unknown name the nearest names are shown.

    \b
    Example:
      gopt explain step.ranks
      gopt explain step.ranks fc1.weight
      gopt explain step.ranks node_mul_7
      gopt explain step.ranks b0
    """
    from gopt.offline.explain import explain

    from .render_explain import render_story

    print_result(explain(folder, name), as_json, render_story)
