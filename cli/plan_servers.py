"""``gopt plan --trainers T --servers S``: what each way to place parameters on servers would cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gopt.errors import OptionError
from gopt.system.garbage import gc_paused

from .server_options import build_split_options
from .terminal import print_json

if TYPE_CHECKING:
    from gopt.analysis.role_map import RoleMap

_OF_RANKS = ("ranks", "mesh", "link", "device", "micro_batches", "axis")
_OF_SERVERS = ("mode", "minimum", "wire")


def plans_servers(args: dict[str, Any]) -> bool:
    """Return whether to rank splits over servers; raises OptionError for options of both kinds."""
    counts = [name for name in ("trainers", "servers") if args[name] is not None]
    names = [name for name in _OF_RANKS if args[name] not in (None, ())]
    needing = [name for name in _OF_SERVERS if args[name] is not None]
    if counts and names:
        raise OptionError(
            f"--{counts[0]} cannot be combined with --{names[0].replace('_', '-')}",
            "plan for ranks and for servers in two commands",
        )
    if needing and not counts:
        raise OptionError(f"--{needing[0]} needs --trainers and --servers", "add both")
    return bool(counts)


def plan_servers(model: str, roles: RoleMap, memory: int | None, args: dict[str, Any]) -> None:
    """Weigh and show."""
    from gopt import api
    from gopt.offline.plan_split import rank_splits, split_choices

    from .render_progress import progress
    from .render_split import render_choices

    options = build_split_options(args)
    with gc_paused(), progress() as advance:
        advance("reading")
        source = api.load(model, roles=roles)
        choices = list(split_choices(source.training, options, advance))
    ranked = rank_splits(choices, options.servers, memory)
    if args["as_json"]:
        head = {"trainers": options.trainers, "servers": options.servers, "mode": options.mode.value, "memory": memory}
        print_json({"format": "gopt-plan/1", **head, "choices": [split.to_json() for split in ranked]})
    else:
        render_choices(ranked, memory)
