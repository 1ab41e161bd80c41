"""The step as a timeline of compute and calls, from the files of one rank.

Nothing is timed: the axis counts operators in the order of the files. A call reaches to the first node that computes
with the result: the call can overlap with the work in between."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from gopt.api import load_stored_source, stored_roles
from gopt.artifact.manifest import Manifest
from gopt.artifact.manifest_entries import RankEntry
from gopt.artifact.report_groups import expand_ops
from gopt.artifact.report_record import Report
from gopt.errors import InputError
from gopt.ir.graph import COMM, Graph, Node
from gopt.ir.load import load
from gopt.ir.node_kinds import heavy
from gopt.ir.opaque.expand import expand
from gopt.ir.phase import Phase
from gopt.offline.html_report.record import Span, Timeline
from gopt.spmd.traffic import GATHERS, uses_of_results

SPANS = 4000
"""Spans of a timeline at most."""
_PHASES = tuple(phase.value for phase in Phase)
_UPDATES = ("shard", "refold-optimizers", "parameter-server")
"""Passes that write updates anew. What others add belongs to the phase that it stands in."""
_COMPUTE = "compute"


def step_timeline(folder: Path, manifest: Manifest, report: Report, rank: int) -> Timeline:
    """The step of a rank; raises InputError where a file is missing or broken."""
    entry = next(entry for entry in manifest.ranks if entry.rank == rank)
    phases = _phases(folder, report)
    spans: list[Span] = []
    lanes = _Lanes()
    start = 0
    for phase, times in manifest.schedule.items():
        graph = _file(folder, entry, phase)
        suffix = "" if phase == "step" else f" ({phase}{f', {times} times' if times > 1 else ''})"
        spans += _spans(graph, phases, start, lanes, suffix)
        start += len(graph.nodes)
    role = "rank" if manifest.parameter_server is None else entry.role
    note = (
        f"operators of {role} {rank} in their order; nothing is timed. A call reaches to the first operator that "
        "computes with its result."
    )
    names, shown = lanes.in_groups(spans[:SPANS])
    return Timeline("plan", "operators", note, names, shown, (0, start), max(len(spans) - SPANS, 0))


def _file(folder: Path, entry: RankEntry, phase: str) -> Graph:
    """The graph of a phase; for a trainer or server without a file of the phase, the graph of another file."""
    name = entry.files.get(phase) or next(iter(entry.files.values()), None)
    if name is None or not (folder / Path(name).name).is_file():
        raise InputError(f"rank {entry.rank} has no file for the phase {phase}", "write the folder again")
    return load(folder / Path(name).name, own=True)


def _phases(folder: Path, report: Report) -> Mapping[str, str]:
    """First output of a node of the source, or label of an added node -> the phase."""
    path = folder / "source.onnx"
    if not path.is_file():
        raise InputError(f"{folder} has no {path.name}", "write the folder again with gopt shard")
    graph = load(path, own=True)
    training = load_stored_source(expand(graph), stored_roles(graph, path), path)
    phases = {node.first_output: node.phase.value for node in training.graph.nodes if node.phase is not None}
    added = expand_ops(fact for fact in report.added_ops if fact.pass_name in _UPDATES and fact.role in _PHASES)
    return {fact.name: fact.role for fact in added} | phases


def _spans(graph: Graph, phases: Mapping[str, str], start: int, lanes: _Lanes, suffix: str) -> Iterator[Span]:
    """The spans of one file, from ``start`` on; ``lanes`` get the spans of called groups."""
    nodes = graph.nodes
    first_use, _ = uses_of_results(nodes)
    work = [0, *accumulate(int(heavy(node)) for node in nodes)]
    yield from _compute(nodes, phases, start, suffix)
    for index, node in enumerate(nodes):
        if node.domain != COMM:
            continue
        end = max(min((first_use.get(name, len(nodes)) for name in node.outputs), default=len(nodes)), index + 1)
        lane = lanes.free(_lane(node), start + index, start + end)
        yield Span(
            lane, node.op_type, node.label + suffix, start + index, start + end, _payload(graph, node),
            work[end] > work[index + 1],
        )  # fmt: skip


class _Lanes:
    """The lanes of a timeline. Calls of a group that are open at once get separate lanes, up to ``BESIDE``."""

    BESIDE = 4

    def __init__(self) -> None:
        self.names = [_COMPUTE]
        self._of: dict[str, list[int]] = {}
        self._ends: dict[int, int] = {}

    def free(self, name: str, start: int, end: int) -> int:
        """A lane of this name that is free at ``start``; the last lane if all are taken."""
        mine = self._of.setdefault(name, [])
        lane = next((number for number in mine if self._ends[number] <= start), None)
        if lane is None and len(mine) < self.BESIDE:
            lane = len(self.names)
            self.names.append(f"{name} ({len(mine) + 1})" if mine else name)
            mine.append(lane)
        elif lane is None:
            lane = mine[-1]
        self._ends[lane] = max(end, self._ends.get(lane, 0))
        return lane

    def in_groups(self, spans: Sequence[Span]) -> tuple[tuple[str, ...], tuple[Span, ...]]:
        """The lanes of a group below one another, and their spans."""
        order = [0, *(lane for lanes in self._of.values() for lane in lanes)]
        order_of = {lane: number for number, lane in enumerate(order)}
        return tuple(self.names[lane] for lane in order), tuple(
            replace(span, lane=order_of[span.lane]) for span in spans
        )


def _lane(node: Node) -> str:
    """The group of a collective; the server of a message."""
    group = node.attributes.get("group")
    if group is not None:
        return f"calls over {group}"
    server = node.attributes.get("server")
    return f"messages with server {server}" if server is not None else "messages"


def _compute(nodes: Sequence[Node], phases: Mapping[str, str], start: int, suffix: str) -> Iterator[Span]:
    """Runs of nodes of one phase between calls. Added nodes belong to the phase around them."""
    begin, now, count, products = 0, "", 0, 0
    for index, node in enumerate(nodes):
        call = node.domain == COMM
        mine = now if call else phases.get(node.label if node.made_by else node.first_output, now)
        if count and (call or (now and mine != now)):
            yield _run(now, count, products, start + begin, start + index, suffix)
            count = products = 0
        now = mine
        if not call:
            begin = begin if count else index
            count += 1
            products += heavy(node)
    if count:
        yield _run(now, count, products, start + begin, start + len(nodes), suffix)


def _run(phase: str, count: int, products: int, begin: int, end: int, suffix: str) -> Span:
    heavy_ones = f", {products} of them heavy" if products else ""
    return Span(0, phase or _COMPUTE, f"{count} operator{'s' * (count != 1)}{heavy_ones}{suffix}", begin, end)


def _payload(graph: Graph, node: Node) -> int | None:
    """Bytes of the tensors moved by a call, None for an unknown size."""
    names = node.outputs if node.op_type in GATHERS or node.op_type == "Pull" else node.inputs
    types = [graph.types.get(name) for name in names if name]
    if not all(type is not None and type.static for type in types):
        return None
    return sum(type.nbytes for type in types if type is not None)
