"""What the shard pass leaves on each rank: who gathers what and when, what is held, in which type it travels."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from helpers import FIXTURES, Builder, calls, perceptron, sgd
from recipes import Recipe, build

import gopt
from gopt.errors import OptionError, UnsupportedError
from gopt.passes.pipeline import build_pipeline
from gopt.records.mesh import Mesh
from gopt.verification.verify import Verifier


def written(path: Path, folder: Path, mesh: str, micro_steps: int = 1, **options: Any) -> Path:
    given = {key.replace("_", "-"): value for key, value in options.items()}
    pipeline = build_pipeline(defaults={"shard": given}, verify_each=True)
    gopt.shard(gopt.load(path), Mesh.parse(mesh), accumulate=micro_steps, pipeline=pipeline).write(folder / "out")
    result = Verifier(folder / "out").run(steps=2, confirm=False)
    assert result.equal, result.worst
    return folder / "out"


def saved(recipe: Recipe, folder: Path) -> Path:
    path = folder / "step.onnx"
    path.write_bytes(build(recipe).SerializeToString())
    return path


def rank_file(folder: Path, name: str) -> onnx.ModelProto:
    return onnx.load(folder / name, load_external_data=False)


def shard_facts(folder: Path) -> dict[str, Any]:
    report = json.loads((folder / "report.json").read_text())
    return next(each["facts"] for each in report["pipeline"] if each["name"] == "shard")


def attribute(node: onnx.NodeProto, name: str) -> Any:
    return next(onnx.helper.get_attribute_value(each) for each in node.attribute if each.name == name)


GPT = FIXTURES / "gpt_adamw.onnx"


def test_a_bucket_is_gathered_once_per_window(tmp_path):
    out = written(GPT, tmp_path, "shard=2", stage=3, bucket_mb=0)
    model = rank_file(out, "rank_0000.onnx")
    gathers = calls(model, "AllGather")
    assert all(len(node.output) == 1 for node in gathers)
    parameters = {state.tensor for state in gopt.load(GPT).training.parameters}
    times = Counter(node.input[0] for node in gathers)
    assert len(times) == len(parameters) and set(times.values()) <= {1, 2}
    facts = shard_facts(out)
    assert facts["kept_for_backward"] >= 1, "what is used last and first is not dropped in between"
    again = [node for node in gathers if ".again" in node.output[0]]
    place = {value: at for at, node in enumerate(model.graph.node) for value in node.output}
    for node in again:
        users = [at for at, other in enumerate(model.graph.node) if node.output[0] in other.input]
        first = [other for other in gathers if other.input[0] == node.input[0] and other is not node]
        assert users and len(first) == 1
        forward = [at for at, other in enumerate(model.graph.node) if first[0].output[0] in other.input]
        assert max(forward) < place[node.output[0]] < min(users)
    assert len(again) == sum(count == 2 for count in times.values()) > 0


def test_without_reshard_each_is_gathered_once(tmp_path):
    out = written(GPT, tmp_path, "shard=2", stage=3, bucket_mb=0, reshard_after_forward=False)
    assert max(Counter(n.input[0] for n in calls(rank_file(out, "rank_0000.onnx"), "AllGather")).values()) == 1


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_rank_refers_to_no_value_that_it_does_not_hold(stage, tmp_path):
    out = written(GPT, tmp_path, "shard=3", stage=stage)
    manifest = json.loads((out / "manifest.json").read_text())
    for rank in range(3):
        model = rank_file(out, f"rank_{rank:04d}.onnx")
        states = [*manifest["common"]["state"], *manifest["ranks"][rank]["state"]]
        sizes = {each["input"]: sum(p["stop"] - p["start"] for p in each["pieces"]) for each in states}
        inputs = {each.name for each in model.graph.input}
        for tensor in model.graph.initializer:
            if tensor.name in sizes:
                assert int(np.prod(tensor.dims)) == sizes[tensor.name]
            elif tensor.name in inputs:
                pytest.fail(f"{tensor.name} has a value and is not a state")


@pytest.mark.parametrize("persist", [100, 64])
def test_small_parameters_may_stay(persist, tmp_path):
    """One of exactly so many elements is gathered."""
    out = written(GPT, tmp_path, "shard=2", stage=3, persist=persist)
    manifest = json.loads((out / "manifest.json").read_text())
    types = gopt.load(GPT).training.graph.types
    kinds = {each["tensor"]: each["kind"] for each in manifest["states"]}
    whole = {each["input"] for each in manifest["common"]["state"] if kinds[each["pieces"][0]["tensor"]] == "parameter"}
    small = {name for name, kind in kinds.items() if kind == "parameter" and types[name].elements < persist}
    assert whole == small and 0 < len(small) < list(kinds.values()).count("parameter")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_travels_is_narrow_and_wide_masters_have_one_home(stage, tmp_path):
    source = FIXTURES / "mlp_adamw_fp16_scaler.onnx"
    out = written(source, tmp_path, "shard=2", stage=stage)
    parameters = {s.tensor for s in gopt.load(source).training.parameters}
    for rank in range(2):
        model = rank_file(out, f"rank_{rank:04d}.onnx")
        types = {v.name: v.type.tensor_type.elem_type for v in (*model.graph.value_info, *model.graph.output)}
        gathers = calls(model, "AllGather")
        assert {types[name] for node in gathers for name in node.output} == {onnx.TensorProto.FLOAT16}
        cast = {node.input[0] for node in model.graph.node if node.op_type == "Cast"}
        assert not cast & parameters, "no cast of a parameter is left in forward and backward"
        assert not parameters & {value.name for value in model.graph.input}, "a wide master is held in shards alone"


@pytest.mark.parametrize("options", [{"stage": 1}, {"stage": 3}, {"partition": "rows"}, {"partition": "whole"}])
def test_parameters_without_elements_stay_on_every_rank(options, tmp_path):
    """A hidden layer without units: no rank would have a piece of its weights."""
    path = saved(Recipe(widths=(3, 0, 2)), tmp_path)
    gopt.shard(gopt.load(path), 2, **options).write(tmp_path / "out")
    found = Verifier(tmp_path / "out").run(steps=2, confirm=False).to_json()
    assert found["failing"]["values"] == 0 and found["compared"] > 0
    whole = [each for each in shard_facts(tmp_path / "out")["buckets"] if each["mode"] == "replicated"]
    assert sum(len(each["tensors"]) for each in whole) == 3
    assert {reason for each in whole for reason in each["reasons"]} == {"it has no elements"}


def test_mixed_readers_of_a_parameter_are_left_alone(tmp_path):
    b = Builder()
    net = perceptron(b, half=True)
    sgd(b, net)
    b.output("spread", b.op("ReduceMax", "w0", keepdims=0), ())
    path = b.save(tmp_path / "step.onnx")
    for stage in (1, 2, 3):
        folder = tmp_path / str(stage)
        folder.mkdir()
        written(path, folder, "shard=2", stage=stage)


def test_a_shape_needs_no_gather(tmp_path):
    b = Builder()
    net = perceptron(b)
    largest = b.op("Cast", b.op("ReduceMax", b.op("Shape", "w0"), keepdims=0), to=1)
    net.loss = b.op("Add", net.loss, b.op("Mul", largest, b.const(0.0)))
    sgd(b, net)
    out = written(b.save(tmp_path / "step.onnx"), tmp_path, "shard=2", stage=3, bucket_mb=0)
    assert not any(node.op_type == "Shape" for node in rank_file(out, "rank_0000.onnx").graph.node)


def test_broadcast_style_sends_each_tensor_from_and_to_its_owner(tmp_path):
    path = saved(Recipe(), tmp_path)
    out = written(path, tmp_path, "shard=2", stage=2, partition="whole", style="broadcast")
    for rank in range(2):
        model = rank_file(out, f"rank_{rank:04d}.onnx")
        assert not calls(model, "ReduceScatter", "AllGather", "AllReduce")
        for node in calls(model, "Broadcast"):
            assert bool(node.input) == (attribute(node, "root") == rank)
        read = {name for node in model.graph.node for name in node.input}
        for node in calls(model, "Reduce"):
            assert bool(read.intersection(node.output)) == (attribute(node, "root") == rank)


@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
def test_gradients_travel_in_the_type_that_was_asked_for(wire, tmp_path):
    path = saved(Recipe(), tmp_path)
    narrow = written(path, tmp_path, "shard=2", reduce_dtype=wire)
    report = json.loads((narrow / "report.json").read_text())
    sent = {row["op"]: row["bytes_sent"] for row in report["ranks"][0]["communication"]}
    assert sent["ReduceScatter"] * 2 == sent["AllGather"]


def test_a_widened_sum_is_not_rounded_before_it_is_read(tmp_path):
    """The source casts its half gradients up: the reduced float32 goes there as it is."""
    path = saved(Recipe(half=True), tmp_path)
    out = written(path, tmp_path, "shard=2", reduce_dtype="float32")
    model = rank_file(out, "rank_0000.onnx")
    made = {name for node in calls(model, "ReduceScatter") for name in node.output}
    users = [node for node in model.graph.node if made.intersection(node.input)]
    to_half = [n for n in users if n.op_type == "Cast" and attribute(n, "to") == onnx.TensorProto.FLOAT16]
    assert users and not to_half


# --- accumulation ---------------------------------------------------------------------------------------------------


def accumulators(folder: Path, rank: int) -> list[dict[str, Any]]:
    return json.loads((folder / "manifest.json").read_text())["ranks"][rank]["accumulators"]


@pytest.mark.parametrize(("stage", "whole"), [(0, True), (1, True), (2, False), (3, False)])
def test_accumulators_are_wide_and_sharded_from_stage_2(stage, whole, tmp_path):
    path = saved(Recipe(widths=(3, 6, 4), half=True, loss_scale=True), tmp_path)
    out = written(path, tmp_path, "shard=2", 3, stage=stage)
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["accumulate"] == 3
    assert manifest["phases"] == [{"name": "micro", "times": 3}, {"name": "update", "times": 1}]
    assert manifest["ranks"][1]["files"] == {"micro": "rank_0001.micro.onnx", "update": "rank_0001.update.onnx"}
    held = [sum(int(np.prod(each["shape"])) for each in accumulators(out, rank)) for rank in range(2)]
    elements = 3 * 6 + 6 + 6 * 4 + 4
    assert held == [elements, elements] if whole else sum(held) == elements
    assert {each["dtype"] for rank in range(2) for each in accumulators(out, rank)} == {"float32"}


def test_traffic_of_the_data_group_is_once_an_update(tmp_path):
    path = saved(Recipe(widths=(3, 6, 4)), tmp_path)
    out = written(path, tmp_path, "dp=2,shard=2", 4, stage=2)
    micro, update = (rank_file(out, f"rank_0000.{phase}.onnx") for phase in ("micro", "update"))
    assert {node.op_type for node in calls(micro)} == {"ReduceScatter"}
    assert {attribute(node, "group") for node in calls(micro)} == {b"shard"}
    assert [attribute(node, "group") for node in calls(update)].count(b"dp") == 1
    report = json.loads((out / "report.json").read_text())
    counts = {(row["op"], row["group"]): row["calls"] for row in report["ranks"][0]["communication"]}
    assert counts == {("ReduceScatter", "shard"): 4, ("AllReduce", "dp"): 1, ("AllGather", "shard"): 1}
    early = written(path, tmp_path / "1", "shard=2", 4, stage=1) if (tmp_path / "1").mkdir() is None else None
    assert not calls(rank_file(early, "rank_0000.micro.onnx"))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 2])
def test_casts_are_once_an_update(stage, ranks, tmp_path):
    path = saved(Recipe(half=True), tmp_path)
    out = written(path, tmp_path, f"shard={ranks}", 3, stage=stage)
    parameters = {s.tensor for s in gopt.load(path).training.parameters}
    micro = rank_file(out, "rank_0000.micro.onnx")
    assert not {name for node in micro.graph.node if node.op_type == "Cast" for name in node.input} & parameters
    assert not parameters & {value.name for value in micro.graph.input}


def test_an_update_that_reads_the_batch_is_refused(tmp_path):
    b = Builder()
    net = perceptron(b)
    rate = b.op("Mul", b.op("ReduceMax", b.op("Abs", "x"), keepdims=0), b.const(0.1))
    for name, shape in net.params.items():
        b.output(f"{name}_new", b.op("Sub", name, b.op("Mul", net.gradients[name], rate)), shape)
    b.output("loss", net.loss, ())
    path = b.save(tmp_path / "step.onnx")
    with pytest.raises(UnsupportedError, match="a value of one rank"):
        gopt.shard(gopt.load(path), 2, accumulate=2)


@pytest.mark.parametrize("options", [{"stage": 2}, {"stage": 3}, {"stage": 1, "partition": "whole"}], ids=str)
def test_terms_of_a_sum_over_all_gradients_keep_their_signs(options, tmp_path):
    """As D-Adaptation sums new minus old norms of its states; some parameters take them the other way round."""
    b = Builder()
    net = perceptron(b, widths=(3, 5, 5, 2))
    total = b.const(4.0)
    for place, gradient in enumerate(net.gradients.values()):
        terms = [b.op("ReduceSum", value, keepdims=0) for value in (gradient, b.op("Mul", gradient, gradient))]
        total = b.op(("Add", "Sub")[place % 2], total, b.op("Sub", *(terms if place % 3 else terms[::-1])))
    for name, shape in net.params.items():
        b.output(f"{name}_new", b.op("Sub", name, b.op("Div", net.gradients[name], total)), shape)
    b.output("loss", net.loss, ())
    out = written(b.save(tmp_path / "step.onnx"), tmp_path, "shard=3", **options)
    assert gopt.prove(out).proven
    assert shard_facts(out)["scalars"] == 1


def test_one_micro_step_is_the_step_itself(tmp_path):
    path = saved(Recipe(), tmp_path)
    out = written(path, tmp_path, "shard=2", 1)
    manifest = json.loads((out / "manifest.json").read_text())
    assert "accumulate" not in manifest and manifest["ranks"][0]["files"] == {"step": "rank_0000.onnx"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bucket-mb": -1}, "bucket_mb cannot be -1"),
        ({"bucket-mb": (1 << 30) + 1}, "bucket_mb cannot be 1073741825"),
        ({"stage": 3, "persist": -1}, "persist is -1 and min-piece None"),
        ({"partition": "rows", "min-piece": 0}, "persist is 0 and min-piece 0"),
        ({"stage": 0, "partition": "rows"}, "partition has no use at stage 0"),
        ({"stage": 2, "persist": 5}, "persist has no use at stage 2"),
        ({"min-piece": 5}, "nothing is cut in rows"),
        ({"style": "broadcast"}, "some are to be cut"),
        ({"override": "rows"}, "cannot read 'rows' as a partition"),
        ({"override": "*:columns"}, "cannot read '\\*:columns' as a partition"),
        ({"override": "fc1.wight:whole"}, "override fc1.wight:whole matches no parameter"),
        ({"override": "zz*:whole"}, "override zz\\*:whole matches no parameter"),
    ],
)
def test_options_without_a_use_or_a_sense_are_refused_with_a_hint(options, message):
    source = gopt.load(FIXTURES / "mlp_adamw.onnx")
    with pytest.raises(OptionError, match=message) as caught:
        gopt.shard(source, Mesh.parse("shard=2"), pipeline=build_pipeline(defaults={"shard": options}))
    assert caught.value.hints and all(caught.value.hints)


@pytest.mark.parametrize("options", [{"bucket-mb": 0}, {"bucket-mb": 1 << 30}, {"partition": "rows", "min-piece": 1}])
def test_options_at_their_bounds_are_taken(options):
    source = gopt.load(FIXTURES / "mlp_adamw.onnx")
    gopt.shard(source, Mesh.parse("shard=2"), pipeline=build_pipeline(defaults={"shard": options}))


def test_the_nearest_parameter_is_named():
    source = gopt.load(FIXTURES / "mlp_adamw.onnx")
    pipeline = build_pipeline(defaults={"shard": {"override": "fc1.wight:whole"}})
    with pytest.raises(OptionError) as caught:
        gopt.shard(source, Mesh.parse("shard=2"), pipeline=pipeline)
    assert caught.value.hints == ("did you mean 'fc1.weight'?",)
