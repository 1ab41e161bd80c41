"""``gopt shard --auto``: take the best choice of ``gopt plan``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from gopt.errors import OptionError

from .options import F

if TYPE_CHECKING:
    from gopt.api import Source
    from gopt.artifact.report_record import ChoiceEntry
    from gopt.mesh import Mesh

SETTLED = ("stage", "partition", "bucket_mb", "pipeline", "config")
"""Options that say what ``--auto`` is to find."""


def auto_options(function: F) -> F:
    """``--auto``, ``--memory``, ``--link``."""
    for option in (
        click.option("--link", metavar="LINKS", help="For --auto: the links between ranks, as gopt plan takes them."),
        click.option("--memory", metavar="SIZE", help="For --auto: what a rank may hold, e.g. 80GB."),
        click.option("--auto", is_flag=True, help="Take the best choice of gopt plan; the report says which and why."),
    ):
        function = option(function)
    return function


def check_auto(given: dict[str, Any]) -> None:
    """Refuse options that contradict ``--auto``, or that do nothing without it."""
    for name in SETTLED if given["auto"] else ():
        if given[name] is not None:
            flag = f"--{name.replace('_', '-')}"
            raise OptionError(f"--auto chooses what {flag} says", f"leave out {flag}, or --auto")
    for name in () if given["auto"] else ("memory", "link"):
        if given[name] is not None:
            raise OptionError(f"--{name} does nothing without --auto", "add --auto, or ask gopt plan")


def choose(
    source: Source, mesh: Mesh, given: dict[str, Any], advance: Callable[[str], None]
) -> tuple[dict[str, Any], ChoiceEntry]:
    """The knobs of the best choice, and what the report says of it."""
    from gopt.api import on_mesh
    from gopt.offline.plan import best, choices
    from gopt.offline.topology import Topology, parse_bytes

    limit = None if given["memory"] is None else parse_bytes(given["memory"])
    topology = None if given["link"] is None else Topology.parse(given["link"], mesh)
    found = list(choices(on_mesh(source, mesh), mesh, topology=topology, advance=advance))
    first = best(found, limit)
    return asdict(first.choice.settings), first.entry(len(found), limit, given["link"])
