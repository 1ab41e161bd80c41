"""The story of a whole folder: the choice of ``--auto``, and what each pass did to the step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields

from gopt.analysis.training import StateKind
from gopt.artifact.report_groups import OpGroup
from gopt.artifact.report_record import ChoiceEntry, Report
from gopt.offline.explain.story import Fact
from gopt.offline.plan_settings import ShardSettings
from gopt.records.mesh import Mesh
from gopt.records.pass_facts import PassRecord
from gopt.text.amounts import format_bytes, format_seconds

KINDS = frozenset(kind.value for kind in StateKind)
NEITHER = "removes and adds no operator"


def folder_story(report: Report) -> Iterator[Fact]:
    """Yield the facts in the order of the work: source, choice, passes, proof, notes."""
    counts = report.source.counts
    states = [
        f"{count} {kind.replace('_', ' ')}{'s' * (count != 1)}" for kind, count in counts.items() if kind in KINDS
    ]
    yield Fact("source", f"{report.source.file}: {counts['nodes']:,} nodes, {', '.join(states)}")
    yield Fact("mesh", f"{Mesh(report.mesh.axes)}, {report.mesh.ranks} ranks")
    if report.choice is not None:
        yield from _choice(report.choice)
    removed, added = _by_pass(report.removed_ops), _by_pass(report.added_ops)
    for record in report.pipeline:
        counted = [
            f"{count:,} operator{'s' * (count != 1)} {what}"
            for count, what in ((removed[record.name], "of the source removed"), (added[record.name], "added"))
            if count
        ]
        yield Fact(record.name, "; ".join(filter(None, (", ".join(counted), record.note))) or NEITHER)
    yield from (Fact("stages", line) for line in stage_lines(report.pipeline))
    if report.proof is not None:
        yield Fact("proof", report.proof.line())
    yield from (Fact("note", note) for note in report.notes)


def _choice(choice: ChoiceEntry) -> Iterator[Fact]:
    """Yield what --auto chose, and why; the parts of a step where a device timed it."""
    where = f" on {choice.device}" if choice.device else f" over {choice.link}" if choice.link else ""
    yield Fact("chosen", f"of {choice.weighed} choices{where}: {choice_text(choice)}")
    limit = "" if choice.memory is None else f", of {format_bytes(choice.memory)} given"
    yield Fact("holds", f"{format_bytes(choice.nbytes['total'])} on the fullest rank{limit}")
    if choice.step is not None:
        parts = [
            f"{format_seconds(seconds)} {name}"
            for name, seconds in choice.step.items()
            if seconds and name != "seconds"
        ]
        yield Fact("step", f"{format_seconds(choice.step['seconds'])}: {', '.join(parts)}")
    elif choice.seconds is not None:
        total, exposed = (format_seconds(choice.seconds[name]) for name in ("total", "exposed"))
        yield Fact("calls", f"{total}, of these {exposed} beside no computation")


def _by_pass(groups: Iterable[OpGroup]) -> Counter[str]:
    """The number of operators in groups, by pass."""
    counts = Counter[str]()
    for group in groups:
        counts[group.pass_name] += group.count
    return counts


def choice_text(choice: ChoiceEntry) -> str:
    """The options chosen by ``--auto``, and the reason."""
    chosen = ShardSettings(**{field.name: getattr(choice, field.name) for field in fields(ShardSettings)})
    return f"{chosen}: {choice.why}"


def stage_lines(passes: Sequence[PassRecord]) -> Iterator[str]:
    """Yield a line on the parameters of each pipeline stage, if any."""
    for facts in (record.facts for record in passes if record.name == "pipeline" and record.facts):
        sizes = zip(facts["parameters"], facts["elements"])
        texts = [f"{number} has {count} of {elements:,} elements" for number, (count, elements) in enumerate(sizes)]
        yield f"parameters of pipeline stages: {', '.join(texts)}"
