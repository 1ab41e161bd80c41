"""Steps of ``steps_gen``, split as drawn, against two references: cut where gopt says, and at the true gradients."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from draws import Verdict
from onnx import ModelProto, helper
from rank_files import Values
from steps_gen.judge import Setting as Sharding
from steps_gen.judge import draw_batches
from steps_gen.judge import excuse as unfit
from steps_gen.make import Made
from steps_gen.plan import Plan

from split_gen.compare import EXACT, Allowance, Batches
from split_gen.judge import Setting, judge

NEAR = Allowance(1e-4)
REDUCING = frozenset({"trust", "normalised", "rows", "muon", "dual", "schedule-free"})


def allowance(plan: Plan) -> Allowance:
    """No bit where updates are elementwise, else what another order of sums makes."""
    apart = plan.clip in ("none", "value", "global-max") and plan.gate in (
        "none",
        "flag",
        "flag-number",
        "every",
        "finite",
    )
    whole = (
        not REDUCING.intersection(plan.rules)
        and plan.network != "weight-norm"
        and not plan.joint
        and "project" not in plan.tail
    )
    return EXACT if apart and whole and not plan.metric else NEAR


def drawn_batches(made: Made, setting: Setting) -> Callable[[int], tuple[Batches, Values]]:
    new = made.names

    def draw(step: int) -> tuple[Batches, Values]:
        turns = [draw_batches(made, setting.trainers, step, turn) for turn in range(setting.accumulate)]
        batches = [
            [{new.get(k, k): v for k, v in turn[trainer].items()} for turn in turns]
            for trainer in range(setting.trainers)
        ]
        return batches, {new.get(name, name): values[step % len(values)] for name, values in made.hyper.items()}

    return draw


def tried(made: Made, setting: Setting, model: ModelProto | None = None) -> Verdict:
    """Split a generated step; ``model``: another form of it that means the same."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "step.onnx"
        onnx.save(made.model if model is None else model, path)
        draw, allow = drawn_batches(made, setting), allowance(made.plan)
        with np.errstate(all="ignore"):
            found = judge(path, setting, Path(place), draw=draw, allow=lambda name: allow)
        if found.outcome == "equal" and made.plan.trap != "none":
            return Verdict("WRONG", "written, although its update reads a trainer's own batch")
    return found


def fair(made: Made, setting: Setting, verdict: Verdict) -> bool:
    """Whether a refusal is one that the step, or its split, calls for."""
    plain = Sharding(micro=setting.accumulate)
    return bool(unfit(made.plan, plain, verdict.why)) or made.plan.trap != "none"


def with_identities(model: ModelProto, seed: int) -> ModelProto:
    """The same with an Identity behind every output, and some of the inputs' readers behind one."""
    r = random.Random(seed)
    made = ModelProto()
    made.CopyFrom(model)
    graph, nodes = made.graph, []
    behind = {each.name for each in graph.output}
    for node in graph.node:
        node.output[:] = [f"{name}.early" if name in behind else name for name in node.output]
        _rename(node, {name: f"{name}.early" for name in behind})
        nodes.append(node)
    nodes += [helper.make_node("Identity", [f"{name}.early"], [name]) for name in sorted(behind)]
    first = []
    for each in graph.input:
        if r.random() < 0.5:
            first.append(helper.make_node("Identity", [each.name], [f"{each.name}.alias"]))
            for node in graph.node:
                _rename(node, {each.name: f"{each.name}.alias"})
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in [*first, *nodes]]
    del graph.node[:]
    graph.node.extend(kept)
    onnx.checker.check_model(made)
    return made


def renamed(model: ModelProto, new: dict[str, str]) -> ModelProto:
    """The same with other names of some values."""
    made = ModelProto.FromString(model.SerializeToString())
    for each in (*made.graph.input, *made.graph.output, *made.graph.initializer, *made.graph.value_info):
        each.name = new.get(each.name, each.name)
    for node in made.graph.node:
        node.output[:] = [new.get(name, name) for name in node.output]
        _rename(node, new)
    return made


def _rename(node: Any, new: dict[str, str]) -> None:
    node.input[:] = [new.get(name, name) for name in node.input]
    for attribute in node.attribute:
        for body in [attribute.g] if attribute.HasField("g") else attribute.graphs:
            for inner in body.node:
                _rename(inner, new)
