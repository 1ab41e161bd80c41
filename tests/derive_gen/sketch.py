"""A forward model that grows node by node. Each node is run in float64 as it is added, so that every shape is known."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from node_models import model_of
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from .kernels import KERNELS

LARGEST, MOST = 60.0, 240
"""Size of an element and number of elements above which a result is thrown away."""
KINK = 1e-3
"""Numbers nearer than this to each other tie."""


class Rejected(Exception):
    """A draw made no sensible operator: another is drawn."""


class Sketch:
    """``values``: every value so far. ``stored``: initializers. ``weights``: those of them, and of Constant nodes, that
    are parameters. ``fed``: the inputs."""

    def __init__(self, random: np.random.Generator, opset: int, batch: int) -> None:
        self.random, self.opset, self.batch = random, opset, batch
        self.nodes: list[NodeProto] = []
        self.values: dict[str, np.ndarray] = {}
        self.stored: dict[str, np.ndarray] = {}
        self.weights: dict[str, np.ndarray] = {}
        self.narrow: dict[str, int] = {}
        """Stored values of another type than float32."""
        self.fed: dict[str, np.ndarray] = {}
        self.floats: list[str] = []
        """Values that may be operands of what comes next."""
        self.count = 0

    # --- drawing ----------------------------------------------------------------------------------------------------

    def chance(self, share: float) -> bool:
        return bool(self.random.random() < share)

    def below(self, bound: int, least: int = 0) -> int:
        if bound <= least:
            raise Rejected
        return int(self.random.integers(least, bound))

    def one_of(self, *choices: Any) -> Any:
        return choices[self.below(len(choices))]

    def pick(self, *ranks: int) -> str:
        """A value, a late one more likely, of one of these ranks."""
        known = [name for name in self.floats if not ranks or self.values[name].ndim in ranks]
        if not known:
            raise Rejected
        late = known[-4:] if self.chance(0.8) else known
        return str(self.one_of(*late))

    def shape(self, name: str) -> tuple[int, ...]:
        return self.values[name].shape

    def name(self, stem: str) -> str:
        self.count += 1
        return f"{stem}{self.count}"

    # --- values -----------------------------------------------------------------------------------------------------

    def numbers(self, shape: tuple[int, ...], scale: float = 0.7) -> np.ndarray:
        return np.asarray(self.random.standard_normal(shape) * scale).astype(np.float32).astype(np.float64)

    def weight(self, *shape: int, scale: float = 0.7, positive: bool = False) -> str:
        """A parameter: new, or one that is used elsewhere already; a Constant node, or narrow and cast."""
        if self.chance(0.2):
            same = [name for name in self.weights if self.shape(name) == shape and name not in self.narrow]
            turned = [name for name in self.weights if self.shape(name)[::-1] == shape and name not in self.narrow]
            if same and not positive:
                return str(self.one_of(*same))
            if turned and len(shape) == 2 and not positive:
                return self.op("Transpose", [self.one_of(*turned)], perm=[1, 0])
        array = self.numbers(shape, scale)
        array = np.abs(array) + 0.3 if positive else array
        name = self.name("w")
        if self.chance(0.1) and array.size > 1:
            literal = numpy_helper.from_array(array.astype(np.float32), name)
            self.nodes.append(helper.make_node("Constant", [], [name], value=literal))
            self.values[name] = self.weights[name] = array
            return name
        if self.chance(0.06) and array.size > 1:
            kind, dtype = self.one_of((TensorProto.FLOAT16, np.float16), (TensorProto.DOUBLE, np.float64))
            self.narrow[name] = kind
            array = array.astype(dtype).astype(np.float64)
        self.stored[name] = self.values[name] = self.weights[name] = array
        return self.op("Cast", [name], to=TensorProto.FLOAT) if name in self.narrow else name

    def ints(self, values: Any) -> str:
        """A constant of whole numbers: an initializer, or a Constant node."""
        array, name = np.array(values, np.int64), self.name("i")
        self.values[name] = array
        if self.chance(0.3):
            self.nodes.append(helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array, name)))
        else:
            self.stored[name] = array
        return name

    def scalar(self, value: float) -> str:
        """A floating constant without dimensions, which is not trained."""
        name = self.name("c")
        self.values[name] = self.stored[name] = np.array(value, np.float32).astype(np.float64)
        return name

    def input(self, array: np.ndarray) -> str:
        name = self.name("x")
        self.values[name] = self.fed[name] = array
        return name

    # --- nodes ------------------------------------------------------------------------------------------------------

    def op(self, op_type: str, inputs: list[str], **attributes: Any) -> str:
        return self.ops(op_type, inputs, 1, **attributes)[0]

    def ops(self, op_type: str, inputs: list[str], outputs: int, domain: str = "", **attributes: Any) -> list[str]:
        names = [self.name("v") for _ in range(outputs)]
        node = helper.make_node(op_type, inputs, names, domain=domain, **attributes)
        self.run(node)
        self.nodes.append(node)
        return names

    def run(self, node: NodeProto) -> None:
        """Compute the results of a node; raises Rejected for those that are too many, too large or near a kink."""
        known = {name: self.values[name] for name in reads(node) if name}
        for name, value in zip(node.output, evaluated(node, known, self.opset)):
            if value.size > MOST or value.size == 0:
                raise Rejected
            if value.dtype.kind == "f" and not (np.abs(value) < LARGEST).all():
                raise Rejected
            self.values[name] = value

    def use(self, name: str) -> None:
        """Let what comes next read a value."""
        if self.values[name].dtype == np.float64:
            self.floats.append(name)

    def apart(self, *arrays: np.ndarray) -> None:
        """Raise Rejected where numbers nearly tie, so that a comparison of them has no derivative."""
        for first, second in itertools.pairwise(arrays):
            if (np.abs(first - second) < KINK).any():
                raise Rejected

    def distinct(self, array: np.ndarray, axis: int | None = None) -> None:
        """Raise Rejected where two elements along an axis nearly tie."""
        ordered = np.sort(array, axis=-1 if axis is None else axis) if axis is not None else np.sort(array.ravel())
        if (np.diff(ordered, axis=-1 if axis is None else axis) < KINK).any():
            raise Rejected

    # --- going back -------------------------------------------------------------------------------------------------

    def place(self) -> tuple[Any, ...]:
        return (
            len(self.nodes),
            dict(self.stored),
            dict(self.weights),
            dict(self.narrow),
            dict(self.fed),
            list(self.floats),
        )

    def back(self, place: tuple[Any, ...]) -> None:
        count, self.stored, self.weights, self.narrow, self.fed, self.floats = place
        del self.nodes[count:]


def reads(node: NodeProto) -> set[str]:
    """What a node reads, its bodies included."""
    found = set(node.input)
    for each in node.attribute:
        if each.HasField("g"):
            made = {name for inner in each.g.node for name in inner.output} | {one.name for one in each.g.input}
            inside = {name for inner in each.g.node for name in reads(inner)} | {one.name for one in each.g.output}
            found |= inside - made - {one.name for one in each.g.initializer}
    return found


def evaluated(node: NodeProto, known: dict[str, np.ndarray], opset: int) -> list[np.ndarray]:
    """The results of one node in float64."""
    model = wide(model_of([node], known, node.output, opset=opset))
    try:
        with np.errstate(all="ignore"):
            return [np.asarray(each) for each in ReferenceEvaluator(model, new_ops=KERNELS).run(None, known)]
    except Exception as error:  # it raises whatever NumPy does
        raise Rejected(str(error)) from error


FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)


def wide(model: ModelProto) -> ModelProto:
    """The model in float64 throughout."""
    twin = ModelProto.FromString(model.SerializeToString())
    _widen(twin.graph)
    for function in twin.functions:
        for node in function.node:
            _widen_node(node)
    return twin


def _widen(graph: GraphProto) -> None:
    for each in (*graph.input, *graph.output, *graph.value_info):
        if each.type.tensor_type.elem_type in FLOATS:
            each.type.tensor_type.elem_type = TensorProto.DOUBLE
    for tensor in graph.initializer:
        _widen_tensor(tensor)
    for node in graph.node:
        _widen_node(node)


def _widen_node(node: NodeProto) -> None:
    for each in node.attribute:
        if each.HasField("g"):
            _widen(each.g)
        if each.HasField("t"):
            _widen_tensor(each.t)
        if each.name in ("to", "dtype", "stash_type") and each.i in FLOATS:
            each.i = TensorProto.DOUBLE


def _widen_tensor(tensor: TensorProto) -> None:
    if tensor.data_type in FLOATS:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name))
