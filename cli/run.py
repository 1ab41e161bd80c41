"""``gopt run``: train with the ranks of an output folder."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from gopt.errors import OptionError, RunError, StoppedError

from .json_text import strict_json
from .options import arguments_of, deadline
from .terminal import print_error, print_json_text, print_note


@click.command("run")
@click.argument("folder", metavar="DIR", type=click.Path())
@click.option(
    "--data",
    required=True,
    metavar="FILE|MODULE:FUNCTION",
    help="Samples: .npz, .safetensors, or a function that yields batches.",
)
@click.option(
    "--steps",
    required=True,
    type=click.IntRange(1),
    metavar="K",
    help="The step to stop at, counted from the start of training: with --resume, earlier steps count.",
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="A hyper-parameter: 1e-3, linear:A:B:STEPS, cosine:A:B:STEPS or module:function.",
)
@click.option("--state", metavar="FILE", help="Values of states (.safetensors, .npz) where the folder has none.")
@click.option(
    "--engine",
    type=click.Choice(["threads", "mpi", "nccl"]),
    help="What ranks are: threads, processes, or processes with a GPU each.  "
    "[default: mpi under a launcher, else threads]",
)
@click.option("--launch", type=click.IntRange(1), metavar="N", help="Start N ranks with mpiexec: as many as DIR holds.")
@click.option(
    "--shuffle", type=click.IntRange(0), metavar="SEED", help="Deal the samples out in a new order in every pass."
)
@click.option(
    "--checkpoint", metavar="CKPT", help="Folder for checkpoints, each in CKPT/step_…; one is written at the end."
)
@click.option("--every", type=click.IntRange(1), metavar="N", help="A checkpoint every N steps as well.")
@click.option(
    "--keep", type=click.IntRange(1), default=2, show_default=True, metavar="N", help="How many checkpoints stay."
)
@click.option("--resume", is_flag=True, help="Go on from the newest checkpoint in CKPT; without one, from the start.")
@click.option("--log", metavar="FILE", help="Append a line of JSON per step: losses, seconds, samples per second.")
@click.option("--trace", metavar="FILE", help="Write what every rank did when, in Chrome's trace format.")
@click.option("--stop-on-nan", is_flag=True, help="End the run, with exit code 5, at a loss that is NaN or infinite.")
@click.option(
    "--sync-init",
    is_flag=False,
    flag_value="all",
    metavar="[AXES]",
    help="Take start values that ranks hold in common from the first rank of their group: along all axes, or those "
    "named, such as dp or dp+tp.",
)
@click.option(
    "--no-tuning",
    is_flag=True,
    help="Run without tiling, generated kernels, planned and shared memory: slower, the same bits, to bisect.",
)
@click.option(
    "--trainers", type=click.IntRange(1), metavar="T", help="Of a split: so many trainers.  [default: as it was split]"
)
@click.option(
    "--roles",
    metavar="MAP",
    help="Of a split: which process is what, e.g. trainer:0-3;server:4,5.  A process may be both.",
)
@click.option(
    "--on-trainer-loss",
    type=click.Choice(["abort", "continue"]),
    default="abort",
    show_default=True,
    help="Of a split in rounds: whether steps go on when a trainer is lost. Without rounds they always do.",
)
@click.option(
    "--nan",
    type=click.Choice(["abort", "pass"]),
    default="pass",
    show_default=True,
    help="Of a split in rounds: whether servers end the run, with exit code 5, at a gradient that is NaN or infinite.",
)
@click.option(
    "--staleness",
    type=click.IntRange(0),
    metavar="N",
    help="Of a split without rounds: let no trainer be more than N steps ahead of the slowest one.",
)
@deadline("Seconds that a rank waits for the others at a call.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.pass_context
def command(context: click.Context, /, folder: str, **given: Any) -> int:
    """Train: every rank runs its own graph on its own part of the data.

    Without a launcher the ranks are threads of this process; under mpiexec or srun each process is a rank; --launch N
    starts mpiexec itself (pip install 'gopt[mpi]').

    \b
    Example:
      gopt run step.ranks --data samples.npz --steps 100 --set lr=1e-3
      gopt run step.ranks --launch 4 --data samples.npz --steps 1000 --set lr=cosine:1e-3:0:1000 \\
          --checkpoint ckpt --every 100 --resume
      gopt run step.ranks --data samples.npz --steps 10 --set lr=1e-3 --log plain.jsonl --no-tuning
    """
    from gopt.runtime.training.job import Job, read_manifest

    if given["every"] and not given["checkpoint"]:
        raise OptionError("--every needs --checkpoint CKPT")
    if given["launch"] is not None:
        return _launch_ranks(context, folder, given)
    job = Job(
        folder=Path(folder), data=given["data"], steps=given["steps"], settings=_pairs(given["settings"]),
        state=given["state"], shuffle=given["shuffle"],
        checkpoint=None if given["checkpoint"] is None else Path(given["checkpoint"]), every=given["every"] or 0,
        keep=given["keep"], resume=given["resume"], stop_on_nan=given["stop_on_nan"], sync_init=given["sync_init"],
        tuning=not given["no_tuning"], trace=None if given["trace"] is None else Path(given["trace"]),
    )  # fmt: skip
    from gopt.runtime.engines.mpi import launched, load_mpi, raise_on_all_ranks

    from . import run_servers

    split = run_servers.has_servers(folder)
    run_servers.check_options(given, split)
    engine = given["engine"] or ("mpi" if launched() else "threads")
    if split:
        launch = run_servers.run_threads if engine == "threads" else run_servers.run_process
        return launch(job, given, context.find_root().params["debug"])
    if engine == "threads":
        return _threads(job, read_manifest(job.folder)[1], given)
    if not launched() and (ranks := read_manifest(job.folder)[1].ranks) > 1:
        raise OptionError(
            f"--engine {engine} runs every rank as a process, and no launcher has started this one",
            f"add --launch {ranks}, or start it with mpiexec -n {ranks}",
        )
    load_mpi(engine)
    _, mesh = raise_on_all_ranks(lambda: read_manifest(job.folder))
    return _processes(job, mesh, given, engine, context.find_root().params["debug"])


def _launch_ranks(context: click.Context, folder: str, given: dict[str, Any]) -> int:
    from gopt.runtime.engines.launch import launch, mpiexec
    from gopt.runtime.training.job import read_manifest

    from . import run_servers

    if given["engine"] == "threads":
        raise OptionError("--launch starts MPI ranks, and --engine is threads")
    if not run_servers.has_servers(folder):
        _, mesh = read_manifest(Path(folder))
        if mesh.ranks != given["launch"]:
            raise OptionError(f"--launch {given['launch']}, but {folder} holds {mesh.ranks} ranks", "see gopt reshard")
    engine = given["engine"] or "mpi"
    mpiexec(engine)
    more = run_servers.launch_options(folder, given) if run_servers.has_servers(folder) else {}
    arguments = ["run", folder, "--engine", engine, *arguments_of(context, ("launch", "engine"))]
    from .render_run import live_run

    with live_run(given["steps"]) as show:
        kept = given["checkpoint"] is not None
        return launch(
            given["launch"], arguments, given["deadline"], lambda line: show(step_line(line)), patient=kept, **more
        )


def step_line(line: str) -> dict[str, Any]:
    """What the first rank tells of a step."""
    from gopt.documents import TOLD, as_run_error, parse_json
    from gopt.errors import InputError

    try:
        record = parse_json(line, TOLD, "what the first rank tells")
    except InputError as error:
        raise as_run_error(error) from error
    return record | {"loss": math.nan if record["loss"] is None else record["loss"]}


def _threads(job: Any, mesh: Any, given: dict[str, Any]) -> int:
    from gopt.runtime.engines.base import run_threads
    from gopt.runtime.training.stop_signal import listen_for_stop
    from gopt.runtime.training.train import Trainer

    def live(engine: Any) -> tuple[int, int]:
        trainer = Trainer(job, engine, _ignore_position, stop_signal=stop)
        trainer.run(tell, _report_resume(job, trainer))
        return trainer.step, trainer.stopped

    with (
        listen_for_stop(job.checkpoint is not None, signal_note) as stop,
        report_steps(job, mesh.ranks, given, "threads") as tell,
    ):
        step, stopped = run_threads(mesh, given["deadline"], live)[0]
    if stopped:
        raise stopped_error(job, step, stopped)
    return 0


def stopped_error(job: Any, step: int, number: int) -> StoppedError:
    """The end for which a signal asked, once what was complete is kept."""
    from gopt.artifact.checkpoint_index import step_dir

    return StoppedError(number, f"step {step} is kept in {job.checkpoint / step_dir(step)}: --resume goes on from it")


def signal_note(text: str) -> None:
    """A note from within a signal handler, which may have come in the midst of other output."""
    os.write(2, f"gopt: note: {text}\n".encode())


def _processes(job: Any, mesh: Any, given: dict[str, Any], kind: str, debug: bool) -> int:
    """This process is one rank of many."""
    from gopt.runtime.engines.heartbeat import ENDED, ERROR_GRACE, REPORTED, Heartbeat, follow
    from gopt.runtime.engines.mpi import MpiEngine, raise_on_all_ranks
    from gopt.runtime.training.stop_signal import listen_for_stop
    from gopt.runtime.training.train import Trainer

    from .main import exit_code, explain_error

    beat: Heartbeat | None = None

    def explain(text: str) -> None:
        step, call = (beat.step, beat.call) if beat is not None else (0, -1)
        if beat is None or beat.first(RunError("").exit_code):
            print_error(f"rank {engine.rank}, step {step + 1}{f', call {call}' if call >= 0 else ''}: {text}")
        else:
            time.sleep(ERROR_GRACE)
        if beat is not None:
            beat.at(step, call, REPORTED)

    engine: Any = raise_on_all_ranks(lambda: MpiEngine(mesh, given["deadline"], explain))
    beat = Heartbeat.open(engine.rank, engine.gather)
    follow(engine.watchdog, beat, engine.rank)
    try:
        host = engine
        place: list[Any] = []
        if kind == "nccl":
            from gopt.runtime.engines.nccl import on_gpus

            engine, *place = on_gpus(mesh, engine)
        with listen_for_stop(job.checkpoint is not None, lambda _: None) as stop:
            trainer = raise_on_all_ranks(lambda: Trainer(job, engine, beat.at, *place, stop_signal=stop))
            if engine.rank == 0:
                with report_steps(job, mesh.ranks, given, kind, lambda: host.shared_calls) as tell:
                    trainer.run(tell, _report_resume(job, trainer))
            else:
                trainer.run(lambda _: None)
        if trainer.stopped and engine.rank == 0 and beat.first(128 + trainer.stopped):
            explain_error(stopped_error(job, trainer.step, trainer.stopped), debug)
        beat.at(trainer.step, -1, ENDED)
    except Exception as error:  # a defect too: a rank that only left would let the others wait
        if beat.first(exit_code(error)):
            explain_error(error, debug)
        else:
            time.sleep(ERROR_GRACE)  # another rank is saying why, and ends this one
        beat.at(beat.step, beat.call, REPORTED)
        engine.fail(error)
    except SystemExit:  # another rank says why
        beat.at(beat.step, beat.call, ENDED)
        raise
    return 128 + trainer.stopped if trainer.stopped else 0


def _ignore_position(step: int, call: int) -> None:
    return None


@contextmanager
def report_steps(
    job: Any, ranks: int, given: dict[str, Any], engine: str, shared_calls: Callable[[], int] = lambda: 0,
    servers: Sequence[Any] = (),
) -> Iterator[Callable[[Any], None]]:  # fmt: skip
    """Loss and throughput in the terminal, the log, and a result at the end; ``servers``: what each did, by then."""
    from gopt.runtime.engines.heartbeat import HEARTBEATS
    from gopt.runtime.engines.launch import LIVE

    from .render_run import live_run, render_run

    steps: list[Any] = []
    resumed = _resume_step(job)
    watched = os.environ.get(HEARTBEATS)
    live_path = os.path.join(watched, LIVE) if watched else None
    with live_run(job.steps) as show, _log(given["log"]) as write, _log(live_path) as live:

        def tell(progress: Any) -> None:
            steps.append(progress)
            told = progress.to_json()
            show(told)
            line = strict_json(told)
            live(line)
            write(line)

        yield tell
    spent = sum(each.seconds for each in steps)
    failed = [each.step for each in steps if not math.isfinite(each.loss)]
    record = {
        "format": "gopt-run/1", "folder": str(job.folder), "engine": engine, "ranks": ranks,
        "shared_calls": shared_calls(), "steps": len(steps), "asked": job.steps, "resumed": resumed,
        "first": steps[0].to_json() if steps else None, "last": steps[-1].to_json() if steps else None,
        "not_finite": {"steps": len(failed), "first": failed[0]} if failed else None,
        "seconds": round(spent, 6),
        "samples_per_second": round(sum(each.samples for each in steps) / spent, 3) if spent else 0.0,
        "checkpoint": None if job.checkpoint is None else str(job.checkpoint),
    }  # fmt: skip
    if servers:
        record["servers"] = [each.to_json() for each in servers]
    if given["as_json"]:
        print_json_text(strict_json(record, 1))
    else:
        render_run(record, [each.loss for each in steps])


def _resume_step(job: Any) -> int | None:
    """The step that a run goes on from; None: from the beginning."""
    if not job.resume or job.checkpoint is None:
        return None
    from gopt.artifact.checkpoint_index import complete_steps

    return max(complete_steps(job.checkpoint), default=None)


def _report_resume(job: Any, trainer: Any) -> Callable[[], None]:
    """What says on stderr which step a run goes on from, when all that could refuse it has passed."""
    there = job.checkpoint is not None and job.checkpoint.exists()

    def say() -> None:
        from gopt.artifact.checkpoint_index import step_dir

        if not job.resume or job.checkpoint is None or trainer.step >= job.steps:
            return
        if trainer.step:
            _note(f"goes on from step {trainer.step}, {job.checkpoint / step_dir(trainer.step)}")
        else:
            lack = "holds no whole checkpoint" if there else "does not exist"
            _note(f"{job.checkpoint} {lack}: training starts from the beginning")

    return say


def _note(text: str) -> None:
    print_note(text)


@contextmanager
def _log(path: str | None) -> Iterator[Callable[[str], None]]:
    """Something that writes a line, at once."""
    if path is None:
        yield lambda _: None
        return
    try:
        file = open(path, "ab", buffering=0)  # noqa: SIM115 - it is closed below; only opening it is refused here
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}") from error
    with file:

        def write(line: str) -> None:
            left = line.encode() + b"\n"
            try:
                while left:
                    left = left[file.write(left) :]
            except OSError as error:
                raise RunError(f"cannot write {path}: {error.strerror}") from error

        yield write


def _pairs(texts: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise OptionError(f"cannot read {text!r} as a hyper-parameter", "write --set lr=1e-3")
        found[name] = value
    return found
