"""Bytes that a rank holds between steps and within one, from the graph of all ranks."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import NAMES, Builder, perceptron, sgd, source
from products import spread

import gopt
from gopt.records.mesh import Mesh
from gopt.spmd.program import SpmdProgram
from gopt.spmd.step_memory import held, live, members, reduced_gradient_bytes
from gopt.spmd.traffic import find_calls
from gopt.text.amounts import balance

MESH = Mesh((("dp", 2), ("shard", 4)))


@pytest.mark.parametrize(
    ("name", "stage", "partition"),
    [*spread(NAMES, [1, 2, 3], ["flat", "rows", "whole"]), *[(name, 0, "flat") for name in NAMES]],
)
def test_bytes_are_those_of_the_ranks(name, stage, partition):
    result = gopt.shard(source(name), MESH, stage=stage, partition=partition, bucket_mb=0.005)
    report = result.report().to_json()
    rows: dict[str, Any] = held(result.program)
    rows["gradients"] = reduced_gradient_bytes(result.program)
    for kind, row in rows.items():
        assert row == [each["bytes"][kind] for each in report["ranks"][:4]], kind
    assert max(map(balance, rows.values())) == max(report["balance"].values())


def test_live_bytes_of_a_chain(tmp_path):
    b = Builder()
    sgd(b, perceptron(b, (8, 8, 8), batch=4, bias=False))
    training = gopt.load(b.save(tmp_path / "step.onnx")).training
    step = SpmdProgram.start(training, Mesh((("shard", 1),)))
    found = live(step, find_calls(step), members(step)[0])
    hidden, weight = 4 * 8 * 4, 8 * 8 * 4  # bytes of a layer's values, and of a weight
    # Most is alive when what goes back through w1 is made: the loss, tanh(x w0), the difference and what is made of it,
    # w1 transposed, and the gradient of w1.
    assert found.activations == 4 + 3 * hidden + weight
    assert found.peak == found.activations + weight
    assert found.gradients == 2 * weight, "of both, when the second one is made"
    assert found.gathered == 0


@pytest.mark.parametrize(("mesh", "part"), [("shard=1", 1.0), ("tp=2", 0.6), ("dp=2,tp=2", 0.6)])
def test_ranks_whose_gradients_no_call_reduces_hold_their_own(mesh, part):
    """Along tp alone, and on one rank, nothing is reduced: the gradients are there all the same."""
    sizes = gopt.shard(source("gpt_adamw"), Mesh.parse(mesh)).report().before_after
    assert sizes is not None
    assert 0.4 * sizes.source.gradients < sizes.largest.gradients <= part * sizes.source.gradients
    assert sizes.largest.gradients == sizes.largest.parameters
