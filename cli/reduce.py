"""``gopt reduce``: a smaller model on which a command fails in the same way."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .options import seconds
from .terminal import print_json, print_note, print_text

if TYPE_CHECKING:
    from gopt.offline.reduce.reduction import Reduction
    from gopt.offline.reproducer.failure import Failure

PLACE, THEN = "{}", "--then"


@click.command("reduce")
@click.argument("path", metavar="MODEL|REPRODUCER", type=click.Path(readable=False))
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND...]")
@click.option("-o", "--output", required=True, metavar="SMALL", help="The ONNX file to write.")
@click.option(
    "--tries",
    default=2000,
    show_default=True,
    type=click.IntRange(1),
    metavar="N",
    help="Run the command at most N times.",
)
@click.option(
    "--time",
    "budget",
    default=3600.0,
    show_default=True,
    type=seconds,
    metavar="S",
    help="Begin no run after S seconds.",
)
@click.option(
    "--deadline",
    default=120.0,
    show_default=True,
    type=seconds,
    metavar="S",
    help="Stop a run after S seconds, and count it as another failure.",
)
@click.option("--force", is_flag=True, help="Replace an existing model.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    path: str, words: tuple[str, ...], output: str, tries: int, budget: float, deadline: float, force: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Make a smaller model on which a command fails in the same way: the same exit code, kind of error and place, and a
    message of the same form.

    COMMAND is a command of gopt, or a program, in which {} stands for the model; several commands of gopt are joined
    by --then. A reproducer brings its own. Each run is a process of its own in an empty folder. First the outputs of
    whole parameters are removed, then other outputs, then nodes, by halves; then nodes are bypassed, stored values
    become inputs, and dimensions small. Every graph that is kept passes onnx.checker, as the whole one does.

    \b
    Example:
      gopt reduce failure.zip -o small.onnx
      gopt reduce step.onnx -o small.onnx -- shard {} --ranks 8
      gopt reduce step.onnx -o small.onnx -- \\
          shard {} --ranks 2 -o out --then verify out
      gopt reduce step.onnx -o small.onnx -- python check.py {}
    """
    from gopt.artifact.model_file import check_model
    from gopt.artifact.output_paths import resolve_output
    from gopt.offline.reduce.reduction import parameter_groups, read_model, reduce_model
    from gopt.offline.reduce.search import SearchBudget
    from gopt.system.signals import raise_on_signals

    from .render_progress import progress

    target = resolve_output(output)
    check_model(target, shown=Path(output), force=force)
    folder = tempfile.TemporaryDirectory(prefix="gopt-reduce-")
    with raise_on_signals() as check_signals, folder as scratch, progress() as advance:
        advance("reading")
        model_path, runs, notes = _commands(Path(path), words, Path(scratch))
        for note in notes:
            print_note(note)
        model = read_model(model_path)
        fails = _runner(runs, Path(scratch), deadline, check_signals)
        reduction = reduce_model(
            model, fails, groups=parameter_groups(model_path), bounds=SearchBudget(tries, budget), tell=_teller(advance)
        )
        advance("writing")
        _write(target, Path(output), reduction, force)
    if as_json:
        print_json(_to_json(reduction))
    else:
        _tell(reduction, output)


def _teller(advance: Callable[[str], None]) -> Callable[[str], None]:
    """Every try to a terminal; with --verbose, which prints a line for each phase, the first of each step alone."""
    from .verbosity import Verbosity, verbosity

    if verbosity() is not Verbosity.VERBOSE:
        return advance
    steps = [""]

    def tell(text: str) -> None:
        step = text.partition(":")[0]
        if step != steps[-1]:
            steps.append(step)
            advance(text)

    return tell


def _commands(path: Path, words: Sequence[str], scratch: Path) -> tuple[Path, list[list[str]], list[str]]:
    """The model, and the commands with ``{}`` in its place, of a reproducer or of the words behind ``--``; notes."""
    from gopt.errors import InputError, OptionError
    from gopt.offline.reproducer import archive

    if words:
        return path, _split(words, path), []
    try:
        archive.read(path)
    except InputError:
        if path.suffix == ".onnx":
            raise OptionError(
                "the failing command is missing", "name it behind --, such as -- shard {} --ranks 8"
            ) from None
        raise
    from .reproduce import command_of

    folder = scratch / "reproducer"
    folder.mkdir()
    record = archive.unpack(path, folder)
    models = [index for index, name in enumerate(record.inputs) if name.kind == "model"]
    if len(models) != 1:
        raise OptionError(
            f"{path} holds {len(models)} models, and one is reduced at a time",
            "reduce the model of the folder: gopt reduce MODEL -o SMALL -- shard {} ... -o out --then verify out",
        )
    model = archive.input_path(folder, record, models[0])
    names = [PLACE if word == str(model) else word for word in command_of(record, Path("."), folder)]
    notes = [f"{option} is not in the reproducer, and the command runs without it" for option in record.left_out]
    return model, [names], notes


def _split(words: Sequence[str], model: Path) -> list[list[str]]:
    """Commands of gopt, or a program, with ``{}`` for the model and whole paths for existing files."""
    from gopt.errors import OptionError

    if not any(PLACE in word for word in words) and str(model) not in words:
        raise OptionError("the command does not name the model", "write {} in its place")
    commands: list[list[str]] = [[]]
    for index, word in enumerate(words):
        if word == THEN:
            commands.append([])
            continue
        written = index > 0 and words[index - 1] in ("-o", "--output")
        if word == str(model):
            word = PLACE
        elif commands[-1] and not written and not word.startswith("-") and os.path.exists(word):
            word = os.path.abspath(word)
        commands[-1].append(word)
    return [argv[1:] if argv[:1] == ["gopt"] else argv for argv in commands]


def _runner(
    commands: Sequence[Sequence[str]], scratch: Path, deadline: float, check_signals: Callable[[], None]
) -> Callable[[bytes], Failure | None]:
    """Runs commands on a model, each time in an empty folder; ``check_signals`` raises where the search is to end."""
    from gopt.errors import OptionError

    from .main import COMMANDS
    from .trial import run_commands, run_program

    of_gopt = [bool(argv) and argv[0] in COMMANDS for argv in commands]
    if not all(of_gopt) and len(commands) > 1:
        raise OptionError("--then takes gopt commands only", "put the others into a script")
    model = scratch / "model.onnx"

    def fails(data: bytes) -> Failure | None:
        check_signals()
        model.write_bytes(data)
        folder = scratch / "run"
        with suppress(FileNotFoundError):
            shutil.rmtree(folder)
        folder.mkdir()
        filled = [[word.replace(PLACE, str(model)) for word in argv] for argv in commands]
        run = run_commands(filled, folder, deadline) if of_gopt[0] else run_program(filled[0], folder, deadline)
        check_signals()
        return run

    return fails


def _write(target: Path, shown: Path, reduction: Reduction, force: bool) -> None:
    """Put the model in place, whole or not at all."""
    from gopt.errors import OptionError
    from gopt.system.staging import staged_file

    try:
        with staged_file(target) as staged:
            with staged.open() as file:
                file.write(reduction.model.SerializeToString(deterministic=True))
            staged.commit_over() if force else staged.commit()
    except FileExistsError:
        raise OptionError(
            f"{shown} was created by another command in the meantime", "choose another name with -o"
        ) from None


def _to_json(reduction: Reduction) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "format": "gopt-reduction/1", "nodes_before": reduction.nodes_before, "nodes": reduction.nodes,
        "tries": reduction.tries, "kept": reduction.kept, "stopped": reduction.stopped,
        "failure": asdict(reduction.failure),
    }  # fmt: skip


def _tell(reduction: Reduction, output: str) -> None:
    from .verbosity import Verbosity, verbosity

    if verbosity() is Verbosity.QUIET:
        return
    ended = f"; stopped after {reduction.stopped}" if reduction.stopped else ""
    print_text(
        f"{output}: {reduction.nodes} of {reduction.nodes_before} nodes, {reduction.tries} tries, "
        f"{reduction.kept} kept{ended}"
    )
    print_text(f"it fails in the same way: {reduction.failure}")
