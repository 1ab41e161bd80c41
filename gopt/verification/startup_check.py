"""Compares start-up graphs: ranks have the pieces of the source's computed values, bit by bit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from gopt.artifact.manifest import Manifest
from gopt.artifact.manifest_entries import LocalState
from gopt.ir.graph import Graph
from gopt.runtime.training.startup import run_startup, startup_values
from gopt.verification.compare import Values, finite
from gopt.verification.rank_programs import RankPrograms
from gopt.verification.result import Difference, Verification

STARTUP = "start-up"
"""The variant in results."""


def check_startup(
    result: Verification, folder: Path, manifest: Manifest, ranks: Sequence[RankPrograms], stored: Values,
    model: Graph | None, deadline: float | None,
) -> None:  # fmt: skip
    """Compare the start-up graphs of a folder, if any, and enter the outcome in ``result``.

    ``stored``: values of states without such a graph. ``model``: the start-up graph of the user's model, with the same
    values required; None without a model."""
    if manifest.startup is None:
        if model is not None:
            result.doubt(next(iter(model.outputs)), "the model computes its first value, and the folder does not")
        return
    kinds = {state.tensor: state.kind.value for state in manifest.states}
    whole = startup_values(folder / manifest.startup, {state.tensor: state.type for state in manifest.states}, deadline)
    for name, value in whole.items():
        if not finite(value):
            result.doubt(name, "its start-up graph computes values that are not finite")
    if model is not None:
        startup = run_startup(model, "the model's initialization", deadline)
        for name in {**startup, **whole}:
            _enter(result, 0, name, kinds[name], startup.get(name), whole.get(name))
    for rank in ranks:
        for state, actual, wanted in _states(folder, rank, {**stored, **whole}, whole, deadline):
            _enter(result, rank.record.rank, state.input, kinds[state.pieces[0].tensor], actual, wanted)


def _states(
    folder: Path, rank: RankPrograms, start: Values, whole: Values, deadline: float | None
) -> Iterator[tuple[LocalState, np.ndarray | None, np.ndarray]]:
    """States of a rank from start-up graphs: the rank's value, or None, and the source's."""
    types = {state.input: rank.type_of(state.input) for state in rank.states}
    name = rank.record.startup
    computed = {} if name is None else startup_values(folder / name, types, deadline)
    wanted = rank.feeds(start)
    for state in rank.states:
        if rank.record.role == "trainer" and state.copy and not state.local:
            continue  # it is pulled before the first step
        if state.input in computed or any(piece.tensor in whole for piece in state.pieces):
            yield state, computed.get(state.input), wanted[state.input]


def _enter(
    result: Verification, rank: int, name: str, kind: str, actual: np.ndarray | None, wanted: np.ndarray | None
) -> None:
    equal = actual is not None and wanted is not None and _bits(actual) == _bits(wanted)
    result.note(Difference(STARTUP, 0, rank, name, kind, 0.0 if equal else math.inf))


def _bits(value: np.ndarray) -> tuple[str, tuple[int, ...], bytes]:
    return value.dtype.str, value.shape, value.tobytes()
