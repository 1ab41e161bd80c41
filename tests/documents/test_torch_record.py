"""The names that PyTorch has for a step's values, as text in its metadata."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from helpers import FIXTURES

import gopt
from gopt.documents.default_values import DefaultValue
from gopt.documents.torch_record import (
    KEY,
    TorchGroup,
    TorchOptimizer,
    TorchParameter,
    TorchRecord,
    TorchScheduler,
)
from gopt.errors import InputError
from gopt.ir.external_data import load_state
from gopt.offline.state_values import load_values, save_state_dict

WEIGHT, BIAS = "fc1.weight", "fc1.bias"
PARAMETER = TorchParameter(name=WEIGHT, states={"step": "s"}, numbers=("step",), others={"none": None})
GROUP = TorchGroup(
    parameters=(PARAMETER,), options={"betas": {"tuple": [0.9, 0.5]}, "fused": None}, rate=DefaultValue("0.5"),
    counters={"count": "c"},
)  # fmt: skip
FULL = TorchRecord(
    module={"tied": WEIGHT, "fc1.weight": WEIGHT, "mask": "mask"}, loss={"scale": BIAS}, averages={WEIGHT: "ema"},
    optimizers=(TorchOptimizer(name="AdamW", groups=(GROUP,), started="started"),),
    scheduler=TorchScheduler(name="LambdaLR", first=3, others={"lr_lambdas": [None]}), scaler={"scale": "loss_scale"},
    lost=("extra",), outputs=("logits",), inputs={"t": "draw_0"},
)  # fmt: skip


def test_what_is_written_is_read():
    assert TorchRecord.of({KEY: FULL.text()}, "here") == FULL
    assert TorchRecord.of({}, "here") is None


@pytest.mark.parametrize("text", ["{", '{"module": {}}', FULL.text().replace('"AdamW"', "3")])
def test_a_broken_entry_is_refused_by_its_file(text):
    with pytest.raises(InputError, match=r"here: pytorch\.training"):
        TorchRecord.of({KEY: text}, "here")


@pytest.fixture(scope="module")
def named(tmp_path_factory):
    """A step with a record, and a constant that nothing reads."""
    model = onnx.load(FIXTURES / "mlp_sgd.onnx")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.arange(3.0, dtype=np.float32), "mask"))
    model.metadata_props.add(key=KEY, value=FULL.text())
    path = tmp_path_factory.mktemp("named") / "step.onnx"
    onnx.save(model, path)
    return path


def test_ranks_and_merged_steps_give_all_names_of_the_module(named, tmp_path):
    """Tied names twice, and constants that no rank has."""
    gopt.shard(gopt.load(named), 2, stage=3).write(tmp_path / "ranks")
    gopt.merge(tmp_path / "ranks", tmp_path / "merged.onnx")
    for place, source in enumerate((tmp_path / "ranks", tmp_path / "merged.onnx", named)):
        saved = save_state_dict(source, tmp_path / f"{place}.safetensors")
        found = {name: tensor.numpy() for name, tensor in load_state(saved.file).items()}
        assert list(found) == list(FULL.module) and saved.missing == ("extra",)
        np.testing.assert_array_equal(found["tied"], found["fc1.weight"])
        np.testing.assert_array_equal(found["mask"], [0, 1, 2])
    for path in (tmp_path / "ranks").glob("rank_*.onnx"):
        held = onnx.load(path, load_external_data=False)
        assert KEY not in {each.key for each in held.metadata_props}, "it is of the whole step"
        assert "mask" not in {each.name for each in held.graph.initializer}


def test_a_tied_tensor_comes_into_a_step_by_any_of_its_names(named, tmp_path):
    model = onnx.load(named)
    (old,) = (onnx.numpy_helper.to_array(each) for each in model.graph.initializer if each.name == WEIGHT)
    np.savez(tmp_path / "one.npz", tied=old + 1, mask=np.zeros(3, np.float32))
    loaded = load_values(named, tmp_path / "one.npz", tmp_path / "new.onnx")
    assert loaded.loaded == 2 and WEIGHT not in loaded.kept
    held = {each.name: onnx.numpy_helper.to_array(each) for each in onnx.load(tmp_path / "new.onnx").graph.initializer}
    np.testing.assert_array_equal(held[WEIGHT], old + 1)
    np.testing.assert_array_equal(held["mask"], 0)
    np.savez(tmp_path / "two.npz", **{"tied": old + 1, WEIGHT: old})
    with pytest.raises(InputError, match="have two values, and are one tensor in the module"):
        load_values(named, tmp_path / "two.npz", tmp_path / "other.onnx")
