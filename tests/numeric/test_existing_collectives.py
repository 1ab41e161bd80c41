"""Steps that reduce their own gradients, or talk along axes that see the same data: taken over, kept, or refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from gopt.cli.main import main
from helpers import Builder, Network, calls, perceptron, rank_path
from products import fewer, spread

import gopt
from gopt.analysis.roles import RoleMap
from gopt.errors import GoptError, InputError, OptionError, UnsupportedError
from gopt.importers.collectives import recognise
from gopt.ir.load import load
from gopt.records.mesh import Mesh
from gopt.runtime.engines.threads import run_ranks
from gopt.runtime.executor import Executor
from gopt.runtime.session import SessionCache
from gopt.verification.verify import Verifier

GROUPS = {"1": "shard"}


def adam(b: Builder, net: Network) -> None:
    """Loss and updates with a moment each, and a clip by the norm of all gradients."""
    b.output("loss", net.loss, ())
    squares = [b.op("ReduceSumSquare", g, keepdims=0) for g in net.gradients.values()]
    total = squares[0]
    for each in squares[1:]:
        total = b.op("Add", total, each)
    factor = b.op("Div", b.const(1.0), b.op("Max", b.const(1.0), b.op("Sqrt", total)))
    for name, shape in net.params.items():
        moment = b.small(f"{name}.m", shape)
        new = b.op("Add", b.op("Mul", moment, b.const(0.9)), b.op("Mul", net.gradients[name], factor))
        b.output(f"{name}.m_out", new, shape)
        b.output(f"{name}_out", b.op("Sub", name, b.op("Mul", new, b.const(0.1))), shape)


def reduced(b: Builder, net: Network, form: str, ranks: int, together: bool) -> None:
    """Put the source's own reduction between the gradients and the update."""
    groups = [list(net.params)] if together else [[name] for name in net.params]
    b.extra_domains += ["gopt.comm", "com.microsoft"]
    for names in groups:
        given = [net.gradients[name] for name in names]
        count, domain = len(names), "gopt.comm"
        one = {"outputs": count, "domain": domain, "group": "shard"}
        if form == "nccl":
            made = b.op("NcclAllReduce", *given, outputs=count, domain="com.microsoft", group_type=1)
        elif form == "world":
            made = b.op("AllReduce", *given, outputs=count, domain="com.microsoft")
        elif form == "pair":
            made = b.op("Reduce", *given, **one, root=1, reduce="sum")
            made = [made] if count == 1 else made
            shapes = [",".join(map(str, net.params[name])) for name in names]
            made = b.op("Broadcast", *made, **one, root=1, dtype="float32", shapes=shapes)
        else:
            made = b.op("AllReduce", *given, **one, reduce="mean")
        for name, value in zip(names, [made] if count == 1 else made):
            net.gradients[name] = value if form == "mean" else b.op("Mul", value, b.const(1.0 / ranks))


def source(folder: Path, form: str = "mean", ranks: int = 2, together: bool = True, half: bool = False) -> Path:
    b = Builder()
    net = perceptron(b, half=half)
    reduced(b, net, form, ranks, together)
    adam(b, net)
    return b.save(folder / "step.onnx")


def read(path: Path, **groups: str) -> gopt.api.Source:
    return gopt.load(path, group_types={**GROUPS, "all": "shard", **groups})


def run_source(path: Path, mesh: Mesh, feeds: list[dict[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
    """One step of the source as it stands on every rank, with real calls."""
    graph = load(path)
    recognise(graph, {**GROUPS, "all": "shard"})
    programs = []
    for rank in range(mesh.ranks):
        own = graph.copy()
        for node in own.nodes:
            if node.op_type == "Broadcast" and mesh.index(node.attributes["group"], rank) != node.attributes["root"]:
                node.inputs, node.proto = [], None
        programs.append(Executor(own, SessionCache()))
    return run_ranks(programs, feeds, mesh)


def both(path: Path, folder: Path, mesh: Mesh) -> None:
    """Source and ranks, each with real calls, from the same states and batches: the new states must be equal."""
    verifier = Verifier(folder)
    generator = np.random.default_rng(7)
    batches = [{n: generator.standard_normal(s).astype(np.float32) for n, s in (("x", (4, 3)), ("y", (4, 2)))}
               for _ in range(mesh.ranks)]  # fmt: skip
    batches = [batches[which] for which in verifier.which]
    wanted = run_source(path, mesh, batches)
    feeds = [{**rank.values, **batch} for rank, batch in zip(verifier.ranks, batches)]
    outputs = run_ranks([rank.programs["step"] for rank in verifier.ranks], feeds, mesh)
    new = verifier.all_ranks.joined("output", outputs)
    for state in verifier.training.states:
        for rank in wanted:
            np.testing.assert_allclose(new[state.tensor], rank[state.updated], rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("form", "together", "ranks", "stage"),
    fewer(spread(["nccl", "world", "mean", "pair"], [True, False], [2, 3], [0, 1, 2, 3]), 5),
)
def test_reductions_of_gradients_are_taken_over(form, together, ranks, stage, tmp_path):
    path = source(tmp_path, form, ranks, together)
    report = gopt.shard(read(path), ranks, stage=stage).write(tmp_path / "out").to_json()
    assert any("taken over" in note for note in report["notes"])
    kinds = {node.op_type for node in calls(onnx.load(rank_path(tmp_path / "out", 0)))}
    assert ("ReduceScatter" in kinds) == (stage > 0)
    assert not any(node.domain == "com.microsoft" for node in onnx.load(rank_path(tmp_path / "out", 0)).graph.node)
    result = Verifier(tmp_path / "out").run(steps=2, confirm=stage == 0)
    assert result.equal and result.compared, result.to_json()
    assert all(each.holds for each in result.gradients)
    both(path, tmp_path / "out", Mesh((("shard", ranks),)))


def test_halves(tmp_path):
    """The factor stands where the call stood: the sum overflows when the source's does."""
    path = source(tmp_path, "nccl", half=True)
    gopt.shard(read(path), 2).write(tmp_path / "out")
    assert Verifier(tmp_path / "out").run(steps=2, confirm=False).equal


def test_a_scaled_or_narrowed_gradient(tmp_path):
    b = Builder()
    net = perceptron(b)
    for name in net.params:
        narrow = b.op("Cast", b.op("Mul", net.gradients[name], b.const(0.5)), to=10)
        net.gradients[name] = narrow
    reduced(b, net, "mean", 2, True)
    for name in net.params:
        net.gradients[name] = b.op("Cast", net.gradients[name], to=1)
    adam(b, net)
    gopt.shard(gopt.load(b.save(tmp_path / "step.onnx")), 2).write(tmp_path / "out")
    assert Verifier(tmp_path / "out").run(steps=2, confirm=False).equal


def test_the_given_model_is_taken_over_too(tmp_path):
    path = source(tmp_path, "nccl")
    gopt.shard(read(path), 2).write(tmp_path / "out")
    assert Verifier(tmp_path / "out", path).run(steps=1, confirm=False).equal


def test_one_rank_leaves_no_call(tmp_path):
    gopt.shard(read(source(tmp_path, "pair", ranks=1)), 1).write(tmp_path / "out")
    assert not calls(onnx.load(rank_path(tmp_path / "out", 0)))
    assert Verifier(tmp_path / "out").run(steps=1, confirm=False).equal


def test_the_whole_data_group_and_nothing_less(tmp_path):
    path = source(tmp_path)
    mesh = Mesh((("dp", 2), ("shard", 2)))
    with pytest.raises(UnsupportedError, match="joins only a part"):
        gopt.shard(read(path), mesh)
    gopt.shard(read(path), Mesh((("dp", 1), ("shard", 2)))).write(tmp_path / "out")
    assert Verifier(tmp_path / "out").run(steps=1, confirm=False).equal
    with pytest.raises(OptionError, match="no axis of the mesh"):
        gopt.shard(read(path), Mesh((("dp", 2),)))


# --- other axes -----------------------------------------------------------------------------------------------------


def tensor_parallel(folder: Path, *, data: bool = True, norm: bool = True) -> Path:
    """Two sums along ``tp`` side by side in the forward, one in the backward, one of the norm in the update."""
    b = Builder()
    b.extra_domains.append("gopt.comm")
    x, y, w, v = b.input("x", (4, 3)), b.input("y", (4, 2)), b.parameter("w", (3, 2)), b.parameter("v", (3, 2))

    def total(value: str, group: str = "tp", reduce: str = "sum") -> str:
        return b.op("AllReduce", value, domain="gopt.comm", group=group, reduce=reduce)

    h = b.op("Add", total(b.op("MatMul", x, w)), total(b.op("MatMul", x, v)))
    wide = b.op("AllGather", h, domain="gopt.comm", group="tp", axis=0, sizes=[4, 4])
    difference = b.op("Sub", b.op("Slice", wide, b.const([0], "int64"), b.const([4], "int64")), y)
    loss = b.op("ReduceMean", b.op("Mul", difference, difference), keepdims=0)
    delta = total(b.op("Mul", difference, b.const(0.25)), reduce="mean")
    gradient = b.op("MatMul", b.op("Transpose", x, perm=[1, 0]), delta)
    # As of a value that all members hold: the sum of what each of them adds belongs to the gradient.
    gradients = {"w": total(gradient), "v": b.op("Mul", gradient, b.const(1.0))}
    if data:
        gradients = {name: total(value, "shard", "mean") for name, value in gradients.items()}
    b.output("loss", loss, ())
    scale = b.const(1.0)
    if norm:
        squares = [b.op("ReduceSumSquare", each, keepdims=0) for each in gradients.values()]
        scale = b.op("Reciprocal", b.op("Sqrt", total(b.op("Add", *squares))))
    for name, each in gradients.items():
        moment = b.small(f"{name}.m", (3, 2))
        new = b.op("Add", b.op("Mul", moment, b.const(0.9)), b.op("Mul", each, scale))
        b.output(f"{name}.m_out", new, (3, 2))
        b.output(f"{name}_out", b.op("Sub", name, b.op("Mul", new, b.const(0.1))), (3, 2))
    return b.save(folder / "step.onnx")


@pytest.mark.parametrize(("stage", "data"), spread([0, 1, 2, 3], [True, False]))
def test_calls_along_other_axes_stay(data, stage, tmp_path):
    path = tensor_parallel(tmp_path, data=data)
    mesh = Mesh((("shard", 2), ("tp", 2)))
    report = gopt.shard(gopt.load(path), mesh, stage=stage).write(tmp_path / "out").to_json()
    found = [node for node in calls(onnx.load(rank_path(tmp_path / "out", 3))) if _group(node) == "tp"]
    assert [(node.op_type, len(node.input)) for node in found] == [
        ("AllReduce", 2), ("AllGather", 1), ("AllReduce", 1), ("AllReduce", 1), ("AllReduce", 1),
    ]  # fmt: skip
    assert [row for row in report["ranks"][0]["communication"] if row["group"] == "tp"]
    assert [row for row in report["removed_ops"] if row["pass"] == "fuse-collectives"]
    result = Verifier(tmp_path / "out").run(steps=2, confirm=stage == 0)
    assert result.equal and result.compared, result.to_json()
    if data:
        both(path, tmp_path / "out", mesh)


def test_a_group_of_one_along_another_axis(tmp_path):
    gopt.shard(gopt.load(tensor_parallel(tmp_path)), Mesh((("shard", 2), ("tp", 1)))).write(tmp_path / "out")
    groups = {_group(node) for node in calls(onnx.load(rank_path(tmp_path / "out", 0)))}
    assert groups == {"shard"}


def _group(node: onnx.NodeProto) -> str:
    return next(each.s.decode() for each in node.attribute if each.name == "group")


# --- refusals -------------------------------------------------------------------------------------------------------


def refused(tmp_path: Path, error: type[GoptError], match: str, change, mesh: Mesh | int = 2) -> None:
    """``change`` gets the builder and the network, and may put calls anywhere."""
    b = Builder()
    b.extra_domains += ["gopt.comm", "com.microsoft"]
    net = perceptron(b)
    change(b, net)
    if not b.outputs:
        adam(b, net)
    with pytest.raises(error, match=match):
        gopt.shard(gopt.load(b.save(tmp_path / "step.onnx"), roles=RoleMap(loss="loss")), mesh)


def comm(b: Builder, op_type: str, *inputs: str, **given):
    return b.op(op_type, *inputs, domain="gopt.comm", **{"group": "shard", **given})


def test_a_group_type_that_nobody_declared(tmp_path, capsys):
    path = source(tmp_path, "nccl")
    with pytest.raises(UnsupportedError, match=r"NcclAllReduce .* has group_type 1") as caught:
        gopt.load(path)
    assert "--group-type 1=" in caught.value.hints[0]
    assert main(["shard", str(path), "--ranks", "2", "--dry-run"]) == 4
    assert main(["shard", str(path), "--ranks", "2", "--dry-run", "--group-type", "1"]) == 2
    capsys.readouterr()
    assert main(["shard", str(path), "--ranks", "2", "--dry-run", "--json", "--group-type", "1=shard,4=tp"]) == 0
    assert "taken over" in " ".join(json.loads(capsys.readouterr().out)["notes"])


def test_the_model_may_declare_it(tmp_path):
    model = onnx.load(source(tmp_path, "nccl"))
    entry = model.metadata_props.add()
    entry.key, entry.value = "gopt.group_type", "1=shard"
    onnx.save(model, tmp_path / "step.onnx")
    gopt.shard(gopt.load(tmp_path / "step.onnx"), 2).write(tmp_path / "out")
    assert Verifier(tmp_path / "out", tmp_path / "step.onnx").run(steps=1, confirm=False).equal


@pytest.mark.parametrize("op_type", ["NcclReduceScatter", "NcclAllGather", "AdasumAllReduce"])
def test_microsoft_calls_that_are_not_taken(op_type, tmp_path):
    def change(b, net):
        net.gradients["w0"] = b.op(op_type, net.gradients["w0"], domain="com.microsoft")

    refused(tmp_path, UnsupportedError, op_type, change)


def test_a_forward_over_data_axes(tmp_path):
    def change(b, net):
        net.loss = comm(b, "AllReduce", net.loss, reduce="mean")

    refused(tmp_path, UnsupportedError, "is in the forward", change)


def test_a_metric_over_data_axes(tmp_path):
    def change(b, net):
        adam(b, net)
        b.output("shown", comm(b, "AllReduce", b.op("Exp", net.loss), reduce="mean"), ())

    refused(tmp_path, UnsupportedError, "is in the forward", change)


def test_new_parameters_that_are_broadcast(tmp_path):
    def change(b, net):
        b.output("loss", net.loss, ())
        for name, shape in net.params.items():
            new = b.op("Sub", name, net.gradients[name])
            shapes = [",".join(map(str, shape))]
            b.output(f"{name}_out", comm(b, "Broadcast", new, root=0, dtype="float32", shapes=shapes), shape)

    refused(tmp_path, UnsupportedError, "sharded already", change)


def test_a_shard_of_the_gradient(tmp_path):
    def change(b, net):
        comm(b, "ReduceScatter", net.gradients["w0"], reduce="sum", cuts=[0, 8, 15])

    refused(tmp_path, UnsupportedError, "has cuts", change)


@pytest.mark.parametrize("together", [True, False])
def test_some_gradients_alone(together, tmp_path):
    def change(b, net):
        for name in ("w0", "b0"):
            net.gradients[name] = comm(b, "AllReduce", net.gradients[name], reduce="mean")

    refused(tmp_path, UnsupportedError, "not the gradient of 'w1'", change)


def test_an_update_that_reads_the_local_gradient_too(tmp_path):
    def change(b, net):
        local = dict(net.gradients)
        reduced(b, net, "mean", 2, True)
        net.gradients["w1"] = b.op("Add", net.gradients["w1"], b.op("Mul", local["w1"], b.const(0.1)))

    refused(tmp_path, UnsupportedError, "before the source reduces it", change)


def test_a_maximum_of_gradients(tmp_path):
    def change(b, net):
        for name in net.params:
            net.gradients[name] = comm(b, "AllReduce", net.gradients[name], reduce="max")

    refused(tmp_path, UnsupportedError, "not a sum or mean", change)


def test_an_axis_that_the_mesh_has_not(tmp_path):
    def change(b, net):
        net.gradients["w0"] = comm(b, "AllReduce", net.gradients["w0"], group="tp")

    refused(tmp_path, OptionError, "'tp'", change)


def test_malformed_calls(tmp_path):
    refused(tmp_path, InputError, "no operator 'Gossip'", lambda b, net: comm(b, "Gossip", net.loss))
    refused(tmp_path, InputError, "reduce", lambda b, net: comm(b, "AllReduce", net.loss, reduce="xor"))
    refused(tmp_path, InputError, "output size 1", lambda b, net: comm(b, "Send", net.loss, peer=1, tag=0))

    def send(b: Builder, net: object) -> None:
        comm(b, "Send", net.loss, peer=1, tag=0, outputs=0)

    refused(tmp_path, UnsupportedError, "joins two ranks", send)
