"""``gopt passes``: what the pipeline is made of."""

from __future__ import annotations

import click

from .terminal import print_json


@click.command("passes")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def command(as_json: bool) -> None:
    """List every pass of gopt shard in order, with its effect, the passes before it, and its options.

    An option is shown as NAME = DEFAULT (what it takes); gopt shard -O PASS.NAME=VALUE sets it. "auto" leaves the
    choice to the pass.

    \b
    Example:
      gopt passes
      gopt shard step.onnx --ranks 8 -O shard.reduce-dtype=bfloat16
    """
    from gopt.passes import DEFAULT, PASSES
    from gopt.passes.base import option_table

    if not as_json:
        from .render import render_passes

        render_passes(PASSES.values(), DEFAULT)
        return
    rows = [
        {
            "name": spec.name,
            "summary": spec.summary,
            "options": [{"name": n, "type": t, "default": d} for n, t, d in option_table(spec)],
            "after": list(spec.after),
            "default": spec.name in DEFAULT,
        }
        for spec in PASSES.values()
    ]
    print_json({"format": "gopt-passes/1", "passes": rows})
