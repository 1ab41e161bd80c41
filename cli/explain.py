"""``gopt explain``: what became of one name."""

from __future__ import annotations

import click

from .terminal import print_json


@click.command("explain")
@click.argument("folder", metavar="DIR", type=click.Path(readable=False))
@click.argument("name", metavar="NAME")
@click.option("--json", "as_json", is_flag=True, help="Print the story as JSON.")
def command(folder: str, name: str, as_json: bool) -> None:
    """Tell the story of one operator, value, state, parameter, bucket, key or table of an output folder.

    Where it came from, which ranks hold what of it, in which bucket and by which calls it travels, why it was removed
    or added, and what stands for it now. A name that is not there is answered with the nearest ones.

    \b
    Example:
      gopt explain step.ranks fc1.weight
      gopt explain step.ranks node_mul_7
      gopt explain step.ranks b0
    """
    from gopt.offline.explain import explain

    story = explain(folder, name)
    if as_json:
        print_json(story.to_json())
        return
    from .render_explain import render_story

    render_story(story)
