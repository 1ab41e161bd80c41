"""``gopt diff``: two models, two output folders or two checkpoints."""

from __future__ import annotations

import click

from .terminal import print_json

KINDS = (
    "added", "removed", "op", "attribute", "rewired", "input", "output", "value", "state", "bytes", "model", "record",
)  # fmt: skip
"""What a difference may be."""


@click.command("diff")
@click.argument("a", metavar="A", type=click.Path())
@click.argument("b", metavar="B", type=click.Path())
@click.option("--summary", is_flag=True, help="Show how many differences of each kind there are, not the differences.")
@click.option(
    "--ignore", multiple=True, metavar="KIND", type=click.Choice(KINDS),
    help=f"Differences of this kind do not count. May be repeated. Kinds: {', '.join(KINDS)}.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(a: str, b: str, summary: bool, ignore: tuple[str, ...], as_json: bool) -> int:
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

    result = diff(a, b).without(ignore)
    if as_json:
        print_json(result.to_json())
    else:
        from .render_diff import render_diff

        render_diff(result, summary=summary)
    return result.exit_code
