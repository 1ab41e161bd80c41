"""``gopt merge``: ranks, or trainers and servers, back into one model."""

from __future__ import annotations

import click

from .terminal import print_json


@click.command("merge")
@click.argument("path", metavar="DIR|CHECKPOINT", type=click.Path())
@click.option("-o", "--output", required=True, metavar="MODEL", help="The ONNX file to write.")
@click.option("--force", is_flag=True, help="Replace an existing model.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def command(path: str, output: str, force: bool, as_json: bool) -> None:
    """Write one model, the step as it was, with the values that its states have on ranks, or on trainers and servers.

    DIR is a folder of gopt shard or gopt split, CHECKPOINT one step that gopt run has kept. Where the values are more
    than 64 MiB they lie beside the model, in MODEL.<digest>.data.

    \b
    Example:
      gopt merge step.ranks -o step.onnx
      gopt merge checkpoints/step_00000100 -o trained.onnx
    """
    from gopt.offline.merge import merge

    from .render import progress, render_merged

    with progress() as advance:
        advance("merging")
        merged = merge(path, output, force=force)
    if as_json:
        print_json({"format": "gopt-merge/1", **merged.to_json()})
    else:
        render_merged(merged.to_json())
