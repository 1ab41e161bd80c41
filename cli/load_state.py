"""``gopt load-state``: values of a state dict into a training step."""

from __future__ import annotations

import click

from .terminal import print_result


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
    """Write a training step with values from a file, by the names of its states.

    States that the file does not name keep their values. STATE is a .safetensors or .npz file, an index of safetensors
    files or the folder with it, a file of torch.save (.pt, .pth, .bin), or a folder of torch.distributed.checkpoint, as
    FSDP2 and torchtitan write it. A file of torch.save has a state dict, or a dict with "model" or "state_dict", and
    "optimizer"; gopt runs no code from it. The names of a module, and the states of its optimizer, fit a step of gopt
    export. For values of ranks and checkpoints see gopt merge.

    \b
    Example:
      gopt load-state step.onnx model.safetensors -o warm.onnx
      gopt load-state step.onnx model.safetensors -o warm.onnx --ignore-unknown
      gopt load-state step.onnx model.safetensors.index.json -o warm.onnx
      gopt load-state step.onnx checkpoint.pt -o warm.onnx
    """
    from gopt.verbs.folders import load_values

    from .render import render_loaded
    from .render_progress import progress

    with progress() as advance:
        advance("loading")
        loaded = load_values(model, state, output, ignore_unknown=ignore_unknown, force=force)
    print_result(loaded, as_json, render_loaded)
