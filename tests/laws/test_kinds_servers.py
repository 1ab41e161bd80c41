"""States that no gradient updates, between trainers and servers: frozen, targets, averages, schedules, moments."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from products import part
from split_gen.judge import Setting
from split_gen.simulator import Simulation
from whole_gen import odd
from whole_gen.judge import feeds_of
from whole_gen.kinds import load_all
from whole_gen.splits import drawn_split, judged_split
from whole_gen.writer import Writer

import gopt
from gopt.analysis.role_map import RoleMap
from gopt.artifact.server_entries import Mode, PullAt
from gopt.parameter_server.options import SplitOptions

CASES = Path(__file__).parents[2] / "fixtures/cases/split"
OWN = sorted(name for name, step in load_all().items() if step.__module__.endswith("kinds_servers"))


@pytest.mark.parametrize("name, seed", part([(name, seed) for name in OWN for seed in range(40)], 4))
def test_trainers_and_servers(name, seed):
    def make(samples: int, scale: int) -> Writer:
        w = Writer(seed, samples, scale)
        load_all()[name](w)
        return w

    found = judged_split(make, drawn_split(seed), seed, told=seed % 2 == 0, verify=seed % 4 == 0)
    right = found.kind == "refused" and (why := make(4, 1).refusal) and re.search(why, found.text)
    assert right or found.kind == "right", found


@pytest.mark.parametrize("name, mode", [("lora_scaled", "sync"), ("lora_scaled", "async"), ("target_hard", "sync")])
def test_a_run_of_a_reported_step(name, mode, tmp_path):
    """Merged states are those of ranks with all-reduces; without rounds those of one trainer are its own."""
    step, count = CASES / f"{name}.onnx", 1 if mode == "async" else 2
    source = gopt.load(step)
    random = np.random.default_rng(5)
    batch = {each: source.training.graph.types[each].dims for each in source.training.batch}
    data = {each: random.standard_normal((12, *shape[1:])).astype("f4") for each, shape in batch.items()}
    split = gopt.split(source, SplitOptions(trainers=count, servers=2, minimum=4, mode=Mode(mode)))
    found = []
    for place, made in enumerate((gopt.shard(source, count, stage=0), split)):
        run = gopt.run(made, data, 4, settings={"lr": "0.3"})
        gopt.merge(run, tmp_path / f"{place}.onnx")
        found.append(gopt.load(tmp_path / f"{place}.onnx").training.graph.initializers)
    for state in source.training.states:
        one, other = (each[state.tensor].numpy() for each in found)
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
        moved = not np.array_equal(one, source.training.graph.initializers[state.tensor].numpy())
        assert moved == (state.tensor != "W"), state.tensor
    assert mode == "async" or gopt.verify(split).outcome == "equal"


@pytest.mark.parametrize("name, trainers", [("metric_of_another_loss", 2), ("metric_of_new_weights", 1)])
def test_metrics_of_trainers_are_those_of_the_source(name, trainers, tmp_path):
    w = Writer(4, 4)
    load_all()[name](w)
    onnx.save(w.model(), tmp_path / "step.onnx")
    source = gopt.load(tmp_path / "step.onnx", roles=RoleMap("loss", dict(w.states)))
    options = SplitOptions(trainers=trainers, servers=2, minimum=1, pull=PullAt.END)
    gopt.split(source, options).write(tmp_path / "split")
    start = {each: w.stored[each] for each in w.states}
    (step, *_) = feeds_of(w, trainers, 1, 0, 4)
    simulation = Simulation(tmp_path / "split", dict(start))
    simulation.round([[each] for each in step[0]], w.hyper)
    for trainer, fed in enumerate(step[0]):
        wanted = ReferenceEvaluator(w.model()).run(None, {**start, **fed})
        for each, value in zip(w.outputs, wanted, strict=True):
            if each not in w.states.values() and each != "loss":
                np.testing.assert_allclose(simulation.outputs[trainer][each], value, rtol=1e-9)


@pytest.mark.parametrize("name, accumulate", [("masked_loss", 3), ("masked_loss_with_penalty", 2)])
def test_weighted_means_over_micro_steps(name, accumulate):
    """Micro-steps with counts of their own: their sum is the weight of what is pushed."""

    def make(samples: int, scale: int) -> Writer:
        w = Writer(accumulate, samples, scale)
        odd.load_all()[name](w)
        return w

    how = Setting(trainers=2, servers=2, minimum=2, accumulate=accumulate)
    assert judged_split(make, how, accumulate, told=True, verify=True).kind == "right"
