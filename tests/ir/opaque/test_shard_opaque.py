"""Steps whose update is opaque: the ranks are equal to them, and hold the operator where it still is one."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import steps
from contract_reader import Folder
from helpers import FIXTURES, edit_rank, folder_bytes, rank_path, scramble
from products import fewer, part, spread
from steps_gen.make import make
from steps_gen.plan import Plan

import gopt
from gopt.api import Sharded
from gopt.artifact.report_groups import OpFact, expand_ops, expand_removed_vars
from gopt.collectives import schemas
from gopt.errors import InputError, UnsupportedError
from gopt.ir.load import load
from gopt.ir.opaque.table import OPERATORS
from gopt.verification.verify import Verifier

MODELS = functools.cache(steps.models)
NAMES = sorted(MODELS())
OPAQUE = {key[1] for key in OPERATORS} | {"step"}
CHOICES = [(0, "flat"), (1, "flat"), (2, "flat"), (3, "flat"), (2, "whole"), (3, "whole"), (2, "rows")]
RANKS = [1, 2, 3]
SHOWN = [(*choice, RANKS[-1 - place % 2]) for place, choice in enumerate(CHOICES)] + [(2, "flat", 1)]
"""Every choice with two ranks or three. One of them for each step, which go round; the rest, and all with all
numbers of ranks: ``-m slow``."""


def save(model: onnx.ModelProto, folder: Path) -> Path:
    path = folder / "step.onnx"
    path.write_bytes(model.SerializeToString(deterministic=True))
    return path


def sharded(model: onnx.ModelProto | str, folder: Path, ranks: int = 3, **options: Any) -> tuple[Path, Sharded]:
    path = save(MODELS()[model] if isinstance(model, str) else model, folder)
    made = gopt.shard(gopt.load(path), ranks, **options)
    made.write(folder / "out", force=True)
    return folder / "out", made


def held(folder: Path, rank: int) -> list[onnx.NodeProto]:
    """The opaque nodes of a rank file."""
    model = onnx.load(str(rank_path(folder, rank)), load_external_data=False)
    return [node for node in model.graph.node if node.op_type in OPAQUE and node.domain not in ("", "gopt.comm")]


def record(made: Sharded) -> list[OpFact]:
    return [each for each in expand_ops(made.report().removed_ops) if each.pass_name == "refold-optimizers"]


@pytest.mark.parametrize(("name", "choice"), fewer(spread(NAMES, SHOWN), 7))
def test_the_ranks_are_equal(name, choice, tmp_path):
    is_equal(name, *choice, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("stage", "partition"), CHOICES)
@pytest.mark.parametrize("name", NAMES)
def test_all_ranks_are_equal(name, stage, partition, ranks, tmp_path):
    is_equal(name, stage, partition, ranks, tmp_path)


def is_equal(name: str, stage: int, partition: str, ranks: int, tmp_path: Path) -> None:
    out, _ = sharded(name, tmp_path, ranks, stage=stage, partition=partition)
    result = Verifier(out).run(steps=2, confirm=False)
    assert result.equal, result.to_json()
    assert result.compared > 0
    assert not ("guarded" in name and ranks > 1) or any("infinite" in each for each in result.worst)


@pytest.mark.parametrize("name", part(NAMES, 7))
def test_gradients_are_gradients(name, tmp_path):
    out, _ = sharded(name, tmp_path, 2)
    result = Verifier(out).run(steps=1, variants=[], confirm=True)
    assert result.gradients
    assert all(each.holds for each in result.gradients), result.gradients


@pytest.mark.parametrize("name", ["AdamWOptimizer", "LambOptimizer guarded", "Adam", "narrow", "function", "groups"])
def test_names_do_not_matter(name, tmp_path):
    model, _ = scramble(MODELS()[name], 7)
    out, made = sharded(model, tmp_path)
    assert Verifier(out).run(steps=1).equal
    plain = gopt.shard(gopt.load(save(MODELS()[name], tmp_path)), 3)
    assert [len(rank.nodes) for rank in made.ranks] == [len(rank.nodes) for rank in plain.ranks]


@pytest.mark.parametrize(
    ("name", "partition"),
    spread(["AdamWOptimizer", "AdamOptimizer", "Momentum", "orthogonal", "SGDOptimizerV2"], ["flat", "whole"]),
)
def test_more_ranks_than_weights(name, partition, tmp_path):
    out, _ = sharded(name, tmp_path, 9, partition=partition)
    assert Verifier(out).run(steps=1, confirm=False).equal
    assert not held(out, 8), "a rank with no weight loses the node"


# --- what the ranks hold --------------------------------------------------------------------------------------------


def test_a_node_a_weight_stays_with_its_owners(tmp_path):
    out, made = sharded("AdamOptimizer", tmp_path, 3, partition="whole")
    counts = [len(held(out, rank)) for rank in range(3)]
    assert sum(counts) == 6
    assert all(counts)
    assert {each.op_type for each in record(made)} == {"com.microsoft.AdamOptimizer"}
    assert len(record(made)) == 6
    for rank in range(3):  # what is counted is counted everywhere
        model = onnx.load(str(rank_path(out, rank)), load_external_data=False)
        assert {f"count.{name}_out" for name in ("w0", "b0", "w1")} <= {each.name for each in model.graph.output}


def test_a_sequence_lists_what_the_rank_has(tmp_path):
    out, made = sharded("AdamWOptimizer", tmp_path, 3, partition="whole", bucket_mb=0)
    lengths = []
    for rank in range(3):
        (node,) = held(out, rank)
        model = onnx.load(str(rank_path(out, rank)), load_external_data=False)
        producer = next(each for each in model.graph.node if each.output[0] == node.input[2])
        assert producer.op_type == "SequenceConstruct"
        lengths.append(len(producer.input))
        assert [(each.domain, each.name) for each in model.functions] == [("com.microsoft", "AdamWOptimizer")]
        onnx.checker.check_model(str(rank_path(out, rank)))
    assert sum(lengths) == 6
    assert any(each.of == "w0" for each in record(made))


def test_a_variadic_node_lists_what_the_rank_has(tmp_path):
    out, _ = sharded("Adam", tmp_path, 3, partition="whole", bucket_mb=0)
    weights = [(len(node.input) - 2) // 4 for rank in range(3) for node in held(out, rank)]
    assert sum(weights) == 6
    assert len(weights) == 3


def test_a_class_runs_once(tmp_path):
    """Six nodes of one rate become one, over the rank's run of all weights."""
    out, made = sharded("SGDOptimizer", tmp_path, 2)
    assert [len(held(out, rank)) for rank in range(2)] == [1, 1]
    reasons = [each.reason for each in record(made)]
    assert sum("over runs of weights of one class" in each for each in reasons) == 5


def test_lists_of_numbers_are_filtered(tmp_path):
    """At stage 0 a node is as it was; Lamb's norms are why it is not one on shards."""
    out, made = sharded("LambOptimizer", tmp_path, 2, stage=0)
    (node,) = held(out, 0)
    decay = next(each for each in node.attribute if each.name == "lambda")
    np.testing.assert_allclose(decay.floats, [0.1, 0.1, 0.1, 0.0, 0.0, 0.0])
    assert not record(made)
    out, made = sharded("LambOptimizer", tmp_path, 2)
    assert not held(out, 0)
    assert "ReduceSumSquare" in record(made)[0].reason


def test_two_bodies_of_one_operator(tmp_path):
    out, _ = sharded("groups", tmp_path, 2)
    assert {node.overload for node in held(out, 0)} == {"", "body1"}


def test_an_owner_calls_the_function_on_whole_tensors(tmp_path):
    out, made = sharded("orthogonal", tmp_path, 3)
    assert [len(held(out, rank)) for rank in range(3)] == [1, 1, 1]
    assert {each.op_type for each in record(made)} == {"own.step"}


def test_one_rank_gives_the_source_back(tmp_path):
    for name in ("AdamWOptimizer", "LambOptimizer", "function", "AdamOptimizer guarded"):
        out, made = sharded(name, tmp_path, 1)
        source = onnx.load(str(out / "source.onnx"), load_external_data=False)
        rank = onnx.load(str(rank_path(out, 0)), load_external_data=False)
        count = [sorted(node.op_type for node in each.graph.node if node.op_type in OPAQUE) for each in (source, rank)]
        assert count[0] == count[1]
        assert {each.op_type for each in record(made)} <= {"SequenceConstruct", "SequenceAt"}  # packed anew


def test_equal_runs_give_equal_bytes(tmp_path):
    found = []
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        found.append(folder_bytes(sharded("groups", tmp_path / place)[0]))
    assert found[0] == found[1]


# --- who can run it -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", part(NAMES, 7, first=1))
def test_plain_onnxruntime_runs_source_and_rank(name, tmp_path):
    """The functions in the files are enough: no operator of training is known to this runtime."""
    out, made = sharded(name, tmp_path, 1)
    training = made.source.training
    generator = np.random.default_rng(3)
    results = []
    values: dict[str, np.ndarray] = {}
    for name, type in training.graph.inputs.items():
        drawn = generator.uniform(0.01, 0.1, type.dims)
        values[name] = (drawn * 100 if type.dtype == "int64" else drawn).astype(type.dtype)
    for path in (out / "source.onnx", rank_path(out, 0)):
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        names = [each.name for each in session.get_outputs()]
        results.append(dict(zip(names, session.run(names, values))))
    assert results[0].keys() == results[1].keys()
    for output, value in results[0].items():
        np.testing.assert_allclose(value, results[1][output], rtol=1e-4, atol=1e-5)


def test_a_rank_with_a_wrong_body_is_caught(tmp_path):
    out, _ = sharded("AdamWOptimizer", tmp_path, 2)
    assert Verifier(out).run(steps=1, confirm=False).equal

    def plant(model: onnx.ModelProto) -> None:
        node = next(each for each in model.functions[0].node if each.op_type == "Sqrt")
        node.op_type = "Abs"

    edit_rank(out, 0, plant)
    assert not Verifier(out).run(steps=1, confirm=False).equal


def test_swapped_members_are_caught(tmp_path):
    out, _ = sharded("AdamWOptimizer", tmp_path, 1)

    def plant(model: onnx.ModelProto) -> None:
        node = [each for each in model.graph.node if each.op_type == "SequenceConstruct"][2]
        names = list(node.input)
        shapes = {each.name: len(each.type.tensor_type.shape.dim) for each in model.graph.input}
        moved = [name.replace(".m0", ".m1") for name in names]
        assert all(name in shapes for name in moved)
        node.input[:] = moved

    edit_rank(out, 0, plant)
    assert not Verifier(out).run(steps=1, confirm=False).equal


# --- refusals -------------------------------------------------------------------------------------------------------


def test_refusals_name_the_node(tmp_path):
    def change(name: str, edit: Any) -> Path:
        model = onnx.ModelProto.FromString(MODELS()[name].SerializeToString())
        edit(model, next(node for node in model.graph.node if node.op_type in OPAQUE))
        return save(model, tmp_path)

    def attribute(key: str, value: Any) -> Any:
        return lambda model, node: node.attribute.append(onnx.helper.make_attribute(key, value))

    with pytest.raises(UnsupportedError, match="weight_decay_mode 7"):
        gopt.load(change("AdamOptimizer", _replace("weight_decay_mode", 7)))
    with pytest.raises(UnsupportedError, match="unheard"):
        gopt.load(change("SGDOptimizer", attribute("unheard", 1)))
    with pytest.raises(InputError, match="no moment_2"):
        gopt.load(change("AdamOptimizer", lambda m, n: n.input.pop()))
    with pytest.raises(InputError, match="The sum of optimized tensor count"):  # so says ONNX's own schema
        gopt.load(change("Adam", lambda m, n: n.input.pop()))
    with pytest.raises(InputError, match="3 numbers for 6 weights"):
        gopt.load(change("LambOptimizer", attribute("alpha", [0.9, 0.9, 0.9])))


def _replace(key: str, value: Any) -> Any:
    def edit(model: onnx.ModelProto, node: onnx.NodeProto) -> None:
        kept = [each for each in node.attribute if each.name != key]
        del node.attribute[:]
        node.attribute.extend([*kept, onnx.helper.make_attribute(key, value)])

    return edit


def test_a_sequence_from_elsewhere_is_refused(tmp_path):
    model = onnx.ModelProto.FromString(MODELS()["SGDOptimizerV2"].SerializeToString())
    producer = next(each for each in model.graph.node if each.op_type == "SequenceConstruct")
    place = list(model.graph.node).index(producer)
    again = onnx.helper.make_node("Identity", [producer.output[0]], ["again"])
    model.graph.node.insert(place + 1, again)
    user = next(each for each in model.graph.node if each.op_type == "SGDOptimizerV2")
    user.input[1] = "again"
    path = save(model, tmp_path)
    for read in (gopt.load, gopt.inspect):  # inspect looks at what stays behind the refusal: sequences have no type
        with pytest.raises(UnsupportedError, match=r"'again'.*SequenceConstruct"):
            read(path)


def test_a_function_of_the_forward_stays_a_function(tmp_path):
    """Only what updates a state is looked into."""
    b, net = steps.start("own")
    steps.sgd_plain(b, net)
    model = b.model()
    node = next(each for each in model.graph.node if each.op_type == "Tanh")
    node.op_type, node.domain = "squash", "own"
    text = '<domain: "own", opset_import: ["" : 20]>\nsquash (x) => (y) { y = Tanh(x) }'
    model.functions.append(onnx.parser.parse_function(text))
    out, _ = sharded(model, tmp_path, 2)
    assert Verifier(out).run(steps=1).equal
    kept = onnx.load(str(rank_path(out, 0)), load_external_data=False)
    assert "squash" in [each.op_type for each in kept.graph.node]


def test_the_users_own_function_goes_before_the_table(tmp_path):
    """A file that brings a body for a known operator means that body."""
    model = onnx.ModelProto.FromString(MODELS()["SGDOptimizer"].SerializeToString())
    text = """<domain: "com.microsoft", opset_import: ["" : 20]>
    SGDOptimizer (r, w, g) => (n) { q = Squeeze(r) s = Sign(g) d = Mul(q, s) n = Sub(w, d) }"""
    model.functions.append(onnx.parser.parse_function(text))
    out, made = sharded(model, tmp_path, 2)
    assert Verifier(out).run(steps=1).equal
    assert "Sign" in {node.op_type for node in made.source.training.graph.nodes}
    assert len(held(out, 0)) == 1


def test_what_is_written_out_is_read_again(tmp_path):
    """The source beside the ranks has its operators as they were."""
    out, _ = sharded("AdamWOptimizer", tmp_path, 2)
    kept = load(out / "source.onnx", own=True)
    assert [node.op_type for node in kept.nodes if node.op_type in OPAQUE] == ["AdamWOptimizer"]
    assert not [line for line in gopt_diff(tmp_path / "step.onnx", out / "source.onnx") if line.kind == "op"]


def gopt_diff(a: Path, b: Path) -> Any:
    from gopt.offline.diff import diff

    return diff(a, b).lines


@pytest.mark.parametrize(("name", "stage"), spread(["AdamWOptimizer", "AdamOptimizer", "Momentum"], [2, 3]))
def test_hoisted_casts_and_meshes(name, stage, tmp_path):
    """Forward and backward in float16 behind casts of the weights; shards inside, another data axis outside."""
    model = steps.build(name, half=True).model()
    path = save(model, tmp_path)
    made = gopt.shard(gopt.load(path), gopt.Mesh((("dp", 2), ("shard", 2))), stage=stage)
    made.write(tmp_path / "out")
    assert Verifier(tmp_path / "out").run(steps=2).equal
    assert held(tmp_path / "out", 0)
    assert any(each.pass_name == "hoist-casts" for each in made.report().removed_ops)


@pytest.mark.parametrize(
    ("name", "way"),
    spread(
        [each for each in NAMES if not each.startswith(("function", "orthogonal"))],
        [(0, "flat"), (2, "flat"), (3, "whole")],
    ),
)
def test_every_value_that_a_rank_lacks_is_in_the_report(name, way, tmp_path):
    """Sequences and results of the operator too. Bodies of functions are not: their values are not in the file."""
    stage, partition = way
    made = gopt.shard(gopt.load(save(MODELS()[name], tmp_path)), 2, stage=stage, partition=partition)
    made.write(tmp_path / "out")
    folder = Folder(tmp_path / "out")
    source = folder.source_values()
    for number, rank in folder.ranks.items():
        here = rank.values | rank.constants
        assert folder.told("removed_vars", number) - (folder.states.keys() & here) == source - here
        assert folder.told("added_vars", number) == here - source


def test_a_sequence_has_the_bytes_of_its_tensors():
    source = gopt.load(FIXTURES / "mlp_ort_adamw.onnx")
    facts = {each.name: each for each in expand_removed_vars(gopt.shard(source, 2).report().removed_vars)}
    total = sum(source.training.graph.types[each.tensor].nbytes for each in source.training.parameters)
    for name in ("weights", "gradients", "updated_weights", "updated_momentums_1"):
        found = facts[name]
        assert (found.dtype, found.shape, found.nbytes, found.ranks) == ("float32", None, total, "0-1")
        assert (found.pass_name, found.reason.partition(":")[0]) == (
            "refold-optimizers",
            "tensors of an optimizer in a sequence",
        )


@pytest.mark.parametrize("stage", [2, 3])
def test_functions_of_equal_bodies_in_one_run(stage, tmp_path):
    """Each parameter has a function of its own, and one run has several parameters: none of these functions says which
    operand is which of another's."""
    path = save(make(Plan(seed=1213, batch=2, gate_form="mix", tail_on="all", function=True)).model, tmp_path)
    assert gopt.verify(gopt.shard(gopt.load(path), "shard=2", stage=stage), steps=2).equal


LAYERS = """<ir_version: 9, opset_import: ["" : 18, "my" : 1]>
step (float[4,3] x, float[4,2] y, float[3,4] W, float[4,2] U) => (float[3,4] W_out, float[4,2] U_out, float loss) {
  h = my.Layer(x, W)
  p = my.Layer(h, U)
  e = Sub(p, y)
  q = Mul(e, e)
  loss = ReduceMean<keepdims = 0>(q)
  n = Constant<value_float = 4.0>()
  d = Div(e, n)
  dh, gU = my.LayerGrad(h, U, p, d)
  dx, gW = my.LayerGrad(x, W, h, dh)
  W_out = my.Sgd(W, gW)
  U_out = my.Sgd(U, gU)
}
<opset_import: ["" : 18], domain: "my"> Layer (x, W) => (h) { loss = MatMul(x, W) h = Tanh(loss) }
<opset_import: ["" : 18], domain: "my"> LayerGrad (x, W, h, dy) => (dx, dW) {
  one = Constant<value_float = 1.0>()
  q = Mul(h, h)
  y = Sub(one, q)
  z = Mul(dy, y)
  Wt = Transpose<perm = [1, 0]>(W)
  dx = MatMul(z, Wt)
  xt = Transpose<perm = [1, 0]>(x)
  dW = MatMul(xt, z)
}
<opset_import: ["" : 18], domain: "my"> Sgd (W, g) => (n) {
  lr = Constant<value_float = 0.05>()
  U = Mul(g, lr)
  n = Sub(W, U)
}"""


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_backward_may_be_a_function_beside_the_optimizer(stage, tmp_path):
    """Its result has the shape of the weight that it reads, as an optimizer's has; it is no part of the update. Schemas
    that a process has registered are no matter."""
    schemas.register()
    folder, _ = sharded(onnx.parser.parse_model(LAYERS), tmp_path, 2, stage=stage)
    assert gopt.verify(folder, steps=1).equal
    split = gopt.split(tmp_path / "step.onnx", gopt.SplitOptions(trainers=2, servers=2))
    assert gopt.verify(split, steps=1, confirm=False).equal
