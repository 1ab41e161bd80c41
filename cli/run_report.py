"""Prints a run: lines of steps, the log, notes, and the result."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from gopt.errors import RunError, StoppedError
from gopt.text.sanitize import listed

from .json_text import strict_json
from .terminal import print_json_text, print_note

if TYPE_CHECKING:
    from gopt.artifact.manifest import Manifest
    from gopt.runtime.parameter_server.waits import ServerSummary
    from gopt.runtime.training.job import Progress, StepMessage


def step_message(line: str) -> StepMessage:
    """The record of a step printed by the first rank. Raises RunError for any other line."""
    from gopt.documents import RANK_MESSAGE, as_run_error, parse_json
    from gopt.documents.records import from_document
    from gopt.errors import InputError
    from gopt.runtime.training.job import StepMessage

    try:
        return from_document(StepMessage, parse_json(line, RANK_MESSAGE, "a message of the first rank"))
    except InputError as error:
        raise as_run_error(error) from error


def stopped_error(job: Any, step: int, number: int) -> StoppedError:
    """The end requested by a signal, after keeping everything complete."""
    from gopt.artifact.checkpoint_index import step_dir

    return StoppedError(number, f"step {step} is kept in {job.checkpoint / step_dir(step)}: --resume continues from it")


def signal_note(text: str) -> None:
    """A note from within a signal handler, which may have come in the midst of other output."""
    with suppress(OSError):
        os.write(2, f"gopt: note: {text}\n".encode())


@contextmanager
def report_steps(
    job: Any, manifest: Manifest, args: dict[str, Any], engine: str, shared_calls: Callable[[], int] = lambda: 0,
    servers: Sequence[ServerSummary] = (), roles: Mapping[str, int] | None = None,
) -> Iterator[Callable[[Any], None]]:  # fmt: skip
    """Loss and throughput in the terminal, the log, and a result at the end. Of a split, ``servers``: what each did, by
    then; ``roles``: how many trainers and servers there are."""
    from gopt.runtime.engines.launcher_folder import LIVE, launcher_folder
    from gopt.runtime.training.draws import seed_of
    from gopt.runtime.training.run_result import RunResult
    from gopt.verbs.curves import curves

    from .render_run import live_run, render_evaluation, render_run

    steps: list[Progress] = []
    resumed, seed = _resume_step(job), seed_of(job, manifest)
    watched = launcher_folder()
    live_path = None if watched is None else str(watched / LIVE)
    with (
        live_run(job.steps) as show, _log(args["log"]) as write, _log(live_path) as live,
        curves(args["tensorboard"]) as draw,
    ):  # fmt: skip

        def tell(progress: Any) -> None:
            steps.append(progress)
            show(progress)
            if progress.evaluation is not None and not args["as_json"]:
                render_evaluation(progress.step, progress.evaluation)
            line = strict_json(progress.to_json())
            live(line)
            write(line)
            draw(progress)

        yield tell
    result = RunResult(
        folder=job.folder, engine=engine, ranks=manifest.total_ranks, steps=steps, asked=job.steps, resumed=resumed,
        checkpoint=job.checkpoint, shared_calls=shared_calls(), roles=roles, servers=servers,
        seed=seed, draws=manifest.draws, settings=job.settings, defaults=manifest.defaults,
        loss_reduction=manifest.loss_reduction,
        record=job.record if steps and steps[-1].step == job.steps else None,
    )  # fmt: skip
    if args["as_json"]:
        print_json_text(strict_json(result.to_json(), 1))
    else:
        render_run(result)


def _resume_step(job: Any) -> int | None:
    """The step a run resumes at; None: from the beginning."""
    if not job.resume or job.checkpoint is None:
        return None
    from gopt.artifact.checkpoint_index import complete_steps

    return max(complete_steps(job.checkpoint), default=None)


def report_resume(job: Any, manifest: Manifest) -> Callable[[int, str], None]:
    """Return a function that prints on stderr, after all checks, the step of resuming or the start from start-up
    graphs, the drawn values, and a note on the data."""
    from gopt.runtime.training.draws import seed_of

    resumes = job.resume and job.checkpoint is not None and job.checkpoint.exists()
    seed = seed_of(job, manifest)

    def say(step: int, note: str) -> None:
        from gopt.artifact.checkpoint_index import step_dir

        if note:
            print_note(note)
        if seed is not None and step < job.steps:
            names = listed([f"{name} {draw}" for name, draw in manifest.draws.items()], 4)
            print_note(f"what the data does not give of these is drawn from the seed {seed}: {names}")
        defaults = {name: value for name, value in manifest.defaults.items() if name not in job.settings}
        if defaults and step < job.steps:
            names = listed([f"{name} is {value}" for name, value in defaults.items()], 4)
            one = len(defaults) == 1
            print_note(
                f"{names}, as the step has {'it' if one else 'them'}; --set {next(iter(defaults))}=VALUE takes another"
            )
        if not step and job.startup and manifest.startup is not None:
            print_note("states start as start-up graphs compute them; --no-startup takes the stored values")
        if not job.resume or job.checkpoint is None or step >= job.steps:
            return
        if step:
            print_note(f"resumes at step {step}, {job.checkpoint / step_dir(step)}")
        else:
            lack = "has no complete checkpoint" if resumes else "does not exist"
            print_note(f"{job.checkpoint} {lack}: training starts from the beginning")

    return say


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
            rest = line.encode() + b"\n"
            try:
                while rest:
                    rest = rest[file.write(rest) :]
            except OSError as error:
                raise RunError(f"cannot write {path}: {error.strerror}") from error

        yield write
