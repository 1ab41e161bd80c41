"""Ranks that follow a rank with the same nodes have the values that they have by themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_proof_prove import SETS, SPLIT_SETS, sharded

from gopt.verification.proof.folder import folder_relation
from gopt.verification.proof.prove import Prover
from gopt.verification.proof.sweep import RankSweep, Sweep

CASES = [
    *(("gpt_adamw", kind) for kind in ("copies", "hybrid", "all", "three axes")), ("mlp_adamw", "weighted"),
    ("cnn_mom_fp16", "hybrid"), ("mlp_adamw_fp16_scaler", "hybrid"), ("mlp_mom_clip_sched", "hybrid"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_follower_has_the_values_it_has_alone(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sharded(name, (SETS | SPLIT_SETS)[kind], tmp_path / "ranks")
    run = Sweep.run
    followers = list[RankSweep]()

    def both(sweep: Sweep, graphs, inputs):  # type: ignore[no-untyped-def]
        with monkeypatch.context() as patch:
            patch.setattr(Sweep, "_follow", lambda self, sweeps: None)
            alone = [dict(values) for values in run(sweep, graphs, [dict(values) for values in inputs])]
        sweep._memo.clear()
        sweep._calls.clear()
        results = run(sweep, graphs, inputs)
        followers.extend(rank for rank in sweep.sweeps if rank.leader is not None or len(rank.ranks) > 1)
        assert [dict(values) for values in results] == alone
        return results

    monkeypatch.setattr(Sweep, "run", both)
    Prover(folder_relation(tmp_path / "ranks")).run()
    assert followers
