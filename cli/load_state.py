"""``gopt load-state``: values of a state dict into a training step."""

from __future__ import annotations

import click

from .terminal import print_json


@click.command("load-state")
@click.argument("model", type=click.Path(readable=False))
@click.argument("state", metavar="STATE", type=click.Path(readable=False))
@click.option("-o", "--output", required=True, metavar="MODEL", help="The ONNX file to write.")
@click.option(
    "--ignore-unknown",
    is_flag=True,
    help="Skip tensors of STATE that are not states of the model, instead of refusing them.",
)
@click.option("--force", is_flag=True, help="Replace an existing model.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def command(model: str, state: str, output: str, ignore_unknown: bool, force: bool, as_json: bool) -> None:
    """Write a training step with values from a .safetensors or .npz file, by the names of its states.

    States that the file does not name keep their values. A state dict of PyTorch fits a step of gopt export; for values
    of ranks and checkpoints see gopt merge.

    \b
    Example:
      gopt load-state step.onnx model.safetensors -o warm.onnx
      gopt load-state step.onnx model.safetensors -o warm.onnx --ignore-unknown
    """
    from gopt.offline.state_values import load_values

    from .render import render_loaded
    from .render_progress import progress

    with progress() as advance:
        advance("loading")
        loaded = load_values(model, state, output, ignore_unknown=ignore_unknown, force=force)
    if as_json:
        print_json(loaded.to_json())
    else:
        render_loaded(loaded)
