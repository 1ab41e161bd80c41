"""Prints the result of ``gopt prove``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from gopt.text.sanitize import listed

from .render import console, table

if TYPE_CHECKING:
    from gopt.verification.proof.result import Claim, RankProof

MOST = 8
"""Values that are not proven, with lines of their own; --json has them all."""
COLOURS = {"proven": "green", "unproven": "bold yellow", "different": "bold red"}


def render_proof(proof: RankProof, folder: str | None) -> None:
    """How many values of each kind are proven, the rest by name, and the verdict; ``folder``: None for single files."""
    out = console()
    verdicts = ("proven", "different", "unproven")
    counts = Counter((claim.kind, claim.verdict.value) for claim in proof.claims)
    kinds = dict.fromkeys(claim.kind for claim in proof.claims)
    rows = [(kind.replace("_", " "), *(counts[kind, verdict] or "" for verdict in verdicts)) for kind in kinds]
    when = "for all inputs" if "output" in kinds else "at the end of a step"
    title = f"Values {when}, on {proof.ranks} ranks"
    out.print(table(title, ("kind", *verdicts), rows, (1, 2, 3)))
    groups: dict[tuple[object, ...], list[Claim]] = {}
    for number, claim in enumerate(proof.open()):
        node = claim.mismatch and claim.mismatch.node
        groups.setdefault((claim.verdict, claim.mismatch and claim.mismatch.rank, node or number), []).append(claim)
    for claims in list(groups.values())[:MOST]:
        _group(claims, out)
    if len(groups) > MOST:
        names = [claim.name for claims in list(groups.values())[MOST:] for claim in claims]
        out.print(f"and {listed(names)}: --json has them all")
    proven = sum(claim.verdict.value == "proven" for claim in proof.claims)
    word = {"proven": "proven", "different": "NOT equal", "unproven": "NOT proven"}[proof.verdict.value]
    count = f": {proven} of {len(proof.claims)} values are proven"
    out.print(Text.assemble((word, COLOURS[proof.verdict.value]), count))
    if proof.roundings:
        casts, nodes = sum(proof.roundings.values()), listed(list(proof.roundings))
        out.print(f"where ranks add halves in float32, {casts} casts round once as the source's operator does: {nodes}")
    if folder is None:
        return
    node = next((claim.mismatch.node for claim in proof.open() if claim.mismatch and claim.mismatch.node), None)
    if proof.verdict.value == "different" and node is not None:
        out.print(f"gopt explain {folder} {node} shows where the first of these stands")
    if proof.verdict.value == "unproven":
        out.print(f"gopt verify {folder} compares the rest by numbers")


def _group(claims: Sequence[Claim], out: Console) -> None:
    """Values that differ in the same node: the first with the actual and the expected expression."""
    claim, mismatch = claims[0], claims[0].mismatch
    kind, verdict = claim.kind.replace("_", " "), claim.verdict.value
    names = f"{listed([each.name for each in claims])} are" if len(claims) > 1 else f"{claim.name} ({kind}) is"
    out.print(Text.assemble(f"{names} ", (verdict, COLOURS[verdict])))
    if mismatch is None:
        return
    rest = f" and {mismatch.ranks - 1} more" if mismatch.ranks > 1 else ""
    node = f", {mismatch.node}" if mismatch.node else ""
    out.print(f"  rank {mismatch.rank}{rest}{node}")
    out.print(Text(f"  has       {mismatch.actual}"))
    out.print(Text(f"  expected  {mismatch.expected}"))
    if mismatch.example is not None:
        example = mismatch.example
        digits = 7 if f"{example.actual:.7g}" != f"{example.expected:.7g}" else 17
        values = f"{example.actual:.{digits}g}, expected {example.expected:.{digits}g}"
        out.print(f"  e.g. element {example.element}: {values}")
