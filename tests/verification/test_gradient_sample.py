"""Which gradients of a large model are confirmed."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import FIXTURES
from test_gradient_check import stack, training_of

import gopt
from gopt.verification import gradient_sample
from gopt.verification.gradient_check import Verdict, check_gradients
from gopt.verification.gradient_sample import sample_gradients


@pytest.fixture(scope="module")
def training():
    return gopt.load(FIXTURES / "gpt_adamw.onnx").training


def test_small_models_are_looked_at_whole(training) -> None:
    assert sample_gradients(training, 0) is None
    assert sample_gradients(training, 0, limit=len(training.gradients)) is None


def test_every_kind_is_seen_and_the_seed_draws_the_rest(training) -> None:
    samples = [sample_gradients(training, seed, limit=20) for seed in (0, 0, 1)]
    assert samples[0] == samples[1] and samples[0].parameters != samples[2].parameters
    types = training.graph.types
    for sample in samples:
        assert len(sample.parameters) == 20 and sample.total == len(training.gradients)
        shapes = {types[name].shape for name in sample.parameters}
        assert shapes == {types[name].shape for name in training.gradients}
    assert sample_gradients(training, 0, limit=1).kinds == len(sample_gradients(training, 0, limit=1).parameters)


def test_an_update_of_its_own_is_a_class_of_its_own() -> None:
    """Muon's updates are not split: each is looked at."""
    training = gopt.load(FIXTURES / "mlp_muon.onnx").training
    sample = sample_gradients(training, 0, limit=1)
    assert sample is not None and sample.classes > 1
    assert set(training.gradients) - set(sample.parameters) == set() or sample.kinds == len(sample.parameters)


def test_a_sample_with_a_wrong_gradient_widens_to_all(tmp_path) -> None:
    """One that is wrong in the sample: all others are looked at, so that every wrong one is named."""
    text = stack(12, "a = Abs(c1)  c = Mul(c1, a)  e = Abs(c9)  f = Mul(c9, e)")
    training = training_of(text, tmp_path, {f"w{n}": f"c{n}" for n in range(12)} | {"w1": "c", "w9": "f"})
    generator = np.random.default_rng(0)
    batches = [
        {name: generator.standard_normal(type.dims).astype(np.float32) for name, type in training.graph.inputs.items()}
    ]
    batches.append({**batches[0], "x": generator.standard_normal((4, 5)).astype(np.float32)})
    found = check_gradients(training, batches, 0, names=["w0", "w1", "w2"])
    assert [each.parameter for each in found if each.verdict is Verdict.REFUTED] == ["w1", "w9"]
    assert len(found) == 12
    assert [each.parameter for each in check_gradients(training, batches, 0, names=["w0", "w2"])] == ["w0", "w2"]


def test_the_command_says_what_was_looked_at(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(gradient_sample, "LIMIT", 2)
    folder = tmp_path / "out"
    gopt.shard(gopt.load(FIXTURES / "mlp_sgd.onnx"), gopt.Mesh((("shard", 2),))).write(folder)
    from gopt.verification.verify import Verifier

    verifier = Verifier(folder)
    some, every = verifier.run(steps=1), verifier.run(steps=1, every=True)
    assert some.sample is not None and some.sample.total == 4 and some.to_json()["sample"]["seed"] == 0
    assert len(some.gradients) == len(some.sample.parameters) and not some.sample.widened
    assert every.sample is None and len(every.gradients) == 4
    assert some.compared == every.compared, "states and losses are never sampled"
