"""The values of a rewritten graph: constants by content, producers, and fresh names."""

from __future__ import annotations

import numpy as np

from gopt.ir.graph import Graph, Node
from gopt.ir.tensor import Tensor
from gopt.ir.types import TensorType, dtype_name


class Values:
    """Looks values up, and adds new values. Equal constants are stored once."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.producers: dict[str, Node] = {}
        """Value -> the node that makes it, of those that were met."""
        self._stored: dict[object, str] = {}
        self._taken = {*graph.inputs, *graph.initializers, *(name for node in graph.nodes for name in node.outputs)}
        for name, tensor in list(graph.initializers.items()):
            if name not in graph.inputs and tensor.nbytes <= 1024:
                self._stored.setdefault(_key(tensor.numpy()), name)

    def produce(self, node: Node) -> None:
        self.producers.update((name, node) for name in node.outputs if name)

    def array(self, name: str) -> np.ndarray | None:
        """Return a constant's value; None for a computed value, a fed value or a state."""
        tensor = self.graph.initializers.get(name)
        return None if tensor is None or name in self.graph.inputs else tensor.numpy()

    def integers(self, name: str) -> list[int] | None:
        """Return a constant list of whole numbers, such as axes; None if computed."""
        value = self.array(name) if name else None
        return None if value is None else [int(number) for number in value.reshape(-1)]

    def constant(self, value: np.ndarray, name: str = "") -> str:
        """Return the name of a constant with this value; a new constant is named ``name`` if given."""
        array = np.asarray(value)
        key = _key(array)
        if key not in self._stored:
            name = self._stored[key] = name or self.fresh("constant")
            kind = TensorType(dtype_name(_code(array)), array.shape)
            self.graph.initializers[name] = Tensor(kind, array=array)
            self.graph.types[name] = kind
        return self._stored[key]

    def fresh(self, stem: str) -> str:
        """Return an unused name."""
        number, name = 1, stem
        while name in self._taken:
            number, name = number + 1, f"{stem}.{number}"
        self._taken.add(name)
        return name

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the dimensions of a value; None unless all are known."""
        kind = self.graph.types.get(name)
        return kind.dims if kind is not None and kind.static else None


def _key(array: np.ndarray) -> object:
    return array.dtype.str, array.shape, array.tobytes()


def _code(array: np.ndarray) -> int:
    import onnx

    return int(onnx.helper.np_dtype_to_tensor_dtype(array.dtype))
