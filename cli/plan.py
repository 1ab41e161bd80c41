"""``gopt plan``: what each choice would cost."""

from __future__ import annotations

import json

import click

from .options import build_mesh, group_option, group_types, read_config, role_map, role_options


@click.command("plan")
@click.argument("model", type=click.Path())
@click.option("--ranks", type=int, metavar="N", help="Ranks that share the states.")
@click.option("--mesh", metavar="AXES", help="The ranks as a grid, e.g. dp=2,shard=4.")
@click.option("--memory", metavar="SIZE", help="What a rank may hold, e.g. 80GB.")
@click.option("--link", metavar="RATE[:LATENCY]", help="The link between ranks, e.g. 200GB/s:5us.")
@click.option("--bucket-mb", type=float, metavar="M", help="Cap of a bucket in MiB.  [default: total/8, 1 to 25]")
@click.option("--config", metavar="FILE", help="A gopt.toml with [mesh] and [roles].")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
@group_option
@role_options
def command(
    model: str,
    ranks: int | None,
    mesh: str | None,
    memory: str | None,
    link: str | None,
    bucket_mb: float | None,
    config: str | None,
    as_json: bool,
    loss: str,
    params: tuple[str, ...],
    states: tuple[str, ...],
    batch: tuple[str, ...],
    group_type: tuple[str, ...],
) -> None:
    """Weigh every stage and partition: bytes a rank holds, traffic against its bound, calls, balance. Writes nothing.

    \b
    Example:
      gopt plan step.onnx --ranks 64 --memory 80GB --link 200GB/s:5us
    """
    from gopt import api
    from gopt.offline.plan import Link, choices, parse_bytes, ranked

    from .render import progress, render_plan

    table = read_config(config)
    grid = build_mesh(ranks, mesh, table)
    limit = None if memory is None else parse_bytes(memory)
    speed = None if link is None else Link.parse(link)
    with progress() as advance:
        advance("reading")
        roles = role_map(loss, params, states, batch, table)
        source = api.load(model, roles=roles, group_types=group_types(group_type))
        found = ranked(list(choices(source, grid, bucket_mb=bucket_mb, link=speed, advance=advance)), limit)
    rows = [{**choice.to_json(), "fits": limit is None or choice.held <= limit} for choice in found]
    if as_json:
        click.echo(json.dumps({"mesh": str(grid), "memory": limit, "choices": rows}, indent=1))
    else:
        render_plan(str(grid), limit, rows, timed=speed is not None)
