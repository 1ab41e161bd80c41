"""Verify compares the ranks' step with the step of one large batch, where the source can be evaluated on it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from helpers import FIXTURES, Builder, perceptron, sgd

import gopt
from gopt import limits
from gopt.analysis.role_map import RoleMap
from gopt.errors import RunError, UnsupportedError
from gopt.verification import joined_step
from gopt.verification.large_batch import LargeBatch, LargeBatchCheck, StateDistance

COUNTS = Path(__file__).parents[1] / "numeric" / "adversary" / "counts"


def verified(source, **options):
    return gopt.verify(gopt.shard(source, options.pop("mesh", 2), **options), steps=1, confirm=False)


def step(tmp_path, add, batch=4, **roles):
    """A perceptron with a state ``s`` whose new value ``add`` writes; batches of ``batch`` samples."""
    b = Builder()
    sgd(b, perceptron(b, (3, 5, 2), batch=batch))
    s = b.state("s", np.float32([0.5, 0.7, 0.9]))
    b.output("s_out", add(b, s), (3,))
    return gopt.load(b.save(tmp_path / "step.onnx"), roles=RoleMap(states={"s": "s_out"}, **roles))


def total(b: Builder, s: str) -> str:
    """A sum over samples, as a product with weights: gopt asks whether these divide by the number of samples."""
    rows = b.op("MatMul", b.const(np.ones((1, 4))), "x")
    return b.op("Add", b.op("Mul", s, b.const(0.9)), b.op("Squeeze", rows, b.const([0], "int64")))


def placed(b: Builder, s: str) -> str:
    """A mean of samples with weights of their own."""
    weights = b.const(np.float32([[0.1], [0.2], [0.3], [0.4]]))
    return b.op("Add", s, b.op("ReduceMean", b.op("Mul", "x", weights), b.const([0], "int64"), keepdims=0))


@pytest.mark.parametrize("name", ["mlp_sgd", "mlp_adamw_fp16_scaler"])
def test_exports_with_a_fixed_batch_are_compared(name):
    found = verified(FIXTURES / f"{name}.onnx", stage=1).large_batch
    assert found.outcome is LargeBatch.EQUAL and found.states > 3 and "equal" in found.line()


def test_micro_steps_are_joined_as_ranks_are(tmp_path):
    b = Builder()
    sgd(b, perceptron(b, (3, 5, 2)))
    assert verified(b.save(tmp_path / "step.onnx"), accumulate=2).large_batch.outcome is LargeBatch.EQUAL


@pytest.mark.parametrize("masked", [False, True])
def test_what_is_equal_on_these_batches_alone_is_told_as_such(masked, tmp_path):
    """A note said "not the step of one large batch", and the line above it "equal"."""
    if masked:
        result = verified(FIXTURES / "real" / "tagger_padding.onnx")
        assert "equal, " in result.large_batch.line() and "without labels to ignore" in result.large_batch.line()
        assert result.notes[0].endswith(" off on batches with labels to ignore")
    else:
        b = Builder()
        sgd(b, perceptron(b, (3, 5, 2), loss="weighted"))
        ranks, random = gopt.shard(b.save(tmp_path / "step.onnx"), 2), np.random.default_rng(0)
        data = [{"x": random.normal(size=(4, 3)), "y": random.normal(size=(4, 2)), "mask": np.ones((4, 1))}] * 2
        np.savez(tmp_path / "data.npz", **{name: np.concatenate([each[name] for each in data]) for name in data[0]})
        result = gopt.verify(ranks, steps=1, confirm=False, data=str(tmp_path / "data.npz"))
        assert result.large_batch.line().startswith("one large batch: equal on these batches")
        assert re.search(r": [0-9.e-]+ off on these batches$", result.notes[0])
    assert result.notes[0].startswith("not the step of one large batch on every batch: ")


def test_a_reduction_of_gradients_that_is_wrong_is_seen_and_named():
    result = verified(FIXTURES / "mlp_sgd.onnx", loss_reduction="sum")
    found = result.large_batch
    assert found.outcome is LargeBatch.DIFFERENT and found.notes and {"fc1.weight"} <= {e.name for e in found.apart}
    assert result.equal and found.line().endswith("as noted")  # the ranks do what was asked of them, and shard said so


def test_constants_of_the_batch_are_taken_for_numbers_of_samples(tmp_path):
    found = verified(step(tmp_path, lambda b, s: b.op("Add", s, s))).large_batch
    assert found.outcome is LargeBatch.EQUAL and found.taken


def test_a_constant_that_is_no_number_of_samples_may_leave_the_numbers_as_one(tmp_path):
    """A quarter of one, less a fifth, has a root; an eighth, as of twice the samples, has none."""

    def rooted(b: Builder, s: str) -> str:
        mean = b.op("ReduceMean", "x", b.const([0], "int64"), keepdims=0)
        one = b.op("Add", b.op("Mul", mean, b.const(0.0)), b.const(1.0))
        root = b.op("Sqrt", b.op("Sub", b.op("Mul", one, b.const(0.25)), b.const(0.2)))
        return b.op("Add", b.op("Mul", s, b.const(0.9)), b.op("Add", root, mean))

    found = verified(step(tmp_path, rooted)).large_batch
    assert found.outcome is LargeBatch.EQUAL, found.line()


def test_a_rule_that_the_user_states_wrong_is_a_finding(tmp_path):
    result = verified(step(tmp_path, total, statistics={"s": "mean"}))
    assert [each.name for each in result.large_batch.apart if not each.noted] == ["s"]
    assert result.outcome.value == "different" and result.exit_code == 1
    assert "NOT the step of one large batch: statistic 's'" in result.reason()
    assert result.to_json()["large_batch"]["apart"][0]["name"] == "s"


def test_a_batch_of_open_size_is_compared(tmp_path, monkeypatch):
    """It is no batch of one sample, and no excuse for a difference that no note tells of."""

    def open_total(b: Builder, s: str) -> str:
        for each in b.inputs[:2]:
            each.type.tensor_type.shape.dim[0].dim_param = "N"
        return b.op("Add", s, b.op("ReduceSum", "x", b.const([0], "int64"), keepdims=0))

    monkeypatch.setattr(joined_step._Joined, "_told_of", lambda *_: set())
    found = verified(step(tmp_path, open_total, statistics={"s": "mean"})).large_batch
    assert found.outcome is LargeBatch.DIFFERENT and "s" in {each.name for each in found.apart}, found.line()


def test_a_rule_for_all_statistics_that_contradicts_the_data_flow_is_seen_as_noted():
    states = {"acc": "acc_out", "s": "s_out", "cnt": "cnt_out"}
    found = verified(gopt.load(COUNTS / "sumcount_shape.onnx", roles=RoleMap(states=states)), statistics="mean")
    assert found.equal and {each.name for each in found.large_batch.apart} == set(states)
    assert any("as --statistics says" in note for note in found.large_batch.notes)


def test_a_step_of_a_fixed_number_of_samples_is_not_compared(tmp_path):
    result = verified(step(tmp_path, placed, statistics={"s": "mean"}))
    assert result.large_batch.outcome is LargeBatch.NOT_COMPARABLE and "each sample" in result.large_batch.why
    assert result.equal


def test_a_batch_of_one_sample_tells_no_constant_from_its_size(tmp_path):
    found = verified(step(tmp_path, lambda b, s: b.op("Add", s, s), batch=1)).large_batch
    assert found.outcome is LargeBatch.NOT_COMPARABLE and "one or two samples" in found.why
    assert verified(step(tmp_path, total, statistics={"s": "sum"})).large_batch.outcome is LargeBatch.EQUAL


def test_what_takes_too_much_memory_is_not_compared(monkeypatch):
    monkeypatch.setattr(limits, "LARGE_BATCH_BYTES", 1000)
    found = verified(FIXTURES / "mlp_sgd.onnx").large_batch
    assert found.outcome is LargeBatch.NOT_COMPARABLE and "GOPT_LIMITS=LARGE_BATCH_BYTES=" in found.why


def test_a_source_that_fails_on_the_large_batch_is_told_in_plain_words(monkeypatch):
    def fails(*given: object) -> None:
        raise RunError("ONNX Runtime refuses a segment: [ONNXRuntimeError] : 1 : FAIL : Node (mm) Op (MatMul)")

    monkeypatch.setattr(joined_step, "run_source", fails)
    found = verified(FIXTURES / "mlp_sgd.onnx").large_batch
    assert found.outcome is LargeBatch.NOT_COMPARABLE and "ONNX" not in found.why
    assert "does not run on the batches of all ranks at once" in found.why


def test_one_batch_is_compared_with_nothing():
    assert verified(FIXTURES / "mlp_sgd.onnx", mesh=1).large_batch is None


def test_the_line_of_a_finding():
    apart = (StateDistance("w", "parameter", 0.5), StateDistance("v", "scalar", 0.1))
    line = LargeBatchCheck(LargeBatch.DIFFERENT, 2, apart=apart).line()
    assert line == (
        "NOT the step of one large batch: parameter 'w' is 0.5 of its change off and 1 more, and no note said so"
    )


def weighed(tmp_path, reduce, weight, adjoint):
    """A linear model, and a squared error times a weight, whose number and its derivative's are one constant."""
    b = Builder()
    x, y, lr, w = b.input("x", (5, 3)), b.input("y", (5, 2)), b.input("lr", ()), b.parameter("w", (3, 2))
    off = b.op("Sub", b.op("MatMul", x, w), y)
    b.output("loss", b.op("Mul", b.op(reduce, b.op("Mul", off, off), keepdims=0), b.const(weight)), ())
    turned = b.op("Transpose", x, perm=[1, 0])
    gradient = b.op("MatMul", turned, b.op("Mul", off, b.const(2 * adjoint)))
    b.output("w_out", b.op("Sub", w, b.op("Mul", gradient, lr)), (3, 2))
    return b.save(tmp_path / "step.onnx")


@pytest.mark.parametrize(
    ("reduce", "adjoint", "outcome"),
    [("ReduceMean", 0.63, LargeBatch.EQUAL), ("ReduceSum", 6.3, LargeBatch.DIFFERENT)],
)
def test_a_weight_of_the_loss_hides_no_number_of_samples(reduce, adjoint, outcome, tmp_path):
    """6.3 / 10 is one over no number of samples: "NOT the step of one large batch, and no note said so"."""
    found = verified(weighed(tmp_path, reduce, 6.3, adjoint)).large_batch
    assert (found.outcome, found.unnoted) == (outcome, False), found.line()


def test_a_maximum_of_samples_keeps_its_mean(tmp_path):
    """Its derivative is chosen from two constants, a half at a tie: the mean was told to be a sum (of PPO's loss)."""
    b = Builder()
    x, y, lr, w = b.input("x", (4, 3)), b.input("y", (4, 1)), b.input("lr", ()), b.parameter("w", (3, 1))
    off = b.op("Sub", b.op("MatMul", x, w), y)
    other, zero = b.op("Mul", off, b.const(-0.5)), b.const(0.0)
    b.output("loss", b.op("ReduceMean", b.op("Max", off, other), keepdims=0), ())
    tie = b.op("Equal", off, other)
    seed = b.op("Where", tie, b.const(np.full((4, 1), 0.125)), b.const(np.full((4, 1), 0.25)))
    one = b.op("Where", b.op("Less", off, other), zero, seed)
    two = b.op("Mul", b.op("Where", b.op("Greater", off, other), zero, seed), b.const(-0.5))
    gradient = b.op("MatMul", b.op("Transpose", x, perm=[1, 0]), b.op("Add", one, two))
    b.output("w_out", b.op("Sub", w, b.op("Mul", gradient, lr)), (3, 1))
    sharded = gopt.shard(b.save(tmp_path / "step.onnx"), 2)
    assert sharded.report().couplings == ()
    found = gopt.verify(sharded, steps=1, confirm=False).large_batch
    assert (found.outcome, found.unnoted) == (LargeBatch.EQUAL, False), found.line()


def test_labels_to_ignore_are_left_out_of_the_large_batch():
    """Ranks average means over their own labels, which differ where some are ignored: drawn ones then are not."""
    result = verified(FIXTURES / "mlp_adamw.onnx")
    assert result.large_batch.outcome is LargeBatch.EQUAL
    assert "on batches without labels to ignore" in result.large_batch.line()


def test_a_normalisation_that_is_one_operator(tmp_path):
    """Its running variance is noted with its result, and was called a difference that no note tells of; sync names what
    to do, and named itself."""
    model = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["" : 18]>
    step (float[4, 3] x, float[4, 2] y, float[3, 2] w, float[3] m, float[3] v)
        => (float loss, float[3, 2] w_out, float[3] m_out, float[3] v_out)
        <float[3] g = {1, 2, 1}, float[3] b = {0, 1, 0}, float[3] m = {0, 0, 0}, float[3] v = {1, 1, 1}> {
      n, m_out, v_out = BatchNormalization <training_mode = 1> (x, g, b, m, v)
      h = MatMul (n, w)
      d = Sub (h, y)
      s = Mul (d, d)
      loss = ReduceMean <keepdims = 0> (s)
      c = Constant <value = float {0.25}> ()
      e = Mul (d, c)
      t = Transpose <perm = [1, 0]> (n)
      dw = MatMul (t, e)
      r = Constant <value = float {0.1}> ()
      u = Mul (dw, r)
      w_out = Sub (w, u)
    }""")
    onnx.save(model, tmp_path / "step.onnx")
    step = gopt.load(tmp_path / "step.onnx", roles=RoleMap(states={"m": "m_out", "v": "v_out"}))
    result = verified(step)
    assert result.equal and {state.name for state in result.large_batch.apart} == {"v", "w"}
    with pytest.raises(UnsupportedError, match="is taken over a rank's own samples") as refused:
        gopt.shard(step, 2, statistics="sync")
    assert refused.value.hints[0].startswith("write BatchNormalization as operators") and len(refused.value.hints) == 2


def image_model() -> onnx.ModelProto:
    """Convolution, batch normalization in training, maxima and means over windows that overlap, batches of 4."""
    model = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["" : 18]>
    net (float[4, 3, 16, 16] x) => (float[4, 4] y) {
      c = Conv <pads = [1,1,1,1], strides = [2,2]> (x, w)
      n, mean_out, var_out = BatchNormalization <training_mode = 1> (c, g, b, mean, var)
      r = Relu (n)
      p = MaxPool <kernel_shape = [3,3], strides = [2,2], pads = [1,1,1,1]> (r)
      a = AveragePool <kernel_shape = [2,2], strides = [2,2]> (p)
      f = Flatten (a)
      y = Gemm (f, head, head_b)
    }""")
    random = np.random.default_rng(0)
    shapes = {"w": (6, 3, 3, 3), "g": (6,), "b": (6,), "mean": (6,), "var": (6,), "head": (24, 4), "head_b": (4,)}
    for name, shape in shapes.items():
        value = random.normal(0, 0.3, shape) if len(shape) > 1 else np.full(shape, float(name in ("g", "var")))
        model.graph.initializer.append(onnx.numpy_helper.from_array(value.astype(np.float32), name))
    return model


@pytest.mark.parametrize(("statistics", "outcome"), [("sync", LargeBatch.EQUAL), ("auto", LargeBatch.DIFFERENT)])
def test_a_derived_image_model_is_compared(statistics, outcome, tmp_path):
    """Its derivatives divide by samples and by places, whose numbers are alike; those of maxima keep samples apart."""
    onnx.save(image_model(), tmp_path / "forward.onnx")
    gopt.derive(
        tmp_path / "forward.onnx", tmp_path / "step.onnx", gopt.DeriveOptions(loss="cross-entropy", optimizer="sgd")
    )
    found = verified(tmp_path / "step.onnx", statistics=statistics).large_batch
    assert (found.outcome, found.unnoted) == (outcome, False)
