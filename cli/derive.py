"""``gopt derive``: from a forward ONNX model to a training step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from gopt.errors import OptionError

from .terminal import print_json

if TYPE_CHECKING:
    from gopt.frontends.derive.options import DeriveOptions

KNOBS = ("momentum", "eps", "alpha", "momentum_decay")
SCHEDULE_KNOBS = ("total_steps", "start_factor", "end_factor", "min_lr", "step_size", "gamma")


@click.command("derive")
@click.argument("forward", metavar="FORWARD")
@click.option("-o", "--output", required=True, metavar="STEP", help="The ONNX file to write.")
@click.option("--loss", required=True, metavar="LOSS", help="cross-entropy, mse, or a scalar output of the model.")
@click.option(
    "--optimizer", required=True, metavar="NAME",
    help="sgd, momentum, nesterov, adam, adamw, adagrad, rmsprop, adamax, nadam or lion.",
)  # fmt: skip
@click.option("--lr", type=float, metavar="X", help="Write the learning rate into the graph; else it is the input lr.")
@click.option("--weight-decay", type=float, metavar="X", help="Decoupled for adamw and lion, else added to gradients.")
@click.option("--momentum", type=float, metavar="X", help="Of momentum and nesterov.")
@click.option("--betas", metavar="B1,B2", help="Of adam, adamw, adamax, nadam and lion.")
@click.option("--eps", type=float, metavar="X", help="What the denominator is raised by.")
@click.option("--alpha", type=float, metavar="X", help="Of rmsprop.")
@click.option("--momentum-decay", type=float, metavar="X", help="Of nadam.")
@click.option("--clip-norm", type=float, metavar="X", help="Bound the norm of all gradients together.")
@click.option("--clip-value", type=float, metavar="X", help="Bound each element of the gradients.")
@click.option("--loss-scale", metavar="dynamic|N", help="Scale the loss, as torch.amp.GradScaler does.")
@click.option("--schedule", metavar="NAME", help="linear, cosine or step: the rate as a function of the steps taken.")
@click.option("--total-steps", type=float, metavar="N", help="Length of a linear or cosine schedule.")
@click.option("--start-factor", type=float, metavar="X", help="Of linear: the share of the rate at first.")
@click.option("--end-factor", type=float, metavar="X", help="Of linear: the share of the rate at last.")
@click.option("--min-lr", type=float, metavar="X", help="Of cosine: the rate at its end.")
@click.option("--step-size", type=float, metavar="N", help="Of step: steps of one rate.")
@click.option("--gamma", type=float, metavar="X", help="Of step: the factor between rates.")
@click.option(
    "--prediction", default="", metavar="OUTPUT", help="The output that the loss reads, if there are several."
)
@click.option("--class-axis", type=int, metavar="AXIS", help="The dimension of logits that counts classes.")
@click.option(
    "--batchnorm", type=click.Choice(["keep", "train"]), default="keep", show_default=True,
    help="Leave BatchNormalization in inference form, or normalize by the batch and update its statistics.",
)  # fmt: skip
@click.option(
    "--dropout", type=click.Choice(["keep", "train"]), default="keep", show_default=True,
    help="Leave Dropout in inference form, or drop by uniform numbers, the inputs draw_0, draw_1, ...",
)  # fmt: skip
@click.option("--trainable", multiple=True, metavar="PATTERN", help="Train only what matches.")
@click.option("--freeze", multiple=True, metavar="PATTERN", help="Train nothing that matches.")
@click.option("--dim", "dims", multiple=True, metavar="NAME=SIZE", help="The size of an open dimension.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the batches that the check draws.")
@click.option("--force", is_flag=True, help="Replace an existing model.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def command(forward: str, output: str, force: bool, as_json: bool, **given: Any) -> None:
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
        derived = derive(forward, output, _options(given), force=force, advance=advance)
    if as_json:
        print_json(derived.to_json())
    else:
        render_derived(derived)


def _options(given: dict[str, Any]) -> DeriveOptions:
    from gopt.frontends.derive.options import DYNAMIC, DeriveOptions, Norms

    scale = given["loss_scale"]
    if scale is not None and scale != DYNAMIC:
        try:
            scale = float(scale)
        except ValueError:
            raise OptionError(f"--loss-scale cannot be {scale!r}", "give dynamic, or a number above 0") from None
    knobs = {name: given[name] for name in KNOBS if given[name] is not None}
    same = (
        "loss",
        "optimizer",
        "lr",
        "weight_decay",
        "clip_norm",
        "clip_value",
        "schedule",
        "prediction",
        "class_axis",
    )
    return DeriveOptions(
        **{name: given[name] for name in (*same, "trainable", "freeze", "seed")},
        knobs={**knobs, **_betas(given["betas"])},
        loss_scale=scale,
        schedule_knobs={name: given[name] for name in SCHEDULE_KNOBS if given[name] is not None},
        batchnorm=Norms(given["batchnorm"]),
        dropout=Norms(given["dropout"]),
        dims=dict(map(_dim, given["dims"])),
    )


def _betas(text: str | None) -> dict[str, float]:
    if text is None:
        return {}
    try:
        first, second = map(float, text.split(","))
    except ValueError:
        raise OptionError(f"--betas cannot be {text!r}", "give two numbers, such as --betas 0.9,0.999") from None
    return {"beta1": first, "beta2": second}


def _dim(text: str) -> tuple[str, int]:
    name, _, size = text.rpartition("=")
    if not name or not size.isdecimal() or not 0 < int(size) < 2**31:
        raise OptionError(f"--dim cannot be {text!r}", "give a name and a size, such as --dim batch=16")
    return name, int(size)
