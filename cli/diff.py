"""``gopt diff``: two models, two output folders or two checkpoints."""

from __future__ import annotations

import click

from .annotations import DIFFERENCE, format_option, print_annotation
from .reproducer_option import tell_result
from .terminal import print_json, print_text

KINDS = (
    "added", "removed", "op", "attribute", "rewired", "input", "output", "value", "state", "bytes", "model", "record",
)  # fmt: skip
"""The kinds of differences."""


@click.command("diff")
@click.argument("a", metavar="A", type=click.Path(readable=False))
@click.argument("b", metavar="B", type=click.Path(readable=False))
@click.option("--summary", is_flag=True, help="Show how many differences of each kind there are, not the differences.")
@click.option("--full", is_flag=True, help="Show every difference; of output folders also each node of each rank.")
@click.option("--markdown", is_flag=True, help="Print a comment for a pull request: folded tables, below 60 kB.")
@click.option(
    "--rtol",
    type=click.FloatRange(0),
    default=0.0,
    show_default=True,
    help="Allow values of states to differ by this part of B's.",
)
@click.option(
    "--atol",
    type=click.FloatRange(0),
    default=0.0,
    show_default=True,
    help="Allow values of states to differ by this much.",
)
@click.option(
    "--ignore", multiple=True, metavar="KIND", type=click.Choice(KINDS),
    help=f"Do not count differences of this kind. May be repeated. Kinds: {', '.join(KINDS)}.",
)  # fmt: skip
@format_option
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    a: str, b: str, summary: bool, full: bool, markdown: bool, rtol: float, atol: float, ignore: tuple[str, ...],
    form: str, as_json: bool,
) -> int:  # fmt: skip
    """Compare two models, two output folders or two checkpoints: ops, wiring, attributes, values, states, bytes.

    Inner values that only changed their names are no difference. Of output folders the cause comes first: options,
    mesh and source; then what each rank holds and sends, and operators by pass and role. Of checkpoints the values of
    all states are compared, whatever ranks wrote them, the worst first. --full, --json, --summary and --ignore compare
    every rank's graph node by node. Exit code 1 when they differ, 0 when they are equal.

    \b
    Example:
      gopt diff before.onnx after.onnx
      gopt diff step.ranks other.ranks
      gopt diff step.ranks other.ranks --markdown
      gopt diff ckpt/step_00000100 other/step_00000100 --rtol 1e-5
    """
    from gopt.offline.diff import Tolerance, diff, review
    from gopt.system.garbage import gc_paused

    compare = diff if full or summary or ignore or as_json else review
    with gc_paused():
        result = compare(a, b, Tolerance(rtol, atol)).without(ignore)
    tell_result(", ".join(sorted({line.kind for line in result.lines})))
    if as_json:
        print_json(result.to_json())
    elif markdown:
        from .markdown_diff import markdown_diff

        print_text(markdown_diff(result))
    else:
        from .render_diff import render_full, render_sections, render_verdict

        if full:
            render_full(result)
        elif not summary:
            render_sections(result)
        render_verdict(result)
    if form == "github" and not result.equal:
        print_annotation(f"{a} and {b}: {result.verdict}", DIFFERENCE, file=b)
    return result.exit_code
