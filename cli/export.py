"""``gopt export``: from eager PyTorch training code to a functional step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from .options import clip_norm_option, clip_value_option, loss_scale, loss_scale_option
from .terminal import print_result

if TYPE_CHECKING:
    from gopt.frontends.pytorch.options import ExportOptions


@click.command("export")
@click.argument("factory", metavar="MODULE:FACTORY")
@click.option("-o", "--output", required=True, metavar="STEP", help="The ONNX file to write.")
@clip_norm_option
@clip_value_option
@click.option("--autocast", type=click.Choice(["fp16", "bf16"]), help="Run the forward under torch.autocast.")
@loss_scale_option
@click.option(
    "--ema",
    type=float,
    metavar="DECAY",
    help="Keep moving averages of the parameters as states ema.NAME, e.g. --ema 0.999.",
)
@click.option(
    "--scheduler", type=click.Choice(["auto", "graph", "input"]), default="auto", show_default=True,
    help="Where the scheduler's rate is computed: in the graph, or outside, and fed as lr; auto: in the graph if it "
    "has a closed form.",
)  # fmt: skip
@click.option(
    "--random", "draws", type=click.Choice(["inputs", "nodes"]), default="inputs", show_default=True,
    help="Where random numbers, such as dropout's, come from: inputs draw_0, draw_1, ..., which gopt run draws "
    "by a seed, or random nodes.",
)  # fmt: skip
@click.option(
    "--hyper",
    multiple=True,
    metavar="NAMES",
    help="Make options of parameter groups inputs, beside lr, e.g. weight_decay,betas. May be repeated.",
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Call torch.manual_seed with this before FACTORY runs."
)
@click.option(
    "--check", type=int, default=3, show_default=True, metavar="K", help="Compare this many steps with eager PyTorch."
)
@click.option(
    "--schedule-steps", type=int, default=10_000, show_default=True, metavar="K",
    help="Write down this many steps of a schedule that is not in the graph, as a formula or a table, for gopt run.",
)  # fmt: skip
@click.option("--outputs", is_flag=True, help="Keep the results of the module, such as logits, as outputs.")
@click.option(
    "--outputs-of", multiple=True, metavar="MODULES",
    help="Keep the results of submodules as outputs, e.g. encoder,layers.3. May be repeated.",
)  # fmt: skip
@click.option(
    "--no-values",
    is_flag=True,
    help="Trace shapes alone, for a model that does not fit in memory; nothing is compared.",
)
@click.option(
    "--eval", "evaluation", is_flag=True,
    help="Write the forward in evaluation mode too, as STEP.eval.onnx, for gopt run --eval.",
)  # fmt: skip
@click.option("--dynamic", type=click.Choice(["batch"]), help="Leave the number of samples in a batch open.")
@click.option("--force", is_flag=True, help="Replace an existing model.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def command(factory: str, output: str, force: bool, as_json: bool, **args: Any) -> None:
    """Trace a training step of PyTorch and write it as one ONNX file: forward, backward, clip and update.

    FACTORY takes nothing and returns (module, loss function or None, optimizer, example batch), and as a fifth a
    scheduler that moves at every step, if there is one. The optimizer may be what Lightning's configure_optimizers
    returns, the batch a DataLoader. The loss function is called as loss(module, batch) where the batch is a dict or
    one tensor, as loss(module(*inputs), target) where it is a tuple; None: the module returns the loss. Several
    optimizers are a list.

    Nothing is written unless all states and the loss agree with eager PyTorch over --check steps. With --no-values
    parameters have no memory and the file no values of states, and nothing is compared.

    \b
    Example:
      gopt export train.py:make -o step.onnx
      gopt export train.py:make -o step.onnx --eval
      gopt export package.module:make -o step.onnx --clip-norm 1 --autocast bf16
      gopt export train.py:make -o step.onnx \\
          --hyper weight_decay,betas --ema 0.999
    """
    from gopt.verbs.export import export

    from .render_export import render_exported
    from .render_progress import progress

    with progress() as advance:
        exported = export(factory, output, options=options_of(args), force=force, advance=advance)
    print_result(exported, as_json, render_exported)


def options_of(args: dict[str, Any]) -> ExportOptions:
    """The options of the command line as the record of the verb. Raises OptionError."""
    from gopt.frontends.pytorch.options import Autocast, Draws, Dynamic, ExportOptions, Schedules

    return ExportOptions(
        clip_norm=args["clip_norm"],
        clip_value=args["clip_value"],
        autocast=None if args["autocast"] is None else Autocast(args["autocast"]),
        loss_scale=loss_scale(args["loss_scale"]),
        ema=args["ema"],
        schedules=Schedules(args["scheduler"]),
        draws=Draws(args["draws"]),
        hyper=_names(args["hyper"]),
        seed=args["seed"],
        check=args["check"],
        schedule_steps=args["schedule_steps"],
        outputs=args["outputs"],
        outputs_of=_names(args["outputs_of"]),
        evaluation=args["evaluation"],
        values=not args["no_values"],
        dynamic=None if args["dynamic"] is None else Dynamic(args["dynamic"]),
    )


def _names(texts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for text in texts for name in text.split(",") if name)
