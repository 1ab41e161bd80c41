"""``gopt diff``: two models, two output folders or two checkpoints."""

from __future__ import annotations

import click

from .reproducer_option import tell_result
from .terminal import print_json


@click.command("diff")
@click.argument("a", metavar="A", type=click.Path())
@click.argument("b", metavar="B", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(a: str, b: str, as_json: bool) -> int:
    """Compare two models, two output folders or two checkpoints: ops, wiring, attributes, values, states, bytes.

    One change is one line; inner values that only changed their names are no difference. Of output folders, each
    rank's graph, the manifest and the report are compared; of checkpoints the values of all states, whatever ranks
    wrote them. Exit code 1 when they differ, 0 when they are equal.

    \b
    Example:
      gopt diff before.onnx after.onnx
      gopt diff step.ranks other.ranks
      gopt diff ckpt/step_00000100 other/step_00000100
    """
    from gopt.offline.diff import diff

    result = diff(a, b)
    tell_result(", ".join(sorted({each.kind for each in result.lines})))
    if as_json:
        print_json(result.to_json())
    else:
        from .render_inspect import render_diff

        render_diff(result)
    return result.exit_code
