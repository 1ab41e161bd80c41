"""``gopt merge``: ranks, or trainers and servers, back into one model; a step in other forms."""

from __future__ import annotations

import click

from gopt.errors import OptionError

from .terminal import print_json, print_result


@click.command("merge")
@click.argument("path", metavar="DIR|CHECKPOINT|STEP", type=click.Path(readable=False))
@click.option("-o", "output", metavar="MODEL", help="The ONNX file to write.")
@click.option(
    "--state-dict",
    metavar="FILE",
    help="Write the state dict of the module as a .safetensors or .pt file, no model.",
)
@click.option(
    "--dcp", metavar="DIR", help="Write the state dict as a new folder of torch.distributed.checkpoint, no model."
)
@click.option("--inference", is_flag=True, help="Write the forward alone, as it is evaluated.")
@click.option("--training-info", is_flag=True, help="Write the forward, with the step beside it as training_info.")
@click.option(
    "--output", "values", multiple=True, metavar="VALUE", help="With --inference, --training-info: what it computes."
)
@click.option("--all-states", is_flag=True, help="With --state-dict, --dcp: optimizer states and counters too.")
@click.option(
    "--explain", "explained", is_flag=True, help="Print which files and bytes make each state, and write nothing."
)
@click.option("--force", is_flag=True, help="Replace an existing model.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def command(
    path: str, output: str | None, state_dict: str | None, dcp: str | None, inference: bool, training_info: bool,
    values: tuple[str, ...], all_states: bool, explained: bool, force: bool, as_json: bool,
) -> None:  # fmt: skip
    """Put ranks, or trainers and servers, together into one training step with their current values.

    DIR is a folder of gopt shard or gopt split, CHECKPOINT one step that gopt run has kept. Where the values are more
    than 64 MiB they lie beside the model, in MODEL.<digest>.data.

    --state-dict writes what module.load_state_dict takes, strictly where gopt export made the step: tied, frozen and
    counted tensors too; of other steps, parameters and running statistics. A .pt file loads with weights_only=True, and
    with --all-states holds "model", "optimizer" and "step", and "scheduler", "scaler", "ema" and "loss" where the step
    has them. A .safetensors file has all states under their names in the step.

    --dcp writes the same as a folder that torch.distributed.checkpoint and FSDP2 load: "model", and with --all-states
    "optim", by the names of the parameters.

    --inference writes a model of the forward alone: parameters are constants, BatchNorm reads its running statistics,
    dropout passes values on. It computes the step's outputs beside loss and states (gopt export --outputs), or each
    value that --output names.

    --training-info writes that model with the step in it, in ONNX's own form of a training step: the algorithm computes
    the loss and the new value of every state, update_binding says which initializer it replaces. gopt reads it again.

    All four options take a training step as well: STEP is its file.

    --explain shows the pieces that are put together, behind a check of every file's digest. A place counts the elements
    of the whole tensor, of a box of its rows and columns, or of every n-th row.

    \b
    Example:
      gopt merge step.ranks -o step.onnx
      gopt merge checkpoints/step_00000100 -o trained.onnx
      gopt merge checkpoints/step_00000100 --state-dict trained.safetensors
      gopt merge checkpoints/step_00000100 --state-dict trained.pt --all-states
      gopt merge checkpoints/step_00000100 --dcp trained.dcp --all-states
      gopt merge checkpoints/step_00000100 --inference -o model.onnx
      gopt merge step.onnx --training-info --output logits -o both.onnx
      gopt merge checkpoints/step_00000100 --explain
    """
    from gopt.offline.inference.write import merge_inference
    from gopt.offline.merge import merge
    from gopt.offline.training_info.write import merge_training_info
    from gopt.verbs.folders import save_dcp, save_state_dict

    from .render import render_inference, render_merged, render_state_dict, render_training_info
    from .render_progress import progress

    targets = [output, state_dict, dcp]
    if explained:
        if targets != [None] * 3 or inference or training_info or values or all_states:
            raise OptionError("--explain writes nothing", "leave out other options")
        from .render_provenance import explain_bytes

        explain_bytes(path, as_json)
        return
    if targets.count(None) != 2:
        raise OptionError("gopt merge writes one file", "give -o MODEL, --state-dict FILE, or --dcp DIR")
    if all_states and output is not None:
        raise OptionError("--all-states needs --state-dict or --dcp", "give --state-dict FILE in place of -o")
    if inference and training_info:
        raise OptionError("--training-info writes the model of --inference, and more", "give one of them")
    if (inference or training_info) and output is None:
        raise OptionError(f"{'--inference' if inference else '--training-info'} needs -o MODEL", "add -o MODEL")
    if values and not (inference or training_info):
        raise OptionError(
            "--output VALUE needs --inference or --training-info", "add one of them; the file to write is -o MODEL"
        )
    if output is None:
        if state_dict is not None:
            saved = save_state_dict(path, state_dict, all_states=all_states, force=force)
        else:
            assert dcp is not None
            saved = save_dcp(path, dcp, all_states=all_states)
        print_result(saved, as_json, render_state_dict)
    elif inference:
        model = merge_inference(path, output, outputs=values, force=force)
        print_result(model, as_json, render_inference)
    elif training_info:
        info = merge_training_info(path, output, outputs=values, force=force)
        print_result(info, as_json, render_training_info)
    else:
        with progress() as advance:
            advance("merging")
            merged = merge(path, output, force=force)
        if as_json:
            print_json({"format": "gopt-merge/1", **merged.to_json()})
        else:
            render_merged(merged)
