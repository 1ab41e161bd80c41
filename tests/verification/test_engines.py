"""verify with PyTorch in place of ONNX Runtime, and beside it."""

import pytest
from helpers import FIXTURES

import gopt

pytestmark = pytest.mark.torch
pytest.importorskip("torch")
NAMES = sorted(path.stem for path in FIXTURES.glob("*.onnx"))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_ranks_equal_their_source_by_pytorch(name, stage):
    sharded = gopt.shard(str(FIXTURES / f"{name}.onnx"), "dp=2,shard=2" if stage else "dp=2", stage=stage)
    found = gopt.verify(sharded, steps=2, confirm=False, engine="torch")
    assert found.equal, found


@pytest.mark.parametrize("name", NAMES)
def test_both_engines_compute_a_step_alike(name):
    found = gopt.verify(gopt.shard(str(FIXTURES / f"{name}.onnx"), 2), steps=1, confirm=False, engine="both")
    assert found.equal
    assert {check.engine for check in found.engines} == {"PyTorch"}
    assert not [doubt for check in found.engines for doubt in check.doubts()]


def test_a_wrong_operator_is_named(monkeypatch):
    from gopt.operators.table import OPERATORS

    monkeypatch.setattr(type(OPERATORS["Relu"]), "__setattr__", object.__setattr__)
    monkeypatch.setattr(OPERATORS["Relu"], "torch", lambda torch, attributes, x: torch.relu(x) * 1.01)
    found = gopt.verify(gopt.shard(str(FIXTURES / "mlp_adamw.onnx"), 2), steps=1, confirm=False, engine="both")
    reasons = [reason for check in found.engines for _, reason in check.doubts()]
    assert any("ONNX Runtime and PyTorch differ on Relu" in reason for reason in reasons), reasons
