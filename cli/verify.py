"""``gopt verify``: the proof."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .json_text import strict_json
from .options import arguments_of, deadline, setting_pairs
from .reproducer_option import tell_result
from .terminal import print_error, print_json_text

if TYPE_CHECKING:
    from gopt.verification.options import VerifyOptions


@click.command("verify")
@click.argument("paths", nargs=-1, required=True, metavar="[MODEL] DIR", type=click.Path(readable=False))
@click.option("--steps", default=3, show_default=True, type=click.IntRange(1), metavar="K", help="Run K steps.")
@click.option(
    "--seed",
    default=0,
    show_default=True,
    metavar="S",
    help="Draw batches, and states without a value, from this seed.",
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="Set a hyper-parameter, e.g. lr=1e-3. May be repeated.  [default: the step's own, at least 0.01]",
)
@click.option(
    "--data",
    metavar="DATA",
    help="Use your own batches: FILE.npz, FILE.safetensors or module:function.  [default: drawn ones]",
)
@click.option("--no-confirm", is_flag=True, help="Do not confirm gradients by finite differences.")
@click.option("--all", "every", is_flag=True, help="Confirm every gradient; without it, a sample of more than 256.")
@click.option(
    "--engine",
    type=click.Choice(["threads", "mpi", "torch", "both"]),
    default="threads",
    show_default=True,
    help="Run ranks as threads or as processes (mpi), by ONNX Runtime; or let PyTorch compute source and ranks "
    "(torch), or check one step of the source (both).",
)
@click.option(
    "--replay",
    metavar="FILE",
    help="Run a split without rounds again as FILE, a record of gopt run --record, says; compare it with that run and "
    "with the source.",
)
@deadline("Wait at most S seconds for a rank, or for a part of a graph.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.pass_context
def command(
    context: click.Context, /, paths: tuple[str, ...], settings: tuple[str, ...], engine: str, no_confirm: bool,
    as_json: bool, **rest: Any,
) -> int:  # fmt: skip
    """Run the source and all ranks, or trainers and servers, each on its own batch, and compare states, losses and
    metrics.

    Repeats the run with all local gradients × 1/64 and × 64, with one infinite gradient where the step checks for it,
    and from counters and flags at which the conditions of its schedule have the other outcome. Random nodes are fed
    what they would have drawn, the same to source and ranks. Of more than 256 gradients a sample is confirmed by finite
    differences, some of every kind (--all: every one); states, losses and metrics are always all compared. Exit code 1
    when a value differs, 4 when something cannot be confirmed: it says what, and why. In --json, an
    error_over_tolerance above 1 means that the value failed; times "tolerance" it is the relative error.

    \b
    Example:
      gopt verify step.ranks
      gopt verify step.onnx step.ranks --steps 5
      gopt verify step.ranks --data samples.npz
      gopt verify step.ranks --all
      gopt verify step.ranks --engine mpi
      gopt verify step.split --replay run.json
    """
    from gopt.errors import OptionError

    from .render_progress import progress
    from .render_verify import render_verification
    from .run_servers import role_names

    if len(paths) > 2:
        raise OptionError("verify takes at most a model and a folder", "gopt verify MODEL DIR")
    if len(paths) == 2 and Path(paths[0]).is_dir() and Path(paths[1]).is_file():
        raise OptionError("verify takes the model first, then the folder", f"gopt verify {paths[1]} {paths[0]}")
    hyper = {}
    for name, value in setting_pairs(settings).items():
        try:
            hyper[name] = float(value)
        except ValueError:
            raise OptionError(f"cannot read --set {name}={value!r} as a number", "write --set lr=1e-3") from None
    from gopt.runtime.engines.mpi import launched

    if rest["replay"] is not None and engine == "mpi":
        raise OptionError("--engine mpi cannot be combined with --replay: roles run one at a time", "leave it out")
    if engine == "mpi" and not launched():
        from gopt.runtime.engines.launch import launch
        from gopt.runtime.training.job import read_manifest

        _, mesh = read_manifest(Path(paths[-1]))
        arguments = ["verify", *paths, *arguments_of(context, ("paths",))]
        return launch(mesh.ranks, arguments, rest["deadline"], lambda line: None)
    from gopt.offline.html_report.verification_record import FORMAT
    from gopt.verbs.verify import verify
    from gopt.verification.engines import NodeEngine
    from gopt.verification.options import VerifyOptions

    model = paths[0] if len(paths) == 2 else None
    nodes = NodeEngine(engine if engine in ("torch", "both") else "onnxruntime")
    options = VerifyOptions(settings=hyper, engine=nodes, confirm=not no_confirm, **rest)
    if engine == "mpi":
        return _as_rank(paths[-1], model, options, as_json)
    with progress() as advance:
        result = verify(paths[-1], model, options, advance=advance)
    tell_result(result.reason())
    if as_json:
        print_json_text(strict_json({"format": FORMAT, **result.to_json()}, 1))
    else:
        render_verification(result, role_names(paths[-1], result.ranks))
    return result.exit_code


def _as_rank(folder: str, model: str | None, options: VerifyOptions, as_json: bool) -> int:
    """A process of many: computes the reference, runs its rank, and gathers the results of the others."""
    from gopt.errors import GoptError
    from gopt.offline.html_report.verification_record import FORMAT
    from gopt.runtime.engines.base import run_one_rank
    from gopt.runtime.engines.heartbeat import StatusPublisher, follow
    from gopt.runtime.engines.mpi import MpiEngine
    from gopt.runtime.engines.rank_status import ENDED, REPORTED
    from gopt.runtime.training.data import check_data
    from gopt.runtime.training.job import read_manifest
    from gopt.verification.verify import Verifier

    from .render_verify import render_verification

    _, mesh = read_manifest(Path(folder))
    assert options.deadline is not None
    if options.data is not None:
        check_data(options.data)
    engine = MpiEngine(mesh, options.deadline, print_error)
    beat = StatusPublisher.open(engine.rank, engine.gather)
    follow(engine.watchdog, beat, engine.rank)
    how = ENDED
    try:
        verifier = Verifier(folder, model, options.deadline)
        engine.prepare(verifier.groups())
        verifier.transport = run_one_rank(engine)
        result = verifier.run(options)
        if engine.rank == 0 and as_json:
            print_json_text(strict_json({"format": FORMAT, **result.to_json()}, 1))
        elif engine.rank == 0:
            render_verification(result)
        return result.exit_code
    except GoptError as error:
        how = REPORTED
        beat.report(error.exit_code, partial(print_error, f"rank {engine.rank}: {error.message}", error.hints))
        engine.fail(error)
        return error.exit_code
    finally:
        beat.at(0, -1, how)
