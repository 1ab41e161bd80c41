"""Fit the figures of a device to the trace of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import quantiles

from gopt import documents
from gopt.artifact.manifest_check import read_manifest
from gopt.collectives.layout import parse_shapes, total_elements
from gopt.collectives.table import COLLECTIVES
from gopt.documents.records import from_document
from gopt.documents.trace_record import TraceEvent, TraceFile
from gopt.errors import InputError, OptionError
from gopt.ir.graph import Graph, Node
from gopt.ir.load import load
from gopt.ir.opaque.expand import expand
from gopt.ir.types import nbytes
from gopt.offline.calibration import MeasuredCall, MeasuredSegment, fit_calls, fit_device
from gopt.offline.device import DeviceFigures
from gopt.offline.roofline import NOTHING, graph_works
from gopt.records.mesh import Mesh
from gopt.runtime.execution_plan import plan_execution
from gopt.runtime.inlined_functions import inlined
from gopt.runtime.partition import CallStep, Segment
from gopt.runtime.step_runs import step_runs
from gopt.runtime.tuning.tiling import ElementwiseRun

WARMUP = 5
"""Steps at the start of a trace that do not count, where there are more."""


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run of a file as planned: the titles of segments in order, their works, and the calls, None for a message."""

    titles: Sequence[str]
    segments: Sequence[MeasuredSegment]
    calls: Sequence[MeasuredCall | None]

    @property
    def events(self) -> int:
        return len(self.titles) + len(self.calls)


def device_of_trace(folder: Path, trace: Path, rank: int, name: str, base: DeviceFigures) -> DeviceFigures:
    """The device on which a folder of ranks ran, from the events of a rank; ``base`` gives the figures the trace
    does not settle. Raises InputError and OptionError."""
    manifest, mesh = read_manifest(folder)
    entry = next((entry for entry in manifest.ranks if entry.rank == rank), None)
    if entry is None:
        raise OptionError(f"{folder} has no rank {rank}", f"ranks are 0 to {mesh.ranks - 1}")
    following = manifest.next_inputs(entry)
    planned = {
        phase: planned_run(load(folder / Path(entry.files[phase]).name, own=True), following, mesh, rank, base)
        for phase in manifest.schedule
    }
    runs = [planned[phase] for phase, _ in step_runs(folder, manifest, mesh, rank)]
    events = from_document(TraceFile, documents.read_json(trace, documents.TRACE)).events
    steps = _steps([event for event in events if event.ph == "X" and event.pid == rank], runs, str(trace))
    return replace(_fitted(runs, steps, base), name=name)


def planned_run(graph: Graph, following: Mapping[str, str], mesh: Mesh, rank: int, base: DeviceFigures) -> PlannedRun:
    graph = inlined(expand(graph, "gopt plan --calibrate"))
    nodes = [node for node in graph.nodes if node.outputs]
    works = {node.outputs[0]: work for node, work in zip(nodes, graph_works(graph, nodes, base.fuse_from))}
    plan = plan_execution(graph, following, member=lambda group: mesh.index(group, rank))
    titles, segments, calls = [], [], []
    for part, step in zip(plan.parts, plan.steps, strict=True):
        if isinstance(step, CallStep):
            calls.append(None if "peer" in step.node.attributes else _call(step.node, plan.graph, mesh))
        elif isinstance(step, Segment):
            titles.append(part.title if isinstance(part, ElementwiseRun) else step.title)
            row = [works.get(node.outputs[0], NOTHING) for node in step.nodes]
            segments.append(MeasuredSegment(row, 0.0, starts=not isinstance(part, ElementwiseRun)))
    return PlannedRun(titles, segments, calls)


def _call(node: Node, graph: Graph, mesh: Mesh) -> MeasuredCall:
    """A call with no time yet: bytes on a ring, as ``gopt plan`` counts."""
    members = mesh.size(str(node.attributes["group"]))
    moved = max(
        sum(type.nbytes for type in map(graph.type_of, names) if type.static) for names in (node.inputs, node.outputs)
    )
    if "shapes" in node.attributes:
        moved = nbytes(graph.type_of(node.outputs[0]).dtype, total_elements(parse_shapes(node.attributes["shapes"])))
    record = COLLECTIVES[node.op_type]
    sent = record.rounds * (members - 1) / members * moved
    return MeasuredCall(record.rounds, members, sent, record.added(sent), 0.0)


def _steps(events: Sequence[TraceEvent], runs: Sequence[PlannedRun], file: str) -> list[list[TraceEvent]]:
    """The events of each step behind the first few, in order. Raises InputError for a trace of other files."""
    ordered = sorted(events, key=lambda event: event.ts or 0.0)
    titles = [title for run in runs for title in run.titles]
    size = sum(run.events for run in runs)
    count, computed = len(ordered) // max(size, 1), [event.name for event in ordered if event.tid == 0]
    if not count or computed != titles * count or len(ordered) != size * count:
        raise InputError(
            f"{file} is not a trace of these files on CPUs",
            "run the folder with gopt run DIR --trace FILE, then calibrate",
        )
    return [ordered[turn * size :][:size] for turn in range(min(WARMUP, count - 1), count)]


def _fitted(runs: Sequence[PlannedRun], steps: Sequence[Sequence[TraceEvent]], base: DeviceFigures) -> DeviceFigures:
    computed = [[event for event in step if event.tid == 0] for step in steps]
    called = [[event for event in step if event.tid != 0] for step in steps]
    device = fit_device(base, (
        replace(segment, seconds=_typical(_seconds(step[at]) for step in computed))
        for at, segment in enumerate(segment for run in runs for segment in run.segments)
    ))  # fmt: skip
    calls: list[MeasuredCall] = []
    messages: list[float] = []
    for at, call in enumerate(call for run in runs for call in run.calls):
        seconds = [_seconds(step[at]) for step in called]
        if call is None:
            messages += seconds
        else:
            calls.append(replace(call, seconds=_typical(seconds)))
    gaps = _gaps(runs, steps)
    issue, run = gaps.inside / max(len(called[0]), 1), base.run if gaps.behind_run is None else gaps.behind_run
    device = replace(device, run=run, step=max(_between(steps) - run, 0.0), overlaps=any(map(_overlapping, steps)))
    if messages:
        device = replace(device, message=issue + _typical(messages))
    return replace(fit_calls(device, calls), call=issue) if calls else device


@dataclass(frozen=True, slots=True)
class _Gaps:
    """Typical seconds without an event in a step. ``inside``: of all gaps inside runs of files; ``behind_run``: of the
    gap behind a run, None with a single run."""

    inside: float
    behind_run: float | None


def _gaps(runs: Sequence[PlannedRun], steps: Sequence[Sequence[TraceEvent]]) -> _Gaps:
    ends = {number - 1 for number in accumulate(run.events for run in runs)}
    inside, behind = [], []
    for step in steps:
        gaps = [max((b.ts or 0.0) - _end(a), 0.0) / 1e6 for a, b in pairwise(step)]
        inside.append(sum(gap for at, gap in enumerate(gaps) if at not in ends))
        behind += [gap for at, gap in enumerate(gaps) if at in ends]
    return _Gaps(_typical(inside), _typical(behind) if behind else None)


def _between(steps: Sequence[Sequence[TraceEvent]]) -> float:
    """Typical seconds between the events of two steps."""
    return _typical(max((b[0].ts or 0.0) - max(map(_end, a)), 0.0) / 1e6 for a, b in pairwise(steps))


def _overlapping(step: Sequence[TraceEvent]) -> bool:
    """Return whether nodes run during a call."""
    return any(a.tid != b.tid and _end(a) > (b.ts or 0.0) + 1 for a, b in pairwise(step))


def _typical(times: Iterable[float]) -> float:
    """The lower quartile; 0 of no times."""
    values = list(times)
    return quantiles(values, n=4)[0] if len(values) > 1 else sum(values)


def _seconds(event: TraceEvent) -> float:
    return (event.dur or 0.0) / 1e6


def _end(event: TraceEvent) -> float:
    return (event.ts or 0.0) + (event.dur or 0.0)
