"""``gopt plan --trainers T --servers S``: what each way to place parameters on servers would cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gopt.errors import OptionError
from gopt.system.garbage import gc_paused

from .server_options import build_split_options
from .terminal import print_json

if TYPE_CHECKING:
    from gopt.analysis.role_map import RoleMap

_OF_RANKS = ("ranks", "mesh", "link", "axis")
_OF_SERVERS = ("mode", "minimum", "wire")


def plans_servers(given: dict[str, Any]) -> bool:
    """Return whether to rank splits over servers; raises OptionError for options of both kinds."""
    asked = [name for name in ("trainers", "servers") if given[name] is not None]
    others = [name for name in _OF_RANKS if given[name] not in (None, ())]
    alone = [name for name in _OF_SERVERS if given[name] is not None]
    if asked and others:
        raise OptionError(
            f"--{asked[0]} cannot be combined with --{others[0]}", "plan for ranks and for servers in two commands"
        )
    if alone and not asked:
        raise OptionError(f"--{alone[0]} needs --trainers and --servers", "add both")
    return bool(asked)


def plan_servers(model: str, roles: RoleMap, memory: int | None, given: dict[str, Any]) -> None:
    """Weigh and show."""
    from gopt import api
    from gopt.offline.plan_split import rank_splits, split_choices

    from .render_progress import progress
    from .render_split import render_choices

    options = build_split_options(given)
    with gc_paused(), progress() as advance:
        advance("reading")
        source = api.load(model, roles=roles)
        found = list(split_choices(source.training, options, advance))
    ranked = rank_splits(found, options.servers, memory)
    if given["as_json"]:
        head = {"trainers": options.trainers, "servers": options.servers, "mode": options.mode.value, "memory": memory}
        print_json({"format": "gopt-plan/1", **head, "choices": [each.to_json() for each in ranked]})
    else:
        render_choices(ranked, memory)
