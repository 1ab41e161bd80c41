"""One rank's graph, cut at its collectives into segments, each an onnxruntime session. The only importer of it.

A segment holds the nodes that depend on the same number of collectives, so a call waits for no more than it needs.
Every run makes fresh outputs: no buffer is shared between an input and an output, so no update can overwrite a value
that is still read.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import onnx

from gopt.errors import RunError, UnsupportedError
from gopt.graph.model import COMM, Graph, Node, Tensor, value_info
from gopt.graph.types import TensorType, dtype_code

Values = dict[str, np.ndarray]
Call = Callable[[int, Node, list[np.ndarray]], list[np.ndarray]]
INLINE = 1024
"""Constants of at most so many bytes are part of the session, larger ones are fed."""
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def runtime() -> Any:
    """The onnxruntime module; raises RunError when it is missing or broken."""
    try:
        import onnxruntime
    except ImportError as error:
        raise RunError(f"onnxruntime cannot be imported: {error}", "pip install onnxruntime-gpu") from error
    if not hasattr(onnxruntime, "InferenceSession"):
        raise RunError(
            "onnxruntime is broken: onnxruntime and onnxruntime-gpu overwrite each other",
            "pip uninstall onnxruntime onnxruntime-gpu; pip install onnxruntime-gpu",
        )
    return onnxruntime


class SessionCache:
    """Sessions by what they compute: ranks with an equal segment share one."""

    def __init__(self) -> None:
        self._sessions: dict[str, Any] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._sessions)

    def session(self, model: bytes) -> Any:
        key = hashlib.sha256(model).hexdigest()
        with self._lock:
            if key not in self._sessions:
                self._sessions[key] = _session(model)
            return self._sessions[key]


def _session(model: bytes) -> Any:
    ort = runtime()
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    try:
        return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises classes of its own for every cause
        raise UnsupportedError(f"onnxruntime cannot run the graph: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:400] if str(error).strip() else type(error).__name__


@dataclass(slots=True)
class Segment:
    """Nodes that run as one session."""

    session: Any
    inputs: list[str]
    outputs: list[str]
    drop: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Collective:
    """A call between segments."""

    index: int
    node: Node
    drop: list[str] = field(default_factory=list)


class Program:
    """A graph ready to run: segments and calls in order."""

    def __init__(self, graph: Graph, cache: SessionCache) -> None:
        self.graph = graph
        self.calls = [node for node in graph.nodes if node.domain == COMM]
        self._constants = {
            name: np.asarray(tensor.numpy()) for name, tensor in graph.initializers.items() if name not in graph.inputs
        }
        self._defaults = {name: t for name, t in graph.initializers.items() if name in graph.inputs}
        self.steps = self._plan(cache)

    def _plan(self, cache: SessionCache) -> list[Segment | Collective]:
        graph = self.graph
        level: dict[str, int] = {}
        groups: list[list[Node]] = [[] for _ in range(len(self.calls) + 1)]
        seen = 0
        made_in: dict[str, int] = {}
        for node in graph.nodes:
            depth = max((level.get(name, 0) for name in node.reads), default=0)
            if node.domain == COMM:
                seen += 1
                depth = seen
            else:
                groups[depth].append(node)
                made_in.update((name, depth) for name in node.outputs)
            level.update((name, depth) for name in node.outputs if name)
        exported = set(graph.outputs) | {name for node in self.calls for name in node.inputs}
        for place, group in enumerate(groups):
            exported.update(name for node in group for name in node.reads if made_in.get(name, place) != place)
        steps: list[Segment | Collective] = []
        for place, group in enumerate(groups):
            if place:
                steps.append(Collective(place - 1, self.calls[place - 1]))
            if group:
                steps.append(self._segment(group, exported, cache))
        self._free_early(steps)
        return steps

    def _segment(self, nodes: list[Node], exported: set[str], cache: SessionCache) -> Segment:
        graph = self.graph
        made = {name for node in nodes for name in node.outputs if name}
        reads = dict.fromkeys(name for node in nodes for name in node.reads if name not in made)
        inline = [name for name in reads if name in self._constants and self._constants[name].nbytes <= INLINE]
        inputs = [name for name in reads if name not in set(inline)]
        outputs = [name for node in nodes for name in node.outputs if name in exported]
        body = onnx.GraphProto(name="segment")
        body.node.extend(node.to_proto() for node in nodes)
        body.input.extend(value_info(name, self._type(name)) for name in inputs)
        body.output.extend(value_info(name, graph.type_of(name)) for name in outputs)
        for name in inline:
            proto = onnx.numpy_helper.from_array(self._constants[name], name)
            body.initializer.append(proto)
        model = onnx.ModelProto()
        model.CopyFrom(graph.header)
        del model.metadata_props[:]
        for opset in [opset for opset in model.opset_import if opset.domain == COMM]:
            model.opset_import.remove(opset)
        model.graph.CopyFrom(body)
        return Segment(cache.session(model.SerializeToString(deterministic=True)), inputs, outputs)

    def _type(self, name: str) -> TensorType:
        type = self.graph.type_of(name)
        if type.dtype == "undefined":
            raise UnsupportedError(f"the type of value {name!r} is not known: it cannot be fed to a session")
        return type

    def _free_early(self, steps: list[Segment | Collective]) -> None:
        """Note after which step each value is read for the last time."""
        last: dict[str, Segment | Collective] = {}
        for step in steps:
            names = step.inputs if isinstance(step, Segment) else step.node.inputs
            last.update(dict.fromkeys(names, step))
        for name, step in last.items():
            if name not in self.graph.outputs and name not in self._constants:
                step.drop.append(name)

    def run(self, feeds: Values, call: Call) -> Values:
        """One step: graph inputs in, graph outputs out. ``call(index, node, inputs)`` performs a collective."""
        held: Values = {**self._constants, **feeds}
        for name, tensor in self._defaults.items():
            if name not in held:
                held[name] = np.asarray(tensor.numpy())
        missing = [name for name in self.graph.inputs if name not in held]
        if missing:
            raise RunError(f"no value was given for input {missing[0]!r}")
        for step in self.steps:
            if isinstance(step, Segment):
                held.update(zip(step.outputs, run_session(step, held, self.graph)))
            else:
                results = call(step.index, step.node, [held[name] for name in step.node.inputs])
                held.update(zip(step.node.outputs, results))
            for name in step.drop:
                held.pop(name, None)
        return {name: held[name] for name in self.graph.outputs}


def run_session(segment: Segment, held: Values, graph: Graph) -> list[np.ndarray]:
    """Run a segment on NumPy values of any type, bfloat16 included."""
    feeds = {name: to_ort(held[name], graph.type_of(name).dtype) for name in segment.inputs}
    try:
        results = segment.session.run_with_ort_values(segment.outputs, feeds)
    except Exception as error:  # onnxruntime raises classes of its own for every cause
        raise RunError(f"onnxruntime failed: {_first_line(error)}") from error
    return [from_ort(value) for value in results]


def to_ort(array: np.ndarray, dtype: str) -> Any:
    """An OrtValue of an array; bfloat16 travels as its bits."""
    ort = runtime()
    array = np.ascontiguousarray(array).reshape(np.shape(array))
    if array.dtype == BFLOAT16:
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), dtype_code(dtype))
    return ort.OrtValue.ortvalue_from_numpy(array)


def from_ort(value: Any) -> np.ndarray:
    """A copy of an OrtValue; the OrtValue may go."""
    if value.data_type() != "tensor(bfloat16)":
        return np.array(value.numpy())
    raw = (ctypes.c_char * value.tensor_size_in_bytes()).from_address(value.data_ptr())
    return np.frombuffer(raw, BFLOAT16).reshape(value.shape()).copy()


def evaluator(graph: Graph, outputs: Sequence[str]) -> Callable[[Values], Values]:
    """A function that computes ``outputs``; by onnxruntime, or by onnx's own evaluator where it has no kernel."""
    cut = Graph(
        graph.name, graph.nodes, graph.inputs, {name: graph.types[name] for name in outputs},
        graph.initializers, graph.types, graph.header, {},
    )  # fmt: skip
    try:
        program = Program(cut, SessionCache())
    except UnsupportedError:
        return _reference(cut)

    def run(feeds: Values) -> Values:
        return program.run({name: feeds[name] for name in graph.inputs if name in feeds}, _refuse)

    return run


def _refuse(index: int, node: Node, inputs: list[np.ndarray]) -> list[np.ndarray]:
    raise RunError(f"{node.op_type} needs other ranks")


def _reference(graph: Graph) -> Callable[[Values], Values]:
    from onnx.reference import ReferenceEvaluator

    model = onnx.ModelProto()
    model.CopyFrom(graph.header)
    model.graph.name = graph.name
    model.graph.node.extend(node.to_proto() for node in graph.nodes)
    model.graph.input.extend(value_info(name, type) for name, type in graph.inputs.items())
    model.graph.output.extend(value_info(name, type) for name, type in graph.outputs.items())
    model.graph.initializer.extend(_initializer(name, tensor) for name, tensor in graph.initializers.items())
    session = ReferenceEvaluator(model)
    names = list(graph.outputs)

    def run(feeds: Values) -> Values:
        given = {name: feeds[name] for name in graph.inputs if name in feeds}
        with np.errstate(all="ignore"):
            return {name: np.asarray(v) for name, v in zip(names, session.run(names, given))}  # type: ignore[arg-type]

    return run


def _initializer(name: str, tensor: Tensor) -> onnx.TensorProto:
    return onnx.numpy_helper.from_array(np.ascontiguousarray(tensor.numpy()).reshape(tensor.type.dims), name)
