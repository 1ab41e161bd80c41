"""Records to rich tables: with the siblings ``render_*``, the only importer of rich."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from gopt.artifact.pass_facts import BucketFacts, buckets
from gopt.artifact.report_groups import total
from gopt.artifact.report_record import RankUsage, Report
from gopt.records.mesh import PIPELINE
from gopt.records.pass_facts import PassRecord
from gopt.text.amounts import format_bytes, group_ranks, rank_ranges
from gopt.text.sanitize import clean_line, listed

from .verbosity import Verbosity, verbosity

if TYPE_CHECKING:
    from gopt.analysis.coupling import Coupling
    from gopt.offline.inference.write import Inference
    from gopt.offline.merge import Merged
    from gopt.offline.seal import Sealed
    from gopt.offline.state_values import Loaded, StateDict
    from gopt.offline.training_info.write import TrainingInfo
    from gopt.passes.base import Pass

WIDE = 200
"""Columns of what goes into a pipe or a file."""


def console() -> SafeConsole:
    """A console on stdout; wide unless a terminal, so names are not cut."""
    fits = sys.stdout.isatty() or "COLUMNS" in os.environ
    return SafeConsole(file=sys.stdout, width=None if fits else WIDE, fits=fits)


class SafeConsole(Console):
    """Prints lines of text and tables, without markup; control characters and line breaks, such as in names, are shown
    as escapes. Prints nothing with ``--quiet``.

    Text wider than the terminal is wrapped between words: a word, such as a path, stays whole. ``fits``: whether there
    is a terminal; otherwise a text stays a line.
    """

    def __init__(self, fits: bool = True, **options: Any) -> None:
        self.fits = fits
        super().__init__(quiet=verbosity() is Verbosity.QUIET, highlight=False, markup=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print lines of text and tables; the title of a table is a line."""
        for part in objects or ("",):
            if isinstance(part, str | Text):
                self._print_text(part, options)
                continue
            if isinstance(part, Table):
                if part.title is not None:
                    self._print_text(Text(str(part.title), "bold"), options)
                    part.title = None
                for column in part.columns:
                    column._cells = [_cleaned(cell) for cell in column.cells]
            super().print(part, **options)

    def print_line(self, text: Text) -> None:
        """Print a text on a single line of any width: for lines read by other programs, such as differences."""
        super().print(_cleaned(text), soft_wrap=True)

    def _print_text(self, text: str | Text, options: dict[str, Any]) -> None:
        line = _cleaned(text)
        for row in wrapped(line, self.width) if self.fits else (line,):
            super().print(row, soft_wrap=True, **options)


def wrapped(line: Text, width: int) -> list[Text]:
    """A line as several, cut between words; those behind the first are indented."""
    indent = " " * (len(line.plain) - len(line.plain.lstrip()) + 2)
    cuts, start, room = [], 0, width
    for word in re.finditer(r"\S+", line.plain):
        if cell_len(line.plain[start : word.end()]) > room and line.plain[start : word.start()].strip():
            cuts.append(word.start())
            start, room = word.start(), width - len(indent)
    rows = line.divide(cuts) if cuts else [line]
    for row in rows:
        row.rstrip()
    return [rows[0], *(Text(indent).append_text(row) for row in rows[1:])]


def _cleaned(part: Any) -> Any:
    """A text as a line without control characters; other printable things of rich unchanged."""
    text = Text(part) if isinstance(part, str) else part
    if not isinstance(text, Text) or clean_line(text.plain) == text.plain:
        return text
    return Text(clean_line(text.plain), style=text.style)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], right: Sequence[int] = ()) -> Table:
    """A plain table; columns whose indices are in ``right`` are right-aligned."""
    made = Table(title=Text(title, "bold"), header_style="bold", box=None, pad_edge=False)
    for index, name in enumerate(columns):
        number = index in right  # a number never wraps
        made.add_column(name, justify="right" if number else "left", overflow="fold", no_wrap=number)
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text | Group) else Text(str(cell)) for cell in row))
    return made


def render_report(report: Report, output: Path | None) -> None:
    """Print the result of ``gopt shard``."""
    from gopt.offline.explain.folder_story import choice_text, stage_lines

    from .render_before_after import render_before_after

    out = console()
    render_before_after(out, report.source.file, report.mesh.axes, report.pipeline, report.before_after)
    _render_buckets(out, buckets(report.pipeline), report.mesh.mesh().data_ranks)
    for line in (*stage_lines(report.pipeline), *host_lines(report.pipeline)):
        out.print(line)
    _render_ranks(out, report)
    if report.choice is not None:
        out.print(f"chosen of {report.choice.weighed}: {choice_text(report.choice)}")
    out.print(table("Figures", ("", "is", "of"), _figure_rows(report), ()))
    kinds = ", ".join(f"{check.name} {check.count}" for check in report.checks)
    gone, new = total(report.removed_ops), total(report.added_ops)
    out.print(f"operators: {gone} of the source removed, {new} added; gopt explain DIR NAME shows one of them")
    if verbosity() is Verbosity.VERBOSE:
        out.print(f"all {sum(check.count for check in report.checks)} checks of the sharding passed: {kinds}")
    if report.proof is not None:
        out.print(report.proof.line())
    print_notes(out, report.notes, report.couplings)
    whole = len(report.ranks) == report.mesh.ranks
    done = f"written to {output}" + (f"; gopt verify {output} compares it with its source" if whole else "")
    out.print(done if output else "nothing written (--dry-run)")


def print_notes(out: Console, notes: Iterable[str], couplings: Iterable[Coupling] = ()) -> None:
    """Print a line for each note; with ``--verbose`` also of couplings too usual for a note."""
    if verbosity() is Verbosity.VERBOSE:
        from gopt.analysis.coupling import CouplingKind, of_kind

        notes = [*notes, *of_kind(couplings, CouplingKind.IGNORED)]
    for note in notes:
        out.print(f"note: {note}")


def _render_buckets(out: Console, facts: Sequence[BucketFacts], data_ranks: int) -> None:
    if not facts:
        return
    why = verbosity() is Verbosity.VERBOSE
    rows = [
        (
            bucket.name,
            bucket.sharing(data_ranks),
            len(bucket.tensors),
            "" if bucket.classes is None else bucket.classes,
            format_bytes(bucket.nbytes),
            bucket.dtype,
            *([bucket.closed_because] if why else []),
        )
        for bucket in few(facts)
    ]
    columns = ("name", "update", "tensors", "classes", "size", "dtype", *(["closed because"] if why else []))
    out.print(table("Buckets", columns, rows, (2, 3, 4)))
    print_left(out, len(facts) - len(rows), where="report.json")


def calls_text(calls: Mapping[str, int]) -> str:
    """The number of calls of each kind, such as ``1 AllGather shard, 1 AllReduce dp``."""
    return ", ".join(f"{count} {name}" for name, count in calls.items()) or "none"


def print_ranks(out: Console, columns: Sequence[str], groups: Sequence[Sequence[str]], shown: int) -> None:
    """Print a row for each of the first ``shown`` groups of equal ranks; a column is ``calls``.

    If all ranks make the same calls, the calls are a line below the table, so the table fits in 80 columns.
    """
    column = columns.index("calls")
    calls = {cells[column] for cells in groups}
    rows: list[list[Any]] = [list(cells) for cells in groups[:shown]]
    if len(calls) == 1:
        columns = [*columns[:column], *columns[column + 1 :]]
        rows = [cells[:column] + cells[column + 1 :] for cells in rows]
    else:
        rows = [[*cells[:column], Group(*map(Text, cells[column].split(", "))), *cells[column + 1 :]] for cells in rows]
    right = [number for number, name in enumerate(columns) if name not in ("rank", "calls")]
    out.print(table("Ranks", columns, rows, right))
    if len(calls) == 1:
        out.print(f"calls of each rank in a step: {calls.pop()}")


def _render_ranks(out: Console, report: Report) -> None:
    """One line for all ranks holding and sending the same."""
    usages = []
    for usage in report.ranks:
        several = len({call.group for call in usage.communication}) > 1
        counts = {f"{call.op} {call.group}" if several else call.op: call.calls for call in usage.communication}
        calls = calls_text(counts)
        sizes = map(format_bytes, usage.nbytes.by_kind.values())
        usages.append((usage.rank, (*sizes, calls, format_bytes(usage.bytes_sent))))
    groups = group_ranks(usages)
    shown = len(few(groups))
    columns = ("rank", "parameters", "optimizer states", "gradients", "calls", "sent per step")
    print_ranks(out, columns, [(rank_ranges(ranks), *cells) for ranks, cells in groups], shown)
    print_left(out, len(groups) - shown, "kinds of ranks", "report.json")


def host_lines(passes: Sequence[PassRecord]) -> Iterator[str]:
    """The bytes in the memory of the host, and the bytes copied in a step."""
    for facts in (record.facts for record in passes if record.name == "offload" and record.facts):
        size = {name: format_bytes(facts[name]) for name in ("state_bytes", "activation_bytes", "to_host", "to_device")}
        parts = []
        if facts["states"]:
            parts.append(f"{size['state_bytes']} of states of a rank, updated there by {facts['nodes']} nodes")
        if facts["activations"]:
            parts.append(f"{size['activation_bytes']} of values of a forward until its backward")
        yield f"on the host: {' and '.join(parts)}"
        yield f"copied in a step: {size['to_host']} to the host, {size['to_device']} to the device"


def _figure_rows(report: Report) -> list[tuple[str, str, str]]:
    """Each figure, with a bound or another number for comparison."""
    traffic, calls, casts = report.figures.traffic, report.figures.calls, report.figures.casts
    overlap, balance = report.figures.overlap, max(report.balance.values(), default=1)
    kinds = ", ".join(f"{share:.0%} of {kind}" for kind, share in overlap.by_kind.items())
    uneven = next(kind for kind, value in report.balance.items() if value == balance)
    rows = [
        (
            "traffic",
            f"{traffic.ratio:.3f} × minimum",
            f"{format_bytes(traffic.sent)} sent, minimum {format_bytes(traffic.bound)}",
        ),
        ("calls", str(calls.count), _least(calls.packing_bound, calls.count) + _beside(report.ranks)),
        ("balance", f"{balance:.3f}", f"max / mean of {uneven.replace('_', ' ')}"),
        ("overlap", f"{overlap.hidden_share:.0%} overlapped", kinds or "no calls"),
    ]
    if overlap.peak_gathered_bytes:
        rows.append(("gathered", format_bytes(overlap.peak_gathered_bytes), "alive at once at most"))
    if casts.owned_tensors or casts.in_forward:
        rest = f", {casts.in_forward} left in the forward" if casts.in_forward else ""
        rows.append(("casts", str(casts.per_update), f"{casts.owned_tensors} owned tensors{rest}"))
    return rows


def _beside(ranks: Sequence[RankUsage]) -> str:
    """The messages between pipeline stages, not counted as calls."""
    counts = [sum(call.calls for call in rank.communication if call.group == PIPELINE) for rank in ranks]
    messages = max(counts, default=0)
    return f"; beside {messages} sends and receives of a rank" if messages else ""


def _least(bound: int, count: int) -> str:
    return "the fewest with these buckets" if count <= bound else f"{bound} would do with these buckets"


def few(rows: Sequence[Any], most: int = 12) -> Sequence[Any]:
    return rows[:most]


def print_left(out: Console, rest: int, what: str = "", where: str = "--json") -> None:
    """Print how many rows of a table are left out, and where they are; nothing where there are all."""
    if rest > 0:
        out.print(f"… and {rest} more{what and ' '}{what} in {where}")


def written_to(result: Any) -> str:
    """Where the model of a result is, and the values."""
    return f"written to {result.model}" + (f", values in {result.data}" if result.data else "")


def render_step(out: Console, step: Any, before: str = "", feeds: str = "") -> None:
    """Print the size of a written step, and the inputs of a run. ``before``, ``feeds``: begin and end the two lines."""
    counts = f"{step.nodes} nodes, {step.parameters} parameters, {step.states} states, {format_bytes(step.nbytes)}"
    out.print(before + counts)
    out.print(f"inputs: {', '.join(step.inputs)}{feeds}")


def render_shards_it(out: Console, step: Any) -> None:
    """Print the file of a step, and the next command."""
    out.print(f"{written_to(step)}; gopt shard {step.model} --ranks 2 shards it")


def render_merged(merged: Merged) -> None:
    """Print the result of ``gopt merge``."""
    out = console()
    out.print(f"{merged.states} states, {format_bytes(merged.nbytes)}: {written_to(merged)}")
    if merged.missing:
        out.print(f"note: {len(merged.missing)} states have no value: {listed(merged.missing)}")


def render_sealed(done: Sealed) -> None:
    """Print the result of ``gopt seal``."""
    many = len(done.changed)
    named = f"{listed(done.changed)} {'has' if many == 1 else 'have'} new digests" if many else "none was edited"
    console().print(f"{done.files} files sealed in {done.path}: {named}")


def render_inference(written: Inference) -> None:
    """Print the result of ``gopt merge --inference``."""
    out = console()
    out.print(f"{format_bytes(written.nbytes)}: {written_to(written)}")
    out.print(f"reads {', '.join(written.inputs)}; computes {', '.join(written.outputs)}")
    if written.dropped:
        names = listed(written.dropped)
        out.print(f"note: dropout does nothing, and these inputs are left out: {names}")
    if written.running:
        out.print(f"note: {len(written.running)} batch statistics are replaced by running statistics")


def render_training_info(written: TrainingInfo) -> None:
    """Print the result of ``gopt merge --training-info``."""
    out = console()
    out.print(f"{format_bytes(written.nbytes)}: {written_to(written)}")
    fed = f", with {', '.join(written.fed)} besides" if written.fed else ""
    for line in (
        f"graph: {written.nodes} nodes; reads {', '.join(written.inputs)}; computes {', '.join(written.outputs)}",
        f"algorithm: {written.algorithm} nodes{fed}; computes {written.loss}, replaces {written.states} initializers",
    ):
        out.print(line)
    if written.initialized:
        out.print(f"initialization: kept, of {written.initialized} initializers")
    if written.twice:
        name, again = next(iter(written.twice.items()))
        out.print(
            f"note: {len(written.twice)} values differ in evaluation, and are computed a second time for training: "
            f"{name} is {again} there"
        )  # fmt: skip


def render_state_dict(saved: StateDict) -> None:
    """Print the result of ``gopt merge --state-dict``."""
    out = console()
    out.print(f"{saved.tensors} tensors, {format_bytes(saved.nbytes)}: written to {saved.file}")
    if saved.missing:
        out.print(f"note: {len(saved.missing)} states have no value: {listed(saved.missing)}")


def render_loaded(loaded: Loaded) -> None:
    """Print the result of ``gopt load-state``."""
    out = console()
    out.print(f"{loaded.loaded} states loaded, {len(loaded.kept)} kept: written to {loaded.model}")
    if loaded.unknown:
        names = listed(loaded.unknown)
        out.print(f"note: {len(loaded.unknown)} tensors are not states and were left out: {names}")
    print_notes(out, loaded.notes)


def render_passes(passes: Iterable[Pass], default: Collection[str]) -> None:
    """Print the table of ``gopt passes``. ``default``: names of the default pipeline."""
    from gopt.passes.base import option_table

    out = console()
    for spec in passes:
        mark = "" if spec.name in default else "  (not in the default pipeline)"
        out.print(Text.assemble((spec.name, "bold"), mark))
        for text in (spec.summary, *([f"runs after {', '.join(spec.after)}"] if spec.after else [])):
            out.print(fill(text, out.width, initial_indent="  ", subsequent_indent="  "))
        for name, kind, value in option_table(spec):
            shown = '""' if value == "" else value
            out.print(Text.assemble(f"  {name} = {shown}   ", (f"({kind})", "dim")))
