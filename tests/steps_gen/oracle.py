"""What must come out: the true gradients of every rank's batch, their mean, and the source's own update after it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import onnx
from node_models import info, session
from onnx import ModelProto, helper
from rank_files import Values

from steps_gen.graphs import reads


@dataclass(frozen=True)
class Nudge:
    """A disturbance as large as rounding is: by how much relative to a value, and at random or one way for all.

    ``way``: every gradient is moved up (1) or down (-1) by a share of the largest of them.
    """

    size: float
    seed: int = 0
    way: int = 0


class Known(Protocol):
    """A step and what its generator knows of it: of ``Made``, and of the streams of ``mesh_gen``."""

    plain: ModelProto
    loss: str
    gradients: dict[str, str]
    states: dict[str, str]
    statistics: list[str]
    batch: Mapping[str, Any]
    known: Values


class Oracle:
    """The plain model in two halves, cut at the gradients that its generator knows."""

    losses: list[float]
    """Of the last step, by micro-step and part of the samples."""

    def __init__(self, made: Known) -> None:
        self.made = made
        self.cuts = sorted(set(made.gradients.values()))
        statistics = [made.states[name] for name in made.statistics]
        rest = [made.states[name] for name in made.states if name not in made.statistics]
        self.first = cut(made.plain, [made.loss, *self.cuts, *statistics], (), {})
        self.second = cut(made.plain, rest, self.cuts, made.known)
        read = {each.name for each in self.second.graph.input}
        assert not read.intersection(made.batch), "an update reads the batch itself: no truth is known"
        self.runners = [session(half) if half.graph.node else None for half in (self.first, self.second)]

    def local(self, feeds: Values) -> Values:
        """Loss, gradients and new statistics of one batch."""
        return run(self.first, self.runners[0], feeds)

    def step(self, states: Values, hyper: Values, batches: list[list[Values]], nudge: Nudge = Nudge(0.0)) -> Values:
        """New states from the states, settings, and batches by micro-step and rank; states and means disturbed."""
        generator = np.random.default_rng(nudge.seed)
        states = {name: nudged(value, nudge, generator) for name, value in states.items()}
        local: list[Values] = []
        held = [dict(states) for _ in batches[0]]
        for turn in batches:
            for mine, batch in zip(held, turn, strict=True):
                local.append(self.local({**mine, **hyper, **batch}))
                mine.update({name: local[-1][self.made.states[name]] for name in self.made.statistics})
        self.losses = [float(each[self.made.loss]) for each in local]
        means = {name: mean([each[name] for each in local]) for name in self.cuts}
        top = max([float(np.abs(value[np.isfinite(value)]).max(initial=0)) for value in means.values()], default=0.0)
        given = {name: nudged(value, nudge, generator, top) for name, value in means.items()}
        new = run(self.second, self.runners[1], {**states, **hyper, **given})
        found = {name: mean([mine[name] for mine in held]) for name in self.made.statistics}
        for state, output in self.made.states.items():
            if state not in found:
                found[state] = new[output if output in new else f"{output}.same"]
        return found


def mean(values: list[np.ndarray]) -> np.ndarray:
    with np.errstate(all="ignore"):
        wide = [each.astype(np.float64) for each in values]
        return np.asarray(sum(wide[1:], wide[0]) / len(wide)).astype(values[0].dtype)


def nudged(value: np.ndarray, nudge: Nudge, generator: np.random.Generator, top: float = 0.0) -> np.ndarray:
    """The value, disturbed in its last place; ``top``: the largest magnitude around it."""
    if not nudge.size or value.dtype not in (np.float32, np.float16):
        return value
    if nudge.way:
        return np.asarray(value + 4 * nudge.way * nudge.size * top).astype(value.dtype)
    return np.asarray(value * (1 + nudge.size * generator.uniform(-1, 1, value.shape))).astype(value.dtype)


def run(model: ModelProto, runner: object, feeds: Values) -> Values:
    names = [each.name for each in model.graph.output]
    if not names:
        return {}
    wanted = {each.name: feeds[each.name] for each in model.graph.input}
    return dict(zip(names, runner.run(names, wanted), strict=True))


def cut(model: ModelProto, wanted: Iterable[str], stops: Iterable[str], known: Values) -> ModelProto:
    """The part of a graph that makes ``wanted``, with ``stops`` as inputs, typed as they are known."""
    graph, stops = model.graph, set(stops)
    wanted = list(dict.fromkeys(wanted))
    needed, kept = set(wanted), []
    for node in reversed(graph.node):
        if (needed - stops).intersection(node.output):
            kept.append(node)
            needed |= reads(node)
    inputs = [each for each in graph.input if each.name in needed]
    inputs += [info(name, known[name]) for name in sorted(stops & needed)]
    names = {each.name for each in inputs}
    stored = [each for each in graph.initializer if each.name in needed and each.name not in names]
    # A gradient that is an output as well is not computed again.
    outputs = [onnx.ValueInfoProto(name=name) for name in wanted if name not in stops]
    extra = [name for name in wanted if name in stops]
    nodes = list(reversed(kept))
    for name in extra:
        nodes.append(helper.make_node("Identity", [name], [f"{name}.same"]))
        outputs.append(onnx.ValueInfoProto(name=f"{name}.same"))
    made = ModelProto()
    made.CopyFrom(model)
    made.graph.CopyFrom(helper.make_graph(nodes, "half", inputs, outputs, stored))
    return made
