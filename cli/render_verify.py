"""Prints the result of ``gopt verify``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from .render import console, table

MOST = 12
"""Unconfirmed values that are named; --json has them all."""
GRADIENTS = "gradients "
"""The first word of most variants; where all have it, it is the title of their column."""
FAILING = 24
"""Values that differ with a row of their own; the others are named in a line."""
VERDICTS = {
    "equal": ("equal", "green"),
    "different": ("NOT equal", "bold red"),
    "unconfirmed": ("NOT confirmed", "bold yellow"),
}


def render_verification(record: Mapping[str, Any], roles: Sequence[str] = ()) -> None:
    """The worst error of each variant, gradients that were not confirmed, what is in doubt, and the verdict. ``roles``:
    the names of trainers and servers, where they are not ranks."""
    out = console()
    plain = all(name.startswith(GRADIENTS) for name in record["worst"])
    rows = [
        (
            name.removeprefix(GRADIENTS) if plain else name,
            each["name"],
            each["kind"],
            roles[each["rank"]] if roles else each["rank"],
            each["step"],
            f"{each['error_over_tolerance'] * record['tolerance']:.2e}",
        )
        for name, each in record["worst"].items()
    ]
    steps = record["steps"]
    who = "trainers and servers" if roles else "ranks"
    over = f"{len(roles) or record['ranks']} {who} and {steps} step{'s' * (steps != 1)}"
    title = f"Worst relative error over {over} (tolerance {record['tolerance']:g})"
    first = GRADIENTS.strip() if plain else "variant"
    out.print(table(title, (first, "value", "kind", "role" if roles else "rank", "step", "error"), rows, (3, 4, 5)))
    _failing(record, out, roles)
    _gradients(record, out)
    for each in record["unconfirmed"][:MOST]:
        out.print(Text.assemble((f"{each['name']} is not confirmed", "yellow"), f": {each['why']}"))
    if len(record["unconfirmed"]) > MOST:
        out.print(f"and {len(record['unconfirmed']) - MOST} more, not confirmed either: --json has them all")
    for note in record["notes"]:
        out.print(f"note: {note}")
    out.print(Text.assemble(VERDICTS[record["outcome"]], f": {record['compared']} comparisons"))


def _failing(record: Mapping[str, Any], out: Any, roles: Sequence[str]) -> None:
    """Every value that was out of tolerance, by name."""
    failing = record["failing"]
    if not failing["values"]:
        return
    values = failing["worst_first"]
    rows = [
        (
            each["name"],
            each["kind"],
            f"{each['error_over_tolerance'] * record['tolerance']:.2e}",
            each["comparisons"],
            f"{each['variant']}, step {each['step']}, {roles[each['rank']] if roles else 'rank ' + str(each['rank'])}",
        )
        for each in values[:FAILING]
    ]
    title = f"{failing['values']} values differ, in {failing['comparisons']} of {record['compared']} comparisons"
    out.print(table(title, ("value", "kind", "worst error", "comparisons", "worst in"), rows, (2, 3)))
    if len(values) > FAILING:
        out.print(f"and {', '.join(each['name'] for each in values[FAILING:])}", soft_wrap=True)


def _gradients(record: Mapping[str, Any], out: Any) -> None:
    checked = record["gradients"]
    good = sum(each["holds"] for each in checked)
    if checked:
        out.print(f"gradients confirmed by finite differences: {good} of {len(checked)}{_sample(record['sample'])}")
    refuted = [each for each in checked if not each["holds"] and each.get("verdict", "refuted") == "refuted"]
    if refuted:
        out.print(Text(f"{len(refuted)} values that were taken for gradients are not gradients:", "red"))
    for each in refuted:
        why = each.get("why") or f"ratios {each['ratios']}"
        said = f"{each['gradient']} is not the gradient of {each['parameter']}"
        out.print(Text.assemble((said, "red"), f": {why}"))


def _sample(sample: Mapping[str, Any] | None) -> str:
    """The size of the sample, where only a sample was checked."""
    if sample is None:
        return ""
    kinds = f"{sample['kinds']} kinds of {sample['classes']} classes"
    if sample["widened"]:
        return f" (a sample of {sample['sampled']} held one that is not confirmed, so all were looked at)"
    return f" (a sample of {sample['of']}, some of all {kinds}, seed {sample['seed']}; --all confirms every one)"
