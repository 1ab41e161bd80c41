"""``--shared``: a rate that follows the loss reads its mean over the ranks, and the step is that of one large batch."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
from helpers import Builder, perceptron
from large_batch import Values, worst_difference

import gopt
from gopt.analysis.role_map import RoleMap
from gopt.errors import OptionError, UnsupportedError
from gopt.verification.verify import Verifier

SHARED = RoleMap(shared=["loss"])


def step(kind: str, batch: int):
    """A perceptron whose rate follows the loss: by a plateau, by a factor, or by a state that keeps it."""
    b = Builder(1)
    net = perceptron(b, (3, 4, 2), batch=batch)
    b.output("loss", net.loss, ())
    rate = b.state("rate", np.float32(0.1))
    if kind == "plateau":
        best = b.state("best", np.float32(1.4))
        follows = b.op("Where", b.op("Less", net.loss, best), rate, b.op("Mul", rate, b.const(0.5)))
        b.output("best_out", b.op("Min", best, net.loss), ())
    elif kind == "smooth":
        old = b.state("old", np.float32(1.0))
        follows = b.op("Div", rate, b.op("Add", b.const(1.0), old))
        b.output("old_out", b.op("Add", b.op("Mul", old, b.const(0.9)), b.op("Mul", net.loss, b.const(0.1))), ())
    else:
        follows = b.op("Div", rate, b.op("Add", b.const(1.0), net.loss))
    b.output(
        "rate_out", b.op("Mul", follows, b.const(1.0)) if kind == "plateau" else b.op("Mul", rate, b.const(0.99)), ()
    )
    for name, shape in net.params.items():
        held = b.small(f"{name}.m", shape)
        moment = b.op("Add", b.op("Mul", held, b.const(0.9)), net.gradients[name])
        b.output(f"{name}.m_out", moment, shape)
        b.output(f"{name}_out", b.op("Sub", name, b.op("Mul", moment, follows)), shape)
    return b.model()


KINDS = ("plateau", "factor", "smooth")


def apart(source, generator: np.random.Generator) -> Values:
    """Batches on which the ranks' losses lie far apart, so that a plateau is seen by some alone."""
    types = source.training.graph.types
    wide = generator.choice([0.2, 2.0])
    return {
        name: (wide * generator.standard_normal(types[name].dims)).astype(np.float32) for name in source.training.batch
    }


@pytest.mark.parametrize("mesh,stage", [("shard=3", 1), ("dp=2,shard=2", 3), ("dp=3", 0), ("shard=1", 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_step_of_one_large_batch(kind, mesh, stage, tmp_path):
    worst = worst_difference(
        lambda batch: step(kind, batch), 4, mesh, tmp_path, draw=apart, roles=SHARED, steps=4, stage=stage
    )
    assert worst < 2e-4


@pytest.mark.parametrize("way", ["Identity", "Reshape", "both"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_may_be_shown_through_another_value(kind, way, tmp_path):
    """What is shown stays the rank's own, and is the loss all the same; ``both``: the update reads what is shown."""

    def model(batch: int) -> onnx.ModelProto:
        made = step(kind, batch)
        shown = next(each for each in made.graph.output if each.name == "loss")
        for node in made.graph.node:
            node.output[:] = ["own" if name == "loss" else name for name in node.output]
            if way != "both":
                node.input[:] = ["own" if name == "loss" else name for name in node.input]
        at = next(place for place, node in enumerate(made.graph.node) if "own" in node.output) + 1
        if way == "Reshape":
            made.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1]), "one"))
            shown.type.tensor_type.shape.dim.add(dim_value=1)
        given = ["own", "one"] if way == "Reshape" else ["own"]
        new = onnx.helper.make_node("Reshape" if way == "Reshape" else "Identity", given, ["loss"])
        made.graph.node.insert(at, new)
        return made

    roles = RoleMap(shared=["own"])
    worst = worst_difference(model, 4, "shard=3", tmp_path, draw=apart, roles=roles, steps=4, stage=2)
    assert worst < 2e-4


@pytest.mark.parametrize("kind", KINDS)
def test_verify_and_the_report(kind, tmp_path):
    (tmp_path / "step.onnx").write_bytes(step(kind, 4).SerializeToString())
    sharded = gopt.shard(gopt.load(tmp_path / "step.onnx", roles=SHARED), 3)
    report = sharded.write(tmp_path / "out").to_json()
    assert report["couplings"] == []
    assert Verifier(tmp_path / "out").run().equal
    assert Verifier(tmp_path / "out", tmp_path / "step.onnx").run(steps=1, confirm=False).equal


def test_ranks_that_read_their_own_loss_are_unequal(tmp_path):
    """What the option prevents is seen: a rank's own loss in the place of the mean."""
    (tmp_path / "step.onnx").write_bytes(step("factor", 4).SerializeToString())
    sharded = gopt.shard(gopt.load(tmp_path / "step.onnx", roles=SHARED), 2, prove=False)
    calls = [node for node in sharded.program.graph.nodes if node.op_type == "AllReduce" and "loss" in node.inputs]
    assert calls
    for rank in sharded.ranks:
        for node in rank.nodes:
            if node.op_type == "AllReduce" and "loss" in node.inputs:
                place = node.inputs.index("loss")
                for other in rank.nodes:
                    other.inputs = ["loss" if name == node.outputs[place] else name for name in other.inputs]
    sharded.write(tmp_path / "out")
    assert not gopt.prove(tmp_path / "out").proven
    assert not Verifier(tmp_path / "out").run(confirm=False).equal


def test_without_the_option_it_is_refused(tmp_path):
    (tmp_path / "step.onnx").write_bytes(step("factor", 4).SerializeToString())
    with pytest.raises(UnsupportedError, match="loss"):
        gopt.load(tmp_path / "step.onnx")


def test_what_cannot_be_shared(tmp_path):
    model = step("factor", 4)
    (tmp_path / "step.onnx").write_bytes(model.SerializeToString())
    gradient = gopt.load(tmp_path / "step.onnx", roles=SHARED).training.gradients["w0"]
    for name, why in (
        ("nothing", "no node"),
        (gradient, "it is float32"),
        ("x", "no node"),
        ("rate_out", "nothing reads"),
    ):
        with pytest.raises((OptionError, UnsupportedError), match=why):
            gopt.load(tmp_path / "step.onnx", roles=RoleMap(shared=[name]))
    source = gopt.load(tmp_path / "step.onnx", roles=SHARED)
    with pytest.raises(OptionError, match="micro-step"):
        gopt.shard(source, 2, accumulate=2)


def test_the_roles_travel(tmp_path):
    (tmp_path / "step.onnx").write_bytes(step("plateau", 4).SerializeToString())
    gopt.shard(gopt.load(tmp_path / "step.onnx", roles=SHARED), 2).write(tmp_path / "out")
    record = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert [each["kind"] for each in record["states"] if each["tensor"] in ("rate", "best")] == ["scalar", "scalar"]
