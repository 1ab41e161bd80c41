"""``gopt import``: from another form of a training step to a plain one."""

from __future__ import annotations

import click

from .terminal import print_result


@click.command("import")
@click.argument("source", metavar="SOURCE", type=click.Path(readable=False))
@click.option("-o", "--output", required=True, metavar="STEP", help="The ONNX file to write.")
@click.option("--force", is_flag=True, help="Replace an existing model.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def command(source: str, output: str, force: bool, as_json: bool) -> None:
    """Write the training step in SOURCE as one plain ONNX graph.

    SOURCE is a folder of ONNX Runtime's training artifacts: a training graph, an optimizer graph and a checkpoint, as
    generate_artifacts of release 1.19 writes them. Or it is a model with training_info.
    The other commands take both as they are; this one writes the step alone.

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
        imported = import_step(source, output, force=force)
    print_result(imported, as_json, render_imported)
