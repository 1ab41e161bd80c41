"""Layout operators that change nothing are looked through, and nothing else is."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from helpers import FIXTURES, Builder, perceptron
from onnx import helper
from products import spread

import gopt
from gopt.analysis.layout_aliases import find_aliases
from gopt.artifact.report_groups import expand_ops
from gopt.errors import UnsupportedError
from gopt.ir.load import load
from gopt.verification.verify import Verifier


def shape(b: Builder, *dims: int) -> str:
    return b.const(dims, "int64")


NOTHING = {
    "identity": lambda b, v: b.op("Identity", v),
    "cast to the same type": lambda b, v: b.op("Cast", v, to=1),
    "reshape to the same shape": lambda b, v: b.op("Reshape", v, shape(b, 3, 5)),
    "expand to the same shape": lambda b, v: b.op("Expand", v, shape(b, 3, 5)),
    "flat and back": lambda b, v: b.op("Reshape", b.op("Reshape", v, shape(b, -1)), shape(b, 3, 5)),
    "transposed twice": lambda b, v: b.op("Transpose", b.op("Transpose", v, perm=[1, 0]), perm=[1, 0]),
    "unsqueezed, moved, squeezed": lambda b, v: b.op(
        "Squeeze", b.op("Transpose", b.op("Unsqueeze", v, shape(b, 0)), perm=[1, 0, 2]), shape(b, 1)
    ),
    "a pair inside a pair": lambda b, v: b.op(
        "Transpose",
        b.op("Reshape", b.op("Reshape", b.op("Transpose", v, perm=[1, 0]), shape(b, 15)), shape(b, 5, 3)),
        perm=[1, 0],
    ),
    "a sum of one": lambda b, v: b.op("Sum", v),
}
SOMETHING = {
    "transposed through flat": lambda b, v: b.op("Reshape", b.op("Transpose", v, perm=[1, 0]), shape(b, 3, 5)),
    "reversed": lambda b, v: b.op("Slice", v, b.const([4], "int64"), b.const([-6], "int64"), shape(b, 1), shape(b, -1)),
    "cast through a half": lambda b, v: b.op("Cast", b.op("Cast", v, to=10), to=1),
    "negated": lambda b, v: b.op("Neg", v),
    "transposed by one of two": lambda b, v: b.op("Reshape", b.op("Reshape", v, shape(b, 5, 3)), shape(b, 15)),
}


def one(way, tmp_path) -> tuple[dict[str, str], str]:
    b = Builder()
    b.input("v", (3, 5))
    made = way(b, "v")
    b.output("out", b.op("Abs", made), None)
    return find_aliases(load(b.save(tmp_path / "g.onnx"))), made


@pytest.mark.parametrize("what", NOTHING)
def test_what_changes_nothing_is_an_alias(what, tmp_path):
    aliases, made = one(NOTHING[what], tmp_path)
    assert aliases[made] == "v"


@pytest.mark.parametrize("what", SOMETHING)
def test_what_changes_something_is_none(what, tmp_path):
    aliases, made = one(SOMETHING[what], tmp_path)
    assert made not in aliases


@pytest.mark.parametrize(("what", "where"), spread(NOTHING, ["gradient", "output", "parameter"]))
def test_the_update_is_split_all_the_same(what, where, tmp_path):
    """Around a clip, before an output, between a parameter and its update; each rank has a batch of its own."""
    b = Builder()
    net = perceptron(b, (3, 5), bias=False)
    way = NOTHING[what]
    gradient = net.gradients["w0"]
    if where == "gradient":
        norm = b.op("ReduceL2", gradient, keepdims=0)
        gradient = way(b, b.op("Mul", gradient, b.op("Min", b.const(1.0), b.op("Div", b.const(0.05), norm))))
    old = way(b, "w0") if where == "parameter" else "w0"
    new = b.op("Sub", old, b.op("Mul", gradient, b.const(0.1)))
    b.output("loss", net.loss, ())
    b.output("w0_out", way(b, new) if where == "output" else new, (3, 5))
    source = gopt.load(b.save(tmp_path / "step.onnx"))
    assert source.training.gradients == {"w0": net.gradients["w0"]}
    sharded = gopt.shard(source, 3)
    report = sharded.write(tmp_path / "out")
    shard = report.ran("shard")
    assert shard is not None and shard.facts["parameters"] == {"split": 1}
    assert Verifier(tmp_path / "out").run(steps=2).equal
    gone = {each.name: each.replaced_by for each in expand_ops(report.removed_ops) if each.pass_name == "load"}
    assert gone.keys() == {node.label for node in source.training.looked_through}
    hidden = {name for node in source.training.looked_through for name in node.outputs} - {"w0_out"}
    assert all(by and not hidden & {*by} for by in gone.values()), "what stands for an alias is not an alias"


def test_a_gradient_that_the_update_turns_back_is_read_as_its_parameter_is(tmp_path):
    """Its value in front of the turn is an alias of what one state holds; the other state is flat."""
    b = Builder()
    net = perceptron(b, (3, 5), bias=False)
    (product,) = (node for node in b.nodes if net.gradients["w0"] in node.output)
    left, right = (b.op("Transpose", name, perm=[1, 0]) for name in product.input)
    gradient = b.op("Transpose", b.op("MatMul", right, left), perm=[1, 0])
    turned = b.op("Transpose", gradient, perm=[1, 0])
    size = b.op("ReduceMax", b.op("Abs", turned), keepdims=0)
    flat = b.op("Reshape", gradient, shape(b, -1))
    step = b.op("Reshape", b.op("Div", flat, size), shape(b, 3, 5))
    b.output("loss", net.loss, ())
    b.output("w0_out", b.op("Sub", "w0", step), (3, 5))
    source = gopt.load(b.save(tmp_path / "step.onnx"))
    assert source.training.gradients == {"w0": gradient}
    assert gopt.verify(gopt.shard(source, 2), steps=1).equal


def whole_row(b: Builder, net, cut: str) -> list[str]:
    """All gradients joined in a row and taken out of it again, as optimizers with one flat buffer do."""
    sizes = [15, 5, 10, 2]
    shapes = [net.params[name] for name in net.gradients]
    row = b.op("Concat", *(b.op("Reshape", g, shape(b, -1)) for g in net.gradients.values()), axis=0)
    if cut == "split":
        pieces = b.op("Split", row, shape(b, *sizes), axis=0, outputs=4)
    else:
        stops = np.cumsum(sizes).tolist()
        pieces = [
            b.op(
                "Slice", row, shape(b, stop - size if cut == "slice" else stop - size - 32), shape(b, stop), shape(b, 0)
            )
            for size, stop in zip(sizes, stops)
        ]
    return [b.op("Reshape", piece, shape(b, *dims)) for piece, dims in zip(pieces, shapes)]


@pytest.mark.parametrize("cut", ["split", "slice", "slice from behind"])
def test_a_row_that_is_cut_where_it_was_joined(cut, tmp_path):
    b = Builder()
    net = perceptron(b, (3, 5, 2))
    pieces = whole_row(b, net, cut)
    b.output("loss", net.loss, ())
    for name, gradient in zip(net.gradients, pieces):
        b.output(f"{name}_out", b.op("Sub", name, b.op("Mul", gradient, b.const(0.1))), net.params[name])
    source = gopt.load(b.save(tmp_path / "step.onnx"))
    assert source.training.gradients == net.gradients
    report = gopt.shard(source, 3).write(tmp_path / "out").to_json()
    shard = next(each for each in report["pipeline"] if each["name"] == "shard")
    assert shard["facts"]["parameters"] == {"split": 4}
    assert Verifier(tmp_path / "out").run(steps=2).equal


@pytest.mark.parametrize("cut", ["split", "slice"])
@pytest.mark.parametrize("scaled", ["Div", "Neg"])
def test_a_backward_that_ends_behind_a_join_with_another_update(scaled, cut, tmp_path):
    """The mean is the backward's as far as data flow tells, and what is done to a vector's gradient is its update."""
    b = Builder()
    net = perceptron(b, (3, 5, 2))
    b.input("scale", ())
    operands = ["scale"] if scaled == "Div" else []
    found = dict(net.gradients)
    net.gradients.update({name: b.op(scaled, gradient, *operands) for name, gradient in found.items()})
    pieces = whole_row(b, net, cut)
    b.output("loss", net.loss, ())
    for name, gradient in zip(net.gradients, pieces):
        if len(net.params[name]) > 1:
            gradient = b.op("Sub", gradient, b.op("ReduceMean", gradient, b.const([0], "int64")))
        b.output(f"{name}_out", b.op("Sub", name, b.op("Mul", gradient, b.const(0.1))), net.params[name])
    source = gopt.load(b.save(tmp_path / "step.onnx"))
    vector = next(name for name, dims in net.params.items() if len(dims) == 1)
    assert source.training.gradients[vector] == found[vector]
    gopt.shard(source, 3).write(tmp_path / "out")
    assert Verifier(tmp_path / "out").run(steps=2).equal


@pytest.mark.parametrize("sizes", [(16, 4, 10, 2), (5, 15, 10, 2)])
def test_a_row_that_is_cut_elsewhere_mixes_parameters(sizes, tmp_path):
    b = Builder()
    net = perceptron(b, (3, 5, 2))
    row = b.op("Concat", *(b.op("Reshape", g, shape(b, -1)) for g in net.gradients.values()), axis=0)
    pieces = b.op("Split", row, shape(b, *sizes), axis=0, outputs=4)
    b.output("loss", b.op("ReduceSum", *pieces[:1], keepdims=0), ())
    aliases = find_aliases(load(b.save(tmp_path / "g.onnx")))
    assert aliases.keys().isdisjoint(pieces[:2])


def test_a_count_of_one_rank_is_seen_through_a_row(tmp_path):
    """A rate of a rank's own in front of the join: no mean of the pieces is the gradient."""
    b = Builder()
    net = perceptron(b, (3, 5, 2))
    count = b.op(
        "Add", b.op("ReduceSum", b.op("Cast", b.op("Greater", "x", b.const(0.5)), to=1), keepdims=0), b.const(1.0)
    )
    own = {name: b.op("Div", gradient, count) for name, gradient in net.gradients.items()}
    net.gradients.update(own)
    pieces = whole_row(b, net, "split")
    b.output("loss", net.loss, ())
    for name, gradient in zip(net.gradients, pieces):
        b.output(f"{name}_out", b.op("Sub", name, b.op("Mul", gradient, b.const(0.1))), net.params[name])
    with pytest.raises(UnsupportedError, match="one rank's own batch"):
        gopt.load(b.save(tmp_path / "step.onnx"))


def test_forward_and_backward_keep_their_layout_operators():
    """One rank gives back what the file has there: only the update loses its aliases."""
    source = gopt.load(FIXTURES / "gpt_adamw.onnx").training
    written = onnx.load(FIXTURES / "gpt_adamw.onnx").graph.node
    gone = {node.label for node in source.looked_through}
    kept = [node.label for node in source.graph.nodes]
    assert kept == [node.name for node in written if node.name not in gone]


def test_a_captured_alias_stays(tmp_path):
    """What a body of control flow reads cannot be renamed there."""
    b = Builder()
    net = perceptron(b, (3, 5), bias=False)
    copy = b.op("Identity", net.loss)
    flag = b.input("flag", (), "bool")
    bodies = {
        f"{side}_branch": helper.make_graph(
            [helper.make_node("Identity", [copy], [side])], side, [], [helper.make_tensor_value_info(side, 1, [])]
        )
        for side in ("then", "else")
    }
    b.output("loss", b.op("If", flag, **bodies), ())
    b.output("w0_out", b.op("Sub", "w0", b.op("Mul", net.gradients["w0"], b.const(0.1))), (3, 5))
    gopt.shard(gopt.load(b.save(tmp_path / "step.onnx")), 2).write(tmp_path / "out")
    assert Verifier(tmp_path / "out").run(steps=2, settings={"flag": 1}).equal


def test_a_gradient_may_be_named_by_its_alias(tmp_path):
    from gopt.analysis.role_map import RoleMap

    b = Builder()
    net = perceptron(b, (3, 5), bias=False)
    copy = b.op("Identity", net.gradients["w0"])
    b.output("loss", net.loss, ())
    b.output("w0_out", b.op("Sub", "w0", b.op("Mul", copy, b.const(0.1))), (3, 5))
    path = b.save(tmp_path / "step.onnx")
    assert gopt.load(path, roles=RoleMap(params={"w0": copy})).training.gradients == {"w0": net.gradients["w0"]}


def test_stored_values_survive(tmp_path):
    """An Identity of an initializer that the update reads."""
    b = Builder()
    net = perceptron(b, (3, 5), bias=False)
    rate = b.op("Identity", b.const(np.float32(0.1)))
    b.output("loss", net.loss, ())
    b.output("w0_out", b.op("Sub", "w0", b.op("Mul", net.gradients["w0"], rate)), (3, 5))
    gopt.shard(gopt.load(b.save(tmp_path / "step.onnx")), 2).write(tmp_path / "out")
    assert Verifier(tmp_path / "out").run(steps=2).equal
