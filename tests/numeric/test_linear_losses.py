"""What is told of one large batch, where a loss is linear in the outputs or a function of what samples have in common.

Forward models by hand, derived for a rank's samples and for those of all ranks: no note, then equal; a rule that is
called exact, then equal with it; a loss that is neither a sum nor a mean is called neither; and ``--statistics sync``
is named only where it can be taken.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from node_models import session
from onnx import helper, numpy_helper, parser
from rank_files import Values
from rank_simulator import World

import gopt
from gopt.artifact.open_couplings import open_couplings

pytest.importorskip("onnx_ad", reason="needs pip install 'gopt[derive]'")

SAMPLES, RANKS = 5, 2
X = "float[N,3] x, float[N,2] y"
CUBE = "float[N,3,3] x, float[N,3,3] y"
TOKENS = "float[N,5,4] x, float[N,5,4] y"
IDS = "int64[N,4] x, float[N,2] y"
PLANE = "float[N,4,3] x, float[N,4,3] y"
W: Mapping[str, tuple[int, ...]] = {"w": (3, 2)}
TWO = {"w": (3, 4), "v": (4, 2)}
NORM = {"w": (4, 1), "s": (4,), "b": (4,)}
SQUARES = "o = MatMul(x, w) d = Sub(o, y) q = Mul(d, d) "
COLUMN = (
    "o = MatMul(x, w) t = Transpose<perm = [1, 0]>(o) zero = Constant<value_ints = [0]>() "
    "one = Constant<value_ints = [1]>() u = Slice(t, zero, one, zero) "
)
TRILU = "o = MatMul(x, w) u = Trilu(o) "
GROUPS = "h = Mul(x, w) o = GroupNormalization<num_groups = 2>(h, s, b) u = Mul(o, y) "
ATTENTION = "h = MatMul(x, w) k = MatMul(x, v) u = Attention<q_num_heads = 2, kv_num_heads = 2>(h, k, k) "
LOADS = (
    "o = MatMul(x, w) s = Softmax(o) first = Constant<value_ints = [0]>() i = ArgMax<axis = 1, keepdims = 0>(o) "
    "two = Constant<value = int64 {2}>() offon = Constant<value_floats = [0.0, 1.0]>() hot = OneHot(i, two, offon) "
    "load = ReduceMean<keepdims = 0>(hot, first) "
)
MEAN, SUM = "loss = ReduceMean<keepdims = 0>(u)", "loss = ReduceSum<keepdims = 0>(u)"
BOUND = "far = Constant<value = float {400}>() m = ReduceMean<keepdims = 0>(q) "

CASES: dict[str, tuple[str, str, Mapping[str, tuple[int, ...]], str]] = {
    "two layers, mean": (X, "h = MatMul(x, w) u = MatMul(h, v) " + MEAN, TWO, "exact"),
    "two layers, sum": (X, "h = MatMul(x, w) u = MatMul(h, v) " + SUM, TWO, "sum"),
    "a column, mean": (X, COLUMN + MEAN, W, "exact"),
    "a column, sum": (X, COLUMN + SUM, W, "sum"),
    "columns twice": (X, "o = MatMul(x, w) i = Constant<value_ints = [1, 1]>() u = Gather<axis = 1>(o, i) " + MEAN,
                      W, "exact"),
    "a triangle, mean": (CUBE, TRILU + MEAN, {"w": (3, 3)}, "exact"),
    "a triangle, sum": (CUBE, TRILU + SUM, {"w": (3, 3)}, "sum"),
    "a weighted triangle": (CUBE, TRILU.replace("u =", "t =") + "u = Mul(t, y) " + MEAN, {"w": (3, 3)}, "exact"),
    "groups, mean": (PLANE, GROUPS + MEAN, NORM, "exact"),
    "groups, sum": (PLANE, GROUPS + SUM, NORM, "sum"),
    "attention, mean": (TOKENS, ATTENTION + MEAN, {"w": (4, 4), "v": (4, 4)}, "exact"),
    "attention, sum": (TOKENS, ATTENTION + SUM, {"w": (4, 4), "v": (4, 4)}, "sum"),
    "rows of a table, mean": (IDS, "u = Gather(w, x) " + MEAN, {"w": (5, 2)}, "exact"),
    "rows of a table, sum": (IDS, "u = Gather(w, x) " + SUM, {"w": (5, 2)}, "sum"),
    "weights of classes, mean": (
        X, "o = MatMul(x, w) k = Constant<value_floats = [0.3, 1.7]>() u = Mul(o, k) " + MEAN, W, "unknown"),
    "a critic": (
        X, "h = MatMul(x, w) t = Tanh(h) o = MatMul(t, v) a = ReduceMean<keepdims = 0>(o) g = MatMul(y, z) "
        "b = ReduceMean<keepdims = 0>(g) loss = Sub(b, a)", {**TWO, "z": (2, 2)}, "exact"),
    "a function of a mean of data": (
        X, "first = Constant<value_ints = [0]>() m = ReduceMean(x, first) u = MatMul(m, w) " + MEAN, W, "exact"),
    "a sum of data": (
        CUBE.replace("N,3,3", "N,3"), "t = Transpose<perm = [1, 0]>(x) g = MatMul(t, y) u = Mul(g, w) " + MEAN,
        {"w": (3, 3)}, "sum"),
    "a log of a sum of exponentials": (X, "o = MatMul(x, w) loss = ReduceLogSumExp<keepdims = 0>(o)", W, "nonlinear"),
    "a norm": (X, SQUARES + "loss = ReduceL2<keepdims = 0>(d)", W, "nonlinear"),
    "a root": (X, SQUARES + "m = ReduceMean<keepdims = 0>(q) loss = Sqrt(m)", W, "nonlinear"),
    "a square of a mean": (X, "o = MatMul(x, w) m = ReduceMean<keepdims = 0>(o) loss = Mul(m, m)", W, "nonlinear"),
    "a product of means": (
        X, SQUARES + "a = ReduceMean<keepdims = 0>(q) b = ReduceMean<keepdims = 0>(o) loss = Mul(a, b)", W,
        "nonlinear"),
    "loads of experts": (
        X, LOADS + "imp = ReduceMean<keepdims = 0>(s, first) u = Mul(imp, load) loss = ReduceSum<keepdims = 0>(u)", W,
        "nonlinear"),
    "summed loads": (
        X, LOADS + "imp = ReduceSum<keepdims = 0>(s, first) u = Mul(imp, load) loss = ReduceSum<keepdims = 0>(u)", W,
        "nonlinear"),
    "flooding": (
        X, SQUARES + "m = ReduceMean<keepdims = 0>(q) b = Constant<value = float {3}>() e = Sub(m, b) a = Abs(e) "
        "loss = Add(a, b)", W, "nonlinear"),
    "a bounded mean": (X, SQUARES + BOUND + "loss = Clip(m, , far)", W, "nonlinear"),
    "the lesser of a mean and a number": (X, SQUARES + BOUND + "loss = Min(m, far)", W, "nonlinear"),
    "a chosen mean": (X, SQUARES + BOUND + "g = Less(m, far) loss = Where(g, m, far)", W, "nonlinear"),
    "a mean that is no number": (X, SQUARES + BOUND + "g = IsNaN(m) loss = Where(g, far, m)", W, "exact"),
}  # fmt: skip
"""Inputs, nodes, parameters, and what is told: ``exact`` (nothing), a rule that is exact, or the kind of coupling."""


@pytest.mark.parametrize("case", CASES)
def test_what_is_told_of_a_large_batch_is_so(case: str, tmp_path: Path) -> None:
    told = CASES[case][3]
    step, whole = _derived(case, 1, tmp_path), _derived(case, RANKS, tmp_path)
    model = onnx.load(str(step))
    states = {state.tensor for state in gopt.load(step).training.states}
    start = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer if each.name in states}
    batches = [_drawn(model, start, rank) for rank in range(RANKS)]
    joined = {name: np.concatenate([each[name] for each in batches]) for name in batches[0] if name != "lr"}
    large = session(onnx.load(str(whole)))
    updated = {state.tensor: state.updated for state in gopt.load(whole).training.states}
    expected = large.run(list(updated.values()), {**start, **joined, "lr": batches[0]["lr"]})
    wanted = dict(zip(updated, expected))

    def apart(**options: str) -> float:
        gopt.shard(gopt.load(step), f"shard={RANKS}", **options).write(tmp_path / "ranks", force=True)
        world = World(tmp_path / "ranks")
        held = [world.feeds(rank, start) for rank in world.ranks]
        world.step(held, [batches])
        found = world.whole(held)
        return max(
            float(np.linalg.norm(found[name] - wanted[name]) / np.linalg.norm(wanted[name] - start[name]))
            for name in start
        )

    notes = open_couplings(gopt.shard(gopt.load(step), f"shard={RANKS}").program)
    rules = {rule for each in notes for rule in re.findall(r"--loss-reduction (\S+) is exact$", each.exact)}
    kinds = {each.kind.value for each in notes}
    assert (rules, kinds) == {
        "exact": (set(), set()), "sum": ({"sum"}, {"summed_loss"}), "unknown": (set(), {"unknown"}),
        "nonlinear": (set(), {"nonlinear_loss"}),
    }[told]  # fmt: skip
    if told in ("exact", "sum"):
        assert apart(loss_reduction="mean" if told == "exact" else told) < 1e-3
    if any("--statistics sync" in each.exact for each in notes):
        assert apart(statistics="sync") < 1e-3


def _derived(case: str, times: int, folder: Path) -> Path:
    inputs, nodes, shapes, _ = CASES[case]
    opset = 23 if "Attention" in nodes else 21
    text = f'<ir_version: 10, opset_import: ["" : {opset}]> f ({inputs}) => (float loss) {{ {nodes} }}'
    model = parser.parse_model(text.replace("[N", f"[{SAMPLES * times}"))
    generator = np.random.default_rng(3)
    for name, shape in shapes.items():
        value = generator.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    forward, step = folder / f"forward{times}.onnx", folder / f"step{times}.onnx"
    onnx.save(model, str(forward))
    gopt.derive(forward, step, gopt.DeriveOptions(loss="loss", optimizer="sgd"))
    return step


def _drawn(model: onnx.ModelProto, start: Values, rank: int) -> Values:
    generator, found = np.random.default_rng(rank), {"lr": np.full((), 0.05, np.float32)}
    for each in model.graph.input:
        if each.name not in start and each.name != "lr":
            shape = [size.dim_value for size in each.type.tensor_type.shape.dim]
            dtype = helper.tensor_dtype_to_np_dtype(each.type.tensor_type.elem_type)
            drawn = generator.integers(0, 4, shape) if dtype.kind == "i" else generator.standard_normal(shape) + rank
            found[each.name] = drawn.astype(dtype)
    return found
