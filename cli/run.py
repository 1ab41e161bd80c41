"""``gopt run``: train with the ranks of an output folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gopt.errors import OptionError

from .evaluation_options import evaluation_options
from .options import arguments_of, deadline, setting_pairs

if TYPE_CHECKING:
    from gopt.verbs.run_options import RunOptions


@click.command("run")
@click.argument("folder", metavar="DIR", type=click.Path(readable=False))
@click.option(
    "--data",
    required=True,
    metavar="PATH|MODULE:FUNCTION",
    help="Read samples from a .npz, .safetensors or .npy file, a folder of them, a file of tokens "
    "(tokens.bin:uint16:x=0,y=1), or a function(part, parts) that yields batches.",
)
@click.option(
    "--steps",
    type=click.IntRange(1),
    metavar="K",
    help="Stop after step K of the training; with --resume, earlier steps count.  [required without --epochs]",
)
@click.option(
    "--epochs",
    type=click.IntRange(1),
    metavar="E",
    help="Stop after E passes over samples on disk, in place of --steps.",
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="Set a hyper-parameter: a number, linear:A:B:STEPS, cosine:A:B:STEPS, warmup-cosine:PEAK:WARMUP:STEPS, "
    "warmup-linear:…, step:A:EVERY:FACTOR, table:FILE or module:function. May be repeated.  [default: the step's own]",
)
@click.option(
    "--state", metavar="FILE", help="Read values of states from a .safetensors or .npz file, where the folder has none."
)
@click.option(
    "--engine",
    type=click.Choice(["threads", "mpi", "nccl", "torch"]),
    help="Run ranks as threads, as processes (mpi), as processes with a GPU each (nccl), or by PyTorch on "
    "torch.distributed (torch).  [default: torch under torchrun, mpi under another launcher, else threads]",
)
@click.option(
    "--compile/--no-compile",
    "compiled",
    default=None,
    help="With --engine torch: let Inductor compile the graph, or not.  [default: on GPUs]",
)
@click.option(
    "--deterministic",
    is_flag=True,
    help="With --engine torch: compute by deterministic algorithms alone; an operator without one is refused.",
)
@click.option(
    "--launch",
    type=click.IntRange(1),
    metavar="N",
    help="Start N processes on this host, as many as DIR holds.",
)
@click.option(
    "--shuffle",
    type=click.IntRange(0),
    metavar="SEED",
    help="Shuffle the samples anew in every pass over the data.  [default: the order of the file]",
)
@click.option(
    "--last",
    type=click.Choice(["carry", "drop", "pad"]),
    help="Choose what becomes of samples at the end of a pass that fill no step: the next pass fills it up (carry), "
    "they are left out (drop), or the first samples of the pass fill it (pad).  [default: carry]",
)
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    metavar="N",
    help="The samples of each rank's batch, where the step leaves their number open and --data names samples on disk.",
)
@click.option(
    "--draws",
    type=click.IntRange(0),
    metavar="SEED",
    help="Draw the random numbers of dropout and the like that the data does not give from SEED.  "
    "[default: 0; with --resume, the seed of the run that is continued]",
)
@click.option(
    "--checkpoint", metavar="CKPT", help="Write checkpoints to CKPT/step_…: one at the end, and more with --every."
)
@click.option("--every", type=click.IntRange(1), metavar="N", help="Write a checkpoint after every N steps.")
@click.option(
    "--keep", type=click.IntRange(1), default=2, show_default=True, metavar="N", help="Keep the newest N checkpoints."
)
@click.option(
    "--resume", is_flag=True, help="Continue from the newest checkpoint in CKPT; without one, from the start."
)
@evaluation_options
@click.option("--log", metavar="FILE", help="Append a line of JSON per step: losses, seconds, samples per second.")
@click.option("--trace", metavar="FILE", help="Write the times of all ranks in Chrome's trace format.")
@click.option(
    "--audit",
    type=click.IntRange(0),
    metavar="K",
    help="Compare the bits of what ranks hold in common after every K steps and before each checkpoint; 0: never.  "
    "[default: before each checkpoint]",
)
@click.option("--stop-on-nan", is_flag=True, help="End the run, with exit code 5, at a loss that is NaN or infinite.")
@click.option(
    "--sync-init",
    is_flag=False,
    flag_value="all",
    metavar="[AXES]",
    help="Take the first values of what ranks hold in common from the first rank of their group: along all axes, or "
    "along those named, e.g. dp or dp+tp.",
)
@click.option(
    "--no-startup",
    is_flag=True,
    help="Start from the stored values where DIR has start-up graphs, which compute others.",
)
@click.option(
    "--no-tuning",
    is_flag=True,
    help="Run without tiling, generated kernels, and planned and shared memory: slower, with the same bits.",
)
@click.option(
    "--trainers",
    type=click.IntRange(1),
    metavar="T",
    help="With a split: the number of trainers.  [default: as it was split]",
)
@click.option(
    "--roles",
    metavar="MAP",
    help="With a split: the roles of processes, e.g. 'trainer:0-3;server:4,5'. A process may have both.  [default: "
    "as it was split]",
)
@click.option(
    "--on-trainer-loss",
    type=click.Choice(["abort", "continue"]),
    default="abort",
    show_default=True,
    help="With a split in rounds: end the run when a trainer is lost, or continue. Without rounds it always continues.",
)
@click.option(
    "--nan",
    type=click.Choice(["abort", "skip", "pass"]),
    default="pass",
    show_default=True,
    help="With a split: what servers do with gradients that are NaN or infinite: end the run with exit code 5 (abort), "
    "apply nothing of that round, or without rounds of that message (skip), or apply them (pass).",
)
@click.option(
    "--stop",
    type=click.Choice(["first", "all"]),
    help="With a split: read the data once, and end the run when the first trainer has no more, or when all have "
    "none.  [default: data that ends is an error]",
)
@click.option(
    "--staleness",
    type=click.IntRange(0),
    metavar="N",
    help="With a split without rounds: let no trainer be more than N steps ahead of the slowest.  [default: no limit]",
)
@click.option(
    "--record",
    metavar="FILE",
    help="With a split without rounds: write to FILE in which order messages were received, for gopt verify --replay.",
)
@deadline("Let a rank wait for the others at most S seconds at a call.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.pass_context
def command(context: click.Context, /, folder: str, **args: Any) -> int:
    """Train: every rank runs its own graph on its own part of the data.

    Without a launcher the ranks are threads of this process; --launch N starts N processes
    of this host (pip install 'gopt[mpi]'); under mpiexec or srun each process is a rank.

    \b
    Example:
      gopt run step.ranks --data samples.npz --steps 100 --set lr=1e-3
      gopt run step.ranks --launch 4 --data samples.npz --steps 1000 \\
          --set lr=cosine:1e-3:0:1000 --checkpoint ckpt --every 100 --resume
      gopt run step.ranks --data samples.npz --steps 1000 --checkpoint ckpt \\
          --eval step.eval.onnx --eval-data held_out.npz --eval-every 50 \\
          --keep-best loss --patience 5
      gopt run step.ranks --data samples.npz --steps 10 --set lr=1e-3 \\
          --log plain.jsonl --no-tuning
      gopt run step.split --data samples.npz --steps 100 --set lr=1e-3 \\
          --record run.json
    """
    from gopt.runtime.training.job import read_manifest

    options = options_of(args)
    args["steps"] = _steps(folder, options, args)
    if args["launch"] is not None:
        return _launch_ranks(context, folder, args)
    job = options.job(Path(folder), args["data"], args["steps"])
    from gopt.runtime.engines.launch import engine_of_launcher, is_started
    from gopt.runtime.engines.mpi import load_mpi, raise_on_all_ranks

    from . import run_ranks, run_servers

    split = run_servers.has_servers(folder)
    engine = args["engine"] = args["engine"] or engine_of_launcher()
    started = is_started(engine)
    if not split and not started:
        read_manifest(job.folder)  # another folder than gopt's is refused first
    options.check(split=split)
    run_servers.check_engine(args, split)
    if args["compiled"] is not None and engine != "torch":
        raise OptionError(f"--compile and --no-compile do not fit --engine {engine}", "leave it out")
    if args["deterministic"] and engine != "torch":
        raise OptionError(f"--deterministic does not fit --engine {engine}", "leave it out")
    if split:
        launch = run_servers.run_threads if engine == "threads" else run_servers.run_process
        return launch(job, options, args, context.find_root().params["debug"])
    if engine == "threads":
        return run_ranks.run_threads(job, read_manifest(job.folder)[0], options, args)
    if not started and (ranks := read_manifest(job.folder)[1].ranks) > 1:
        starter = f"torchrun --nproc-per-node {ranks} -m" if engine == "torch" else f"mpiexec -n {ranks}"
        raise OptionError(
            f"--engine {engine} runs every rank as a process, and no launcher has started this one",
            f"add --launch {ranks}, or start it with {starter} gopt run",
        )
    if engine == "torch":
        manifest, _ = read_manifest(job.folder)
    else:
        load_mpi(engine)
        manifest, _ = raise_on_all_ranks(lambda: read_manifest(job.folder))
    return run_ranks.run_process(job, manifest, args, engine, context.find_root().params["debug"])


def options_of(args: dict[str, Any]) -> RunOptions:
    """The options of the command line as the record of the verb. Raises OptionError."""
    from gopt.verbs.run_options import RunOptions

    names = (
        "state", "shuffle", "draws", "last", "batch_size", "checkpoint", "keep", "resume", "stop_on_nan", "sync_init",
        "trace", "audit", "eval", "eval_data", "keep_best", "tensorboard", "peak_flops",
        "deadline", "trainers", "roles", "on_trainer_loss", "nan", "stop", "staleness", "record",
    )  # fmt: skip
    return RunOptions(
        settings=setting_pairs(args["settings"]), every=args["every"] or 0,
        eval_every=args["eval_every"] or 0, patience=args["patience"] or 0, tuning=not args["no_tuning"],
        startup=not args["no_startup"],
        **{name: args[name] for name in names},
    )  # fmt: skip


def _steps(folder: str, options: RunOptions, args: dict[str, Any]) -> int:
    """The steps asked for, by --steps or by --epochs."""
    from gopt.runtime.training.epochs import steps_of_epochs

    from . import run_servers

    steps, epochs = args["steps"], args["epochs"]
    if (steps is None) == (epochs is None):
        fault = "--steps and --epochs say twice how long to train" if steps else "how long to train is not said"
        raise OptionError(fault, "say --steps K, or --epochs E of samples on disk")
    if epochs is None:
        return int(steps)
    if run_servers.has_servers(folder):
        raise OptionError("--epochs needs ranks of gopt shard: trainers have paces of their own", "say --steps K")
    return steps_of_epochs(options.job(Path(folder), args["data"], 1), epochs)


def _launch_ranks(context: click.Context, folder: str, args: dict[str, Any]) -> int:
    from gopt.runtime.engines.launch import launch
    from gopt.runtime.engines.mpi import check_installed
    from gopt.runtime.training.job import read_manifest

    from . import run_servers

    if args["engine"] == "threads":
        raise OptionError("--launch starts processes, and --engine is threads", "leave out one of them")
    if not run_servers.has_servers(folder):
        _, mesh = read_manifest(Path(folder))
        if mesh.ranks != args["launch"]:
            raise OptionError(
                f"--launch {args['launch']}, but {folder} holds {mesh.ranks} ranks",
                f"use --launch {mesh.ranks}, or make other ranks with gopt reshard",
            )
    engine = args["engine"] or "mpi"
    check_installed(engine)
    more = run_servers.launch_options(folder, args) if run_servers.has_servers(folder) else {}
    arguments = ["run", folder, "--engine", engine, *arguments_of(context, ("launch", "engine"))]
    from .render_run import live_run
    from .run_report import step_message

    with live_run(args["steps"]) as show:
        patient = args["checkpoint"] is not None
        return launch(
            args["launch"], arguments, args["deadline"], lambda line: show(step_message(line)), patient=patient, **more
        )
