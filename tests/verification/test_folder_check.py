"""What a folder says of its source is held against the source: an edited manifest, exchanged files, other values."""

from __future__ import annotations

import shutil

import numpy as np
import onnx
import pytest
from helpers import FIXTURES, accept, edit_manifest, edit_rank
from onnx import numpy_helper

import gopt
from gopt import limits
from gopt.errors import InputError, RunError

MODEL = FIXTURES / "mlp_adamw.onnx"
QUICK = gopt.VerifyOptions(steps=1, confirm=False)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks") / "out"
    gopt.shard(MODEL, 3, stage=3).write(folder)
    return folder


@pytest.fixture
def folder(ranks, tmp_path):
    return shutil.copytree(ranks, tmp_path / "out")


@pytest.mark.parametrize(("key", "value"), [("kind", "statistic"), ("of", "fc1.bias")])
def test_roles_that_the_source_has_not_are_refused(folder, key, value):
    def edit(record):
        state = next(each for each in record["states"] if each["tensor"] == "fc2.weight.exp_avg")
        state[key] = value

    edit_manifest(folder, edit)
    with pytest.raises(InputError, match=rf"states\[\d+\].{key}: 'fc2.weight.exp_avg' has '{value}' here"):
        gopt.verify(folder, options=QUICK)


def test_an_input_of_another_kind_than_in_the_source_is_refused(folder):
    def edit(record):
        next(each for each in record["common"]["inputs"] if each["name"] == "x")["kind"] = "hyper"

    edit_manifest(folder, edit)
    for check in (lambda: gopt.verify(folder, options=QUICK), lambda: gopt.prove(folder)):
        with pytest.raises(InputError, match=r"common.inputs\[\d+\].kind: 'x' has 'hyper' here, 'batch' in the source"):
            check()


def test_more_ranks_than_one_process_runs_are_refused_before_any_is_read(folder, monkeypatch):
    (folder / "rank_0001.onnx").write_text("not read")
    monkeypatch.setattr(limits, "THREADS", 2)
    with pytest.raises(RunError, match=r"^3 ranks are too many threads .* at most 2 \(THREADS\)"):
        gopt.verify(folder, options=QUICK)


def test_files_of_two_ranks_that_were_exchanged_are_refused(folder):
    """At stage 3 they compute alike, so that states agree; but they start from each other's values."""
    first, second = (folder / f"rank_000{rank}.onnx" for rank in range(2))
    text = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(text)
    accept(folder)
    with pytest.raises(InputError, match=r"rank 0 \(rank_0000.onnx\): its file was written for rank '1'"):
        gopt.verify(folder, options=QUICK)
    batch = {"x": np.zeros((48, 32), np.float32), "y": np.zeros(48, np.int64)}
    with pytest.raises(gopt.GoptError, match="its file was written for rank"):
        gopt.run(folder, batch, 1, settings={"lr": 0.1})


@pytest.mark.parametrize(
    ("attribute", "value", "said"),
    [
        ("cuts", [0, 9, 3, 5], "ReduceScatter: cuts start at 0 and never fall, not 0,9,3,5"),
        ("cuts", [0, 3], "ReduceScatter: 2 cuts for 3 members, which need one more"),
        ("group", "other", "group 'other' names no axis of the mesh shard=3: 'other'"),
        ("reduce", "median", "ReduceScatter: reduce is 'median'"),
        ("more", 1, "ReduceScatter has no attribute 'more'"),
    ],
)
def test_a_call_that_was_edited_is_refused_with_its_file_and_what_to_do(folder, attribute, value, said):
    def edit(model):
        call = next(node for node in model.graph.node if node.op_type == "ReduceScatter")
        kept = [each for each in call.attribute if each.name != attribute]
        del call.attribute[:]
        call.attribute.extend([*kept, onnx.helper.make_attribute(attribute, value)])

    edit_rank(folder, 1, edit)
    with pytest.raises(InputError) as caught:
        gopt.verify(folder, options=QUICK)
    message, file = caught.value.message, folder / "rank_0001.onnx"
    if message.startswith(
        f"{file}: is not a valid ONNX model: "
    ):  # once onnx knows the collectives, its checker says so
        assert "ReduceScatter" in message
        return
    assert message.startswith(f"{file}: 'gopt.") and message.endswith(f": {said}")
    assert caught.value.hints[-1].endswith("write the folder again")


def test_other_start_values_than_those_of_the_model_are_said(folder, tmp_path):
    assert "other values" not in gopt.verify(folder, MODEL, QUICK).reason() + _notes(folder)
    trained = onnx.load(MODEL)
    for each in trained.graph.initializer:
        if each.name == "fc1.weight":
            each.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(each) + 1, each.name))
    onnx.save(trained, tmp_path / "trained.onnx")
    gopt.shard(tmp_path / "trained.onnx", 3, stage=3).write(tmp_path / "other")
    assert "fc1.weight: the ranks start from other values than the model" in _notes(tmp_path / "other")


def test_exchanged_start_values_are_named(tmp_path):
    """Two states of one shape change places in the file of a rank, and the user says that this is meant."""
    folder = tmp_path / "out"
    gopt.shard(MODEL, 2, stage=0).write(folder)

    def exchange(model):
        alike = {}
        for each in model.graph.initializer:
            if each.data_location == onnx.TensorProto.EXTERNAL:
                alike.setdefault((tuple(each.dims), each.data_type), []).append(each)
        first, second = next(found for found in alike.values() if len(found) > 1)[:2]
        one, other = ([(e.key, e.value) for e in each.external_data] for each in (first, second))
        for each, entries in ((first, other), (second, one)):
            for entry, (key, value) in zip(each.external_data, entries, strict=True):
                entry.key, entry.value = key, value

    edit_rank(folder, 0, exchange)
    with pytest.raises(InputError, match=r"than on other ranks") as caught:
        gopt.verify(folder, options=QUICK)
    assert "rank_000" in caught.value.message


def _notes(folder):
    return " ".join(gopt.verify(folder, MODEL, QUICK).to_json()["notes"])
