"""What is told of coupled batches, held against one large batch: the loss of all samples must follow from the ranks'
by the rule that is told, and must not where a coupling is told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from forwards import (
    CLASSES,
    TOKENS,
    WIDTH,
    Case,
    axes,
    batch_norm,
    cross_entropy,
    follows,
    graph_of,
    masked,
    mean,
    reading,
    rows,
    squared,
    tokens,
    total,
)  # fmt: skip
from gopt.cli.main import main
from helpers import FIXTURES
from written_steps import NET, Written, saved, sgd

import gopt
from gopt.analysis.coupling import find_couplings
from gopt.analysis.coupling.ignored_labels import drops_uncounted
from gopt.analysis.coupling.step_couplings import analyse_couplings, notes
from gopt.analysis.role_map import RoleMap
from gopt.ir.graph_index import GraphIndex
from gopt.ir.load import load


def plain(b, n):
    return mean(b, squared(b, rows(b, n)))


def divided(b, n):
    return b.op("Div", total(b, squared(b, rows(b, n))), b.const(float(n * CLASSES)))


def by_samples(b, n):
    return b.op("Mul", total(b, squared(b, rows(b, n))), b.const(1.0 / n))


def spread(b, n):
    """The division stands on every sample's own loss."""
    return total(b, b.op("Mul", squared(b, rows(b, n)), b.const(1.0 / n)))


def merged(b, n):
    """Tokens and samples in one dimension, as exporters write linear layers."""
    h = b.op("Reshape", b.input("x", (n, TOKENS, WIDTH)), axes(b, n * TOKENS, WIDTH))
    h = b.op("Reshape", b.op("MatMul", h, b.parameter("w", (WIDTH, CLASSES))), axes(b, n, TOKENS, CLASSES))
    h = b.op("Transpose", h, perm=[1, 0, 2])
    h = b.op("Softmax", b.op("Reshape", h, axes(b, TOKENS * n, CLASSES)), axis=1)
    return mean(b, squared(b, h))


def attention(b, n):
    """Tokens meet tokens of their own sample alone, whatever dimensions are merged."""
    h = tokens(b, n)
    scores = b.op("MatMul", h, b.op("Transpose", h, perm=[0, 2, 1]))
    return mean(b, squared(b, b.op("MatMul", b.op("Softmax", scores, axis=-1), h)))


def labelled(b, n):
    return mean(b, cross_entropy(b, rows(b, n), n))


def embedded(b, n):
    ids = b.input("y", (n, TOKENS), "int64")
    h = b.op("Gather", b.parameter("table", (CLASSES, WIDTH)), ids)
    places = b.op("Gather", b.parameter("places", (TOKENS, WIDTH)), b.const([list(range(TOKENS))] * n, "int64"))
    return mean(b, squared(b, b.op("Add", h, places)))


def convolved(b, n):
    h = b.op("Conv", b.input("x", (n, 1, 4, 4)), b.parameter("w", (2, 1, 3, 3)), pads=[1, 1, 1, 1])
    h = b.op("MaxPool", b.op("Relu", h), kernel_shape=[2, 2], strides=[2, 2])
    return mean(b, squared(b, b.op("Flatten", h)))


def layer_norm(b, n):
    scale, bias = b.parameter("scale", (WIDTH,)), b.parameter("bias", (WIDTH,))
    return mean(b, squared(b, b.op("Tanh", b.op("LayerNormalization", b.input("x", (n, WIDTH)), scale, bias))))


def decayed(b, n):
    """A term that no sample enters may be added to a mean."""
    loss = plain(b, n)
    return b.op("Add", loss, b.op("Mul", total(b, squared(b, "w")), b.const(0.1)))


def square_dimensions(b, n):
    """As many features as samples: sizes must not confuse."""
    h = b.op("MatMul", b.input("x", (n, 6)), b.parameter("w", (6, 6)))
    h = b.op("Sub", h, b.op("ReduceMean", h, axes(b, 1), keepdims=1))
    return mean(b, squared(b, h))


def two_views(b, n):
    """Two batches in one, as contrastive code joins them, taken apart again."""
    h = b.op("Concat", rows(b, n), b.op("MatMul", b.input("z", (n, WIDTH)), "w"), axis=0)
    h = b.op("Reshape", b.op("Tanh", h), axes(b, 2, n, CLASSES))
    first, second = (b.op("Gather", h, b.const(place, "int64"), axis=0) for place in range(2))
    return mean(b, squared(b, b.op("Sub", first, second)))


def recurrent(b, n):
    """The first state, of rows that are alike or zero, through products and a Reshape; tokens from the last to the
    first."""
    h = b.op("Slice", tokens(b, n), axes(b, -1), axes(b, -9), axes(b, 1), axes(b, -1))
    first = b.op("Gemm", b.const(np.zeros((n, WIDTH))), b.parameter("v", (WIDTH, WIDTH)), b.parameter("c", (WIDTH,)))
    first = b.op("MatMul", first, b.parameter("u", (WIDTH, CLASSES)))
    return mean(b, squared(b, b.op("Add", h, b.op("Reshape", first, axes(b, n, 1, CLASSES)))))


def resampled(b, n):
    """Places inside of each sample, read behind a Transpose as exporters write an upsampling."""
    h = b.op("Transpose", tokens(b, n), perm=[1, 2, 0])
    h = b.op("GatherND", h, b.const([[[0, 1], [2, 4]], [[1, 0], [0, 0]], [[2, 2], [1, 3]]], "int64"))
    return mean(b, squared(b, b.op("Transpose", h, perm=[2, 0, 1])))


def own_rows(b, n, turn=0):
    """Indices that count the samples, as code has them for a mask of keys: mask[arange(n)[:, None], keys]."""
    places = np.stack(np.meshgrid((np.arange(n) + turn) % n, np.arange(TOKENS)[::-1], indexing="ij"), -1)
    h = b.op("GatherND", tokens(b, n), b.const(places[:, None], "int64"))
    return mean(b, squared(b, h))


def rows_of_others(b, n):
    return own_rows(b, n, turn=1)


def typed_like(b, n):
    """A constant in the type of the samples, grown to their shape: only the type and the shape are theirs."""
    h = rows(b, n)
    one = b.op("CastLike", b.const(2, "int64"), h)
    grown = b.op("Expand", one, b.op("Shape", h))
    return mean(b, b.op("Mul", squared(b, h), b.op("CastLike", grown, squared(b, "w"))))


def per_sample_count(b, n):
    """A mean over tokens inside each sample, then over the samples: nothing is weighted."""
    each, mask = masked(b, n)
    own = b.op("Div", b.op("ReduceSum", each, axes(b, 1), keepdims=0), b.op("ReduceSum", mask, axes(b, 1), keepdims=0))
    return mean(b, b.op("Where", b.op("IsNaN", own), b.const(0.0), own))


def token_weighted(b, n):
    each, mask = masked(b, n)
    return b.op("Div", total(b, each), total(b, mask))


def token_weighted_guarded(b, n):
    each, mask = masked(b, n)
    return b.op("Div", total(b, each), b.op("Max", total(b, mask), b.const(1.0)))


def token_weighted_means(b, n):
    each, mask = masked(b, n)
    return b.op("Div", mean(b, each), mean(b, mask))


def token_weighted_decayed(b, n):
    return b.op("Add", token_weighted(b, n), total(b, squared(b, "w")))


def trained_weights(b, n):
    """The weights are trained: no weighting of gradients is exact."""
    h = rows(b, n)
    weight = b.op("Exp", b.op("MatMul", "x", b.parameter("v", (WIDTH, CLASSES))))
    return b.op("Div", total(b, b.op("Mul", squared(b, h), weight)), total(b, weight))


def summed(b, n):
    return total(b, squared(b, rows(b, n)))


def summed_over_rows(b, n):
    """Sums over samples of means over features."""
    return b.op("Div", total(b, squared(b, rows(b, n))), b.const(float(CLASSES)))


def capped(b, n):
    """An upper bound on a sum is no sum, even where these samples do not meet it."""
    return b.op("Clip", summed(b, n), "", b.const(1e6))


def contracted(b, n):
    """A product with ones is a sum."""
    h = b.op("ReduceSum", squared(b, rows(b, n)), axes(b, 1), keepdims=0)
    return b.op("MatMul", h, b.const(np.ones(n)))


def halved(b, n):
    """A constant that says nothing of the batch."""
    return b.op("Mul", total(b, squared(b, rows(b, n))), b.const(0.37))


def summed_and_decayed(b, n):
    return b.op("Add", summed(b, n), total(b, squared(b, "w")))


def framed(b, n):
    """Sums between ones, which no sample enters."""
    each = b.op("ReduceSum", squared(b, rows(b, n)), axes(b, 0), keepdims=0)
    return total(b, b.op("Pad", each, axes(b, 1, 1), b.const(1.0)))


def normalised(b, n):
    return mean(b, b.op("Tanh", batch_norm(b, rows(b, n), n)))


def normalised_by_sums(b, n):
    return mean(b, b.op("Tanh", batch_norm(b, rows(b, n), n, divide=True)))


def contrastive(b, n):
    """CLIP: every row against all others."""
    left = rows(b, n)
    right = b.op("MatMul", b.input("z", (n, WIDTH)), b.parameter("v", (WIDTH, CLASSES)))
    logits = b.op("MatMul", left, b.op("Transpose", right, perm=[1, 0]))
    return b.op("Neg", mean(b, b.op("Mul", b.op("LogSoftmax", logits, axis=1), b.const(np.eye(n)))))


def distances(b, n):
    """All pairs, by broadcasting."""
    h = rows(b, n)
    pairs = b.op("Sub", b.op("Unsqueeze", h, axes(b, 0)), b.op("Unsqueeze", h, axes(b, 1)))
    return mean(b, b.op("Exp", b.op("Neg", squared(b, pairs))))


def over_samples(b, n):
    return mean(b, squared(b, b.op("Softmax", rows(b, n), axis=0)))


def root(b, n):
    return b.op("Sqrt", plain(b, n))


def balanced(b, n):
    """A product of two means, as mixtures of experts balance their load."""
    share = b.op("ReduceMean", b.op("Softmax", rows(b, n), axis=1), axes(b, 0), keepdims=0)
    return total(b, squared(b, share))


def largest(b, n):
    return b.op("ReduceMax", squared(b, rows(b, n)), keepdims=0)


def placed(b, n):
    """The first sample counts twice."""
    h = rows(b, n)
    return b.op("Add", mean(b, squared(b, h)), mean(b, b.op("Gather", h, b.const(0, "int64"), axis=0)))


def numbered(b, n):
    weights = np.linspace(0.5, 1.5, n).reshape(n, 1)
    return mean(b, b.op("Mul", squared(b, rows(b, n)), b.const(weights)))


CASES = [
    *(Case(f.__name__, f) for f in (
        plain, divided, by_samples, spread, merged, attention, labelled, embedded, convolved, layer_norm, decayed,
        square_dimensions, two_views, per_sample_count, typed_like, recurrent, resampled,
        own_rows,
    )),
    *(Case(f.__name__, f, "weighted", ("weighted_loss",)) for f in (
        token_weighted, token_weighted_guarded, token_weighted_means, token_weighted_decayed,
    )),
    *(Case(f.__name__, f, "sum", ("summed_loss",)) for f in (summed, summed_over_rows, contracted)),
    Case("halved", halved, None, ("unknown",)),
    Case("rows_of_others", rows_of_others, "mean", ("unknown",)),
    *(Case(f.__name__, f, None, ("nonlinear_loss",)) for f in (
        trained_weights, summed_and_decayed, root, balanced, largest, capped, framed,
    )),
    *(Case(f.__name__, f, None, ("statistics",)) for f in (normalised, normalised_by_sums)),
    *(Case(f.__name__, f, None, ("in_batch",)) for f in (contrastive, distances, over_samples)),
    *(Case(f.__name__, f, None, ("by_place",)) for f in (placed, numbered)),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("batch", [6, 2])
def test_what_is_told_is_true_of_one_large_batch(case: Case, batch: int, tmp_path: Path) -> None:
    graph, _ = graph_of(case.forward, batch, tmp_path)
    large, _ = graph_of(case.forward, 3 * batch, tmp_path)
    found = reading(graph)
    halves = batch == 2 and case.name in ("by_samples", "spread")  # as often a constant of the loss
    told = ("unknown",) if halves else case.kinds
    assert {each.kind.value for each in found.couplings} == set(told), notes(found.couplings)
    rules = {rule: follows(graph, large, rule, "", 5) for rule in ("mean", "sum")}
    if case.rule == "weighted":
        (advice,) = (each.exact for each in found.couplings)
        assert follows(graph, large, "weighted", advice.removeprefix("--loss-reduction weighted:").split()[0], 5)
        rules["weighted"] = True
    assert rules.get(case.rule or "mean") is (case.rule is not None or (case.name == "halved" and rules["mean"]))
    if case.rule != "mean":
        assert not rules["mean"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_batch_of_one_is_never_called_fine_where_it_is_not(case: Case, tmp_path: Path) -> None:
    """Sizes decide nothing: what is told of one sample holds for more, or is told as unknown."""
    if case.name in ("contracted", "numbered"):
        return  # with one row these are a product with 1.0 and a plain constant
    graph, _ = graph_of(case.forward, 1, tmp_path)
    found = {each.kind.value for each in reading(graph).couplings}
    if case.rule != "mean":
        assert found, case.name
    else:
        assert found <= {"unknown"}


@pytest.mark.parametrize(("ignored", "kind"), [(-100, "ignored_labels"), (-1, "ignored_labels"), (3, "weighted_loss")])
def test_labels_that_are_ignored_are_no_note(ignored, kind, tmp_path, capsys):
    """A class that does not count is a choice of the model; a negative number is none."""
    model = onnx.load(FIXTURES / "mlp_adamw.onnx")
    for each in model.graph.initializer:
        if each.name == "val_0":
            each.CopyFrom(onnx.numpy_helper.from_array(np.array(ignored), each.name))
    onnx.save(model, tmp_path / "step.onnx")
    found = gopt.shard(tmp_path / "step.onnx", 2).report()
    assert [each.kind.value for each in found.couplings] == [kind]
    assert found.couplings[0].exact == "--loss-reduction weighted:sum_1 is exact"
    assert any("one large batch" in each for each in found.notes) is (kind == "weighted_loss")
    for words, told in (([], kind == "weighted_loss"), (["-v"], True)):
        assert main(["inspect", str(tmp_path / "step.onnx"), *words]) == 0
        assert ("one large batch" in capsys.readouterr().out) is told, words


@pytest.mark.parametrize("ignored", [-1, -2])
def test_a_mask_of_another_label_drops_other_samples(ignored, tmp_path):
    text = f"""<ir_version: 10, opset_import: ["" : 20]> g (int64[4] y, float[4] a) => (float loss) {{
      one = Constant<value = int64 {{-1}}>() other = Constant<value = int64 {{{ignored}}}>()
      floor = Constant<value = float {{1}}>()
      same = Equal(y, one) counted = Not(same) ones = Cast<to = 1>(counted) count = ReduceSum<keepdims = 0>(ones)
      safe = Max(count, floor) alike = Equal(y, other) apart = Not(alike) mask = Cast<to = 1>(apart)
      kept = Mul(a, mask) sum = ReduceSum<keepdims = 0>(kept) loss = Div(sum, safe) }}"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "step.onnx")
    assert drops_uncounted(GraphIndex(load(tmp_path / "step.onnx")), "count") == (ignored == -1)


@pytest.mark.parametrize(
    ("reduce", "adjoint", "kind"), [("ReduceMean", 0.0025, "ignored_labels"), ("ReduceSum", 0.2, "nonlinear_loss")]
)
def test_a_mean_beside_labels_that_may_be_ignored_is_no_note(reduce, adjoint, kind, tmp_path):
    """A penalty, a distillation or a second head beside a cross-entropy: all are means where no label is ignored."""
    model = onnx.load(FIXTURES / "mlp_adamw.onnx")
    nodes, stored = model.graph.node, model.graph.initializer
    for place, (name, add) in enumerate({"loss": "penalty", "sub": "more"}.items()):
        made = next(index for index, node in enumerate(nodes) if name in node.output)
        nodes[made].output[0] = f"own_{name}"
        stored.append(onnx.numpy_helper.from_array(np.float32([0.1, adjoint][place]), f"weight_{name}"))
        operand, first = "addmm_1", []
        if name == "loss":
            first = [onnx.helper.make_node("Mul", ["addmm_1", "addmm_1"], ["square"])]
            first += [onnx.helper.make_node(reduce, ["square"], ["whole"], keepdims=0)]
            operand = "whole"
        first += [onnx.helper.make_node("Mul", [operand, f"weight_{name}"], [add])]
        first += [onnx.helper.make_node("Add", [f"own_{name}", add], [name])]
        for offset, node in enumerate(first, 1):
            nodes.insert(made + offset, node)
    onnx.save(model, tmp_path / "step.onnx")
    found = gopt.shard(tmp_path / "step.onnx", 2).report()
    assert [each.kind.value for each in found.couplings] == [kind], found.couplings
    assert any("one large batch" in each for each in found.notes) is (kind == "nonlinear_loss")


def test_padding_of_sequences_is_a_note():
    """Sequences are padded to different lengths, so that ranks have different numbers of labels."""
    found = gopt.shard(FIXTURES / "real" / "tagger_padding.onnx", 2).report()
    assert any("one large batch" in each and "weighted:v101 is exact" in each for each in found.notes)


LARGEST = "  a_x = Abs(x)\n  top = ReduceMax<keepdims = 0>(a_x, first)\n  stat_out = Max(stat, top)\n"
AVERAGE = (
    "  own = ReduceMean<keepdims = 0>(x, first)\n  part = Mul(own, quarter)\n  rest = Mul(stat, quarter)\n"
    "  stat_out = Add(part, rest)\n"
)


@pytest.mark.parametrize(("body", "rule"), [(LARGEST, "max"), (AVERAGE, "mean")], ids=["maximum", "average"])
def test_a_statistic_follows_the_batch_by_a_rule(body, rule, tmp_path):
    """The mean of the ranks' maxima is not the maximum."""
    step = Written(NET + body + sgd(), {"stat": ("float", (3,))})
    found = analyse_couplings(gopt.load(saved(step.model(), tmp_path)).training)
    assert found.statistics.known["stat"].rule == rule and not found.statistics.unclear


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"mesh": "shard=2,h=2"}, {"loss_reduction": "sum"}, {}])
def test_sync_is_recommended_where_it_can_be_taken(options):
    source = gopt.load(FIXTURES / "cnn_sgd.onnx")
    notes = gopt.shard(source, **{"mesh": "shard=2", **options}).report().notes
    about = [note for note in notes if note.startswith("not the step of one large batch: 'val_1'")]
    assert about and all(("--statistics sync" in note) is (not options) for note in about)


ONES = "1, 1, 1, 1, 1, 1, 1, 1"
EIGHTHS = "0.125, 0.125, 0.125, 0.125, 0.125, 0.125, 0.125, 0.125"
LINEAR_MODELS = {
    "a stack of one matrix": (
        "float[3,2] w", "int64[3] stack = {1, 4, 2}, int64[2] flat = {3, 2}", "h = MatMul(x, w)",
        "s = Reshape(seed, stack) t = Transpose<perm = [1, 0]>(x) p = MatMul(t, s) grad = Reshape(p, flat)",
    ),
    "a turned product": (
        "float[3,2] w", "float zero = {0}", "h = MatMul(x, w)",
        "s = Transpose<perm = [1, 0]>(seed) product = MatMul(s, x) grad = Transpose<perm = [1, 0]>(product)",
    ),
    "two terms": (
        "float[3,2] w", "float zero = {0}", "h = MatMul(x, w)",
        "s = Transpose<perm = [1, 0]>(x) p = MatMul(s, seed) q = Mul(p, lr) r = Mul(q, zero) grad = Add(p, r)",
    ),
    "a sum of products": (
        "float[2] w", "int64[1] first = {0}, int64[1] one = {1}, int64[1] two = {2}",
        "a = Slice(x, first, two, one) h = Mul(a, w)",
        "g = Mul(a, seed) grad = ReduceSum<keepdims = 0>(g, first)",
    ),
}  # fmt: skip
"""A model that is linear in its weight, so that no parameter enters the gradient: w, constants, forward, backward."""


@pytest.mark.parametrize("reduce", ["mean", "sum"])
@pytest.mark.parametrize("form", LINEAR_MODELS)
def test_the_gradient_of_a_linear_model_is_no_count(form: str, reduce: str, tmp_path: Path) -> None:
    weight, constants, forward, backward = LINEAR_MODELS[form]
    text = f"""<ir_version: 9, opset_import: ["" : 20]>
    f (float[4,3] x, float lr, {weight}) => (float loss, {weight}_out)
    <float[4,2] seed = {{{ONES if reduce == "sum" else EIGHTHS}}}, {constants}>
    {{
        {forward}
        loss = Reduce{reduce.title()}<keepdims = 0>(h)
        {backward}
        moved = Mul(lr, grad)
        w_out = Sub(w, moved)
    }}"""
    (tmp_path / "step.onnx").write_bytes(onnx.parser.parse_model(text).SerializeToString())
    training = gopt.load(tmp_path / "step.onnx").training
    told = [each.what for each in find_couplings(training)]
    assert (told == []) if reduce == "mean" else all("sums over the samples" in each for each in told) and told


def test_a_factor_of_the_model_behind_the_derivative_of_a_mean_says_nothing_of_samples(tmp_path: Path) -> None:
    """A tenth of a quarter is one of the forty numbers of a sample, and was taken for a mean over these alone."""
    text = """<ir_version: 9, opset_import: ["" : 20]>
    f (float[4,5,8] x, float lr, float[8,1] w) => (float loss, float[8,1] w_out)
    <float tenth = {0.1}, float quarter = {0.25}, int64[2] rest = {1, 2}, int64[3] apart = {4, 1, 1},
    int64[3] spread = {4, 5, 1}, int64[2] rows = {20, 8}, int64[2] column = {20, 1}>
    {
        h = MatMul(x, w) s = ReduceSum<keepdims = 0>(h, rest) t = Mul(s, tenth) each = Softplus(t)
        loss = ReduceMean<keepdims = 0>(each)
        slope = Sigmoid(t) d = Mul(slope, quarter) e = Mul(d, tenth) u = Reshape(e, apart) v = Expand(u, spread)
        flat = Reshape(x, rows) turned = Transpose<perm = [1, 0]>(flat) back = Reshape(v, column)
        grad = MatMul(turned, back) moved = Mul(lr, grad) w_out = Sub(w, moved)
    }"""
    (tmp_path / "step.onnx").write_bytes(onnx.parser.parse_model(text).SerializeToString())
    assert not find_couplings(gopt.load(tmp_path / "step.onnx").training)


JOINED = """step (double[samples,3] x, double[samples,2] y, double[3,2] w, double[3,2] noise)
    => (double loss, double[3,2] new) <double[3,2] w = {0.2, -0.4, 0.2, -0.3, 0.1, -0.1},
    double two = {2}, double rate = {0.1}, double three = {3}>
    { z = MatMul(x, w)  e = Sub(z, y)  s = Mul(e, e)  sum = ReduceSum<keepdims=0>(s)  size = Size(x)
      n3 = Cast<to=11>(size)  n = Div(n3, three)  loss = Div(sum, n)  d = Mul(e, two)  xt = Transpose<perm=[1, 0]>(x)
      g = MatMul(xt, d)  j = Add(g, TERM)  m = Div(j, n)  u = Mul(m, rate)  new = Sub(w, u) }"""


@pytest.mark.parametrize("term, batch, what", [
    ("w", (), "terms that are reduced differently are added"),
    ("noise", ("noise",), "batch input 'noise' has 3 rows where other inputs have samples"),
])  # fmt: skip
def test_what_joins_a_sum_before_the_samples_divide_it_is_a_note(term, batch, what, tmp_path):
    onnx.save(onnx.parser.parse_model('<ir_version: 9, opset_import: ["" : 20]>' + JOINED.replace("TERM", term)),
              tmp_path / "step.onnx")  # fmt: skip
    training = gopt.load(tmp_path / "step.onnx", roles=RoleMap(batch=batch)).training
    assert what in notes(find_couplings(training))[0]
