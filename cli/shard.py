"""``gopt shard``: from one training step to one graph per rank."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gopt.background import processes
from gopt.errors import OptionError
from gopt.garbage import gc_paused

from .auto import auto_options, check_auto, choose, split_link
from .options import (
    axis_option,
    axis_table,
    build_mesh,
    group_option,
    group_types,
    jobs_option,
    parse_ranks,
    pass_option,
    read_config,
    role_map,
    role_options,
)
from .terminal import print_json, print_text

if TYPE_CHECKING:
    from gopt.api import Sharded, Source
    from gopt.mesh import Mesh, Sees


@click.command("shard")
@click.argument("model", type=click.Path())
@click.option("--ranks", type=int, metavar="N", help="Ranks that share the states, each with its own batch.")
@click.option("--mesh", metavar="AXES", help="The ranks as a grid, e.g. shard=8.")
@click.option("-o", "--output", metavar="DIR", help="Output folder.  [default: the model's stem + .ranks]")
@click.option(
    "--stage",
    type=click.IntRange(0, 3),
    help="0: nothing sharded; 1: optimizer states; 2: gradients too; 3: parameters too.  [default: 2]",
)
@click.option(
    "--partition",
    type=click.Choice(["flat", "rows", "whole"]),
    help="Where tensors may be cut.  [default: flat]",
)
@click.option(
    "--bucket-mb",
    type=float,
    metavar="M",
    help="Cap of a bucket in MiB; 0 is one tensor a call.  [default: total/8, 1 to 25]",
)
@click.option(
    "--accumulate",
    type=click.IntRange(1),
    metavar="K",
    help="Micro-steps of one update: two files per rank, micro and update.  [default: 1]",
)
@click.option(
    "--loss-reduction",
    metavar="mean|sum|weighted:VALUE",
    help="How the ranks' gradients become the step's: sum for a summed loss; weighted:VALUE for a loss divided by a "
    "count of the batch, which VALUE holds.  [default: mean]",
)
@click.option(
    "--statistics",
    type=click.Choice(["mean", "root", "local", "sync"]),
    help="BatchNorm statistics: averaged over ranks, those of the first rank, left apart, or taken over all ranks' "
    "samples.  [default: mean]",
)
@click.option(
    "-O",
    "--option",
    "options",
    multiple=True,
    metavar="PASS.NAME=VALUE",
    help="An option of a pass, e.g. shard.style=broadcast; gopt passes lists them. May be repeated.",
)
@axis_option
@group_option
@click.option("--config", metavar="FILE", help="A gopt.toml with [mesh], [axes], [pipeline], [pass.NAME], [roles].")
@click.option(
    "--pipeline", metavar="PASSES", help='Passes in order: "shard{stage=1},statistics,fuse-collectives,prune".'
)
@click.option("--state", metavar="FILE", help="Values of states (.safetensors, .npz) where the model has none.")
@click.option("--only-ranks", metavar="RANKS", help="Write these ranks alone, e.g. 0-3.")
@jobs_option
@click.option("--print-after", metavar="PASS|all", help="Write the graph as text after a pass.")
@click.option("--print-dir", metavar="DIR", help="Where --print-after writes; else to stderr.")
@click.option("--verify-each", is_flag=True, help="Check the graph after every pass, not only at the end.")
@click.option("--explain", metavar="VALUE", help="Say where the placement of a value came from, and write nothing.")
@click.option(
    "--annotate", is_flag=True, help="Say in source.onnx, as sharding specs of ONNX IR 11, which rank holds what part."
)
@click.option("--dry-run", is_flag=True, help="Do everything but write.")
@click.option("--force", is_flag=True, help="Replace an existing output folder.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@auto_options
@role_options
def command(model: str, **given: Any) -> None:
    """Write one runnable graph per rank, with a manifest and a report of all that was removed and added.

    \b
    Example:
      gopt shard step.onnx --ranks 8
      gopt shard step.onnx --ranks 8 --stage 1 --bucket-mb 4 -o out
      gopt shard step.onnx --mesh dp=2,shard=4 --stage 3 --accumulate 4
      gopt shard step.onnx --ranks 4 --partition whole -O shard.style=broadcast
      gopt shard step.onnx --mesh dp=2,tp=4 -O tensor-parallel.sequence=true
      gopt shard step.onnx --mesh dp=2,tp=4 --link 4x200GB/s:5us,25GB/s:10us --annotate
      gopt shard step.onnx --mesh tp=2 --explain view_41
      gopt shard step.onnx --ranks 64 --auto --memory 80GB --link 200GB/s:5us
    """
    from gopt import api
    from gopt.artifact.output_paths import check_output_folder
    from gopt.preflight import check_disk_space

    check_auto(given)
    given["dry_run"] = given["dry_run"] or given["explain"] is not None
    config, axes, mesh = _mesh(given)
    pipeline = _pipeline(given, config)
    wanted = parse_ranks(given["only_ranks"])
    output = Path(given["output"] or f"{Path(model).stem}.ranks")
    whole = output
    if not given["dry_run"]:
        whole = check_output_folder(output, force=given["force"])
    from .render import progress, render_report

    with gc_paused(), progress() as advance, processes(given["jobs"]):
        advance("reading")
        source = _load(model, given, config, axes)
        if not given["dry_run"]:
            check_disk_space(source.training, mesh.ranks if wanted is None else len(wanted), whole)
        advance("sharding")
        choice = None
        if given["auto"]:
            knobs, choice = choose(source, mesh, given, advance)
            pipeline = _pipeline(given | knobs, config)
        unsure = confirm_duals(source, mesh)
        sharded = api.shard(source, mesh, accumulate=_accumulate(given, config), pipeline=pipeline, only_ranks=wanted)
        sharded.program.warnings += unsure
        if given["explain"] is not None:
            lines = [line for each in sharded.program.explanations for line in each.lines(given["explain"])]
            print_text("\n".join(lines or ["no axis of the mesh splits the computation: every value is whole"]))
            return
        sharded.choice = choice
        advance("checking and writing")
        report = (
            sharded.report()
            if given["dry_run"]
            else sharded.write(output, force=given["force"], annotate=given["annotate"])
        )
    if given["as_json"]:
        print_json(report.to_json())
    else:
        render_report(report, None if given["dry_run"] else output)


def sharded(model: str, given: dict[str, Any]) -> Sharded:
    """The step as the options of ``gopt shard`` ask for it, checked; nothing is written."""
    from gopt import api

    config, axes, mesh = _mesh(given)
    source = _load(model, given, config, axes)
    return api.shard(source, mesh, accumulate=_accumulate(given, config), pipeline=_pipeline(given, config))


def _mesh(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Sees], Mesh]:
    """The configuration, what ranks along its axes see, and the checked mesh."""
    from gopt.preflight import check_mesh

    config = read_config(given["config"])
    axes = axis_table(given["axis"], config)
    mesh = build_mesh(given["ranks"], given["mesh"], config, axes)
    check_mesh(mesh)
    given["split_link"] = split_link(given, mesh)
    return config, axes, mesh


def _load(model: str, given: dict[str, Any], config: dict[str, Any], axes: dict[str, Sees]) -> Source:
    from gopt import api

    roles = role_map(given["loss"], given["params"], given["states"], given["batch"], config, given["shared"])
    groups = group_types(given["group_type"])
    return api.load(model, roles=roles, state=given["state"], group_types=groups, axes=axes)


def _accumulate(given: dict[str, Any], config: dict[str, Any]) -> int:
    return int(given["accumulate"] or config.get("accumulate", 1))


def confirm_duals(source: Source, mesh: Mesh) -> list[str]:
    """Notes on mappings of the source whose dual was not found; nothing is loaded or run where there are none."""
    from gopt.analysis.region_mappings import find_region_mappings, without_dual
    from gopt.api import on_mesh

    if not without_dual(find_region_mappings(source.training)):
        return []
    from gopt.verification.source_duals import check_source_duals

    return check_source_duals(on_mesh(source, mesh), mesh)


def _pipeline(given: dict[str, Any], config: dict[str, Any]) -> Any:
    from gopt.passes import DEFAULT, PASSES, find
    from gopt.pipeline import build_pipeline, parse_pipeline

    defaults: dict[str, dict[str, Any]] = {name: dict(table) for name, table in config.get("pass", {}).items()}
    for name in defaults:
        find(name)
    flags = {
        "stage": ("shard", "stage"),
        "partition": ("shard", "partition"),
        "bucket_mb": ("shard", "bucket-mb"),
        "statistics": ("statistics", "statistics"),
        "loss_reduction": ("shard", "loss-reduction"),
        "split_link": ("tensor-parallel", "link"),
    }
    for flag, (owner, option) in flags.items():
        if given[flag] is not None:
            defaults.setdefault(owner, {})[option] = given[flag]
    for owner, option, value in map(pass_option, given["options"]):
        if any(given[flag] is not None and where == (owner, option) for flag, where in flags.items()):
            raise OptionError(f"option {option} of pass {owner} is given twice")
        defaults.setdefault(owner, {})[option] = value
    items = None
    if given["pipeline"] is not None:
        items = parse_pipeline(given["pipeline"])
    elif "pipeline" in config:
        table = config["pipeline"]
        if set(table) != {"passes"} or not all(isinstance(name, str) for name in table["passes"]):
            raise OptionError("[pipeline] takes one key: passes, a list of names", f"passes = {list(DEFAULT)}")
        items = [(name, {}) for name in table["passes"]]
    if items is not None:
        clash = [(name, key) for name, options in items for key in options if key in defaults.get(name, {})]
        if clash and given["pipeline"] is not None and any(given[flag] is not None for flag in flags):
            raise OptionError(f"option {clash[0][1]} of pass {clash[0][0]} is given twice")
        for name, _ in items:
            find(name)
        for name in set(defaults) - {name for name, _ in items}:
            raise OptionError(f"options are given for pass {name}, which is not in the pipeline")
    _same_cap(given, items, defaults)
    after = _printer(given["print_after"], given["print_dir"], PASSES)
    return build_pipeline(items, defaults, verify_each=given["verify_each"], after_each=after)


def _same_cap(given: dict[str, Any], items: Any, defaults: dict[str, dict[str, Any]]) -> None:
    """``--bucket-mb`` caps fused calls as well, unless the configuration or the pipeline says otherwise."""
    wanted = items is None or any(name == "fuse-collectives" and "cap-mb" not in options for name, options in items)
    if given["bucket_mb"] is not None and wanted:
        defaults.setdefault("fuse-collectives", {}).setdefault("cap-mb", given["bucket_mb"])


def _printer(name: str | None, folder: str | None, passes: dict[str, Any]) -> Any:
    """What to call after each pass: write the graph's canonical text."""
    if name is None:
        if folder is not None:
            raise OptionError("--print-dir needs --print-after")
        return None
    from gopt.passes import find

    if name != "all":
        find(name)
    if folder is not None:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OptionError(f"--print-dir {folder} cannot be a folder: {error.strerror}", "choose another") from None

    def write(done: str, step: Any) -> None:
        if name not in ("all", done):
            return
        from gopt.offline.text import canonical_text

        text = canonical_text(step.graph)
        if folder is None:
            print_text(text, error=True)
        else:
            Path(folder, f"{len(step.applied):02d}_{done}.txt").write_text(text, encoding="utf-8")

    return write
