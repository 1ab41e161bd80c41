"""A roll (``torch.roll``: two slices joined in the other order) along a whole dimension of ranks, or one in parts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, numpy_helper
from verification.proof.test_split_holes import model, proof

import gopt
from gopt.errors import UnsupportedError
from gopt.verification.proof.result import ProofVerdict

AFTER = ("o = Identity(r)", "t = Mul(r,r) o = Exp(t)", "t = Add(x,r) o = Exp(t)")


def shape(axis: int, size: int) -> str:
    return ",".join(str(size if dim == axis else 3) for dim in range(3))


def whole(axis: int, shift: int, after: str) -> ModelProto:
    constants = f"int64[1] a={{{axis}}}, int64[1] z={{0}}, int64[1] s={{{8 - shift}}}, int64[1] e={{8}}"
    text = f"b = Slice(x,s,e,a) f = Slice(x,z,s,a) r = Concat<axis={axis}>(b,f) {after}"
    return model(f"(float[{shape(axis, 8)}] x) => (float[{shape(axis, 8)}] o)", text, constants)


def rank(axis: int, shift: int, sender: int, after: str) -> ModelProto:
    """A rank's half: the last places of another rank's half, and its own others."""
    constants = (
        f"int64[1] a={{{axis}}}, int64[1] z={{0}}, int64[1] s={{{4 - shift}}}, int64[1] e={{4}}, "
        f"int64[1] p={{{sender * shift}}}, int64[1] q={{{sender * shift + shift}}}"
    )
    text = (
        f'l = Slice(x,s,e,a) g = gopt.comm.AllGather <group="tp", axis={axis}, sizes=[{shift},{shift}]>(l) '
        f"m = Slice(g,p,q,a) f = Slice(x,z,s,a) r = Concat<axis={axis}>(m,f) {after}"
    )
    return model(f"(float[{shape(axis, 4)}] x) => (float[{shape(axis, 4)}] o)", text, constants)


@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("shift", [1, 2, 3, 4])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_roll_of_parts_is_proven_and_places_of_another_rank_are_different(axis, shift, after, tmp_path):
    split = {"split": ["tp" if dim == axis else "" for dim in range(3)]}
    relation = {"inputs": {"x": split}, "outputs": {"o": split}}
    for senders in ((1, 0), (0, 1), (1, 1)):
        ranks = [rank(axis, shift, sender, after) for sender in senders]
        verdict = proof(whole(axis, shift, after), ranks, relation, tmp_path).verdict
        assert verdict is (ProofVerdict.PROVEN if senders == (1, 0) else ProofVerdict.DIFFERENT), senders


def rolling(axis: int, folder: Path) -> Path:
    """A step with a roll between two products."""
    text = (
        f"h = MatMul(x,w) t = Tanh(h) b = Slice(t,s,e,a) f = Slice(t,z,s,a) r = Concat<axis={axis}>(b,f) "
        "y = MatMul(r,v) d = Sub(y,l) u = Mul(d,d) loss = ReduceMean<keepdims=0>(u)"
    )
    constants = f"int64[1] a={{{axis}}}, int64[1] z={{0}}, int64[1] s={{3}}, int64[1] e={{8}}"
    forward = model("(float[4,8,6] x, float[4,8,6] l) => (float loss)", text, constants)
    draw = np.random.default_rng(0)
    for name, dims in {"w": (6, 8), "v": (8, 6)}.items():
        forward.graph.initializer.append(numpy_helper.from_array(draw.standard_normal(dims).astype(np.float32), name))
    onnx.save(forward, folder / "forward.onnx")
    gopt.derive(folder / "forward.onnx", folder / "step.onnx", gopt.DeriveOptions(loss="loss", optimizer="sgd"))
    return folder / "step.onnx"


SPLIT = [(1, "tp=2"), (1, "sp=2"), (1, "cp=2"), (1, "shard=2,tp=2"), (2, "sp=2"), (2, "cp=2")]


@pytest.mark.parametrize(("axis", "mesh"), SPLIT)
def test_a_roll_that_gopt_splits_is_proven_and_equal(axis, mesh, tmp_path):
    gopt.shard(rolling(axis, tmp_path), mesh).write(tmp_path / "out")
    assert gopt.prove(tmp_path / "out").proven
    assert gopt.verify(tmp_path / "out", steps=2, confirm=False).equal


def test_a_roll_along_the_columns_of_two_products_is_not_split(tmp_path):
    with pytest.raises(UnsupportedError, match="needs whole values"):
        gopt.shard(rolling(2, tmp_path), "tp=2")
