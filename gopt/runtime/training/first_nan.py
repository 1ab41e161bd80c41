"""Why the first loss of a job is not a number: the first input, start value or forward value that is no number."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from gopt.artifact.manifest_entries import LocalState
from gopt.errors import GoptError
from gopt.ir.external_data import load_state
from gopt.ir.types import FLOATS
from gopt.offline.folder_contents import read_folder
from gopt.offline.inference.forward import pruned
from gopt.runtime.executor import Executor
from gopt.runtime.session import Array, SessionCache
from gopt.runtime.training.job import Job
from gopt.text.sanitize import show


def first_nan(
    job: Job, batches: Sequence[Mapping[str, Array]], hyper: Mapping[str, Array], states: Sequence[LocalState],
    start: Callable[[], Mapping[str, Any]],
) -> str:  # fmt: skip
    """Where the numbers end: in the data, in the start values, or in the first forward.

    ``batches``: of a rank's first step; ``states``: of the rank; ``start``: returns the states' values before the
    step."""
    for batch in batches:
        for name, value in batch.items():
            if fault := _fault(value):
                return f"in the data: {show(name)} {fault}"
    for name, value in _pieces(states, start()):
        if fault := _fault(value):
            return f"in the start values: {show(name)} {fault}"
    try:
        reason = next(filter(None, (_in_source(job, {**batch, **hyper}) for batch in batches)), "")
    except (GoptError, MemoryError):  # a source that cannot run here
        reason = ""
    return reason or "in the first forward: its data and start values are numbers"


def _pieces(states: Sequence[LocalState], values: Mapping[str, Any]) -> Iterator[tuple[str, Array]]:
    """The parts of the source's states in a rank's states."""
    for state in states:
        flat, start = np.asarray(values[state.input]).reshape(-1), 0
        for piece in state.pieces:
            yield piece.tensor, flat[start : start + piece.elements]
            start += piece.elements


def _fault(value: Any) -> str:
    """Return the fault of the numbers of an array, '' where all are finite."""
    array = np.asarray(value)
    if array.dtype.kind not in "fV" or not array.size:
        return ""
    bad = ~np.isfinite(array.astype(np.float32) if array.dtype.itemsize < 4 else array)
    if not bad.any():
        return ""
    kind = "NaN" if np.isnan(array[bad].astype(np.float64)).any() else "infinite"
    row = f", first in row {int(np.argwhere(bad)[0][0])}" if array.ndim > 1 and len(array) > 1 else ""
    return f"is {kind} in {int(bad.sum())} of its {array.size} numbers{row}"


def _in_source(job: Job, feeds: Mapping[str, Array]) -> str:
    """The first start value of the folder that is no number, of any rank, or else the first value of the source's
    forward that is NaN, or infinite; '' without such a value, or where start values lie elsewhere."""
    folder = read_folder(job.folder)
    if job.startup and folder.startup is not None:
        return ""
    graph = folder.graph
    if job.state is not None:
        graph.initializers.update(
            {name: value for name, value in load_state(job.state).items() if name in folder.missing}
        )
    for tensor in (state.tensor for state in folder.manifest.states if state.tensor in graph.initializers):
        if fault := _fault(graph.initializers[tensor].numpy()):
            return f"in the start values: {show(tensor)} {fault}"
    part = pruned(graph, folder.manifest.losses)
    producers = {
        name: node for node in part.nodes for name in node.outputs if name and part.type_of(name).dtype in FLOATS
    }
    part.outputs = {name: part.type_of(name) for name in producers}
    values = Executor(part, SessionCache()).run({name: feeds[name] for name in part.inputs if name in feeds})
    faults = {name: fault for name in producers if (fault := _fault(values[name]))}
    worst = next((name for name, fault in faults.items() if "NaN" in fault), next(iter(faults), None))
    if worst is None:
        return ""
    return f"in the first forward: {show(worst)}, which {producers[worst].op_type} computes, {faults[worst]}"
