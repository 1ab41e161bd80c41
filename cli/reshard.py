"""``gopt reshard``: another number of ranks, another mesh, another way to shard."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gopt.errors import OptionError

from .options import axis_option, axis_table, build_mesh, is_given, pass_option, pass_settings_option
from .server_options import MODES, given_options, split_options
from .sharding_options import accumulate_option, cut_options, no_prove_option, time_options
from .terminal import print_json, print_note

if TYPE_CHECKING:
    from gopt.records.mesh import AxisKind

_KEPT = "as it was"
_SETTINGS = ("stage", "partition", "schedule", "recompute", "offload")
_OF_RANKS = ("ranks", "mesh", "axis", "options", "no_prove", *_SETTINGS)
_OF_SERVERS = (
    "trainers", "servers", "mode", "pull", "roles", "slicing", "minimum", "placement", "server_map", "loss_reduction",
    "fixed_trainers", "every", "delay_compensation", "count", "wire", "table", "no_tables", "table_memory",
    "rows", "init",
)  # fmt: skip
_KINDS = "give --ranks N or --mesh shard=N for ranks, --trainers T and --servers S for trainers and servers"


@click.command("reshard")
@click.argument("path", metavar="DIR|CHECKPOINT", type=click.Path(readable=False))
@click.option("--ranks", type=int, metavar="N", help="The number of ranks; each gets its own batch.")
@click.option("--mesh", metavar="AXES", help="The ranks as a grid, e.g. dp=2,shard=4.")
@axis_option
@click.option("-o", "--output", metavar="DIR", help="The folder to write.")
@cut_options(_KEPT, _KEPT)
@accumulate_option("update of ranks, or push of trainers", _KEPT)
@time_options(_KEPT, _KEPT, _KEPT)
@split_options(*MODES)
@pass_settings_option
@click.option(
    "--explain", "explained", is_flag=True, help="Print which files and bytes make each state, and write nothing."
)
@no_prove_option
@click.option("--force", is_flag=True, help="Replace an existing output folder.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def command(path: str, explained: bool, **args: Any) -> None:
    """Write a new output folder for other ranks, from the values in a folder or checkpoint.

    DIR is a folder of gopt shard or gopt split, CHECKPOINT one step that gopt run has kept; it stays as it is. With
    --ranks or --mesh the new folder is one of ranks, with --trainers or --servers one of trainers and servers. Options
    are as they were, unless said otherwise here. A run with the new folder counts its steps from 0.

    --explain shows the pieces from which the values of the new ranks are taken, as gopt merge --explain does.

    \b
    Example:
      gopt reshard step.ranks --ranks 4 -o step4.ranks
      gopt reshard checkpoints/step_00000100 --mesh dp=2,shard=2 \\
          --stage 3 -o bigger.ranks
      gopt reshard step.ranks --mesh pp=2,shard=2 --micro-batches 4 \\
          --schedule zb-h1 --recompute full -o stages.ranks
      gopt reshard step.split --servers 4 -o step4.split
      gopt reshard step.split --ranks 4 -o step4.ranks
      gopt reshard step.ranks --trainers 4 --servers 2 -o step.split
      gopt reshard step.ranks --explain
    """
    from gopt.artifact.output_paths import check_output_folder

    from .render_provenance import explain_bytes

    if explained:
        if more := [name for name, value in args.items() if name != "as_json" and is_given(value)]:
            raise OptionError("--explain writes nothing", f"leave out {_shown(more[0])}")
        explain_bytes(path, args["as_json"])
        return
    if args["output"] is None:
        raise OptionError("gopt reshard writes a folder", "give -o DIR; --explain writes none")
    target = Path(args["output"])
    check_output_folder(target, force=args["force"])
    to_ranks = [name for name in _OF_RANKS if is_given(args[name])]
    to_servers = [name for name in _OF_SERVERS if is_given(args[name])]
    if to_ranks and to_servers:
        raise OptionError(f"{_shown(to_servers[0])} cannot be combined with {_shown(to_ranks[0])}", _KINDS)
    (_split if to_servers else _shard)(path, target, args)


def _shown(name: str) -> str:
    return "-O" if name == "options" else f"--{name.replace('_', '-')}"


def _shard(path: str, target: Path, args: dict[str, Any]) -> None:
    from gopt.steps.shard_options import PASS_OPTIONS
    from gopt.verbs.folders import reshard

    from .render import render_report
    from .render_progress import progress

    options: dict[str, dict[str, object]] = {}
    for name in (*_SETTINGS, "bucket_mb"):
        if args[name] is not None:
            owner, option = PASS_OPTIONS[name]
            options.setdefault(owner, {})[option] = args[name]
    for owner, option, text in map(pass_option, args["options"]):
        if option in options.get(owner, {}):
            raise OptionError(f"option {option} of pass {owner} is given twice", "give it once")
        options.setdefault(owner, {})[option] = text
    with progress() as advance:
        advance("sharding")
        if args["ranks"] is None and args["mesh"] is None:
            raise OptionError("the number of ranks is missing", _KINDS)
        grid = build_mesh(args["ranks"], args["mesh"], None, _kinds(path, args["mesh"], args["axis"]))
        sharded = reshard(
            path, grid, options=options, accumulate=args["accumulate"], prove=not args["no_prove"], note=print_note
        )
        report = sharded.write(target, force=args["force"], advance=advance)
    if args["as_json"]:
        print_json(report.to_json())
    else:
        render_report(report, target)


def _split(path: str, target: Path, args: dict[str, Any]) -> None:
    from gopt.offline.resplit import resplit

    from .render_progress import progress
    from .render_split import print_split

    options = given_options(args)
    with progress() as advance:
        advance("splitting")
        split = resplit(path, options, note=print_note)
        advance("checking and writing")
        report = split.write(target, force=args["force"])
    if args["as_json"]:
        print_json(report.to_json())
    else:
        print_split(split.manifest(), report, target)


def _kinds(path: str, mesh: str | None, said: Sequence[str]) -> dict[str, AxisKind]:
    """The kinds of axes from ``--axis``, and for other axes with the same names from the first sharding."""
    from gopt.offline.folder_contents import read_mesh

    again = {part.partition("=")[0].strip() for part in (mesh or "").split(",")}
    return {name: kind for name, kind in read_mesh(path).kinds if name in again} | axis_table(said, None)
