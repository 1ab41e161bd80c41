"""Small steps written as ONNX text, their gradients known by name, and ranks of them on batches of their own.

The reference cuts the written step at its gradients and runs both parts with ONNX Runtime: of gopt it knows nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gopt.cli.main import main
from node_models import session
from onnx import ModelProto, helper, numpy_helper, parser, shape_inference
from rank_files import Values
from rank_simulator import World

SHAPES = {"w0": (3, 5), "b0": (5,), "w1": (5, 2), "b1": (2,)}
NET = """
  quarter = Constant<value = float {0.25}>()
  zero = Constant<value = float {0}>()
  first = Constant<value_ints = [0]>()
  h0 = MatMul(x, w0)
  h1 = Add(h0, b0)
  h = Relu(h1)
  o0 = MatMul(h, w1)
  o = Add(o0, b1)
  d = Sub(o, y)
  square = Mul(d, d)
  loss = ReduceMean<keepdims = 0>(square)
  do = Mul(d, quarter)
  gb1 = ReduceSum<keepdims = 0>(do, first)
  ht = Transpose<perm = [1, 0]>(h)
  gw1 = MatMul(ht, do)
  w1t = Transpose<perm = [1, 0]>(w1)
  dh = MatMul(do, w1t)
  above = Greater(h1, zero)
  mask = Cast<to = 1>(above)
  dh1 = Mul(dh, mask)
  gb0 = ReduceSum<keepdims = 0>(dh1, first)
  xt = Transpose<perm = [1, 0]>(x)
  gw0 = MatMul(xt, dh1)
"""
"""Forward and backward of a perceptron of two layers; the gradient of ``w0`` is ``gw0``."""
TOLERANCE = 1e-4


def each(text: str, names: Sequence[str] = tuple(SHAPES)) -> str:
    """The text once for each parameter; ``@`` is its name, ``#`` its shape."""
    return "".join(text.replace("@", name).replace("#", ",".join(map(str, SHAPES.get(name, ())))) for name in names)


def sgd(names: Sequence[str] = tuple(SHAPES)) -> str:
    return each("  s_@ = Mul(g@, lr)\n  @_out = Sub(@, s_@)\n", names)


MOMENTUM = "  kept = Constant<value = float {0.9}>()\n" + each(
    "  a_@ = Mul(@_m, kept)\n  @_m_out = Add(a_@, g@)\n  s_@ = Mul(@_m_out, lr)\n  @_out = Sub(@, s_@)\n"
)
MOMENTS = {f"{name}_m": ("float", shape) for name, shape in SHAPES.items()}
FINITE = (
    each("  f_@ = IsInf(g@)\n  n_@ = IsNaN(g@)\n  q_@ = Or(f_@, n_@)\n  r_@ = Cast<to = 1>(q_@)\n")
    + each("  bad_@ = ReduceSum<keepdims = 0>(r_@)\n")
    + f"  bad = Sum({', '.join(f'bad_{name}' for name in SHAPES)})\n"
    + "  any_bad = Greater(bad, zero)\n  ok = Not(any_bad)\n"
)
"""``ok``: every gradient is finite."""


@dataclass(frozen=True)
class Written:
    """A step. ``states``: those beside the parameters, name -> type and shape; each is replaced by ``NAME_out``.

    ``shown``: other outputs; ``batch``: other inputs; ``functions``: text behind the graph; ``start``: stored values;
    ``shapes``: those of the parameters; ``loss``: that of the loss.
    """

    body: str
    states: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    shown: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    batch: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    functions: str = ""
    start: Mapping[str, Any] = field(default_factory=dict)
    gradients: Sequence[str] = tuple(f"g{name}" for name in SHAPES)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: SHAPES)
    loss: tuple[int, ...] = ()

    def model(self) -> ModelProto:
        parameters = {name: ("float", shape) for name, shape in self.shapes.items()}
        held = parameters | dict(self.states)
        fed = {"x": ("float", (4, 3)), "y": ("float", (4, 2)), **self.batch, "lr": ("float", ())}
        outputs = {"loss": ("float", self.loss), **{f"{name}_out": kind for name, kind in held.items()}, **self.shown}
        opsets = '"" : 20' + (', "own" : 1' if self.functions else "")
        model: ModelProto = parser.parse_model(
            f"<ir_version: 10, opset_import: [{opsets}]> step ({_listed(fed | held)}) => ({_listed(outputs)}) "
            f"{{ {self.body} }} {self.functions}"
        )
        generator = np.random.default_rng(5)
        for name, (kind, shape) in held.items():
            drawn = generator.standard_normal(shape) / 2 if name in parameters else generator.uniform(0.1, 0.5, shape)
            value = np.asarray(self.start.get(name, drawn)).astype("float32" if kind == "float" else kind)
            model.graph.initializer.append(numpy_helper.from_array(value.reshape(shape), name))
        for place, node in enumerate(model.graph.node):
            node.name = f"n{place}"
        return model


def _listed(values: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    return ", ".join(
        f"{kind}[{','.join(map(str, shape))}] {name}" if shape else f"{kind} {name}"
        for name, (kind, shape) in values.items()
    )


def saved(model: ModelProto, folder: Path) -> Path:
    path = folder / "step.onnx"
    path.write_bytes(model.SerializeToString())
    return path


Change = Callable[[int, int, Values], None]
"""Changes what a rank is fed in a step: number of the step, rank, what was drawn."""


def hold_ranks(
    step: Written,
    folder: Path,
    ranks: int,
    stage: int,
    *options: str,
    change: Change | None = None,
    file: ModelProto | None = None,
    steps: int = 2,
) -> None:
    """Raise AssertionError unless ranks on different batches give the states and outputs of the step.

    ``file``: the same step in another form, which gopt reads.
    """  # fmt: skip
    model, out = step.model(), folder / f"{ranks}_{stage}"
    path = saved(file or model, folder)
    assert main(["shard", str(path), "--ranks", str(ranks), "--stage", str(stage), "-o", str(out), *options]) == 0
    world, reference = World(out), _Reference(model, step.gradients)
    states = {name: f"{name}_out" for name in (*step.shapes, *step.states)}
    assert {each["tensor"]: each["updated"] for each in world.manifest["states"]} == states
    values = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer if each.name in states}
    first, held = dict(values), [world.feeds(rank, values) for rank in world.ranks]
    for number in range(steps):
        feeds = [_drawn(model, states, number, rank, change) for rank in world.ranks]
        world.step(held, [feeds])
        expected = reference.step(values, feeds)
        for name, updated in states.items():
            whole = world.whole(held)[name]
            _close(name, whole, expected[0][updated], first[name])
            values[name] = expected[0][updated]
        for rank, outputs in enumerate(expected):
            for name in outputs.keys() - set(states.values()):
                _close(f"{name} of rank {rank}", world.last[rank][name], outputs[name], np.zeros(()))


def _drawn(model: ModelProto, states: Mapping[str, str], number: int, rank: int, change: Change | None) -> Values:
    generator, found = np.random.default_rng([number, rank]), {"lr": np.full((), 0.05, np.float32)}
    for each in model.graph.input:
        if each.name not in states and each.name != "lr":
            shape = [size.dim_value for size in each.type.tensor_type.shape.dim]
            dtype = helper.tensor_dtype_to_np_dtype(each.type.tensor_type.elem_type)
            found[each.name] = (generator.standard_normal(shape) * (1 + rank)).astype(dtype)
            if dtype.kind in "iu":
                found[each.name] = generator.integers(0, 2, shape, dtype)
    if change is not None:
        change(number, rank, found)
    return found


class _Reference:
    """Local gradients of each rank, their mean, and the update of that mean."""

    def __init__(self, model: ModelProto, gradients: Sequence[str]) -> None:
        types = {each.name: each for each in shape_inference.infer_shapes(model).graph.value_info}
        local, rest = ModelProto(), ModelProto()
        local.CopyFrom(model)
        rest.CopyFrom(model)
        local.graph.output.extend(types[name] for name in gradients)
        for node in rest.graph.node:
            node.output[:] = [f"{name}.local" if name in gradients else name for name in node.output]
        rest.graph.input.extend(types[name] for name in gradients)
        self.gradients, self.local, self.rest = list(gradients), session(local), session(rest)
        self.outputs = [each.name for each in model.graph.output]

    def step(self, states: Values, feeds: Sequence[Values]) -> list[Values]:
        """All outputs of each rank."""
        found = [self.local.run(self.gradients, {**states, **fed}) for fed in feeds]
        with np.errstate(invalid="ignore"):
            means = {name: np.asarray(np.mean(list(parts), 0)) for name, parts in zip(self.gradients, zip(*found))}
        return [dict(zip(self.outputs, self.rest.run(self.outputs, {**states, **fed, **means}))) for fed in feeds]


def _close(name: str, found: np.ndarray, wanted: np.ndarray, before: np.ndarray) -> None:
    """The contract's measure: by the change, with a floor by the value."""
    assert found.dtype == wanted.dtype, name
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(wanted), name)
    numbers = np.isfinite(wanted)
    due, found = wanted.astype(float), found.astype(float)
    change = np.linalg.norm(due[numbers] - np.broadcast_to(before.astype(float), due.shape)[numbers])
    error = np.linalg.norm(found[numbers] - due[numbers])
    assert error <= TOLERANCE * (change + 1e-3 * np.linalg.norm(due[numbers])), f"{name}: {error} of {change}"


def infinite_on_one(number: int, rank: int, fed: Values) -> None:
    """In the second step rank 1 has an infinite sample."""
    if (number, rank) == (1, 1):
        fed["x"][0, 0] = np.inf
