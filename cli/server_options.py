"""Options of ``gopt split``, ``plan`` and ``reshard`` that say how a step is split between trainers and servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from gopt.errors import OptionError

from .options import F, grouped, is_given
from .terminal import print_note

if TYPE_CHECKING:
    from gopt.parameter_server.options import SplitOptions

MODES = ("sync", "async", "half-async", "geo")
SLICINGS = ("off", "classic", "balanced")
PLACEMENTS = ("round-robin", "hash", "bytes")
CLASSIC_MINIMUM = 8192
"""Below so many elements a piece costs more in messages than it makes servers even."""
_FIELDS = {
    "trainers": "trainers", "servers": "servers", "mode": "mode", "pull": "pull", "slicing": "slicing",
    "minimum": "minimum", "placement": "placement", "server_map": "given", "roles": "roles",
    "loss_reduction": "loss_reduction", "accumulate": "accumulate", "fixed_trainers": "fixed_trainers",
    "every": "every", "delay_compensation": "compensation", "count": "count", "wire": "wire", "bucket_mb": "cap",
    "table": "tables", "no_tables": "tables_off", "table_memory": "table_memory",
    "rows": "rows", "init": "init",
}  # fmt: skip
"""Option -> the field of ``SplitOptions`` that it sets."""


trainers_option = grouped(
    click.option(
        "--servers",
        type=int,
        metavar="S",
        help="The number of servers; they share the parameters and their updates.",
    ),
    click.option("--trainers", type=int, metavar="T", help="The number of trainers; each gets its own batch."),
)
"""``--trainers`` and ``--servers``."""


placement_options = grouped(
    click.option(
        "--server-map", metavar="FILE",
        help="Read the server of parameters, patterns or pieces (NAME#PIECE) from a TOML or JSON file.",
    ),
    click.option(
        "--placement", type=click.Choice(PLACEMENTS),
        help="Place pieces on servers: in turn (round-robin), by a digest of the name (hash), or the largest first "
        "on the server with the fewest bytes (bytes).  [default: bytes]",
    ),
    click.option(
        "--minimum", type=int, metavar="N", help="Aim for pieces of at least N elements.  [default: 8192]"
    ),
    click.option(
        "--slicing", type=click.Choice(SLICINGS),
        help="Cut tensors into pieces: none (off), pieces of one size and a shorter last one (classic), or pieces "
        "as even as rows allow (balanced).  [default: balanced]",
    ),
)  # fmt: skip
"""How parameters are cut, and where the pieces go."""


def split_options(*modes: str) -> Callable[[F], F]:
    """All options of a split except the output; ``modes``: of ``--mode``."""

    return grouped(
        click.option(
            "--bucket-mb", type=float, metavar="M",
            help="Put several keys into one message, up to M MiB.  [default: 4]",
        ),
        click.option(
            "--table-memory", metavar="SIZE",
            help="The memory of a server for tables, e.g. 16GB.  [default: no limit]"
        ),
        click.option(
            "--init", multiple=True, metavar="NAME=RULE",
            help="Let servers draw the first values of a table, a state with its rows, or of all that match NAME "
            "instead of storing them: normal(MEAN,STD)@seed=N, uniform(LOW,HIGH)@seed=N, constant(VALUE) or zeros. "
            "May be repeated.",
        ),
        click.option(
            "--rows", multiple=True, metavar="[NAME=]KIND",
            help="Update all rows of a table (dense), or only those that were pushed (lazy): of all tables, or of "
            "those that match NAME. May be repeated.  [default: dense]",
        ),
        click.option("--no-tables", is_flag=True, help="Pull every parameter whole, embedding tables too."),
        click.option(
            "--table", multiple=True, metavar="NAME=LAYOUT",
            help="Set the layout of the embedding tables that match NAME: dense, whole, modulo, range or columns. "
            "Trainers pull only the rows that they look up. May be repeated.  [default: the cheapest]",
        ),
        click.option(
            "--wire", type=click.Choice(["float16", "bfloat16"]),
            help="The type in which gradients and parameters travel.  [default: their own]",
        ),
        click.option(
            "--count", type=click.Choice(["round", "push", "chief"]),
            help="With --mode async or half-async: when a step counter grows by one: after a push of every trainer "
            "(round), at each push (push), or at each push of trainer 0 (chief).  [default: round]",
        ),
        click.option(
            "--delay-compensation", type=float, metavar="STRENGTH",
            help="With --mode async or half-async: correct late gradients with this strength, e.g. 0.04; "
            "0 corrects nothing.",
        ),
        click.option(
            "--every", type=int, metavar="K", help="With --mode geo: push after every K steps.  [default: 1]"
        ),
        click.option(
            "--fixed-trainers", is_flag=True,
            help="Fix the number of trainers: without it, gopt run --trainers may give another."
        ),
        click.option(
            "--loss-reduction", metavar="mean|sum|weighted:VALUE",
            help="Combine the gradients of trainers: mean for a mean loss; sum for a summed loss; "
            "weighted:VALUE for a loss "
            "divided by a count of the batch, which VALUE holds.  [default: mean]",
        ),
        click.option(
            "--roles", metavar="ROLES",
            help="The roles of the launcher's ranks, e.g. 'trainer:0-3;server:4,5'; a rank may have both.  "
            "[default: trainers first]",
        ),
        click.option(
            "--pull", type=click.Choice(["start", "end"]),
            help="Choose when trainers pull parameters.  [default: start; end with --accumulate and --mode geo]",
        ),
        click.option(
            "--mode", type=click.Choice(modes), help="Choose when servers update; see above.  [default: sync]"
        ),
        placement_options,
        trainers_option,
    )  # fmt: skip


def given_options(args: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ``SplitOptions`` the command line sets. Raises OptionError, and InputError for a damaged server
    map."""
    from gopt.analysis.loss_reduction import LossReduction
    from gopt.artifact.server_entries import Mode, PullAt
    from gopt.parameter_server.placement import Placement
    from gopt.parameter_server.server_map import read_server_map
    from gopt.parameter_server.slicing import Slicing
    from gopt.records.roles import Roles
    from gopt.records.topology import parse_bytes

    convert: dict[str, Callable[[Any], Any]] = {
        "mode": Mode, "pull": PullAt, "slicing": Slicing, "placement": Placement, "roles": Roles.parse,
        "loss_reduction": LossReduction.parse, "bucket_mb": _cap, "server_map": read_server_map,
        "table": lambda texts: _named("table", texts, "modulo"), "table_memory": parse_bytes, "rows": _rows,
        "init": lambda texts: _named("init", texts, "'normal(0,0.02)@seed=7'", first=True),
    }  # fmt: skip
    options = {}
    for option, field in _FIELDS.items():
        value = args.get(option)
        if is_given(value):
            options[field] = convert[option](value) if option in convert else value
    minimum = options.get("minimum")
    if minimum is not None and 1 <= minimum < CLASSIC_MINIMUM:
        print_note(f"--minimum {minimum}: pieces of fewer than {CLASSIC_MINIMUM} elements make many small messages")
    return options


def build_split_options(args: Mapping[str, Any], **defaults: Any) -> SplitOptions:
    """The options of a split, over ``defaults``. Raises OptionError, and InputError for a damaged server map."""
    from gopt.parameter_server.options import SplitOptions

    options = {**defaults, **given_options(args)}
    for field in ("trainers", "servers"):
        if field not in options:
            raise OptionError(f"the number of {field} is missing", f"give --{field} N")
    return SplitOptions(**options)


def _cap(megabytes: float) -> int:
    if not 0 < megabytes < 1 << 20:
        raise OptionError(f"--bucket-mb cannot be {megabytes:g}", "it is more than 0 and less than 1048576")
    return max(1, int(megabytes * (1 << 20)))


def _named(option: str, texts: Sequence[str], example: str, *, first: bool = False) -> dict[str, str]:
    """``NAME=TEXT`` texts as a table; what stands before the last = is the name, or before the ``first``."""
    texts_by_name: dict[str, str] = {}
    for text in texts:
        name, equals, rest = text.partition("=") if first else text.rpartition("=")
        if not equals or not name:
            what = "layout" if option == "table" else "rule" if option == "init" else "name"
            raise OptionError(f"--{option} {text!r} names no {what}", f"write --{option} NAME={example}")
        if name in texts_by_name:
            raise OptionError(f"--{option} gives {name!r} twice", "give it once")
        texts_by_name[name] = rest
    return texts_by_name


def _rows(texts: Sequence[str]) -> dict[str, str]:
    """``[NAME=]KIND`` texts; a text without a name holds for all tables, after texts with a name."""
    named = _named("rows", [text for text in texts if "=" in text], "lazy")
    unnamed = [text for text in texts if "=" not in text]
    defaults = [*([named["*"]] if "*" in named else []), *unnamed]
    if len(defaults) > 1:
        raise OptionError(f"--rows gives {defaults[0]!r} and {defaults[1]!r} for all tables", "leave one of them out")
    return named | ({"*": unnamed[0]} if unnamed else {})
