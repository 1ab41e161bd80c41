"""Adam in NumPy on the rows that a step touches, for steps of ``fixtures/sparse``."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from async_runs import SourceGradients

from gopt.analysis.training import TrainingGraph
from gopt.runtime.session import Array
from gopt.runtime.training.array_source import MicroStep
from gopt.runtime.training.data import open_data


def touched_of_dlrm(batch: Mapping[str, Array]) -> dict[str, Array]:
    """The rows of each table that a batch looks up."""
    return {"table0": batch["ids"][:, 0], "table1": batch["ids"][:, 1], "table2": batch["bag"].reshape(-1)}


def adam(held: dict[str, Array], name: str, gradient: Array, rows: Array | slice, step: float, rate: float) -> None:
    """One update of some rows, in place."""
    first, second = held[f"{name}.exp_avg"], held[f"{name}.exp_avg_sq"]
    first[rows] = 0.9 * first[rows] + 0.1 * gradient[rows]
    second[rows] = 0.999 * second[rows] + 0.001 * gradient[rows] ** 2
    way = first[rows] / (1 - 0.9**step) / (np.sqrt(second[rows] / (1 - 0.999**step)) + 1e-6)
    held[name][rows] -= rate * way


def train_dlrm(training: TrainingGraph, data: str, steps: int, trainers: int, rate: float) -> dict[str, Array]:
    """All states behind some steps of Adam in which tables are updated on touched rows alone."""
    types = training.graph.types
    source = open_data(data, {name: types[name] for name in training.batch})
    held = {
        state.tensor: np.array(training.graph.initializers[state.tensor].numpy(), np.float64)
        for state in training.states
    }  # fmt: skip
    gradients = SourceGradients(training)
    for number in range(steps):
        batches = [source.batch(MicroStep(number, trainer, trainers)) for trainer in range(trainers)]
        now = {name: held[name].astype(np.float32) for name in training.gradients}
        each = [gradients(now, batch) for batch in batches]
        touched = [touched_of_dlrm(batch) for batch in batches]
        held["step"] += 1
        for name in training.gradients:
            mean = np.mean([found[name].astype(np.float64) for found in each], axis=0)
            rows = np.unique(np.concatenate([own[name] for own in touched])) if name in touched[0] else slice(None)
            adam(held, name, mean, rows, float(held["step"]), rate)
    return held
