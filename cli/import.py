"""``gopt import``: from a folder of training artifacts to a functional step."""

from __future__ import annotations

import click

from .terminal import print_json


@click.command("import")
@click.argument("folder", metavar="FOLDER", type=click.Path())
@click.option("-o", "--output", required=True, metavar="STEP", help="The ONNX file to write.")
@click.option("--force", is_flag=True, help="Replace an existing model.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def command(folder: str, output: str, force: bool, as_json: bool) -> None:
    """Write the training artifacts of ONNX Runtime in FOLDER as one training step of standard operators.

    FOLDER has a training graph, an optimizer graph and a checkpoint, as generate_artifacts of release 1.19 writes them.
    The other commands take such a folder as it is; this one writes the step alone.

    \b
    Example:
      gopt import artifacts -o step.onnx
      gopt shard artifacts --ranks 4
    """
    from gopt.verbs.import_step import import_step

    from .render_import import render_imported
    from .render_progress import progress

    with progress() as advance:
        advance("importing")
        imported = import_step(folder, output, force=force)
    if as_json:
        print_json(imported.to_json())
    else:
        render_imported(imported)
