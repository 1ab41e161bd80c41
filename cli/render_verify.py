"""What ``gopt verify`` shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from .render import console, table

MOST = 12
"""Unconfirmed values that are named; --json has them all."""
VERDICTS = {
    "equal": ("equal", "green"),
    "different": ("NOT equal", "bold red"),
    "unconfirmed": ("NOT confirmed", "bold yellow"),
}


def render_verification(record: Mapping[str, Any], roles: Sequence[str] = ()) -> None:
    """The worst error of each variant, gradients that were not confirmed, what is in doubt, and the verdict. ``roles``:
    the names of trainers and servers, where they are no ranks."""
    out = console()
    rows = [
        (
            name,
            each["name"],
            each["kind"],
            roles[each["rank"]] if roles else each["rank"],
            each["step"],
            f"{each['error_over_tolerance'] * record['tolerance']:.2e}",
        )
        for name, each in record["worst"].items()
    ]
    over = f"{len(roles) or record['ranks']} {'trainers and servers' if roles else 'ranks'} and {record['steps']} steps"
    title = f"Worst relative error over {over} (tolerance {record['tolerance']:g})"
    out.print(table(title, ("variant", "value", "kind", "role" if roles else "rank", "step", "error"), rows, (3, 4, 5)))
    _gradients(record, out)
    for each in record["unconfirmed"][:MOST]:
        out.print(Text.assemble((f"{each['name']} is not confirmed", "yellow"), f": {each['why']}"))
    if len(record["unconfirmed"]) > MOST:
        out.print(f"and {len(record['unconfirmed']) - MOST} more, not confirmed either: --json has them all")
    for note in record["notes"]:
        out.print(f"note: {note}")
    out.print(Text.assemble(VERDICTS[record["outcome"]], f": {record['compared']} comparisons"))


def _gradients(record: Mapping[str, Any], out: Any) -> None:
    good = sum(each["holds"] for each in record["gradients"])
    if record["gradients"]:
        out.print(f"gradients confirmed by finite differences: {good} of {len(record['gradients'])}")
    for each in record["gradients"]:
        if not each["holds"] and each.get("verdict", "refuted") == "refuted":
            why = each.get("why") or f"ratios {each['ratios']}"
            said = f"{each['gradient']} is not the gradient of {each['parameter']}"
            out.print(Text.assemble((said, "red"), f": {why}"))
