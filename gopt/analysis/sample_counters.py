"""States that count samples: each step adds the size of the batch, and ranks add up the sizes.

Such a state follows no batch, and looks like a count of steps. A size read from a shape tells the two apart; a constant
of the batch's size does not, and gopt asks."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache
from math import isclose, prod
from typing import TypeAlias

import numpy as np

from gopt.analysis.counters import added_constant
from gopt.analysis.coupling.context import CouplingContext
from gopt.analysis.coupling.propagate import propagate
from gopt.analysis.coupling.sample_counts import SampleCounts
from gopt.analysis.coupling.samples_axis import begun, samples_behind_time
from gopt.analysis.training import Phase, State, StateKind, TrainingGraph
from gopt.errors import UnsupportedError
from gopt.ir.constant_folding import Constants
from gopt.ir.graph_index import GraphIndex, ancestors, descendants
from gopt.ir.node_kinds import chosen_by
from gopt.ir.types import numpy_dtype
from gopt.operators.kinds import SIZES, SUMS, TYPED

_FAR = 32
"""Nodes of a counter's update."""
_FEW = 64
"""Elements of a counter."""
_Sizes: TypeAlias = Callable[[], set[int]]
"""The sizes of a batch, which take a sweep over the step."""
_TRIED = (16.0, 32.0, 80.0)
"""Old values of a counter at which its new value is computed."""


class OpenCountError(UnsupportedError):
    """Whether a state counts samples is open: a question of several ranks alone."""

    def __init__(self, state: str, message: str, hint: str = "") -> None:
        super().__init__(message, hint or _hint(state))
        self.state = state


def settle_counters(training: TrainingGraph, settled: Collection[str] = ()) -> None:
    """Make statistics of the states that count samples, and keep in ``counted`` each step's addition.

    ``settled``: states already settled, such as pointers into rings of rows.

    Raises UnsupportedError for a state that may count samples, where the user does not say whether ranks add the counts
    up."""
    index = GraphIndex(training.graph)
    sizes = cache(lambda: _batch_sizes(training))
    closed, moved = {*training.gradients, *settled}, _moved(training)
    open_ = [state for state in training.states if state.tensor not in closed and state.updated not in moved]
    added = {state.tensor: term for state in open_ if (term := added_constant(index, state.tensor, state.updated))}
    for state in open_:
        if state.tensor not in added:
            _refuse_other_form(index, training, sizes, state)
    if not added:
        return
    counts: SampleCounts | None = None
    for state in training.states:
        term, reduction = added.get(state.tensor, ""), training.reductions.get(state.tensor, "")
        if not term:
            continue
        sized = _is_sized(index, term)
        if sized and counts is None:
            counts = SampleCounts(_marked(training))
        certain = sized and counts is not None and counts.counts_samples(term)
        number = _number(index, term)
        if reduction == "sum" or (certain and not reduction):
            state.kind, state.of = StateKind.STATISTIC, None
            training.counted[state.tensor] = term
        elif certain:
            training.doubted[state.tensor] = (
                f"{state.tensor!r} counts samples, by the shape of an input, and ranks do not add it up, as "
                "--statistics says"
            )
        elif not reduction and sized and counts is not None and counts.of(term).lost:
            raise OpenCountError(
                state.tensor,
                f"what each step adds to {state.tensor!r} is computed from the size of a batch: ranks together add "
                "more if it counts samples",
            )
        elif not reduction and not sized and _is_size(sizes, number):
            raise OpenCountError(
                state.tensor,
                f"each step adds {number:g} to {state.tensor!r}, which is the size of a batch"
                f"{'' if _is_one_of(sizes, number) else ', less one'}: ranks together add more if it counts samples",
            )
        elif not reduction and not sized and (of := _share_of(sizes, number)):
            training.doubted[state.tensor] = (
                f"each step adds {number:g} to {state.tensor!r}, and ranks together add no more: it counts no share "
                f"of the {of} samples of a batch"
            )
    _refuse_read(index, training)


def _moved(training: TrainingGraph) -> set[str]:
    """The values moved by a batch otherwise than by sizes and types: no constants."""
    moved = set(training.batch)
    for node in training.graph.nodes:
        reads = node.inputs[:1] if node.is_in(TYPED) else node.reads
        if not moved.isdisjoint(reads) and not node.is_in(SIZES):
            moved.update(filter(None, node.outputs))
    return moved


def _hint(name: str) -> str:
    return f"if it does, let ranks add it up: --statistics {name}=sum; if not, say --statistics {name}=mean"


def _added_in_all(index: GraphIndex, state: State) -> float | None:
    """Each step's addition to a state, by the new value at several old values; None for a varying addition."""
    type = index.graph.types[state.tensor]
    if not type.static or type.elements > _FEW or numpy_dtype(type.dtype).kind not in "fiu":
        return None
    sums = []
    for old in _TRIED:
        stored = {state.tensor: np.full(type.dims, old, numpy_dtype(type.dtype))}
        new = Constants(index.graph, index.producers, stored).value(state.updated)
        if new is None or new.shape != type.dims:
            return None
        more = new.astype(np.float64) - old
        if not more.size or not np.allclose(more, more.flat[0], rtol=1e-4, atol=1e-6 * old):
            return None
        sums.append(float(more.flat[0]))
    return sums[0] if all(isclose(value, sums[0], rel_tol=1e-3, abs_tol=1e-3) for value in sums) else None


def _refuse_other_form(index: GraphIndex, training: TrainingGraph, sizes: _Sizes, state: State) -> None:
    """Raise UnsupportedError for a state without dependence on a batch, and with the size of a batch added other than
    by a sum."""
    if training.reductions.get(state.tensor, "") not in ("", "sum"):
        return
    in_all = _added_in_all(index, state) if state.kind is not StateKind.STATISTIC else None
    if in_all is not None and _is_size(sizes, in_all):
        raise _other_form(state.tensor, in_all, "")
    stack, visited = [state.updated], set[str]()
    batch_size, reads_counter = "", False
    while stack:
        name = stack.pop()
        reads_counter = reads_counter or name == state.tensor
        node = index.producers.get(name)
        if name in visited or node is None:
            if name in training.batch:
                return
            continue
        visited.add(name)
        if len(visited) > _FAR or node.phase is not Phase.UPDATE:
            return
        for operand in node.reads:
            if index.constants.value(operand) is None:
                stack.append(operand)
            elif (node.is_in(SUMS) or chosen_by(node)) and _is_batch(index, sizes, operand):
                batch_size = batch_size or operand
    if batch_size and reads_counter:
        raise _other_form(state.tensor, _number(index, batch_size), f" ({batch_size!r})")


def _other_form(name: str, number: float, what: str) -> UnsupportedError:
    return OpenCountError(
        name,
        f"each step counts {name!r} on by {number:.6g}{what}, which is the size of a batch, or that less one, and not "
        "by a plain sum",
        f"add the size of an input (Shape) to {name}, and ranks add it up; if it counts no samples, say "
        f"--statistics {name}=mean",
    )


def _marked(training: TrainingGraph) -> CouplingContext:
    context = begun(training)
    propagate(context, [node for node in training.graph.nodes if node.phase is not Phase.UPDATE])
    return context


def _is_sized(index: GraphIndex, value: str) -> bool:
    """Return whether a value is made of a shape."""
    producers = (index.producers.get(ancestor) for ancestor in ancestors(index, [value])[1])
    return any(node is not None and node.is_in(SIZES) for node in producers)


def _number(index: GraphIndex, term: str) -> float:
    value = index.constants.value(term)
    flat = np.asarray(value).reshape(-1).astype(np.float64)
    return float(flat[0]) if flat.size and bool((flat == flat[0]).all()) else 0.0


def _batch_sizes(training: TrainingGraph) -> set[int]:
    """The numbers of samples and of elements of the inputs of the batch; not of one sample."""
    shapes = [training.graph.inputs[name].shape or () for name in training.batch]
    sizes = {prod(size for size in shape[:length] if isinstance(size, int))
             for shape in shapes for length in range(1, len(shape) + 1)}  # fmt: skip
    return {size for size in {*sizes, samples_behind_time(training)} if isinstance(size, int) and size > 1}


def _is_batch(index: GraphIndex, sizes: _Sizes, term: str) -> bool:
    """Return whether a constant, not computed from a shape, is the size of a batch."""
    return _is_one_of(sizes, _number(index, term)) and not _is_sized(index, term)


def _is_size(sizes: _Sizes, number: float) -> bool:
    """Return whether a number is the size of a batch, or 1 less: the degrees of freedom."""
    return _is_one_of(sizes, number) or _is_one_of(lambda: {size - 1 for size in sizes() if size > 2}, number)


def _is_one_of(sizes: _Sizes, number: float) -> bool:
    return abs(number) > 1.5 and any(isclose(abs(number), size, rel_tol=1e-5) for size in sizes())


def _share_of(sizes: _Sizes, number: float) -> int:
    """The size in samples with ``number`` = size / a whole number of samples, as for epochs; 0 without such a size."""
    if not 0 < number < 1:
        return 0
    return next((size for size in sorted(sizes()) if isclose(size / number, round(size / number), rel_tol=1e-6)), 0)


def _refuse_read(index: GraphIndex, training: TrainingGraph) -> None:
    """Raise UnsupportedError where another update reads the new value of a count, different on each rank."""
    if not training.counted:
        return
    state_of = training.state_of()
    updates = {state.updated for state in training.states if state.kind is not StateKind.STATISTIC}
    if updates.isdisjoint(descendants(index, [state_of[name].updated for name in training.counted])):
        return
    for name in training.counted:
        behind = descendants(index, [state_of[name].updated])
        reader = next((state for state in training.states
                       if state.kind is not StateKind.STATISTIC and state.updated in behind), None)  # fmt: skip
        if reader is not None:
            raise OpenCountError(
                name,
                f"the update of {reader.tensor!r} reads the new value of {name!r}, which counts samples: each rank "
                "has counted its own",
                f"let the update read the old value, or say that {name} counts no samples: --statistics {name}=mean",
            )
