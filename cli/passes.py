"""``gopt passes``: what the pipeline is made of."""

from __future__ import annotations

import json

import click


@click.command("passes")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def command(as_json: bool) -> None:
    """List every pass: what it does, its options and their defaults, what must run before it.

    \b
    Example:
      gopt passes
    """
    from gopt.passes import DEFAULT, PASSES
    from gopt.passes.base import option_table

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
    if as_json:
        click.echo(json.dumps(rows, indent=1))
    else:
        from .render import render_passes

        render_passes(rows)
