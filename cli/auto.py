"""``gopt shard --auto``: take the best choice of ``gopt plan``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from gopt.errors import OptionError

from .options import grouped

if TYPE_CHECKING:
    from gopt.records.mesh import Mesh
    from gopt.verbs.shard import Auto

SETTLED = ("stage", "partition", "bucket_mb", "pipeline", "config")
"""Options that say what ``--auto`` is to find."""


device_option = click.option(
    "--device",
    metavar="NAME|FILE",
    help="Time steps on this device: h100, a100, cpu (one core), or a file that gopt plan --calibrate wrote.",
)
"""``--device``."""
auto_options = grouped(
    click.option(
        "--link",
        metavar="LINKS",
        help="The links between ranks, e.g. 200GB/s:5us (see gopt plan): for --auto and tensor parallelism.",
    ),
    click.option("--memory", metavar="SIZE", help="With --auto: the memory of a rank, e.g. 80GB."),
    device_option,
    click.option("--auto", is_flag=True, help="Take the best choice of gopt plan; the report says which and why."),
)
"""``--auto``, ``--memory``, ``--link``, ``--device``."""


def check_auto(args: dict[str, Any]) -> None:
    """Refuse options contradicting ``--auto``, or without effect unless given with ``--auto``."""
    for name in SETTLED if args["auto"] else ():
        if args[name] is not None:
            flag = f"--{name.replace('_', '-')}"
            raise OptionError(f"--auto chooses {flag} itself", f"leave out {flag}, or --auto")
    for name in ("memory", "device") if not args["auto"] else ():
        if args[name] is not None:
            raise OptionError(f"--{name} has no effect without --auto", "add --auto, or use gopt plan")


def split_link(args: dict[str, Any], mesh: Mesh) -> str | None:
    """``--link`` where an axis of the mesh splits the computation, for the pass; raises OptionError where the option
    does nothing."""
    if mesh.splits_computation:
        link: str | None = args["link"]
        return link
    if args["link"] is not None and not args["auto"]:
        raise OptionError(
            f"--link has no effect without --auto: no axis of the mesh {mesh} splits the computation",
            "add --auto, or use gopt plan",
        )
    return None


def auto_of(args: dict[str, Any]) -> Auto | None:
    """The ``auto`` argument of ``gopt.shard`` for ``--auto``, or None."""
    from gopt.verbs.shard import Auto

    return Auto(memory=args["memory"], link=args["link"], device=args["device"]) if args["auto"] else None
