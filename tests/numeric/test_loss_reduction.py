"""``--loss-reduction``: the ranks' step is that of one large batch, exported for it and run on all batches at once."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from helpers import ROOT, Builder, perceptron, sgd, stage_on
from large_batch import worst_difference
from products import spread
from recipes import Recipe, build

import gopt
from gopt.analysis.loss_reduction import LossReduction
from gopt.analysis.role_map import RoleMap
from gopt.errors import OptionError
from gopt.ir.load import load as load_graph
from gopt.verification.verify import Verifier

pytestmark = pytest.mark.usefixtures("unchecked")

LOSSES = ("mean", "sum", "weighted")
UPDATES = {
    "sgd": Recipe(direction=("gradient",)),
    "clipped adam": Recipe(direction=("adam", "momentum"), norm="sumsquare-chain", decay="decoupled"),
    "whole": Recipe(direction=("adam",), rows=True, trust=True),
    "scaled halves": Recipe(direction=("momentum",), half=True, loss_scale=True, check="isinf-any"),
}
MESHES = {"shard=3": 1, "dp=2,shard=2": 1, "dp=2,shard=3": 3, "dp=3": 2, "shard=1": 3, "shard=2": 2}


def step_of(update: str, loss: str):
    return lambda batch: build(replace(UPDATES[update], batch=batch, loss=loss))


def weight_of(model) -> str:
    """The sum of the mask: the value is found by what it is, since outputs may be renamed."""
    node = next(each for each in model.graph.node if each.op_type == "ReduceSum" and "mask" in each.input)
    return node.output[0]


def reduction_of(loss: str, model) -> str:
    return f"weighted:{weight_of(model)}" if loss == "weighted" else loss


@pytest.mark.parametrize(("mesh", "loss", "stage"), spread(MESHES, LOSSES, range(4)))
def test_stages_and_meshes(loss, mesh, stage, tmp_path):
    make = step_of("clipped adam", loss)
    worst = worst_difference(
        make, 2, mesh, tmp_path, micro_steps=MESHES[mesh], stage=stage_on(mesh, stage),
        loss_reduction=reduction_of(loss, make(2)),
    )  # fmt: skip
    assert worst < 2e-4


@pytest.mark.parametrize(("update", "loss", "micro_steps"), spread(UPDATES, LOSSES, (1, 3)))
def test_updates(loss, update, micro_steps, tmp_path):
    make = step_of(update, loss)
    worst = worst_difference(
        make, 2, "dp=2,shard=2", tmp_path, micro_steps=micro_steps, loss_reduction=reduction_of(loss, make(2))
    )
    assert worst < (3e-2 if UPDATES[update].half else 2e-4)
    assert gopt.prove(tmp_path / "ranks").proven


@pytest.mark.parametrize("loss", ("sum", "weighted"))
def test_the_plain_mean_is_not_the_large_batch(loss, tmp_path):
    """The oracle sees the difference that the option makes."""
    assert worst_difference(step_of("sgd", loss), 2, "shard=3", tmp_path) > 1e-2


@pytest.mark.parametrize("micro_steps", (1, 2))
@pytest.mark.parametrize("loss", ("sum", "weighted"))
def test_verify_uses_the_same_rule(loss, micro_steps, tmp_path):
    make = step_of("clipped adam", loss)
    (tmp_path / "step.onnx").write_bytes(make(3).SerializeToString())
    given = reduction_of(loss, make(3))
    sharded = gopt.shard(gopt.load(tmp_path / "step.onnx"), 3, accumulate=micro_steps, loss_reduction=given)
    sharded.write(tmp_path / "out")
    assert Verifier(tmp_path / "out").run(steps=2, confirm=False).equal
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["loss_reduction"] == given
    del manifest["loss_reduction"]
    (tmp_path / "out" / "manifest.json").write_text(json.dumps(manifest))
    assert not Verifier(tmp_path / "out").run(steps=2, confirm=False).equal


@pytest.mark.parametrize("micro_steps", (1, 2))
def test_a_run_shows_the_loss_of_one_large_batch(micro_steps, tmp_path):
    make, random, losses = step_of("sgd", "weighted"), np.random.default_rng(0), []
    for ranks, batch, times in ((2, 3, micro_steps), (1, 6 * micro_steps, 1)):
        model = make(batch)
        (tmp_path / "step.onnx").write_bytes(model.SerializeToString())
        source = gopt.load(tmp_path / "step.onnx")
        given = reduction_of("weighted", model) if ranks > 1 else "mean"
        gopt.shard(source, ranks, accumulate=times, loss_reduction=given).write(tmp_path / str(ranks))
        types = {name: source.training.graph.types[name] for name in source.training.batch}
        data = {name: random.standard_normal((24, *type.dims[1:]), np.float32) for name, type in types.items()}
        if ranks > 1:
            data["mask"] = (np.arange(24) % 7 < 2).astype(np.float32).reshape(data["mask"].shape)
            np.savez(tmp_path / "data.npz", **data)
        hyper = dict.fromkeys(source.training.hyper, 0.01)
        losses.append(
            gopt.run(tmp_path / str(ranks), tmp_path / "data.npz", 2, settings=hyper, stop_on_nan=True).losses
        )
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_what_is_settled_is_told_no_more(tmp_path):
    (tmp_path / "step.onnx").write_bytes(step_of("sgd", "weighted")(4).SerializeToString())
    source = gopt.load(tmp_path / "step.onnx")
    count = weight_of(step_of("sgd", "weighted")(4))

    def kinds(**options) -> list[str]:
        return [each["kind"] for each in gopt.shard(source, 2, **options).report().to_json()["couplings"]]

    assert kinds() == ["weighted_loss"]
    assert kinds(loss_reduction=f"weighted:{count}") == []
    assert kinds(loss_reduction="sum") == ["loss_reduction"]
    assert [each["kind"] for each in gopt.shard(source, 1).report().to_json()["couplings"]] == []


def step_with_values(path):
    """A step with values that can be no weight; they are found by what they are."""
    b = Builder()
    net = perceptron(b, (3, 2), loss="weighted", bias=False)
    values = {"count": net.count, "gradient": net.gradients["w0"]}
    values["trained"] = b.op("ReduceSum", "w0", keepdims=0)
    values["late"] = b.op("ReduceSum", net.gradients["w0"], keepdims=0)
    values["wide"] = b.op("Mul", "mask", b.const(2.0))
    values["fixed"] = b.op("Mul", b.const(2.0), b.const(3.0))
    values["drawn"] = b.op("ReduceSum", b.op("RandomNormalLike", "mask"), keepdims=0)
    for name, value in values.items():
        if name in ("trained", "late", "fixed", "drawn"):
            b.output(f"{name}_metric", value, ())
    sgd(b, net)
    return b.save(path), {name: b.renamed.get(value, value) for name, value in values.items()}


def test_what_cannot_be_a_weight(tmp_path):
    path, values = step_with_values(tmp_path / "step.onnx")
    source = gopt.load(path, roles=RoleMap(loss="loss"))
    wrong = {
        "gradient": "one number", "trained": "depends on 'w0'", "late": "depends on the gradient", "wide": "one number",
        "fixed": "does not depend on the batch", "drawn": "random", "nothing": "no value 'nothing'",
        "loss": "depends on 'w0'",
    }  # fmt: skip
    for name, why in wrong.items():
        with pytest.raises(OptionError, match=why):
            gopt.shard(source, 2, loss_reduction=f"weighted:{values.get(name, name)}")
    gopt.shard(source, 2, loss_reduction=f"weighted:{values['count']}")


@pytest.mark.parametrize("text", ("", "max", "weighted", "weighted:", "sum:", "mean:", "SUM"))
def test_what_is_no_rule(text):
    with pytest.raises(OptionError, match="loss-reduction"):
        LossReduction.parse(text)


def test_the_manifest_follows_its_schema(tmp_path):
    import jsonschema

    (tmp_path / "step.onnx").write_bytes(step_of("sgd", "sum")(4).SerializeToString())
    sharded = gopt.shard(gopt.load(tmp_path / "step.onnx"), 2, loss_reduction="sum")
    for kind, record in (("manifest", sharded.manifest().to_json()), ("report", sharded.report().to_json())):
        jsonschema.validate(record, json.loads((ROOT / f"gopt/schemas/{kind}.schema.json").read_text()))
    assert load_graph(tmp_path / "step.onnx").outputs
