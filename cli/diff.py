"""``gopt diff``: two models or two output folders, by structure."""

from __future__ import annotations

import json

import click


@click.command("diff")
@click.argument("a", metavar="A", type=click.Path())
@click.argument("b", metavar="B", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(a: str, b: str, as_json: bool) -> int:
    """Compare two models or two output folders by what they compute: ops, wiring, attributes, values, states, bytes.

    One change is one line; inner values that only changed their names are no difference. Of folders, each rank's
    graph, the manifest and the report are compared. Exit code 1 when they differ, 0 when they are equal.

    \b
    Example:
      gopt diff before.onnx after.onnx
      gopt diff step.ranks other.ranks
    """
    from gopt.offline.diff import diff

    result = diff(a, b)
    if as_json:
        click.echo(json.dumps(result.to_json(), indent=1, ensure_ascii=False))
    else:
        from .render_inspect import render_diff

        render_diff(result)
    return result.exit_code
