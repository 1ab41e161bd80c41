"""Shard, run, merge, reshard, run, merge: the source's states, as another simulator of ranks computes them."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import onnx
import pytest
from helpers import FIXTURES, accept, stage_on
from onnx import helper, numpy_helper
from products import part
from rank_files import Runner, Values
from rank_simulator import World, members, sample_parts

import gopt
from gopt.records.mesh import Mesh

MODELS = ["cnn_sgd", "emb_adamw", "mlp_adagrad", "mlp_adamw", "mlp_lamb", "mlp_mom_clip_sched", "mlp_muon"]
MESHES = [
    "shard=2",
    "shard=3",
    "shard=5",
    "dp=3",
    "tp=2",
    "dp=2,shard=2",
    "tp=2,shard=2",
    "dp=2,shard=3",
    "shard=2,tp=3",
]
TOLERANCE = 1e-4
"""Of a float32 source (contract section 7)."""


@pytest.mark.parametrize("seed", part(range(40), 4))
def test_a_round_trip_over_two_meshes_gives_the_states_of_the_source(seed, tmp_path):
    draw, generator = random.Random(seed), np.random.default_rng(seed)
    path = FIXTURES / f"{draw.choice(MODELS)}.onnx"
    first, second, stage = draw.choice(MESHES), draw.choice(MESHES), draw.randrange(4)
    partition = draw.choice(["flat", "rows", "whole"]) if stage else None
    source = gopt.load(path)
    states = {state.tensor: state.updated for state in source.training.states}
    feeds = [
        [_feed(path, states, generator) for _ in range(_samples(path, mesh))] for mesh in (first, first, second, second)
    ]
    gopt.shard(source, first, stage=stage_on(first, stage), partition=partition).write(tmp_path / "first")
    train(tmp_path / "first", _for_parts(feeds[:2], first))
    accept(tmp_path / "first")
    gopt.merge(tmp_path / "first", tmp_path / "middle.onnx")
    gopt.reshard(tmp_path / "first", second).write(tmp_path / "second")
    train(tmp_path / "second", _for_parts(feeds[2:], second))
    accept(tmp_path / "second")
    gopt.merge(tmp_path / "second", tmp_path / "end.onnx")
    told = f"{path.stem} on {first}, then {second}, stage {stage} {partition}"
    own = _source_states(path, feeds, states)
    assert _apart(tmp_path / "middle.onnx", own[2], own[0]) == [], told
    assert _apart(tmp_path / "end.onnx", own[4], own[0]) == [], told
    assert _apart(tmp_path / "middle.onnx", own[1], own[0]), f"{told}: no step could be seen"


def test_groups_of_the_simulator_are_those_of_a_row_major_mesh():
    axes = (("dp", 2), ("shard", 3))
    assert members(axes, "shard", 4) == (3, 4, 5)
    assert members(axes, "dp", 4) == (1, 4)
    assert members(axes, "dp+shard", 4) == (0, 1, 2, 3, 4, 5)


def test_parts_of_the_samples_are_those_of_the_axes_that_see_different_ones():
    assert sample_parts((("dp", 2), ("shard", 2))) == [0, 1, 2, 3]
    assert sample_parts((("tp", 2), ("shard", 3))) == [0, 1, 2, 0, 1, 2]
    assert sample_parts((("shard", 2), ("tp", 2))) == [0, 0, 1, 1]
    assert sample_parts((("tp", 2),)) == [0, 0]


@pytest.mark.parametrize("name", MODELS)
def test_the_source_on_one_batch_twice_is_the_source_on_it_once(name):
    """Then the source of a joined batch is right: its loss is the mean over all samples."""
    path = FIXTURES / f"{name}.onnx"
    states = {state.tensor: state.updated for state in gopt.load(path).training.states}
    feed = _feed(path, states, np.random.default_rng(1))
    once, twice = (_source_states(path, [[feed] * times], states) for times in (1, min(2, _samples(path, "dp=2"))))
    for tensor, value in once[1].items():
        change = np.linalg.norm(value - once[0][tensor])
        assert np.linalg.norm(value - twice[1][tensor]) <= 1e-5 * change, tensor


def train(folder: Path, feeds: list[list[Values]]) -> None:
    """Run every rank for some steps; the new states stand in ``states.bin`` afterwards.

    ``feeds``: of each step, the inputs of each part of the samples, as ``sample_parts`` numbers them.
    """
    world = World(folder)
    held = world.starts()
    for of_step in feeds:
        world.step(held, world.dealt([of_step], {}))
    with open(folder / "states.bin", "r+b") as file:
        for record, own in zip(world.records, held):
            model = onnx.load(folder / record["files"]["step"], load_external_data=False)
            for each in model.graph.initializer:
                if each.name in own:
                    where = {pair.key: pair.value for pair in each.external_data}
                    file.seek(int(where.get("offset", 0)))
                    file.write(np.ascontiguousarray(own[each.name]).tobytes())


TOGETHER = ("cnn_sgd",)
"""Samples meet in a normalisation: the mean of the ranks' gradients is not that of one large batch. All ranks see the
same samples, for which it is."""


def _samples(path: Path, mesh: str) -> int:
    """How many different batches there are in one step."""
    return 1 if path.stem in TOGETHER else max(sample_parts(Mesh.parse(mesh).axes)) + 1


def _for_parts(feeds: list[list[Values]], mesh: str) -> list[list[Values]]:
    """Of each step what each part of the samples is fed."""
    parts = max(sample_parts(Mesh.parse(mesh).axes)) + 1
    return [of_step if len(of_step) == parts else of_step * parts for of_step in feeds]


def _feed(path: Path, states: dict[str, str], generator: np.random.Generator) -> Values:
    """A batch and hyper-parameters."""
    graph, feed = onnx.load(path).graph, {}
    held = {each.name for each in graph.initializer} | states.keys()
    for each in graph.input:
        if each.name in held:
            continue
        dims = [dim.dim_value for dim in each.type.tensor_type.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(each.type.tensor_type.elem_type)
        whole = np.issubdtype(dtype, np.integer)
        drawn = generator.integers(0, 8, dims) if whole else generator.standard_normal(dims)
        feed[each.name] = np.asarray(drawn if dims else 1 if whole else 0.01, dtype)
    return feed


def _source_states(path: Path, feeds: list[list[Values]], states: dict[str, str]) -> list[Values]:
    """The states before the first step, and after each: of the source on all batches of a step, put together."""
    found = [_values(path)]
    held = {name: found[0][name] for name in states}
    for of_step in feeds:
        source = Runner(joined(onnx.load(path), {*states}, len(of_step)))
        together = {name: np.concatenate([each[name] for each in of_step]) if value.ndim else value
                    for name, value in of_step[0].items()}  # fmt: skip
        made = source({name: (found[0] | together | held)[name] for name in source.inputs})
        held = {name: made[updated] for name, updated in states.items()}
        found.append(held)
    return found


def joined(model: onnx.ModelProto, states: set[str], times: int) -> onnx.ModelProto:
    """A step for so many times as many samples: in inputs, in shapes that it fills, and in rows of equal numbers."""
    graph = model.graph
    held = states | {each.name for each in graph.initializer}
    batch = [each for each in graph.input if each.name not in held and each.type.tensor_type.shape.dim]
    (rows,) = {each.type.tensor_type.shape.dim[0].dim_value for each in batch}
    for each in batch:
        each.type.tensor_type.shape.dim[0].dim_value *= times
    filled = {node.input[0] for node in graph.node if node.op_type == "ConstantOfShape"}
    filled |= {node.input[1] for node in graph.node if node.op_type == "Expand"}
    for each in graph.initializer:
        value = numpy_helper.to_array(each).copy()
        if each.name in filled and value[0] == rows:
            value[0] *= times
        elif each.name not in states and value.ndim > 1 and len(value) == rows and np.ptp(value) == 0:
            value = np.tile(value, [times] + [1] * (value.ndim - 1))
        each.CopyFrom(numpy_helper.from_array(value, each.name))
    del graph.value_info[:]
    return model


def _apart(merged: Path, wanted: dict[str, np.ndarray], start: dict[str, np.ndarray]) -> list[str]:
    """States of a merged model that are not as wanted."""
    found, wrong = _values(merged), []
    for name, value in wanted.items():
        gap, change = np.linalg.norm(found[name] - value), np.linalg.norm(value - start[name])
        if not gap <= TOLERANCE * change + TOLERANCE * 1e-3 * np.linalg.norm(value):
            wrong.append(name)
    return wrong


def _values(path: Path) -> dict[str, np.ndarray]:
    return {each.name: numpy_helper.to_array(each) for each in onnx.load(path).graph.initializer}
