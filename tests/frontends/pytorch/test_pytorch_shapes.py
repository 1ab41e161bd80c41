"""``gopt export --no-values``: a step of shapes alone is the step, once it is given values. By hand,
``pytest -m torch``."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

import export_recipes as recipes  # noqa: E402
from gopt.cli.main import main  # noqa: E402

import gopt  # noqa: E402
from gopt.errors import UnsupportedError  # noqa: E402
from gopt.frontends.pytorch.export import export  # noqa: E402
from gopt.frontends.pytorch.options import ExportOptions  # noqa: E402
from gopt.runtime.reference_eval import evaluate  # noqa: E402

STEPS = {
    "adamw": recipes.with_optimizer(lambda p: torch.optim.AdamW(p, 0.01)), "tied": recipes.tied,
    "convolution": recipes.convolution(2, False), "two optimizers": recipes.two_optimizers,
    "first step apart": recipes.with_optimizer(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.3)),
    "schedule": recipes.with_scheduler(recipes.SCHEDULERS["cosine"]),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_with_values_it_is_the_step_that_is_compared_with_eager_pytorch(name, tmp_path):
    """The compared export gives the values, and both compute the same, bit for bit, over two steps."""
    found = export(STEPS[name], tmp_path / "shapes.onnx", options=ExportOptions(values=False))
    assert found.checked is None
    model = onnx.load(found.model)
    other = export(STEPS[name], tmp_path / "step.onnx")
    full = gopt.load(other.model).training.graph
    states = {each for each in full.inputs if each in full.initializers}
    stored = states & {each.name for each in model.graph.initializer}
    counts = states & {"scheduler.step", "optimizer0.started"}
    assert len(states) == other.states and stored == counts, "gopt's own counts are known"
    assert ("optimizer0.started" in counts) == (name == "first step apart")
    assert (tmp_path / "shapes.onnx").stat().st_size < (tmp_path / "step.onnx").stat().st_size
    empty = gopt.load(found.model).training.graph
    assert {each: empty.inputs[each].shape for each in states} == {each: full.inputs[each].shape for each in states}

    generator = np.random.default_rng(0)
    fed = {each: drawn(full.inputs[each], generator) for each in full.inputs if each not in states}
    mine = theirs = {each: full.initializers[each].numpy() for each in states}
    for _ in range(2):
        results, expected = evaluate(empty, {**fed, **mine}), evaluate(full, {**fed, **theirs})
        assert results.keys() == expected.keys()
        for each, value in expected.items():
            np.testing.assert_array_equal(results[each], value, err_msg=each)
        mine, theirs = ({each: got[f"{each}_out"] for each in states} for got in (results, expected))


def drawn(type_, generator):
    """A value for an input that is not a state."""
    shape = tuple(type_.shape)
    return generator.integers(0, 4, shape) if type_.dtype == "int64" else generator.random(shape).astype(np.float32)


def test_the_command_says_that_nothing_was_compared_and_the_step_shards(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(recipes.__file__.rpartition("/")[0])
    out = str(tmp_path / "step.onnx")
    assert main(["export", "export_recipes.py:two_optimizers", "-o", out, "--no-values"]) == 0
    assert "compared" in capsys.readouterr().out
    assert main(["shard", out, "--ranks", "2", "-o", str(tmp_path / "ranks")]) == 0


def test_what_needs_a_value_is_refused(tmp_path):
    with pytest.raises(UnsupportedError, match=r"--no-values: '0\.bias' is not trained"):
        export(recipes.groups, tmp_path / "step.onnx", options=ExportOptions(values=False))
    assert not list(tmp_path.iterdir())
