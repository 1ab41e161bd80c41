"""The first table of ``gopt shard``, ``gopt split`` and ``gopt inspect DIR``: the source beside its largest part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from rich.text import Text

from gopt.text.amounts import format_bytes

from .render import table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from gopt.artifact.pass_facts import RoleSize
    from gopt.artifact.report_record import BeforeAfter
    from gopt.records.pass_facts import PassRecord

_FIRST = ("stage", "partition", "bucket_mb")
"""Options of ``shard`` that the first line always has."""
_ROWS = (
    ("nodes", "nodes"), ("parameters", "parameters"), ("optimizer states", "optimizer_states"),
    ("gradients", "gradients"), ("peak live values", "peak_live"), ("initial values on disk", "initializers"),
    ("calls in a step", "calls"), ("sent in a step", "traffic"),
)  # fmt: skip
_COUNTS = ("nodes", "calls")


def render_before_after(
    out: Console,
    file: str,
    mesh: Sequence[tuple[str, int]],
    pipeline: Sequence[PassRecord],
    sizes: BeforeAfter | None,
) -> None:
    """Print the request on one line, and the savings."""
    out.print(Text.assemble((file, "bold"), f"  {_asked(mesh, pipeline)}"))
    if sizes is None:
        return
    sized = (("source", sizes.source), (f"rank {sizes.rank}", sizes.largest))
    out.print(size_table("Before and after", sized, _ROWS))
    out.print(
        f"rank {sizes.rank} is shown, which needs most memory; peak live values are activations and other results, "
        "in addition to the rows above"
    )


def render_roles(out: Console, sizes: Sequence[RoleSize]) -> None:
    """The source against a trainer and the fullest server; nothing for a report with no sizes."""
    if sizes:
        labels = {name: label for label, name in _ROWS} | {"calls": "messages in a step"}
        rows = [(label, name) for name, label in labels.items() if name != "peak_live"]
        out.print(size_table("Before and after", [(size.role, size) for size in sizes], rows))
        out.print("a trainer does not keep what it pulls; the server that holds most is shown")


def size_table(title: str, sizes: Sequence[tuple[str, object]], rows: Sequence[tuple[str, str]]) -> Table:
    """A column for each of ``sizes``, the source first, with savings beside the others; ``rows``: label and
    attribute."""
    (name, source), *others = sizes
    lines = []
    for label, attribute in rows:
        before = getattr(source, attribute)
        cells = [_shown(attribute, before)]
        for _, size in others:
            after = getattr(size, attribute)
            cells += [_shown(attribute, after), _saving(before, after)]
        lines.append((label, *cells))
    heads = ("", name, *(head for name, _ in others for head in (name, "saving")))
    return table(title, heads, lines, range(1, len(heads)))


def _shown(attribute: str, value: int) -> str:
    return f"{value:,}" if attribute in _COUNTS else format_bytes(value)


def _asked(mesh: Sequence[tuple[str, int]], pipeline: Sequence[PassRecord]) -> str:
    grid = ",".join(f"{name}={count}" for name, count in mesh)
    shard = next((run for run in pipeline if run.name == "shard"), None)
    parts = [f"mesh {grid}"]
    if shard is not None:
        bucket = shard.options.get("bucket_mb")
        cap = "default buckets" if bucket is None else f"buckets of {bucket:g} MiB"
        parts = [f"stage {shard.options['stage']}", *parts, f"{shard.options['partition']} partition", cap]
    return ", ".join([*parts, *(text for run in pipeline for text in set_options(run) if not _is_shown(run, text))])


def _is_shown(record: PassRecord, text: str) -> bool:
    return record.name == "shard" and text.split("=")[0] in _FIRST


def set_options(record: PassRecord) -> list[str]:
    """The options of a pass other than defaults; of a pass that runs on request the option of ``gopt shard`` asking."""
    from gopt.passes import ON_REQUEST, PASSES

    spec = PASSES.get(record.name)
    usual: dict[str, Any] = {} if spec is None else {field.name: field.default for field in fields(spec.options)}
    if record.name in ON_REQUEST:
        asked, value = next(iter(record.options.items()))
        return [f"{record.name}={value}", *_set({**record.options, asked: None}, usual)]
    return _set(record.options, usual)


def _set(options: Mapping[str, Any], usual: Mapping[str, Any]) -> list[str]:
    return [f"{name}={value}" for name, value in options.items() if _differs(usual.get(name), value)]


def _differs(usual: Any, value: Any) -> bool:
    return value is not None and getattr(usual, "value", usual) != value


def _saving(before: int, after: int) -> str:
    if not before:
        return ""
    change = 1 - after / before
    return f"{change:.0%}" if change >= 0 else f"{-change:.0%} more"
