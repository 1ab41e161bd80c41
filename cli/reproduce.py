"""``gopt reproduce``: the command of a reproducer once more."""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .command_line import rebuilt
from .options import seconds
from .terminal import print_json, print_note, print_text

if TYPE_CHECKING:
    from gopt.offline.reproducer.failure import Failure
    from gopt.offline.reproducer.record import Reproducer


@click.command("reproduce")
@click.argument("file", type=click.Path(readable=False))
@click.argument("more", nargs=-1, type=click.UNPROCESSED, metavar="[-- OPTIONS...]")
@click.option(
    "--extract", metavar="DIR", help="Write the inputs into a new folder, show the command, and do not run it."
)
@click.option(
    "--deadline", type=seconds, default=600.0, show_default=True, metavar="S", help="Stop the command after S seconds."
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(file: str, more: tuple[str, ...], extract: str | None, deadline: float, as_json: bool) -> int:
    """Run the command of a reproducer again, and say whether the command fails in the same way.

    The command runs in a separate process and in a temporary folder. Options behind -- are added, such as --data: no
    reproducer has data. Exit code 0 for a failure with the same exit code, the same kind of error and a message of the
    same form; 1 for no failure, or another failure.

    \b
    Example:
      gopt shard step.onnx --mesh shard=2,tp=3 --reproducer failure.zip
      gopt reproduce failure.zip
      gopt reproduce failure.zip --extract failure
      gopt reproduce failure.zip -- --data samples.npz
    """
    from gopt.offline.reproducer import archive

    if extract is not None:
        _extract(Path(file), Path(extract), more)
        return 0
    with tempfile.TemporaryDirectory(prefix="gopt-reproduce-") as scratch:
        folder = Path(scratch)
        record = archive.unpack(Path(file), folder)
        (folder / "output").mkdir()
        words = command_of(record, folder / "output", folder) + list(more)
        _notes(record, more)
        from .trial import run_commands

        failed = run_commands([words], folder, deadline)
    reproduced = failed is not None and failed.same_as(record.failed())
    if as_json:
        print_json(_to_json(record, failed, reproduced))
    else:
        _tell(record, failed, reproduced)
    return 0 if reproduced else 1


def command_of(record: Reproducer, output: Path, folder: Path) -> list[str]:
    """The command line on the inputs unpacked into a folder by ``unpack``; its output lies in ``output``.

    Raises InputError for parts no reproducer has.
    """
    from gopt.offline.reproducer import archive

    return rebuilt(record, _found, lambda index: archive.input_path(folder, record, index), output)


def _extract(file: Path, folder: Path, more: tuple[str, ...]) -> None:
    """Unpack into a new folder, whole or not at all."""
    from gopt.errors import OptionError
    from gopt.offline.reproducer import archive
    from gopt.system.files import sync
    from gopt.system.paths import real_path
    from gopt.system.staging import staged_folder

    try:
        target = real_path(folder)
        with staged_folder(target) as staged:
            record = archive.unpack(file, staged.path)
            (staged.path / "output").mkdir()
            words = command_of(record, folder / "output", folder)
            for path in staged.path.rglob("*"):
                sync(path)
            staged.commit()
    except FileExistsError:
        raise OptionError(f"{folder} exists already", "choose another folder with --extract") from None
    print_text(shlex.join(["gopt", *words, *more]))


def _found(name: str) -> click.Command:
    from .main import group

    command = group.get_command(click.Context(group), name)
    assert command is not None  # ``rebuilt`` passes only known commands
    return command


def _notes(record: Reproducer, more: tuple[str, ...]) -> None:
    from gopt.offline.reproducer.record import versions

    for option in record.left_out:
        if option not in more:
            print_note(f"{option} is not in the reproducer, and the command runs without it: -- {option} FILE adds it")
    now = versions()
    differences = [
        f"{name} {text}, here {now[name]}" for name, text in record.versions.items() if now.get(name, text) != text
    ]
    if differences:
        print_note(f"the command failed with {'; '.join(differences)}")


def _to_json(record: Reproducer, failed: Failure | None, reproduced: bool) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "format": "gopt-reproduction/1", "same": reproduced, "command": record.command,
        "recorded": asdict(record.failure), "found": None if failed is None else asdict(failed),
    }  # fmt: skip


def _tell(record: Reproducer, failed: Failure | None, reproduced: bool) -> None:
    from .verbosity import Verbosity, verbosity

    if verbosity() is Verbosity.QUIET:
        return
    if reproduced:
        print_text(f"gopt {record.command} fails in the same way: {failed}")
        return
    print_text(f"gopt {record.command} {'does not fail' if failed is None else f'fails in another way: {failed}'}")
    print_text(f"it was recorded with {record.failed()}")
