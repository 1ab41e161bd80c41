"""Optimizers that branch on values of the step: both sides in the graph, or refused. By hand, ``pytest -m torch``."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

import branching_optimizers as branching  # noqa: E402
import counting_optimizers as counting  # noqa: E402
import export_recipes as recipes  # noqa: E402
import onnx  # noqa: E402

import gopt  # noqa: E402
from gopt.errors import UnsupportedError  # noqa: E402
from gopt.frontends.pytorch import branches, check, choices  # noqa: E402
from gopt.frontends.pytorch.export import export  # noqa: E402
from gopt.frontends.pytorch.options import ExportOptions  # noqa: E402


def exported(maker, folder, **options):
    return export(recipes.with_optimizer(maker), folder / "step.onnx", options=ExportOptions(**options))


def inputs_of(found):
    return {value.name for value in onnx.load(found.model).graph.input}


@pytest.mark.parametrize("maker", branching.ALL, ids=lambda each: each.__name__)
def test_both_sides_of_a_branch_are_those_of_eager_pytorch_on_ranks_too(maker, tmp_path):
    found = exported(maker, tmp_path, check=8)
    assert maker is not branching.Growing or "optimizer0.group0.scale" in inputs_of(found)
    assert all("total == 0" in note for note in found.notes), "one side alone is never taken"
    for stage in (2, 3):
        folder = tmp_path / f"ranks{stage}"
        gopt.shard(gopt.load(found.model), 3, stage=stage).write(folder)
        assert gopt.prove(folder).proven
        assert not gopt.verify(folder).to_json()["failing"]["values"]


LATER = (counting.Late, counting.LateInGroup)


@pytest.mark.parametrize("maker", LATER, ids=lambda each: each.__name__)
def test_steps_are_compared_until_both_sides_are_taken(maker, tmp_path):
    found = exported(maker, tmp_path)
    assert len(found.checked.losses) == 6 and not found.notes


def test_a_side_that_no_compared_step_takes_is_told(tmp_path):
    found = exported(branching.Far, tmp_path)
    assert len(found.checked.losses) == check.BRANCHED
    (note,) = found.notes
    assert "12 compared steps took one side alone of the branch in branching_optimizers.py" in note


@pytest.mark.parametrize("side", (0, 1))
def test_a_planted_error_on_either_side_is_a_difference(side, tmp_path, monkeypatch):
    monkeypatch.setattr(branches.Branches, "_chosen", lambda self, condition, *sides: sides[side])
    with pytest.raises(UnsupportedError, match="not the eager one"):
        exported(branching.Warm, tmp_path)


def operators(found):
    return [node.op_type for node in onnx.load(found.model).graph.node]


def test_a_choice_stands_where_the_sides_differ(tmp_path, monkeypatch):
    """A rate that branches is chosen as a number, not each new parameter."""
    few = operators(exported(branching.Warm, tmp_path))
    monkeypatch.setattr(choices._Choices, "_cost", lambda self, key, depth=0: 2 * choices._MOST)
    many = operators(exported(branching.Warm, tmp_path / "other"))
    assert many.count("Where") == few.count("Where") + 5
    assert many.count("Mul") > few.count("Mul")


def test_a_condition_of_each_parameter_is_a_path_each(tmp_path):
    def factory():
        net = torch.nn.Linear(6, recipes.CLASSES)
        return net, torch.nn.functional.cross_entropy, branching.Clipped(net.parameters()), recipes.batch(8, 6)

    assert export(factory, tmp_path / "step.onnx").nodes
    with pytest.raises(UnsupportedError, match=r"Clipped has more than 32 paths by branches on \d+ values .*0\.5 if"):
        exported(branching.Clipped, tmp_path / "other")


@pytest.mark.parametrize("maker", (branching.Flagged, branching.Storing), ids=lambda each: each.__name__)
def test_sides_that_leave_different_values_in_python_are_refused(maker, tmp_path):
    with pytest.raises(UnsupportedError, match="the sides leave different values in Python"):
        exported(maker, tmp_path)
    assert not list(tmp_path.iterdir())
