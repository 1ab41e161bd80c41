"""``gopt derive``: from a forward ONNX model to a training step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from gopt.errors import OptionError

from .options import clip_norm_option, clip_value_option, loss_scale, loss_scale_option
from .terminal import print_result

if TYPE_CHECKING:
    from gopt.frontends.derive.options import DeriveOptions

OPTIMIZER_OPTIONS = ("momentum", "eps", "alpha", "momentum_decay")
SCHEDULE_OPTIONS = ("total_steps", "start_factor", "end_factor", "min_lr", "step_size", "gamma")


@click.command("derive")
@click.argument("forward", metavar="FORWARD")
@click.option("-o", "--output", required=True, metavar="STEP", help="The ONNX file to write.")
@click.option(
    "--loss",
    required=True,
    metavar="LOSS",
    help="The loss to attach, cross-entropy, binary-cross-entropy or mse, or a scalar output of the model.",
)
@click.option(
    "--optimizer", required=True, metavar="NAME",
    help="The optimizer: sgd, momentum, nesterov, adam, adamw, adagrad, rmsprop, adamax, nadam or lion.",
)  # fmt: skip
@click.option(
    "--lr", type=float, metavar="X", help="Write this learning rate into the graph, e.g. 1e-3.  [default: the input lr]"
)
@click.option(
    "--weight-decay",
    type=float,
    metavar="X",
    help="Decay parameters: decoupled with adamw and lion, else added to gradients.  "
    "[default: 0.01 with adamw, else 0]",
)
@click.option(
    "--momentum",
    type=float,
    metavar="X",
    help="With momentum and nesterov: the share of the buffer that a step keeps.  [default: 0.9]",
)
@click.option(
    "--betas",
    metavar="B1,B2",
    help="With adam, adamw, adamax, nadam and lion: the shares that both averages keep.  "
    "[default: 0.9,0.999; lion: 0.9,0.99]",
)
@click.option(
    "--eps", type=float, metavar="X", help="Add this to the denominator of the update.  [default: 1e-8; adagrad: 1e-10]"
)
@click.option(
    "--alpha",
    type=float,
    metavar="X",
    help="With rmsprop: the share that the average of squares keeps.  [default: 0.99]",
)
@click.option(
    "--momentum-decay", type=float, metavar="X", help="With nadam: how fast the momentum grows.  [default: 0.004]"
)
@clip_norm_option
@clip_value_option
@loss_scale_option
@click.option(
    "--schedule",
    metavar="NAME",
    help="Compute the rate from the steps taken: linear, cosine or step, as LinearLR, CosineAnnealingLR and StepLR do.",
)
@click.option(
    "--total-steps",
    type=float,
    metavar="N",
    help="With linear and cosine: the steps of the schedule.  [default: 5 with linear]",
)
@click.option(
    "--start-factor", type=float, metavar="X", help="With linear: the first rate, as a part of lr.  [default: 1/3]"
)
@click.option(
    "--end-factor", type=float, metavar="X", help="With linear: the last rate, as a part of lr.  [default: 1]"
)
@click.option("--min-lr", type=float, metavar="X", help="With cosine: the last rate.  [default: 0]")
@click.option("--step-size", type=float, metavar="N", help="With step: the steps that have one rate.")
@click.option(
    "--gamma", type=float, metavar="X", help="With step: the factor from one rate to the next.  [default: 0.1]"
)
@click.option(
    "--prediction", default="", metavar="OUTPUT", help="The output that the loss reads.  [default: the only one]"
)
@click.option(
    "--class-axis",
    type=int,
    metavar="AXIS",
    help="The dimension of the logits that has one place for each class, e.g. -1 for tokens, 1 for images.",
)
@click.option(
    "--ignore-index", type=int, metavar="LABEL", help="With cross-entropy: samples with this label do not count."
)
@click.option(
    "--label-smoothing",
    type=float,
    metavar="X",
    help="With cross-entropy: the share of the target that all classes have alike.",
)
@click.option(
    "--batchnorm", type=click.Choice(["keep", "train"]), default="keep", show_default=True,
    help="Leave BatchNormalization in inference form, or normalize by the batch and update its statistics.",
)  # fmt: skip
@click.option(
    "--dropout", type=click.Choice(["keep", "train"]), default="keep", show_default=True,
    help="Leave Dropout in inference form, or drop by uniform numbers, the inputs draw_0, draw_1, ...",
)  # fmt: skip
@click.option(
    "--trainable",
    multiple=True,
    metavar="PATTERN",
    help="Train only parameters whose names match, e.g. 'head.*'. May be repeated.",
)
@click.option(
    "--freeze",
    multiple=True,
    metavar="PATTERN",
    help="Do not train parameters whose names match, e.g. 'encoder.*'. May be repeated.",
)
@click.option(
    "--dim",
    "dims",
    multiple=True,
    metavar="NAME=SIZE",
    help="Fix the size of an open dimension, e.g. batch=16. May be repeated.",
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Seed of the batches on which gradients are checked."
)
@click.option(
    "--data",
    default="",
    metavar="FILE",
    help="Check gradients on batches of yours instead: .npz, .safetensors or module:function, as gopt run takes them.",
)
@click.option(
    "--no-values",
    is_flag=True,
    help="Train floating inputs instead, for weights that do not fit in memory; states have no values, and no gradient "
    "is confirmed.",
)
@click.option("--force", is_flag=True, help="Replace an existing model.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def command(forward: str, output: str, force: bool, as_json: bool, **args: Any) -> None:
    """Write the training step of a forward model: backward, loss and optimizer are added to it.

    FORWARD is any ONNX model; its stored floating values are trained. The batch is its inputs, and a label or target
    where a loss is attached. Nothing is written unless finite differences confirm the gradients.

    \b
    Example:
      gopt derive model.onnx --loss cross-entropy --optimizer adamw -o step.onnx
      gopt derive model.onnx --loss mse --optimizer sgd --dim batch=16 \\
          --freeze 'encoder.*' -o step.onnx
      gopt derive model.onnx --loss my_loss --optimizer adam \\
          --schedule cosine --total-steps 1000 -o step.onnx
    """
    from gopt.verbs.derive import derive

    from .render_derive import render_derived
    from .render_progress import progress

    with progress() as advance:
        derived = derive(forward, output, options_of(args), force=force, advance=advance)
    print_result(derived, as_json, render_derived)


def options_of(args: dict[str, Any]) -> DeriveOptions:
    """The options of the command line as the record of the verb. Raises OptionError."""
    from gopt.frontends.derive.options import DeriveOptions, Norms

    chosen = {name: args[name] for name in OPTIMIZER_OPTIONS if args[name] is not None}
    names = (
        "loss", "optimizer", "lr", "weight_decay", "clip_norm", "clip_value", "schedule", "prediction", "class_axis",
        "ignore_index", "label_smoothing",
    )  # fmt: skip
    return DeriveOptions(
        **{name: args[name] for name in (*names, "trainable", "freeze", "seed", "data")},
        optimizer_options={**chosen, **_betas(args["betas"])}, loss_scale=loss_scale(args["loss_scale"]),
        schedule_options={name: args[name] for name in SCHEDULE_OPTIONS if args[name] is not None},
        batchnorm=Norms(args["batchnorm"]), dropout=Norms(args["dropout"]), dims=_dims(args["dims"]),
        values=not args["no_values"],
    )  # fmt: skip


def _betas(text: str | None) -> dict[str, float]:
    if text is None:
        return {}
    try:
        beta, second = map(float, text.split(","))
    except ValueError:
        raise OptionError(f"--betas cannot be {text!r}", "give two numbers, such as --betas 0.9,0.999") from None
    return {"beta1": beta, "beta2": second}


def _dims(texts: Sequence[str]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for name, size in map(_dim, texts):
        if sizes.setdefault(name, size) != size:
            raise OptionError(f"--dim {name} is given as {sizes[name]} and as {size}", "give one of them")
    return sizes


def _dim(text: str) -> tuple[str, int]:
    name, _, size = text.rpartition("=")
    if not name or not size.isdecimal() or not 0 < int(size) < 2**31:
        raise OptionError(f"--dim cannot be {text!r}", "give a name and a size, such as --dim batch=16")
    return name, int(size)
