"""Fit the figures of a device to the trace of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import quantiles

from gopt import documents
from gopt.artifact.manifest_check import read_manifest
from gopt.collectives.layout import parse_shapes, total_elements
from gopt.documents.records import from_document
from gopt.documents.trace_record import TraceEvent, TraceFile
from gopt.errors import InputError, OptionError
from gopt.ir.graph import Graph, Node
from gopt.ir.load import load
from gopt.ir.types import nbytes
from gopt.offline.calibration import MeasuredCall, fit_device, fit_link
from gopt.offline.device import DeviceFigures, device_of
from gopt.offline.roofline import NodeWork, graph_works
from gopt.records.mesh import Mesh
from gopt.records.topology import Link
from gopt.runtime.execution_plan import plan_execution
from gopt.runtime.partition import CallStep, Segment
from gopt.runtime.tuning.tiling import ElementwiseRun

WARMUP = 5
"""Steps at the start of a trace that do not count, where there are more."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A step of a rank as planned: the titles and works of segments in order, the calls, and the runs of files."""

    titles: Sequence[str]
    works: Sequence[Sequence[NodeWork]]
    calls: Sequence[MeasuredCall]
    runs: int


def device_of_trace(folder: Path, trace: Path, rank: int, name: str) -> DeviceFigures:
    """The device on which a folder of ranks ran, from the events of a rank. Raises InputError and OptionError."""
    manifest, mesh = read_manifest(folder)
    if manifest.pipeline is not None:
        raise OptionError("a trace of pipeline stages calibrates nothing", "run the step on a mesh without pp")
    entry = next((entry for entry in manifest.ranks if entry.rank == rank), None)
    if entry is None:
        raise OptionError(f"{folder} has no rank {rank}", f"ranks are 0 to {mesh.ranks - 1}")
    base, following = device_of("cpu"), manifest.next_inputs(entry)
    parts: list[_Step] = []
    for phase, times in manifest.schedule.items():
        graph = load(folder / Path(entry.files[phase]).name, own=True)
        parts += [_planned(graph, following, mesh, rank, base)] * times
    step = _Step(
        [title for part in parts for title in part.titles], [works for part in parts for works in part.works],
        [call for part in parts for call in part.calls], len(parts),
    )  # fmt: skip
    events = from_document(TraceFile, documents.read_json(trace, documents.TRACE)).events
    return _fitted(step, [event for event in events if event.ph == "X" and event.pid == rank], base, name, str(trace))


def _planned(graph: Graph, following: Mapping[str, str], mesh: Mesh, rank: int, base: DeviceFigures) -> _Step:
    plan = plan_execution(graph, following, member=lambda group: mesh.index(group, rank))
    nodes = [node for step in plan.steps if isinstance(step, Segment) for node in step.nodes]
    works = dict(zip(map(id, nodes), graph_works(plan.graph, nodes, base.fuse_from), strict=True))
    titles, rows, calls = [], [], []
    for part, step in zip(plan.parts, plan.steps, strict=True):
        if isinstance(step, CallStep):
            calls.append(_call(step.node, plan.graph, mesh))
        elif isinstance(step, Segment):
            titles.append(part.title if isinstance(part, ElementwiseRun) else step.title)
            rows.append([works[id(node)] for node in step.nodes])
    return _Step(titles, rows, calls, 1)


def _call(node: Node, graph: Graph, mesh: Mesh) -> MeasuredCall:
    """A call with no time yet: bytes on a ring, as ``gopt plan`` counts."""
    members = mesh.size(str(node.attributes["group"]))
    moved = max(
        sum(type.nbytes for type in map(graph.type_of, names) if type.static) for names in (node.inputs, node.outputs)
    )
    if "shapes" in node.attributes:
        moved = nbytes(graph.type_of(node.outputs[0]).dtype, total_elements(parse_shapes(node.attributes["shapes"])))
    rounds = 2 if node.op_type == "AllReduce" else 1
    return MeasuredCall(rounds, members, rounds * (members - 1) / members * moved, 0.0)


def _fitted(step: _Step, events: Sequence[TraceEvent], base: DeviceFigures, name: str, file: str) -> DeviceFigures:
    ordered = sorted(events, key=lambda event: event.ts or 0.0)
    computed, called = [e for e in ordered if e.tid == 0], [e for e in ordered if e.tid == 1]
    count, expected = len(step.titles), list(step.titles)
    steps = len(computed) // max(count, 1)
    if not steps or [event.name for event in computed] != expected * steps or len(called) != len(step.calls) * steps:
        raise InputError(
            f"{file} is not a trace of these files on CPUs",
            "run the folder with gopt run DIR --trace FILE, then calibrate",
        )
    skip = min(WARMUP, steps - 1)
    segments = [
        (works, _typical(_seconds(computed[at + turn * count]) for turn in range(skip, steps)))
        for at, works in enumerate(step.works)
    ]
    calls = [
        replace(call, seconds=_typical(_seconds(called[at + turn * len(step.calls)]) for turn in range(skip, steps)))
        for at, call in enumerate(step.calls)
    ]
    device = fit_device(base, segments)
    between, inside = _gaps(
        [ordered[turn * (count + len(calls)) :][: count + len(calls)] for turn in range(skip, steps)]
    )
    start = inside / len(calls) if calls else 0.0
    link = fit_link(Link.parse(base.link or ""), calls)
    overlaps = any(a.tid != b.tid and _end(a) > (b.ts or 0.0) + 1 for a, b in pairwise(ordered))
    return replace(
        device, name=name, call=start, run=start if calls else inside / step.runs, step=between, overlaps=overlaps,
        link=f"{link.bandwidth / 1e9:.6f}GB/s:{link.latency * 1e9:.0f}ns",
    )  # fmt: skip


def _gaps(steps: Sequence[Sequence[TraceEvent]]) -> tuple[float, float]:
    """Seconds without an event, typical: between steps, and inside a step."""
    inside = [sum(max((b.ts or 0.0) - _end(a), 0.0) for a, b in pairwise(step)) / 1e6 for step in steps]
    between = [max((b[0].ts or 0.0) - max(map(_end, a)), 0.0) / 1e6 for a, b in pairwise(steps)]
    return _typical(between), _typical(inside)


def _typical(times: Iterable[float]) -> float:
    """The lower quartile; 0 of no times."""
    values = list(times)
    return quantiles(values, n=4)[0] if len(values) > 1 else sum(values)


def _seconds(event: TraceEvent) -> float:
    return (event.dur or 0.0) / 1e6


def _end(event: TraceEvent) -> float:
    return (event.ts or 0.0) + (event.dur or 0.0)
