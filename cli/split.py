"""``gopt split``: from one training step to trainers and servers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gopt.background import processes
from gopt.errors import OptionError
from gopt.garbage import gc_paused

from .options import jobs_option, read_config, role_map, role_options
from .server_options import MODES, build_split_options, is_given, split_options
from .terminal import print_json

if TYPE_CHECKING:
    from gopt.analysis.role_map import RoleMap
    from gopt.api import Split

_SERVERS_ALONE = (
    "servers", "pull", "slicing", "minimum", "placement", "server_map", "roles", "fixed_trainers", "every",
    "delay_compensation", "count", "wire", "table", "no_tables", "table_memory", "rows", "init",
)  # fmt: skip
"""Options that mean nothing where there is no server."""


@click.command("split")
@click.argument("model", type=click.Path())
@split_options(*MODES, "allreduce")
@click.option("-o", "--output", metavar="DIR", help="Output folder.  [default: the model's stem + .split]")
@click.option("--config", metavar="FILE", help="A gopt.toml; its accumulate and [roles] are read.")
@click.option("--state", metavar="FILE", help="Values of states (.safetensors, .npz) where the model has none.")
@jobs_option
@click.option("--dry-run", is_flag=True, help="Do everything but write.")
@click.option("--force", is_flag=True, help="Replace an existing output folder.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@role_options
def command(model: str, **given: Any) -> None:
    """Split a step into one file for all trainers and one for each server: a parameter server.

    Trainers pull parameters, compute gradients, and push them. Servers hold parameters and optimizer states, and run
    the update. --mode says when: sync, once a round, when all trainers have pushed; async, for each push as it comes;
    half-async, the same, but trainers wait for one another behind every step; geo, trainers update on their own and
    push what has changed; allreduce, without servers, as gopt shard --stage 0 does it.

    \b
    Example:
      gopt split step.onnx --trainers 4 --servers 2
      gopt split step.onnx --trainers 4 --servers 2 --mode async --delay-compensation 0.04
      gopt split step.onnx --trainers 2 --servers 3 --slicing off --placement round-robin --dry-run
      gopt split step.onnx --trainers 2 --servers 2 --server-map servers.toml --wire bfloat16
      gopt split step.onnx --trainers 2 --servers 2 --rows lazy --init 'emb*=normal(0,0.02)@seed=7'
      gopt split step.onnx --trainers 2 --servers 2 --roles 'trainer:0,1;server:0,1'
      gopt split step.onnx --trainers 4 --mode allreduce
    """
    from gopt.artifact.output_paths import check_output_folder

    config = read_config(given["config"])
    if given["accumulate"] is None:
        given["accumulate"] = config.get("accumulate")
    output = Path(given["output"] or f"{Path(model).stem}.split")
    roles = role_map(given["loss"], given["params"], given["states"], given["batch"], config, given["shared"])
    write = _without_servers if given["mode"] == "allreduce" else _with_servers
    whole = None if given["dry_run"] else check_output_folder(output, force=given["force"])
    with gc_paused():
        write(model, roles, output, given, whole)


def split_step(model: str, given: dict[str, Any]) -> Split:
    """The split that the options of ``gopt split`` ask for, checked; nothing is written. Raises OptionError."""
    from gopt import api

    if given["mode"] == "allreduce":
        raise OptionError("a golden of --mode allreduce is one of gopt shard", "--mesh dp=T --stage 0")
    config = read_config(given["config"])
    if given["accumulate"] is None:
        given["accumulate"] = config.get("accumulate")
    roles = role_map(given["loss"], given["params"], given["states"], given["batch"], config, given["shared"])
    return api.split(api.load(model, roles=roles, state=given["state"]), build_split_options(given))


def _with_servers(model: str, roles: RoleMap, output: Path, given: dict[str, Any], whole: Path | None) -> None:
    from gopt import api
    from gopt.preflight import check_disk_space

    from .render import progress
    from .render_split import print_split

    options = build_split_options(given)
    with progress() as advance, processes(given["jobs"]):
        advance("reading")
        source = api.load(model, roles=roles, state=given["state"])
        if whole is not None:
            check_disk_space(source.training, 1, whole, split=True)
        advance("splitting")
        split = api.split(source, options)
        advance("checking and writing")
        manifest = split.manifest()
        report = split.report() if given["dry_run"] else split.write(output, force=given["force"])
    if given["as_json"]:
        print_json(report.to_json())
    else:
        print_split(manifest, report, None if given["dry_run"] else output)


def _without_servers(model: str, roles: RoleMap, output: Path, given: dict[str, Any], whole: Path | None) -> None:
    """What ``gopt shard --mesh dp=T --stage 0`` writes."""
    from gopt import api
    from gopt.mesh import Mesh
    from gopt.preflight import check_disk_space

    from .render import progress, render_report

    for name in _SERVERS_ALONE:
        if is_given(given[name]):
            hint = "gopt shard -O shard.reduce-dtype=… narrows gradients" if name == "wire" else "leave it out"
            raise OptionError(f"--{name.replace('_', '-')} means nothing in mode allreduce: there are no servers", hint)
    trainers, accumulate = given["trainers"], given["accumulate"] or 1
    if trainers is None:
        raise OptionError("how many trainers?", "give --trainers T")
    if trainers < 1:
        raise OptionError(f"--trainers cannot be {trainers}", "it is at least 1")
    with progress() as advance, processes(given["jobs"]):
        advance("reading")
        source = api.load(model, roles=roles, state=given["state"])
        if whole is not None:
            check_disk_space(source.training, trainers, whole)
        advance("sharding")
        sharded = api.shard(
            source, Mesh((("dp", trainers),)), stage=0, bucket_mb=given["bucket_mb"], accumulate=accumulate,
            loss_reduction=given["loss_reduction"] or "mean",
        )  # fmt: skip
        advance("checking and writing")
        report = sharded.report() if given["dry_run"] else sharded.write(output, force=given["force"])
    if given["as_json"]:
        print_json(report.to_json())
    else:
        render_report(report, None if given["dry_run"] else output)
