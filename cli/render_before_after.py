"""The table that opens ``gopt shard`` and ``gopt inspect DIR``: the source against the rank that holds most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from rich.text import Text

from gopt.artifact.report import format_bytes

from .render import table

if TYPE_CHECKING:
    from rich.console import Console

    from gopt.artifact.report import PassRecord
    from gopt.artifact.report_record import BeforeAfter

_SHOWN = ("stage", "partition", "bucket_mb")
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
    """What was asked, on one line, and what it saves."""
    out.print(Text.assemble((file, "bold"), f"  {_asked(mesh, pipeline)}"), soft_wrap=True)
    if sizes is None:
        return
    rows = []
    for label, name in _ROWS:
        before, after = getattr(sizes.source, name), getattr(sizes.largest, name)
        shown = [f"{each:,}" if name in _COUNTS else format_bytes(each) for each in (before, after)]
        rows.append((label, *shown, _saving(before, after)))
    out.print(table("Before and after", ("", "source", f"rank {sizes.rank}", "saving"), rows, (1, 2, 3)))
    out.print(f"of all ranks, {sizes.rank} holds most; live values are those beside states, inputs and constants")


def _asked(mesh: Sequence[tuple[str, int]], pipeline: Sequence[PassRecord]) -> str:
    grid = ",".join(f"{name}={count}" for name, count in mesh)
    shard = next((each for each in pipeline if each.name == "shard"), None)
    parts = [f"mesh {grid}"]
    if shard is not None:
        bucket = shard.options.get("bucket_mb")
        cap = "default buckets" if bucket is None else f"buckets of {bucket:g} MiB"
        parts = [f"stage {shard.options['stage']}", *parts, f"{shard.options['partition']} partition", cap]
    return ", ".join([*parts, *(text for each in pipeline for text in set_options(each) if not _is_shown(each, text))])


def _is_shown(record: PassRecord, text: str) -> bool:
    return record.name == "shard" and text.split("=")[0] in _SHOWN


def set_options(record: PassRecord) -> list[str]:
    """The options of a pass that are not as they are by default."""
    from gopt.passes import PASSES

    spec = PASSES.get(record.name)
    usual: dict[str, Any] = {} if spec is None else {each.name: each.default for each in fields(spec.options)}
    return [f"{name}={value}" for name, value in record.options.items() if _differs(usual.get(name), value)]


def _differs(usual: Any, value: Any) -> bool:
    return value is not None and getattr(usual, "value", usual) != value


def _saving(before: int, after: int) -> str:
    if not before:
        return ""
    change = 1 - after / before
    return f"{change:.0%}" if change >= 0 else f"{-change:.0%} more"
