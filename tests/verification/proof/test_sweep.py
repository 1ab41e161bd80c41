"""Ranks that follow a rank with the same nodes have the values that they have by themselves."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import numpy as np
import pytest
from helpers import edit_rank, edit_ranks
from onnx import ModelProto, helper, numpy_helper
from plants import gradient_calls
from test_proof_prove import SETS, SPLIT_SETS, sharded

import gopt
from gopt.verification.proof import rank_sweep
from gopt.verification.proof.folder import folder_relation
from gopt.verification.proof.prove import Prover
from gopt.verification.proof.rank_sweep import UNDEFINED, RankSweep, SweptValues
from gopt.verification.proof.result import ProofVerdict
from gopt.verification.proof.sweep import Sweep

CASES = [
    *(("gpt_adamw", kind) for kind in ("copies", "hybrid", "all", "three axes")), ("mlp_adamw", "weighted"),
    ("mlp_adamw", "broadcast parts"), ("cnn_mom_fp16", "hybrid"), ("mlp_adamw_fp16_scaler", "hybrid"),
    ("mlp_mom_clip_sched", "hybrid"), ("gpt_adamw", "buckets of parts"), ("gpt_adamw", "micro-steps of parts"),
    ("cnn_sgd", "rows and channels"),
]  # fmt: skip


def defined(sweep: Sweep, values: SweptValues) -> dict[str, int]:
    """All values but those that a call leaves undefined, which are named by rank."""
    return {name: number for name, number in values.items() if sweep.expressions.all[number].op != UNDEFINED}


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_follower_has_the_values_it_has_alone(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sharded(name, (SETS | SPLIT_SETS)[kind], tmp_path / "ranks")
    run = Sweep.run
    followers = list[RankSweep]()

    def both(sweep: Sweep, graphs, inputs, distances=()):  # type: ignore[no-untyped-def]
        read = dict(sweep.expressions.read)
        with monkeypatch.context() as patch:
            patch.setattr(Sweep, "_follow", lambda self, sweeps: None)
            patch.setattr(rank_sweep, "common_region", lambda *_: None)  # all nodes by the laws
            alone = [{**values} for values in run(sweep, graphs, [dict(values) for values in inputs], distances)]
        sweep._calls.clear()
        sweep.expressions.read = read
        results = run(sweep, graphs, inputs, distances)
        followers.extend(rank for rank in sweep.sweeps if rank.leader is not None or len(rank.ranks) > 1)
        assert [defined(sweep, values) for values in results] == [defined(sweep, values) for values in alone]
        for graph, values in zip(graphs, results):  # a message names the first of several
            names = [name for node in graph.nodes for name in node.outputs if name]
            assert [name for name in values if name in set(names)] == names
        assert [*map(list, results)] == [*map(list, alone)]
        return results

    monkeypatch.setattr(Sweep, "run", both)
    Prover(folder_relation(tmp_path / "ranks")).run()
    assert followers


@pytest.mark.parametrize("constant", ["", "half_root", "epsilon"])
def test_a_rank_follows_the_same_part_of_the_computation_then_the_same_shard(
    constant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 3 has the part of rank 1 and the nodes of rank 2; another constant in either half of its file is seen."""
    assert sharded("gpt_adamw", SPLIT_SETS["buckets of parts"], tmp_path / "ranks")
    leaders = dict[int, list[int]]()
    follow = RankSweep.follow

    def noted(sweep: RankSweep, leader: RankSweep, *rest) -> bool:  # type: ignore[no-untyped-def]
        follows = follow(sweep, leader, *rest)
        if follows and not constant:
            leaders[sweep.rank] = [leader.rank, *(behind.rank for behind, _ in rest[1:])]
        return follows

    def edit(model: ModelProto) -> None:
        value = {"half_root": 0.5**0.5, "epsilon": 1e-6}[constant]
        scalars = (tensor for tensor in model.graph.initializer if not (tensor.dims or tensor.external_data))
        (tensor,) = (tensor for tensor in scalars if numpy_helper.to_array(tensor) == np.float32(value))
        tensor.CopyFrom(numpy_helper.from_array(np.float32(1.5 * value), tensor.name))

    monkeypatch.setattr(RankSweep, "follow", noted)
    if constant:
        edit_rank(tmp_path / "ranks", 3, edit)
    assert gopt.prove(tmp_path / "ranks").verdict is (ProofVerdict.DIFFERENT if constant else ProofVerdict.PROVEN)
    assert constant or leaders[3] == [1, 2]


def test_a_result_of_the_leader_alone_is_no_value_of_a_follower(tmp_path: Path) -> None:
    """All ranks read what the first alone gets, by the same nodes."""
    assert sharded("mlp_adamw", ["--ranks", "2", "--stage", "0"], tmp_path / "ranks")

    def edit(model: ModelProto) -> None:
        call = gradient_calls(model)[0]
        call.op_type = "Reduce"
        call.attribute.append(helper.make_attribute("root", 0))

    edit_ranks(tmp_path / "ranks", edit)
    (claim,) = gopt.prove(tmp_path / "ranks").claims
    assert claim.verdict is ProofVerdict.DIFFERENT
    assert claim.mismatch is not None and "which it does not have" in claim.mismatch.actual


def test_a_follower_may_have_more_nodes_than_its_leader(tmp_path: Path) -> None:
    """The leader's file is the front of the follower's, which goes on behind it."""
    assert sharded("mlp_adamw", ["--ranks", "2", "--stage", "0"], tmp_path / "ranks")
    more = helper.make_node("Neg", ["fc1.weight_out"], ["more"])
    edit_rank(tmp_path / "ranks", 1, lambda model: model.graph.node.append(more))
    assert gopt.prove(tmp_path / "ranks").proven


@pytest.mark.parametrize("rank", range(4))
def test_a_stored_value_of_any_rank_alone_is_seen(rank: int, tmp_path: Path) -> None:
    """Ranks store equal values, which are read once by their bytes; one rank slices other elements."""
    assert sharded("mlp_adamw", ["--mesh", "dp=2,shard=2", "--stage", "1"], tmp_path / "ranks")
    assert gopt.prove(tmp_path / "ranks").proven

    def edit(model: ModelProto) -> None:
        stored = {tensor.name: tensor for tensor in model.graph.initializer}
        bounds = next(node.input[1:3] for node in model.graph.node if node.op_type == "Slice")
        change = -1 if numpy_helper.to_array(stored[bounds[0]])[0] else 1
        for name in bounds:
            moved = numpy_helper.to_array(stored[name]) + change
            stored[name].CopyFrom(numpy_helper.from_array(moved, name))

    edit_rank(tmp_path / "ranks", rank, edit)
    assert gopt.prove(tmp_path / "ranks").verdict is ProofVerdict.DIFFERENT


def test_a_proof_is_freed_when_it_ends_without_a_collection(tmp_path: Path) -> None:
    assert sharded("gpt_adamw", SPLIT_SETS["buckets of parts"], tmp_path / "ranks")
    gc.disable()
    try:
        prover = Prover(folder_relation(tmp_path / "ranks"))
        prover.run()
        expressions = weakref.ref(prover.expressions)
        del prover
        assert expressions() is None
    finally:
        gc.enable()
