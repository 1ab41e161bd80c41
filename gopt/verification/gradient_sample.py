"""Selects the gradients of a large model for the check by finite differences: some of every kind, from the seed.

States and losses are never sampled. A gradient's kind is the equivalence class of the parameter's update, the shape and
the operator of the gradient's node, so that every class is seen, and every sort of layer inside."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gopt.analysis.training import TrainingGraph
from gopt.analysis.update_subgraphs import find_updates
from gopt.errors import UnsupportedError

LIMIT = 256
"""Gradients above which a sample is drawn, and how many it has where there are no more kinds than that."""


@dataclass(frozen=True, slots=True)
class GradientSample:
    """Parameters with checked gradients, of ``total``; ``classes`` and ``kinds``: their numbers, all seen.

    ``widened``: a sampled gradient was not confirmed, so that all others were checked too."""

    parameters: tuple[str, ...]
    total: int
    classes: int
    kinds: int
    seed: int
    widened: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "sampled": len(self.parameters), "of": self.total, "classes": self.classes, "kinds": self.kinds,
            "seed": self.seed, "widened": self.widened,
        }  # fmt: skip


def sample_gradients(training: TrainingGraph, seed: int, limit: int | None = None) -> GradientSample | None:
    """A sample of ``limit`` gradients (LIMIT), at least one of each kind; None for no more gradients than the limit."""
    limit = LIMIT if limit is None else limit
    names = list(training.gradients)
    if len(names) <= limit:
        return None
    classes = _classes(training)
    producers = {name: node.op_type for node in training.graph.nodes for name in node.outputs}
    kinds: dict[Hashable, list[str]] = {}
    for name in names:
        gradient = training.gradients[name]
        kind = classes[name], training.graph.type_of(name).shape, producers.get(gradient, "")
        kinds.setdefault(kind, []).append(name)
    generator = np.random.default_rng([seed, 11])
    chosen: set[str] = set()
    rest: list[str] = []
    for members in kinds.values():
        order = [members[index] for index in generator.permutation(len(members))]
        chosen.add(order[0])
        rest += order[1:]
    more = max(limit - len(chosen), 0)
    chosen.update(rest[index] for index in generator.permutation(len(rest))[:more])
    drawn = tuple(name for name in names if name in chosen)
    return GradientSample(drawn, len(names), len(set(classes.values())), len(kinds), seed)


def _classes(training: TrainingGraph) -> dict[str, Hashable]:
    """Parameter -> the equivalence class of the update; an unsplit update is a separate class."""
    try:
        subgraphs = find_updates(training, whole_accumulators=False).subgraphs
    except UnsupportedError:  # it was sharded once: by another way than splitting its updates
        subgraphs = {}
    numbers = {name: subgraph.equivalence_class for name, subgraph in subgraphs.items()}
    return {name: numbers[name] if numbers.get(name, -1) >= 0 else name for name in training.gradients}
