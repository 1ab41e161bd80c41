"""Every step of fixtures as ``training_info``: run by the standard and by gopt, with the bits of the source."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from helpers import FIXTURES
from onnx import helper
from training_info_law import check_law, compare_readers, last_product

import gopt
from gopt.analysis.role_map import RoleMap
from gopt.errors import InputError, UnsupportedError
from gopt.offline.state_values import load_values
from gopt.offline.training_info.write import merge_training_info

TOLD = {f"optim/{name}" for name in ("asgd", "asgd_decay", "asgd_constant_lr", "asgd_decay_constant_lr")}
"""Steps whose roles a user must name."""
OTHER = {"mlp_rmsprop", "real/dropout_mlp_random"} | TOLD
"""Steps that need values, seeds or roles: they have tests of their own."""
STEPS = [
    name
    for path in sorted(FIXTURES.glob("**/*.onnx"))
    if "ort" not in path.parts and (name := str(path.relative_to(FIXTURES).with_suffix(""))) not in OTHER
]
SOME = {
    "cnn_mom_fp16", "cnn_sgd", "gpt_adamw", "mlp_adamw", "mlp_adamw_accum", "mlp_adamw_bf16", "mlp_adamw_external",
    "mlp_adamw_fp16_scaler", "mlp_ort_adamw", "mlp_sgd", "optim/adafactor", "optim/adadelta",
    "real/dropout_mlp", "real/tagger_padding", "sparse/dlrm_adagrad",
}  # fmt: skip
"""Steps that are tried each time; the rest is ``-m slow``."""
ARTIFACTS = sorted(path.parent.name for path in FIXTURES.glob("ort/*/training_model.onnx"))


@pytest.mark.parametrize("name", [pytest.param(each, marks=[] if each in SOME else pytest.mark.slow) for each in STEPS])
def test_a_step_keeps_its_bits(name, tmp_path):
    check_law(FIXTURES / f"{name}.onnx", tmp_path / "written.onnx")


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[] if each == "cnn" else pytest.mark.slow) for each in ARTIFACTS]
)
def test_artifacts_keep_their_bits(name, tmp_path):
    check_law(FIXTURES / "ort" / name, tmp_path / "written.onnx")


def _swapped(model: onnx.ModelProto) -> None:
    """A moment is replaced by another one's new value."""
    found = {each.key: each for each in model.training_info[0].update_binding}
    one, other = found["fc1.weight.exp_avg"], found["fc1.weight.exp_avg_sq"]
    one.value, other.value = other.value, one.value


def _doubled(model: onnx.ModelProto) -> None:
    """The inference graph computes something else."""
    node = next(each for each in model.graph.node if each.op_type == "Relu")
    node.op_type = "Abs"


def _moved(model: onnx.ModelProto) -> None:
    """A state that the algorithm stores starts elsewhere."""
    (stored,) = [each for each in model.training_info[0].algorithm.initializer if each.name == "fc1.bias.exp_avg"]
    stored.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(stored) + np.float32(1), stored.name))


@pytest.mark.parametrize("edit", [_swapped, _doubled, _moved])
def test_the_law_sees_a_wrong_file(edit, tmp_path):
    training = gopt.load(FIXTURES / "mlp_adamw.onnx").training
    merge_training_info(FIXTURES / "mlp_adamw.onnx", tmp_path / "written.onnx", outputs=["addmm_1"])
    compare_readers(training, tmp_path / "written.onnx")
    model = onnx.load(tmp_path / "written.onnx")
    edit(model)
    onnx.save(model, tmp_path / "wrong.onnx")
    with pytest.raises(AssertionError):
        compare_readers(training, tmp_path / "wrong.onnx")


@pytest.mark.parametrize("name", sorted(TOLD))
def test_told_roles_are_written_too(name, tmp_path):
    """Data flow does not tell the roles of ranks' source and of what is written: both files say them."""
    path = FIXTURES / f"{name}.onnx"
    with pytest.raises(UnsupportedError, match=r"may (each )?(replace|be the new value of)"):
        merge_training_info(path, tmp_path / "written.onnx")
    graph = onnx.load(path).graph
    stored = {each.name for each in graph.initializer}
    states = {
        each.name: f"{each.name}_out" for each in graph.input
        if each.name in stored and f"{each.name}_out" in {output.name for output in graph.output}
    }  # fmt: skip
    gopt.shard(gopt.load(path, roles=RoleMap(states=states)), 2).write(tmp_path / "ranks")
    check_law(tmp_path / "ranks", tmp_path / "written.onnx")


def test_a_step_without_values_is_refused_until_it_has_some(tmp_path):
    path, values = FIXTURES / "mlp_rmsprop.onnx", tmp_path / "values.npz"
    training = gopt.load(path).training
    asked = {"outputs": [last_product(training)]}
    with pytest.raises(InputError, match=r"'fc1\.weight' has no value") as caught:
        merge_training_info(path, tmp_path / "written.onnx", **asked)
    assert caught.value.hints and not (tmp_path / "written.onnx").exists()
    random = np.random.default_rng(1)
    types = {state.tensor: training.graph.types[state.tensor] for state in training.states}
    given = {name: random.uniform(0.01, 0.1, type.dims).astype(np.float32) for name, type in types.items()}
    np.savez(values, **{name: given[name] for name in training.gradients})
    load_values(path, values, tmp_path / "half.onnx")
    with pytest.raises(InputError, match="has no value, and training_info replaces initializers"):
        merge_training_info(tmp_path / "half.onnx", tmp_path / "written.onnx", **asked)
    np.savez(values, **given)
    load_values(path, values, tmp_path / "full.onnx")
    check_law(tmp_path / "full.onnx", tmp_path / "written.onnx")


def test_random_numbers_with_a_seed_are_drawn_again(tmp_path):
    model = onnx.load(FIXTURES / "real" / "dropout_mlp_random.onnx")
    for node in model.graph.node:
        if node.op_type.startswith("Random"):
            node.attribute.append(helper.make_attribute("seed", 3.0))
    onnx.save(model, tmp_path / "step.onnx")
    assert check_law(tmp_path / "step.onnx", tmp_path / "written.onnx").twice


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_keep_the_bits_of_the_merged_step(stage, tmp_path):
    """Values are those that the ranks of a checkpoint hold."""
    source = FIXTURES / "mlp_adamw.onnx"
    gopt.shard(gopt.load(source), 3, stage=stage).write(tmp_path / "ranks")
    random = np.random.default_rng(1)
    np.savez(tmp_path / "data.npz", x=random.standard_normal((64, 32), np.float32), y=random.integers(0, 10, 64))
    gopt.run(
        tmp_path / "ranks",
        data=str(tmp_path / "data.npz"),
        steps=2,
        settings={"lr": 0.01},
        checkpoint=tmp_path / "kept",
    )
    written = check_law(tmp_path / "kept" / "step_00000002", tmp_path / "written.onnx")
    assert written.states == 13 and written.loss == "loss" and written.inputs == ("x",)
    gopt.merge(tmp_path / "kept" / "step_00000002", tmp_path / "merged.onnx")
    trained = gopt.load(tmp_path / "written.onnx").training.graph.initializers
    merged = gopt.load(tmp_path / "merged.onnx").training.graph.initializers
    assert [name for name in merged if not np.array_equal(merged[name].numpy(), trained[name].numpy())] == []
    first = gopt.load(source).training.graph.initializers
    assert not np.array_equal(first["fc1.weight"].numpy(), trained["fc1.weight"].numpy())
