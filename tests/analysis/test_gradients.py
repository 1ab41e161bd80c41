"""Which value is the gradient, where the update puts affine, gated and nonlinear steps behind it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from helpers import FIXTURES, Builder, Network, perceptron

import gopt
from gopt.analysis.role_map import RoleMap
from gopt.analysis.training import StateKind
from gopt.errors import UnsupportedError
from gopt.verification.verify import Verifier

RATE = 0.1


def gate(b: Builder) -> str:
    """A flag over the loss scale's kind of state: true in the second step."""
    count = b.state("count", np.float32(1))
    b.output("count_out", b.op("Add", count, b.const(1.0)), ())
    return b.op("Greater", count, b.const(1.5))


def sgd(b: Builder, name: str, g: str) -> str:
    return b.op("Sub", name, b.op("Mul", g, b.const(RATE)))


def gated(b: Builder, name: str, g: str) -> str:
    return b.op("Where", gate(b), sgd(b, name, g), name)


def sign(b: Builder, g: str) -> str:
    return b.op("Div", g, b.op("Add", b.op("Abs", g), b.const(1e-3)))


UPDATES: dict[str, Callable[[Builder, str, str], str]] = {
    "gate, Identity": lambda b, w, g: b.op("Identity", gated(b, w, g)),
    "gate, Mul": lambda b, w, g: b.op("Mul", gated(b, w, g), b.const(0.999)),
    "gate, Clip": lambda b, w, g: b.op("Clip", gated(b, w, g), b.const(-0.5), b.const(0.5)),
    "gate, Neg, Neg": lambda b, w, g: b.op("Neg", b.op("Neg", gated(b, w, g))),
    "gate, mask": lambda b, w, g: b.op("Mul", gated(b, w, g), b.const(np.eye(3, 4))),
    "step back": lambda b, w, g: b.op("Mul", b.op("Sub", sgd(b, w, sign(b, g)), w), b.op("Add", w, b.const(1.0))),
    "multiplicative": lambda b, w, g: b.op("Mul", w, b.op("Exp", b.op("Mul", g, b.const(-RATE)))),
    "multiplicative, behind": lambda b, w, g: b.op(
        "Mul", b.op("Mul", w, b.op("Exp", b.op("Mul", g, b.const(-RATE)))), b.const(0.99)
    ),
    "relative": lambda b, w, g: b.op("Mul", w, b.op("Sub", b.const(1.0), b.op("Mul", sign(b, g), b.const(RATE)))),
    "relative, behind": lambda b, w, g: b.op(
        "Add", b.op("Mul", w, b.op("Sub", b.const(1.0), b.op("Mul", sign(b, g), b.const(RATE)))), b.const(1e-3)
    ),
    "lerp": lambda b, w, g: b.op(
        "Add", b.op("Mul", w, b.const(0.5)), b.op("Mul", sgd(b, w, b.op("Mul", g, b.op("Abs", g))), b.const(0.5))
    ),
    "through a half": lambda b, w, g: b.op("Cast", b.op("Cast", sgd(b, w, sign(b, g)), to=10), to=1),
    "centred": lambda b, w, g: sgd(b, w, b.op("Sub", g, b.op("ReduceMean", g, keepdims=1))),
    "flat, clipped": lambda b, w, g: sgd(
        b, w, b.op("Reshape", b.op("Clip", b.op("Reshape", g, b.const([-1], "int64")), b.const(-0.01), b.const(0.01)),
                   b.const([3, 4], "int64"))
    ),
}  # fmt: skip


def step(update: Callable[[Builder, str, str], str], folder: Path) -> tuple[Path, Network]:
    b = Builder()
    net = perceptron(b, (3, 4), bias=False)
    b.output("loss", net.loss, ())
    b.output("w0_out", update(b, "w0", net.gradients["w0"]), (3, 4))
    return b.save(folder / "step.onnx"), net


@pytest.mark.parametrize("what", UPDATES)
def test_the_gradient_is_the_one_that_was_written(what, tmp_path):
    path, net = step(UPDATES[what], tmp_path)
    source = gopt.load(path)
    if what != "centred":  # cut behind the mean, which passes through: the update can be split there
        assert source.training.gradients == net.gradients
    for stage in (0, 2):
        gopt.shard(source, 3, stage=stage).write(tmp_path / f"out{stage}")
        assert Verifier(tmp_path / f"out{stage}").run(steps=3, confirm=False).equal


@pytest.mark.parametrize("what", UPDATES)
def test_the_mean_is_taken_of_that_value(what, tmp_path):
    """An oracle of its own: the true gradient of each batch by hand, their mean through the source's update."""
    import onnx
    from onnx.reference import ReferenceEvaluator

    from gopt.runtime.engines.threads import run_ranks
    from gopt.runtime.executor import Executor
    from gopt.runtime.session import SessionCache

    path, net = step(UPDATES[what], tmp_path)
    sharded = gopt.shard(gopt.load(path), 2, stage=0)
    sharded.write(tmp_path / "out")
    model = onnx.load(path)
    start = {each.name: onnx.numpy_helper.to_array(each) for each in model.graph.initializer}
    generator = np.random.default_rng(7)
    batches = [
        {name: generator.standard_normal(shape).astype(np.float32) for name, shape in (("x", (4, 3)), ("y", (4, 4)))}
        for _ in range(2)
    ]
    w = start["w0"].astype(np.float64)
    gradients = [2 / 16 * batch["x"].T @ (batch["x"] @ w - batch["y"]) for batch in batches]
    update = _behind(model, net.gradients["w0"])
    feeds = {net.gradients["w0"]: np.mean(gradients, axis=0).astype(np.float32), "w0": start["w0"]}
    if "count" in start:
        feeds["count"] = start["count"] + 1
    wanted = ReferenceEvaluator(update).run(None, feeds)[0]
    from gopt.ir.load import load

    programs = [Executor(load(tmp_path / "out" / f"rank_{r:04d}.onnx", own=True), SessionCache()) for r in range(2)]
    given = [{**{k: v for k, v in feeds.items() if k in program.graph.inputs}, **batch}
             for program, batch in zip(programs, batches)]  # fmt: skip
    for outputs in run_ranks(programs, given, sharded.program.mesh):
        np.testing.assert_allclose(outputs["w0_out"], wanted, atol=1e-5)


def _behind(model, gradient):
    """The update alone: everything that the new value needs, with the gradient as an input."""
    import onnx
    from onnx import helper

    needed, kept = {"w0_out"}, []
    for node in reversed(model.graph.node):
        if needed.intersection(node.output) and gradient not in node.output:
            kept.append(node)
            needed.update(node.input)
    inputs = [each for each in model.graph.input if each.name in needed]
    inputs.append(helper.make_tensor_value_info(gradient, 1, (3, 4)))
    constants = [each for each in model.graph.initializer if each.name in needed]
    outputs = [each for each in model.graph.output if each.name == "w0_out"]
    graph = helper.make_graph(kept[::-1], "update", inputs, outputs, constants)
    return onnx.helper.make_model(graph, opset_imports=model.opset_import, ir_version=10)


def test_an_identity_behind_every_output_of_an_accumulating_step(tmp_path):
    """The smallest case that 5,010 tests did not see."""
    import onnx
    from onnx import helper

    model = onnx.load(FIXTURES / "mlp_adamw_accum.onnx")
    for output in model.graph.output:
        inner = f"{output.name}.inner"
        for node in model.graph.node:
            for names in (node.input, node.output):
                names[:] = [inner if name == output.name else name for name in names]
        model.graph.node.append(helper.make_node("Identity", [inner], [output.name]))
    onnx.save(model, tmp_path / "step.onnx")
    plain = gopt.load(FIXTURES / "mlp_adamw_accum.onnx").training
    other = gopt.load(tmp_path / "step.onnx").training
    assert other.gradients == plain.gradients
    assert [(s.tensor, s.kind, s.of) for s in other.states] == [(s.tensor, s.kind, s.of) for s in plain.states]


def test_a_low_precision_parameter_and_its_master(tmp_path):
    """Both are states; nothing but its type and its value ties the half to the master."""
    b = Builder()
    net = perceptron(b, (3, 5, 5, 2), bias=False, half=True)
    b.output("loss", net.loss, ())
    # The network casts its parameters down; here the halves are stored.
    casts = {node.input[0]: node for node in b.nodes if node.op_type == "Cast" and node.input[0] in net.params}
    for name, shape in net.params.items():
        master = next(tensor for tensor in b.stored if tensor.name == name)
        value = np.frombuffer(master.raw_data, np.float32).reshape(shape).astype(np.float16)
        casts[name].op_type = "Identity"
        casts[name].input[:] = [b.state(f"{name}.half", value)]
        del casts[name].attribute[:]
        new = sgd(b, name, net.gradients[name])
        b.output(f"{name}.half_out", b.op("Cast", new, to=10), shape, "float16")
        b.output(f"{name}_out", new, shape)
    source = gopt.load(b.save(tmp_path / "step.onnx"))
    training = source.training
    assert {s.tensor: s.updated for s in training.states} == {
        name: f"{name}_out" for param in net.params for name in (param, f"{param}.half")
    }
    kinds = {s.tensor: (s.kind, s.of) for s in training.states}
    assert all(kinds[f"{name}.half"] == (StateKind.PARAMETER, None) for name in net.params)
    assert all(kinds[name] == (StateKind.OPTIMIZER_STATE, f"{name}.half") for name in net.params)
    for stage in (0, 2, 3):
        gopt.shard(source, 3, stage=stage).write(tmp_path / f"out{stage}")
        assert Verifier(tmp_path / f"out{stage}").run(steps=2).equal


def test_steps_of_scalars_alone(tmp_path):
    b = Builder()
    x, y = b.input("x", (6,)), b.input("y", (6,))
    slope, offset = b.state("slope", np.float32(0.3)), b.state("offset", np.float32(0.1))
    rest = b.op("Sub", b.op("Add", b.op("Mul", x, slope), offset), y)
    delta = b.op("Mul", rest, b.const(2 / 6))
    b.output("loss", b.op("ReduceMean", b.op("Mul", rest, rest), keepdims=0), ())
    gradients = {
        slope: b.op("ReduceSum", b.op("Mul", delta, x), keepdims=0), offset: b.op("ReduceSum", delta, keepdims=0),
    }  # fmt: skip
    for name, gradient in gradients.items():
        b.output(f"{name}_out", sgd(b, name, gradient), ())
    source = gopt.load(b.save(tmp_path / "step.onnx"))
    assert source.training.gradients == gradients and source.training.loss == "loss"
    gopt.shard(source, 2).write(tmp_path / "out")
    assert Verifier(tmp_path / "out").run(steps=2).equal


# --- what is refused ------------------------------------------------------------------------------------------------


def refused(update: Callable[[Builder, str, str], str], folder: Path, match: str) -> None:
    with pytest.raises(UnsupportedError, match=match) as caught:
        gopt.load(step(update, folder)[0])
    assert caught.value.hints


def test_a_rate_that_follows_the_loss_is_refused(tmp_path):
    refused(lambda b, w, g: sgd(b, w, b.op("Mul", g, _loss(b))), tmp_path, "depends on the loss")


def test_a_gate_that_follows_the_loss_is_refused(tmp_path):
    refused(
        lambda b, w, g: b.op("Where", b.op("Less", _loss(b), b.const(9.0)), sgd(b, w, g), w), tmp_path,
        "depends on the loss",
    )  # fmt: skip


def _loss(b: Builder) -> str:
    return next(value for value, name in b.renamed.items() if name == "loss")


def test_a_count_that_the_loss_does_not_know_is_refused(tmp_path):
    """A rate of each rank's own."""

    def update(b: Builder, w: str, g: str) -> str:
        count = b.op("ReduceSum", b.op("Cast", b.op("Greater", "x", b.const(0.0)), to=1), keepdims=0)
        return sgd(b, w, b.op("Div", g, b.op("Add", count, b.const(1.0))))

    refused(update, tmp_path, "one rank's own batch")


def test_a_function_of_the_forward_alone_is_refused_by_name(tmp_path):
    """1/y² may be the gradient of -1/y, or the update by the inverse of a gradient y²: the graph does not say."""
    b = Builder()
    x, w = b.input("x", (4,)), b.parameter("w", (4,))
    y = b.op("Add", x, w)
    square = b.op("Mul", y, y)
    loss = b.op("ReduceSum", b.op("Neg", b.op("Reciprocal", y)), keepdims=0)
    b.output("loss", loss, ())
    b.output("w_out", b.op("Sub", w, b.op("Reciprocal", square)), (4,))
    with pytest.raises(UnsupportedError, match=square) as caught:
        gopt.load(b.save(tmp_path / "step.onnx"))
    assert "--params w=" in caught.value.hints[0]


def test_a_state_that_is_made_anew_is_no_partner_of_the_parameter(tmp_path):
    """last' = g + 0.02 w reads w and not last: paired with w it would leave last to w'."""
    b = Builder()
    net = perceptron(b, (3, 4), bias=False)
    last = b.small("last", (3, 4))
    new = b.op("Add", net.gradients["w0"], b.op("Mul", "w0", b.const(0.02)))
    both = b.op("Sub", b.op("Mul", new, b.const(1.5)), b.op("Mul", last, b.const(0.5)))
    b.output("loss", net.loss, ())
    b.output("w0_out", sgd(b, "w0", both), (3, 4))
    b.output("last_out", new, (3, 4))
    with pytest.raises(UnsupportedError, match="may replace any of") as caught:
        gopt.load(b.save(tmp_path / "step.onnx"))
    assert "--states" in caught.value.hints[0]


def test_a_gradient_of_another_shape_is_refused_by_name(tmp_path):
    """A parameter is used turned, and its gradient clipped before it is turned back."""
    b = Builder()
    x, w = b.input("x", (4, 3)), b.parameter("w", (2, 3))
    out = b.op("MatMul", x, b.op("Transpose", w, perm=[1, 0]))
    b.output("loss", b.op("ReduceMean", b.op("Mul", out, out), keepdims=0), ())
    turned = b.op("MatMul", b.op("Transpose", x, perm=[1, 0]), b.op("Mul", out, b.const(2 / 8)))
    clipped = b.op("Transpose", b.op("Clip", turned, b.const(-0.1), b.const(0.1)), perm=[1, 0])
    b.output("w_out", sgd(b, "w", clipped), (2, 3))
    with pytest.raises(UnsupportedError, match=f"{turned}.*shape"):
        gopt.load(b.save(tmp_path / "step.onnx"))


def test_an_adjoint_behind_a_sum_of_itself_belongs_to_the_backward(tmp_path):
    """Spectral norm: W / (uᵀ W v). Its gradient adds u vᵀ times a sum over the adjoint: no clip coefficient."""
    b = Builder()
    x, y = b.input("x", (4, 3)), b.input("y", (4, 5))
    w, u, v = (
        b.parameter("w", (3, 5)),
        b.state("u", np.full(3, 3**-0.5, np.float32)),
        b.state("v", np.full(5, 5**-0.5, np.float32)),
    )
    row, column = b.op("Reshape", u, b.const([1, 3], "int64")), b.op("Reshape", v, b.const([5, 1], "int64"))
    turned = b.op("MatMul", w, column)
    sigma = b.op("Reshape", b.op("MatMul", row, turned), b.const([], "int64"))
    scaled = b.op("Div", w, sigma)
    rest = b.op("Sub", b.op("MatMul", x, scaled), y)
    b.output("loss", b.op("ReduceMean", b.op("Mul", rest, rest), keepdims=0), ())
    delta = b.op("Mul", rest, b.const(2.0 / 20))
    turned_adjoint = b.op("MatMul", b.op("Transpose", delta, perm=[1, 0]), x)
    adjoint, twin = (b.op("Transpose", turned_adjoint, perm=[1, 0]) for _ in range(2))
    share = b.op("Neg", b.op("Div", b.op("ReduceSum", b.op("Mul", twin, scaled), keepdims=0), sigma))
    outer = b.op("Mul", b.op("Mul", b.op("Transpose", row, perm=[1, 0]), share), b.op("Transpose", column, perm=[1, 0]))
    gradient = b.op("Add", b.op("Div", adjoint, sigma), outer)
    length = b.op("Reshape", b.op("ReduceL2", turned, keepdims=0), b.const([], "int64"))
    b.output("u_new", b.op("Div", b.op("Reshape", turned, b.const([3], "int64")), length), (3,))
    b.output("w_new", b.op("Sub", w, b.op("Mul", gradient, b.const(0.1))), (3, 5))
    path = b.save(tmp_path / "step.onnx")
    source = gopt.load(path, roles=RoleMap(states={"u": "u_new"}))
    assert source.training.gradients == {"w": gradient}
    gopt.shard(source, 3).write(tmp_path / "out")
    assert Verifier(tmp_path / "out").run(steps=3).exit_code == 0


def clipped(b: Builder, gradients: dict[str, str]) -> dict[str, str]:
    return {name: b.op("Clip", value, b.const(-0.1), b.const(0.1)) for name, value in gradients.items()}


def bounded(b: Builder, gradients: dict[str, str]) -> dict[str, str]:
    norm = b.op("Sqrt", b.op("Sum", *(b.op("ReduceSumSquare", value, keepdims=0) for value in gradients.values())))
    factor = b.op("Min", b.op("Div", b.const(0.1), norm), b.const(1.0))
    return {name: b.op("Mul", value, factor) for name, value in gradients.items()}


@pytest.mark.parametrize("clip", [clipped, bounded])
def test_as_many_samples_as_elements_make_no_gradient_of_an_adjoint(clip, tmp_path):
    """A bias of four elements, four samples, a head of one output: the adjoint of the output has the bias's shape, its
    sum is the gradient of the head's bias, and the clip was refused as a part of the backward."""
    b = Builder()
    x, y = b.input("x", (4, 4)), b.input("y", (4,))
    bias, head, end = b.parameter("bias", (4,)), b.parameter("head", (4, 1)), b.parameter("end", (1,))
    moved = b.op("Add", x, bias)
    out = b.op("Squeeze", b.op("Add", b.op("MatMul", moved, head), end), b.const([1], "int64"))
    rest = b.op("Sub", b.op("Sigmoid", out), y)
    loss = b.op("ReduceMean", b.op("Sub", b.op("Softplus", out), b.op("Mul", out, y)), keepdims=0)
    b.output("loss", loss, ())
    adjoint = b.op("Unsqueeze", b.op("Div", rest, b.const(4.0)), b.const([1], "int64"))
    rows = b.op("MatMul", adjoint, b.op("Transpose", head, perm=[1, 0]))
    gradients = {
        "head": b.op("MatMul", b.op("Transpose", moved, perm=[1, 0]), adjoint),
        "bias": b.op("ReduceSum", rows, b.const([0], "int64"), keepdims=0),
        "end": b.op("ReduceSum", adjoint, b.const([0], "int64"), keepdims=0),
    }
    shapes = {"head": (4, 1), "bias": (4,), "end": (1,)}
    for name, value in clip(b, gradients).items():
        b.output(f"{name}_out", sgd(b, name, value), shapes[name])
    source = gopt.load(b.save(tmp_path / "step.onnx"))
    assert source.training.gradients == gradients
    gopt.shard(source, 3).write(tmp_path / "out")
    assert Verifier(tmp_path / "out").run(steps=2).exit_code == 0


HISTORY = """<ir_version: 9, opset_import: ["" : 18]>
step (float[4,3] x, float[4,2] y, float[3,2] w, float[2] amax) => (float loss, float[3,2] w_out, float[2] amax_out)
<float[3,2] w = {0.1, 0.2, 0.3, 0.4, 0.5, 0.6}, float[2] amax = {0.5, 0.7}> {
  p = MatMul(x, w)
  e = Sub(p, y)
  q = Mul(e, e)
  loss = ReduceMean<keepdims = 0>(q)
  four = Constant<value_float = 4.0>()
  d = Div(e, four)
  scale = ReduceMax<keepdims = 0>(amax)
  wide = Div(d, scale)
  whole = Round(wide)
  back = Mul(whole, scale)
  t = Transpose<perm = [1, 0]>(x)
  g = MatMul(t, back)
  rate = Constant<value_float = 0.1>()
  s = Mul(g, rate)
  w_out = Sub(w, s)
  size = Abs(d)
  one = Constant<value_ints = [1]>()
  zero = Constant<value_ints = [0]>()
  top = ReduceMax<keepdims = 0>(size)
  row = Reshape(top, one)
  old = Slice(amax, zero, one)
  amax_out = Concat<axis = 0>(row, old)
}"""


def test_a_history_that_names_pair_is_asked_for_as_a_statistic(tmp_path):
    """It was asked for as an input that is fed, which no step that follows the hint can run with."""
    onnx.save(onnx.parser.parse_model(HISTORY), str(tmp_path / "step.onnx"))
    with pytest.raises(UnsupportedError, match="it reads 'amax', which no loss depends on") as caught:
        gopt.load(tmp_path / "step.onnx")
    assert caught.value.hints[0].startswith("if amax is a statistic that the backward reads, say how ranks combine it")
    roles = RoleMap(statistics={"amax": "max"})
    assert gopt.verify(gopt.shard(gopt.load(tmp_path / "step.onnx", roles=roles), 2), steps=1).outcome.value == "equal"
