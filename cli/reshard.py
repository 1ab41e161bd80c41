"""``gopt reshard``: another number of ranks, another mesh, another way to shard."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gopt.errors import OptionError

from .options import axis_option, axis_table, build_mesh, pass_option
from .terminal import print_json, print_note

if TYPE_CHECKING:
    from gopt.mesh import Sees


@click.command("reshard")
@click.argument("path", metavar="DIR|CHECKPOINT", type=click.Path())
@click.option("--ranks", type=int, metavar="N", help="Ranks that share the states, each with its own batch.")
@click.option("--mesh", metavar="AXES", help="The ranks as a grid, e.g. dp=2,shard=4.")
@axis_option
@click.option("-o", "--output", required=True, metavar="DIR", help="The folder to write.")
@click.option("--stage", type=click.IntRange(0, 3), metavar="0|1|2|3", help="Another stage.  [default: as it was]")
@click.option(
    "--partition", type=click.Choice(["flat", "rows", "whole"]), help="Where tensors may be cut.  [default: as it was]"
)
@click.option("--bucket-mb", type=float, metavar="M", help="Cap of a bucket in MiB.  [default: as it was]")
@click.option(
    "--accumulate", type=click.IntRange(1), metavar="K", help="Micro-steps of one update.  [default: as it was]"
)
@click.option(
    "-O",
    "--option",
    "options",
    multiple=True,
    metavar="PASS.NAME=VALUE",
    help="An option of a pass; gopt passes lists them.",
)
@click.option("--force", is_flag=True, help="Replace an existing output folder.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def command(
    path: str, ranks: int | None, mesh: str | None, axis: tuple[str, ...], output: str, stage: int | None,
    partition: str | None, bucket_mb: float | None, accumulate: int | None, options: tuple[str, ...], force: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Write a new output folder for other ranks, from the values that those of a folder or checkpoint hold.

    DIR is a folder of gopt shard, CHECKPOINT one step that gopt run has kept; it stays as it is. Passes and their
    options are as they were, unless said otherwise here. A run with the new folder counts its steps from 0.

    \b
    Example:
      gopt reshard step.ranks --ranks 4 -o step4.ranks
      gopt reshard checkpoints/step_00000100 --mesh dp=2,shard=2 --stage 3 -o bigger.ranks
    """
    from gopt.artifact.output_paths import check_output_folder
    from gopt.offline.merge import reshard

    from .render import progress, render_report

    target = Path(output)
    check_output_folder(target, force=force)
    given: dict[str, dict[str, object]] = {}
    for name, value in (("stage", stage), ("partition", partition), ("bucket-mb", bucket_mb)):
        if value is not None:
            given.setdefault("shard", {})[name] = value
    for owner, option, text in map(pass_option, options):
        if option in given.get(owner, {}):
            raise OptionError(f"option {option} of pass {owner} is given twice")
        given.setdefault(owner, {})[option] = text
    with progress() as advance:
        advance("sharding")
        grid = build_mesh(ranks, mesh, {}, _kinds(path, mesh, axis))
        sharded = reshard(path, grid, options=given, accumulate=accumulate, note=_note)
        advance("checking and writing")
        report = sharded.write(target, force=force)
    if as_json:
        print_json(report.to_json())
    else:
        render_report(report, target)


def _kinds(path: str, mesh: str | None, said: Sequence[str]) -> dict[str, Sees]:
    """What ``--axis`` says, and of other axes that the mesh names again, what was said when they were sharded."""
    from gopt.offline.folder_contents import read_mesh

    again = {part.partition("=")[0].strip() for part in (mesh or "").split(",")}
    return {name: kind for name, kind in read_mesh(path).kinds if name in again} | axis_table(said, {})


def _note(text: str) -> None:
    print_note(text)
