"""Chains of operators, as ONNX Runtime rewrites them for gopt, are what onnx's reference evaluator computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from engine_gen.__main__ import main
from engine_gen.chains import chain
from engine_gen.judge import judge
from onnx.reference import ReferenceEvaluator

from gopt.runtime import session
from gopt.runtime.session import SessionCache

SAMPLE, MANY = 120, 20_000
CASES = sorted((Path(__file__).parents[2] / "fixtures" / "cases" / "engine").glob("*.onnx"))


@pytest.mark.parametrize("seed", [*range(SAMPLE), 8888, 10754, 11037])
def test_a_chain(seed):
    model, feeds, told = chain(seed)
    verdict = judge(model, feeds)
    assert verdict.outcome in ("right", "refused"), f"{told}: {verdict.why}"


@pytest.mark.slow
def test_many_chains(capsys):
    """For each new version of onnxruntime."""
    assert main(["--seed", str(SAMPLE), "--count", str(MANY), "--minutes", "60"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("rewrite", "seeds"),
    [
        ("Pad_Fusion", (761, 791)),
        ("MatMul_BatchNormalization_Fusion", (513, 574)),
        ("DoubleQDQPairsRemover", (131, 424)),
    ],
)
def test_a_rewrite_that_is_off_would_be_found(rewrite, seeds, monkeypatch):
    found = {judge(*chain(seed)[:2]).outcome for seed in seeds}
    assert found <= {"right", "refused"}
    monkeypatch.setattr(session, "WRONG", session.WRONG - {rewrite})
    assert "rewritten" in {judge(*chain(seed)[:2]).outcome for seed in seeds}


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_a_pad_in_front_of_a_pool(path):
    model = onnx.load(path)
    shape = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim]
    x = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    found = SessionCache().get(model.SerializeToString()).run(None, {"x": x})[0]
    np.testing.assert_allclose(found, ReferenceEvaluator(model).run(None, {"x": x})[0], rtol=1e-5, atol=1e-6)
