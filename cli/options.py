"""Groups of options shared by several commands, and the objects they build."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gopt import limits
from gopt.errors import InputError, OptionError
from gopt.options.types import is_digits
from gopt.text.sanitize import show
from gopt.text.suggestions import near_file

from .unchecked_option import unchecked_arguments
from .verbosity import verbosity_arguments

if TYPE_CHECKING:
    from gopt.analysis.role_map import RoleMap
    from gopt.documents.config import GoptConfig
    from gopt.records.mesh import AxisKind, Mesh

F = TypeVar("F", bound=Callable[..., Any])


def grouped(*options: Callable[[F], F]) -> Callable[[F], F]:
    """All these options as a decorator; help lists the last first."""

    def add(function: F) -> F:
        for option in options:
            function = option(function)
        return function

    return add


def seconds(value: Any) -> float:
    """A time to wait: a number above 0 the system's clocks can hold. Raises BadParameter."""
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number <= 1e9:  # NaN neither
        raise click.BadParameter(f"{value} is not a time to wait: give seconds above 0, at most 1e9")
    return number


def deadline(help: str) -> Callable[[F], F]:
    """The option ``--deadline``; ``help`` says what is waited for."""
    return click.option("--deadline", type=seconds, default=120.0, show_default=True, metavar="S", help=help)


role_options = grouped(
    click.option(
        "--loss", default="", metavar="OUTPUT[,…]",
        help="Say which output is the loss; all of them, with commas, where a step has several.",
    ),
    click.option(
        "--params", multiple=True, metavar="INPUT[=GRADIENT]",
        help="Say that an input is a parameter, and which value is its gradient. May be repeated.",
    ),
    click.option(
        "--states", multiple=True, metavar="INPUT=OUTPUT",
        help="Say which output is the new value of a state. May be repeated.",
    ),
    click.option(
        "--batch", multiple=True, metavar="INPUT",
        help="Say that an input differs from rank to rank. May be repeated.",
    ),
    click.option(
        "--shared", multiple=True, metavar="VALUE",
        help="Average a scalar of the forward, e.g. the loss, over the ranks before the update reads it. May be "
        "repeated.",
    ),
)  # fmt: skip
"""``--loss``, ``--params``, ``--states``, ``--batch``: what the user says of the roles."""


def statistics_option(function: F) -> F:
    """``--statistics`` of commands without combination: names the statistics."""

    def named(context: click.Context, option: click.Parameter, texts: tuple[str, ...]) -> tuple[str, ...]:
        bare = next((part for part in _items(texts) if "=" not in part), None)
        if bare is not None:
            raise OptionError(
                f"--statistics {bare!r} names no state",
                "write --statistics INPUT=mean, or sum, max, min, gather, root, local",
            )
        return texts

    return click.option(
        "--statistics", multiple=True, callback=named, metavar="INPUT=mean|sum|max|min|gather|root|local",
        help="Say that a state follows the batch without a gradient, and how ranks combine it. May be repeated.",
    )(function)  # fmt: skip


def group_option(function: F) -> F:
    """``--group-type``: what the integers of collectives in the source mean."""
    return click.option(
        "--group-type", multiple=True, metavar="N=AXES",
        help="Say which mesh axes group_type N of the source's collectives means, e.g. 1=shard,4=tp.",
    )(function)  # fmt: skip


def jobs_option(function: F) -> F:
    """``--jobs``: how many processes work at once."""
    return click.option(
        "--jobs", type=click.IntRange(1, 64), metavar="N",
        help="Compute in at most N processes.  [default: the usable cores; 1 for a small graph]",
    )(function)  # fmt: skip


def clip_norm_option(function: F) -> F:
    """``--clip-norm``: a bound on all gradients together."""
    return click.option(
        "--clip-norm", type=float, metavar="X", help="Bound the L2 norm of all gradients together, e.g. 1.0."
    )(function)


def clip_value_option(function: F) -> F:
    """``--clip-value``: a bound on each element of the gradients."""
    return click.option(
        "--clip-value", type=float, metavar="X", help="Bound each element of the gradients to -X ... X."
    )(function)


def loss_scale_option(function: F) -> F:
    """``--loss-scale``: see ``loss_scale``."""
    return click.option(
        "--loss-scale", metavar="dynamic|N",
        help="Scale the loss as torch.amp.GradScaler does: by a scale that adapts, or by N.",
    )(function)  # fmt: skip


def loss_scale(text: str | None) -> float | str | None:
    """The value of ``--loss-scale``: a number, or ``dynamic``; raises OptionError for other texts."""
    if text is None or text == "dynamic":
        return text
    try:
        return float(text)
    except ValueError:
        raise OptionError(f"--loss-scale cannot be {text!r}", "give dynamic, or a number above 0") from None


def pass_settings_option(function: F) -> F:
    """``-O``: options of passes, which no option of a command names."""
    return click.option(
        "-O", "--option", "options", multiple=True, metavar="PASS.NAME=VALUE",
        help="Set an option of a pass, e.g. shard.style=broadcast; gopt passes lists them. May be repeated.",
    )(function)  # fmt: skip


def axis_option(function: F) -> F:
    """``--axis``: what ranks along mesh axes of other names see."""
    return click.option(
        "--axis", "axis", multiple=True, metavar="NAME=KIND",
        help="Say what ranks along an axis with a name of your own see: rep=replica (the same samples), or zone=data "
        "(different ones). May be repeated.",
    )(function)  # fmt: skip


def axis_table(texts: Sequence[str], axes: Mapping[str, str] | None) -> dict[str, AxisKind]:
    """``--axis`` over the configuration's ``[axes]``: axis -> the kind of its ranks' data."""
    from gopt.records.mesh import axis_kinds

    return axis_kinds(axes or {}) | axis_kinds(_items(texts))


def group_types(texts: Sequence[str]) -> dict[str, str]:
    """``--group-type`` as a table from number to axes."""
    from gopt.importers.collectives import parse_groups

    return parse_groups(",".join(texts))


def role_map(
    loss: str, params: Sequence[str], states: Sequence[str], batch: Sequence[str],
    config: GoptConfig | None = None, shared: Sequence[str] = (), statistics: Sequence[str] = (),
) -> RoleMap:  # fmt: skip
    """The role map of the options, over the ``[roles]`` table of a configuration."""
    from gopt.analysis.role_map import RoleMap, parse_statistics
    from gopt.documents.config import GoptConfig

    table = RoleMap.of_table((config or GoptConfig()).roles)
    parameters = dict(table.params)
    for text in _items(params):
        name, _, gradient = text.partition("=")
        parameters[name] = gradient
    pairs: dict[str, str] = {}
    for text in _items(states):
        name, equals, output = text.partition("=")
        if not equals:
            raise OptionError(f"--states {text!r} names no output", "write --states INPUT=OUTPUT")
        if pairs.setdefault(name, output) != output:
            raise OptionError(
                f"--states gives {name!r} two new values: {pairs[name]!r} and {output!r}", "keep one of them"
            )
    pairs = {**table.states, **pairs}
    batches, means = [*table.batch, *_items(batch)], [*table.shared, *_items(shared)]
    named = {**table.statistics, **parse_statistics(",".join(statistics))[1]}
    return RoleMap(loss or table.loss, pairs, parameters, batches, means, named)


def _items(texts: Sequence[str]) -> list[str]:
    return [part for text in texts for part in text.split(",") if part]


def read_config(path: str | None) -> GoptConfig:
    """A gopt.toml; raises InputError for a missing file, or a file unlike the schema."""
    from gopt.documents.config import GoptConfig

    if path is None:
        return GoptConfig()
    if not Path(path).exists():
        raise InputError(f"there is no configuration file {path}", *near_file(path))
    from gopt import documents
    from gopt.documents.records import from_document

    return from_document(GoptConfig, documents.read_toml(path, documents.CONFIG))


def build_mesh(
    ranks: int | None, text: str | None, axes: Mapping[str, int] | None, kinds: Mapping[str, AxisKind] | None = None
) -> Mesh:
    """The mesh of ``--ranks``, ``--mesh`` or the configuration's ``[mesh]``, which must agree. ``kinds``: given kinds
    of axes."""
    from gopt.records.mesh import Mesh

    mesh, axis_kinds = None, kinds or {}
    if text is not None:
        mesh = Mesh.parse(text, axis_kinds)
    elif ranks is None and axes is not None:
        mesh = Mesh(tuple(axes.items()), tuple(axis_kinds.items()))
    if ranks is not None and ranks < 1:
        raise OptionError(f"--ranks cannot be {ranks}", "give at least 1")
    if mesh is None:
        if ranks is None:
            raise OptionError("the number of ranks is missing", "give --ranks N or --mesh shard=N")
        return Mesh((("shard", ranks),), tuple(axis_kinds.items()))
    if ranks is not None and mesh.ranks != ranks:
        raise OptionError(f"--ranks {ranks} and --mesh {mesh} ({mesh.ranks} ranks) disagree", "leave out --ranks")
    return mesh


def parse_ranks(text: str | None) -> list[int] | None:
    """``0-3,7`` -> ``[0, 1, 2, 3, 7]``."""
    if text is None:
        return None
    ranks: set[int] = set()
    for part in text.split(","):
        start, dash, last = part.partition("-")
        if not is_digits(start) or (dash and not is_digits(last)) or (dash and int(last) < int(start)):
            raise OptionError(f"cannot read {show(text)} as ranks", "write --only-ranks 0-3 or 0,2,5")
        if int(last or start) >= limits.RANKS:
            raise OptionError(
                f"--only-ranks names rank {last or start}: gopt makes at most {limits.RANKS} ranks (RANKS)",
                "name ranks of the mesh, e.g. 0-3",
            )
        ranks.update(range(int(start), int(last or start) + 1))
    return sorted(ranks)


def pass_option(text: str) -> tuple[str, str, str]:
    """``shard.style=broadcast`` -> pass, option, value."""
    from gopt.passes import find

    name, equals, value = text.partition("=")
    owner, dot, option = name.strip().partition(".")
    if not equals or not dot:
        raise OptionError(f"cannot read {text!r} as an option of a pass", "write it as -O shard.style=broadcast")
    find(owner)
    return owner, option.replace("_", "-"), value.strip()


def is_given(value: object) -> bool:
    """Return whether an option was on the command line: 0 counts, an absent flag does not."""
    return value is not None and value is not False and value != ()


def arguments_of(context: click.Context, without: Sequence[str]) -> list[str]:
    """The options of a command as on a command line, for another process doing the same."""
    names: list[str] = []
    for option in context.command.params:
        value = context.params.get(option.name or "")
        if option.name in without or not is_given(value) or not isinstance(option, click.Option):
            continue
        for part in value if isinstance(value, tuple) else (value,):
            names += [option.opts[0]] if option.is_flag else [option.opts[0], str(part)]
    return names + unchecked_arguments() + verbosity_arguments()


def setting_pairs(texts: Iterable[str]) -> dict[str, str]:
    """Hyper-parameter -> the text of the value; raises OptionError where a text is no pair, or one is set twice."""
    pairs: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise OptionError(f"cannot read {text!r} as a hyper-parameter", "write --set lr=1e-3")
        if name in pairs:
            raise OptionError(f"--set gives {name!r} two values: {pairs[name]} and {value}", "keep one of them")
        pairs[name] = value
    return pairs
