"""Start values that ranks hold in common: which they are, who differs, and whose values count with --sync-init."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from helpers import source

import gopt
from gopt.errors import OptionError, RunError
from gopt.ir.types import TensorType
from gopt.passes.pipeline import build_pipeline
from gopt.records.mesh import Mesh
from gopt.runtime.device import HOST
from gopt.runtime.engines.base import run_threads
from gopt.runtime.training.start_values import Replicas, check_equal, sync_axes, take_from_first


@cache
def held(mesh: str, stage: int, fixture: str = "mlp_sgd", statistics: str = "mean") -> Replicas:
    options = {"shard": {"stage": stage}, "statistics": {"statistics": statistics}}
    sharded = gopt.shard(source(fixture), Mesh.parse(mesh), pipeline=build_pipeline(defaults=options))
    return Replicas(sharded.manifest(), Mesh.parse(mesh))


def starts(replicas: Replicas) -> list[dict[str, np.ndarray]]:
    """Values by rank, as good as any: those of a tensor's elements are its name's, so replicas are equal."""
    manifest = replicas.manifest
    return [
        {
            each.input: np.full(each.elements, sum(map(ord, each.pieces[0].tensor)), np.float32)
            for each in manifest.states_of(rank) if each.pieces
        }
        for rank in manifest.ranks
    ]  # fmt: skip


def check(replicas: Replicas, values: list[dict[str, np.ndarray]]) -> None:
    run_threads(replicas.mesh, 60.0, lambda engine: check_equal(engine, replicas, values[engine.rank]))


def synchronise(replicas: Replicas, values: list[dict[str, np.ndarray]], axes: str) -> None:
    def work(engine: Any) -> None:
        own = values[engine.rank]
        types = {name: TensorType("float32", value.shape) for name, value in own.items()}
        take_from_first(engine, replicas, sync_axes(axes, replicas.mesh), HOST, own, types)

    run_threads(replicas.mesh, 60.0, work)


def split_state(replicas: Replicas, axis: str) -> str:
    """A state that members along an axis hold other parts of."""
    return next(each.input for each in replicas.manifest.ranks[0].state if each.input not in replicas.along(axis, 0))


def test_a_part_of_a_weight_is_common_along_the_data_axis_alone():
    replicas = held("dp=2,tp=2", 0)
    name = split_state(replicas, "tp")
    assert [name in replicas.along("dp", rank) for rank in range(4)] == [True] * 4
    whole = [each.input for each in replicas.manifest.common.state]
    assert whole and set(whole) <= set(replicas.along("tp", 3)), "what is not split is common along both"


def test_a_shard_is_common_to_the_replicas_of_its_group():
    replicas = held("dp=2,shard=2", 3)
    assert len(replicas.along("dp", 3)) > len(replicas.along("shard", 3))


def test_statistics_that_are_left_apart_are_common_along_the_computation_alone():
    for mode in ("mean", "root", "local"):
        replicas = held("dp=2,tp=2", 0, "cnn_sgd", mode)
        of = {each.tensor for each in replicas.manifest.states if each.kind.value == "statistic"}
        common = {
            each.pieces[0].tensor for each in replicas.manifest.states_of(replicas.manifest.ranks[0])
            if each.input in replicas.along("dp", 0)
        }  # fmt: skip
        assert of and (of <= common) == (mode != "local"), mode


@pytest.mark.parametrize(
    ("axis", "ranks", "said"),
    [("dp", [2], "rank 2 and rank 0"), ("dp", [3], "rank 3 and rank 1"), ("dp", [0, 1], "rank 2 and rank 0")],
)
def test_the_first_state_that_differs_is_named_with_its_ranks(axis, ranks, said):
    replicas = held("dp=2,tp=2", 0)
    values, name = starts(replicas), split_state(replicas, "tp")
    check(replicas, values)
    for rank in ranks:
        values[rank][name][0] += 1
    with pytest.raises(RunError, match=f"{said} start with different values of '{name}'.* along {axis}") as caught:
        check(replicas, values)
    assert f"--sync-init {axis}" in caught.value.hints[0]


def test_several_ranks_are_listed():
    replicas = held("shard=4", 0)
    values = starts(replicas)
    for rank in (1, 3):
        values[rank][next(iter(values[rank]))][0] += 1
    with pytest.raises(RunError, match="ranks 1, 3 and rank 0 start"):
        check(replicas, values)


def test_parts_may_differ_along_the_axis_that_splits_them():
    replicas = held("dp=2,tp=2", 0)
    values, name = starts(replicas), split_state(replicas, "tp")
    for rank in (1, 3):
        values[rank][name][0] += 1
    check(replicas, values)


@pytest.mark.parametrize(("axes", "left"), [("all", ""), ("dp+tp", ""), ("dp", "tp"), ("tp", "dp")])
def test_the_first_of_a_group_gives_its_values(axes, left):
    replicas = held("dp=2,tp=2", 0)
    values = starts(replicas)
    whole, part = replicas.manifest.common.state[0].input, split_state(replicas, "tp")
    values[3][whole] += 1  # apart along both axes; rank 1 and 2 are the firsts of groups of it
    values[1][whole] += 2
    values[2][part] += 1
    synchronise(replicas, values, axes)
    if left:
        with pytest.raises(RunError, match=f"along {left}"):
            check(replicas, values)
        return
    check(replicas, values)
    assert [each[whole][0] for each in values] == [starts(replicas)[0][whole][0]] * 4
    assert values[2][part][0] == values[0][part][0]


def test_ranks_of_different_folders_do_not_wait_for_one_another():
    one, other = held("dp=2", 0), held("dp=2", 0, "mlp_adamw")
    values = starts(one)

    def work(engine: Any) -> None:
        take_from_first(engine, other if engine.rank else one, ("dp",), HOST, values[engine.rank], {})

    with pytest.raises(RunError, match=r"start with different values|ranks have different states"):
        run_threads(one.mesh, 60.0, work)


def test_axes_are_those_of_the_mesh():
    mesh = Mesh.parse("dp=2,tp=2")
    assert [sync_axes(text, mesh) for text in (None, "all", "tp")] == [(), ("dp", "tp"), ("tp",)]
    with pytest.raises(OptionError, match="cp"):
        sync_axes("cp", mesh)
