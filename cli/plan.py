"""``gopt plan``: what each choice would cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from gopt.errors import OptionError

from .auto import device_option
from .options import (
    axis_option,
    axis_table,
    build_mesh,
    group_option,
    group_types,
    read_config,
    role_map,
    role_options,
    statistics_option,
)
from .server_options import MODES, trainers_option


@click.command("plan")
@click.argument("model", type=click.Path(readable=False))
@click.option(
    "--ranks",
    type=int,
    metavar="N",
    help="Compare choices for this many ranks, on meshes of shard, tp, ep, cp, sp, h and w, and pp with --device.",
)
@click.option("--mesh", metavar="AXES", help="Compare choices for this grid of ranks only, e.g. dp=2,shard=4.")
@click.option("--memory", metavar="SIZE", help="The memory of a rank, e.g. 80GB: choices that fit come first.")
@click.option("--link", metavar="LINKS", help="The links between ranks, as RATE:LATENCY, e.g. 200GB/s:5us; see above.")
@device_option
@click.option(
    "--bucket-mb",
    type=float,
    metavar="M",
    help="Compare only buckets of at most M MiB.  [default: the usual cap, a quarter of it, and four times it]",
)
@click.option(
    "--micro-batches",
    type=click.IntRange(min=1),
    metavar="M",
    help="With --device: the micro-batches of a step.  [default: as many as let all meshes of --ranks read the same "
    "samples; with --mesh and pp, several]",
)
@click.option(
    "--calibrate",
    metavar="TRACE",
    help="Fit the figures of --device, or of cpu, to the trace of gopt run DIR --trace; MODEL is DIR, -o the file.",
)
@click.option(
    "-o", "--output", metavar="FILE", help="With --calibrate: the file of the device.  [default: device.json]"
)
@click.option("--config", metavar="FILE", help="Read [mesh], [axes] and [roles] from this gopt.toml.")
@click.option("--wide", is_flag=True, help="Show every column, however narrow the terminal is.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
@trainers_option
@click.option("--mode", type=click.Choice(MODES), help="With --servers: when servers update.  [default: sync]")
@click.option(
    "--minimum", type=int, metavar="N", help="With --servers: the least elements of a piece.  [default: 8192]"
)
@click.option(
    "--wire",
    type=click.Choice(["float16", "bfloat16"]),
    help="With --servers: the type in which gradients and parameters travel.  [default: their own]",
)
@axis_option
@group_option
@role_options
@statistics_option
def command(model: str, **args: Any) -> None:
    """Compare every stage, partition and bucket size by memory, traffic, calls, balance and overlap. Writes nothing.

    With --ranks alone, meshes are compared too: ranks that compute a batch together along tp, and along ep, cp, sp, h
    and w where the step has experts, tokens or images. Costs of calls are then per batch, because shard=4,tp=2 reads
    half the batches of shard=8 in a step.

    Choices that fit in --memory come first, then those whose calls add the least time on --link; each row gives the
    reason for its place. --link names one link for all ranks, one per mesh axis (a group over several goes at the
    slowest), or one for the ranks inside a node and another for the rest.

    With --device the whole step is timed: its nodes on the device, its calls on the links, in the order of the file.
    Meshes with pipeline stages (pp), schedules and micro-batches are compared too; recompute and offload where nothing
    fits.

    --calibrate writes the file of a device: shard the step in some way, run it with --trace, and give folder and trace.

    With --trainers and --servers it compares how parameters are cut and placed on servers, for the given number of
    servers, half and twice as many: bytes of each server, traffic of a trainer and of the busiest server.

    \b
    Example:
      gopt plan step.onnx --ranks 64 --memory 80GB --link 200GB/s:5us
      gopt plan step.onnx --mesh dp=8,shard=8 \\
          --link shard=200GB/s:5us,dp=25GB/s:10us
      gopt plan step.onnx --ranks 64 --link 8x200GB/s:5us,25GB/s:10us
      gopt plan step.onnx --ranks 64 --memory 80GB --device h100
      gopt plan step.ranks --calibrate trace.json -o mine.json
      gopt plan step.onnx --trainers 8 --servers 4 --memory 16GB
    """
    if args["calibrate"] is not None:
        _calibrate(model, args)
        return
    if args["output"] is not None:
        raise OptionError("--output has no effect without --calibrate", "a plan writes nothing")
    if args["micro_batches"] is not None and args["device"] is None:
        raise OptionError("--micro-batches has no effect without --device", "add --device h100, a100, cpu or a file")
    _plan(model, args)


def _plan(model: str, args: dict[str, Any]) -> None:
    """Rank and print the choices of sharding, or of servers."""
    from gopt import api
    from gopt.records.topology import parse_bytes
    from gopt.verbs.plan import plan

    from .plan_servers import plan_servers, plans_servers
    from .render_plan import render_plan
    from .render_progress import progress

    ranks, mesh = args["ranks"], args["mesh"]
    servers = plans_servers(args)
    table = read_config(args["config"])
    roles = role_map(
        args["loss"], args["params"], args["states"], args["batch"], table, args["shared"], args["statistics"]
    )  # fmt: skip
    if servers:
        plan_servers(model, roles, None if args["memory"] is None else parse_bytes(args["memory"]), args)
        return
    axes = axis_table(args["axis"], table.axes)
    grid = build_mesh(ranks, mesh, table.mesh, axes)
    fixed = mesh is not None or (ranks is None and table.mesh is not None)
    with progress() as advance:
        result = plan(
            lambda: api.load(model, roles=roles, group_types=group_types(args["group_type"]), axes=axes),
            grid if fixed else grid.ranks,
            **{name: args[name] for name in ("memory", "link", "device", "bucket_mb", "micro_batches")},
            advance=advance,
        )
    if args["as_json"]:
        click.echo(json.dumps(result.to_json(), indent=1))
    else:
        shown = str(result.mesh) if result.mesh is not None else ""
        device = "" if result.device is None else f" --device {args['device']}"
        render_plan(shown, result.memory, result.choices, result.remarks, device, every_column=args["wide"])


def _calibrate(folder: str, args: dict[str, Any]) -> None:
    """Write the file of a device."""
    from gopt.system.files import write_new
    from gopt.verbs.calibrate import calibrate

    for name in ("ranks", "mesh", "memory", "link", "bucket_mb", "micro_batches", "trainers", "servers"):
        if args[name] is not None:
            flag = f"--{name.replace('_', '-')}"
            raise OptionError(f"--calibrate takes no {flag}", f"leave out {flag}")
    target = Path(args["output"] or "device.json")
    if target.suffix != ".json":
        raise OptionError(f"a device is written as JSON, not to {target.name}", "call it mine.json")
    device = calibrate(folder, args["calibrate"], name=target.stem, device=args["device"] or "cpu")
    write_new(target, json.dumps(device.to_json(), indent=1).encode() + b"\n")
    click.echo(f"written to {target}; gopt plan step.onnx --ranks 2 --device {target} times steps with it")
