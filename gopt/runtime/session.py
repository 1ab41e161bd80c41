"""Running graphs on ONNX Runtime's CPU: one session per segment, shared by all ranks that have an equal one.

The only file that imports the runtime, and only when something is to run.

No step writes into memory that it was given: every step makes fresh outputs. Binding a new state to its old one's
memory would save a copy, but ONNX Runtime does not see when the old value is still read, and gives wrong results
without a word.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx

from gopt.errors import GoptError, RunError, UnsupportedError
from gopt.graph.model import COMM, Graph, Node
from gopt.graph.types import TensorType, dtype_code, dtype_name, known
from gopt.runtime.cut import Call, Segment, cut, dropped
from gopt.runtime.lower import lower_halves
from gopt.runtime.proto import build_model, is_constant, is_small, stored
from gopt.sources.expand import expand

Array: TypeAlias = npt.NDArray[Any]
CallBack: TypeAlias = Callable[[int, Node, list[Array]], list[Array]]
"""What does a collective: number of the call in the file, its node, its inputs -> its outputs."""

_PROVIDERS = ["CPUExecutionProvider"]
_PACKED = frozenset({"int4", "uint4", "float4e2m1"})
"""NumPy keeps one element in a byte, the runtime two."""
_INSTALL = "install exactly one of onnxruntime and onnxruntime-gpu: they share a folder, and removing one breaks both"


class NoKernelError(RunError):
    """The runtime knows an operator, but not for these types."""


# --- the runtime ----------------------------------------------------------------------------------------------------


@functools.cache
def _runtime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise RunError(f"ONNX Runtime cannot be imported: {error}", _INSTALL) from error
    if not hasattr(onnxruntime, "InferenceSession"):
        # What is left when one of two wheels that share the folder was uninstalled.
        raise RunError("ONNX Runtime is installed, but empty", _INSTALL)
    return onnxruntime


class SessionCache:
    """Sessions by the bytes of their models. May be shared by threads; sessions too may run in many at once."""

    def __init__(self) -> None:
        self.built = 0
        self.reused = 0
        self._sessions: dict[bytes, Any] = {}
        self._lock = threading.Lock()

    def get(self, model: bytes) -> Any:
        """The session of a model, built on first use. Raises NoKernelError, or RunError on anything else."""
        key = hashlib.sha256(model).digest()
        with self._lock:
            if key in self._sessions:
                self.reused += 1
            else:
                self._sessions[key] = _session(model)
                self.built += 1
            return self._sessions[key]


def _session(model: bytes) -> Any:
    runtime = _runtime()
    options = runtime.SessionOptions()
    options.log_severity_level = 4  # what is fatal is raised as well
    # Ranks are the threads. A pool per session costs milliseconds each, and its size could show in the results.
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    # Basic: nothing that swaps an operator for an approximation, or depends on the processor's layout.
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    # An arena per session would hold on to the memory of every value that has crossed a border.
    options.enable_cpu_mem_arena = False
    try:
        return runtime.InferenceSession(model, options, providers=_PROVIDERS)
    except Exception as error:  # its exceptions have no common base
        kind = NoKernelError if type(error).__name__ == "NotImplemented" else RunError
        raise kind(f"ONNX Runtime refuses a segment: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:500]


# --- values ---------------------------------------------------------------------------------------------------------


def array_dtype(array: Array) -> str:
    """The manifest's word for an array's element type; raises RunError where ONNX has none."""
    try:
        return dtype_name(onnx.helper.np_dtype_to_tensor_dtype(array.dtype))
    except (ValueError, KeyError):
        raise RunError(f"ONNX has no tensors of {array.dtype}") from None


def _value(array: Array) -> Any:
    """A runtime value over an array's own memory; it keeps the array alive."""
    dtype = array_dtype(array)
    array = np.require(array, requirements="C")
    values = _runtime().OrtValue
    if dtype == "string" or array.dtype == object:
        raise UnsupportedError("strings cannot be handed to ONNX Runtime")
    if dtype in _PACKED:
        raise UnsupportedError(f"tensors of {dtype} cannot cross the border of a segment")
    if array.dtype.isbuiltin == 2:  # one of NumPy's add-on types, which the runtime takes as mere bits
        return values.ortvalue_from_numpy_with_onnx_type(array.view(f"u{array.itemsize}"), dtype_code(dtype))
    return values.ortvalue_from_numpy(array)


class _Memory:
    """A runtime value's memory, for NumPy to look at. NumPy keeps this, and this the value, alive."""

    def __init__(self, value: Any, shape: Sequence[int], itemsize: int) -> None:
        self.value = value
        # As plain bits: NumPy's protocol has no word for bfloat16.
        self.__array_interface__ = {
            "data": (value.data_ptr(), False), "shape": tuple(shape), "typestr": f"<V{itemsize}", "version": 3,
        }  # fmt: skip


def _array(value: Any) -> Array:
    """An array over a runtime value's own memory."""
    dtype = onnx.helper.tensor_dtype_to_np_dtype(value.element_type())
    shape = value.shape()
    if dtype.hasobject:
        result: Array = value.numpy()
        return result
    if 0 in shape:
        return np.zeros(shape, dtype)  # no memory to look at: its address is null
    return np.asarray(_Memory(value, shape, dtype.itemsize)).view(dtype)


# --- programs -------------------------------------------------------------------------------------------------------


class _Piece:
    """A segment with its session, and the types of what it makes."""

    def __init__(self, segment: Segment, graph: Graph, types: dict[str, TensorType], cache: SessionCache) -> None:
        embedded = [name for name in segment.inputs if is_constant(graph, name) and is_small(graph.initializers[name])]
        self.inputs = tuple(name for name in segment.inputs if name not in set(embedded))
        self.outputs = segment.outputs
        model = build_model(
            graph.header,
            segment.nodes,
            {name: _border_type(name, types) for name in self.inputs},
            # A declared output shape that is off would be a warning, and no shape is needed.
            {name: TensorType(types[name].dtype if name in types else "undefined", None) for name in self.outputs},
            [stored(name, graph.initializers[name]) for name in embedded],
        )
        self._session = cache.get(model.SerializeToString(deterministic=True))
        for info in self._session.get_outputs():
            types.setdefault(info.name, _runtime_type(info.type))

    def run(self, values: Mapping[str, Any]) -> list[Any]:
        binding = self._session.io_binding()
        for name in self.inputs:
            binding.bind_ortvalue_input(name, values[name])
        for name in self.outputs:
            binding.bind_output(name, "cpu")
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:  # its exceptions have no common base
            raise RunError(f"ONNX Runtime failed: {_first_line(error)}") from error
        results: list[Any] = binding.get_outputs()
        return results


def _border_type(name: str, types: Mapping[str, TensorType]) -> TensorType:
    type = types.get(name)
    if type is None or not known(type.dtype):
        raise UnsupportedError(
            f"the type of value {name!r}, which crosses a call, is unknown", "declare it in the file (value_info)"
        )
    return type


def _runtime_type(text: str) -> TensorType:
    """``tensor(float)`` -> float32, of unknown shape."""
    word = text.removeprefix("tensor(").removesuffix(")")
    word = {"float": "float32", "double": "float64"}.get(word, word)
    return TensorType(word if known(word) else "undefined", None)


class Program:
    """A rank's graph, or one without collectives, made ready to run on the CPU.

    Halves are lowered to float32 operators on the way. ``graph`` is not changed. Raises UnsupportedError where a
    type that is needed is unknown, NoKernelError where the runtime has no kernel, RunError where it refuses.
    """

    def __init__(self, graph: Graph, cache: SessionCache) -> None:
        self.graph = graph = lower_halves(expand(graph, "gopt.run"))
        self._inputs = graph.inputs
        self._initial = {name: graph.initializers[name] for name in graph.inputs if name in graph.initializers}
        self._outputs = tuple(graph.outputs)
        steps = cut(graph)
        self._dropped = dropped(steps, self._outputs)
        types = graph.types | graph.inputs
        self._steps = [step if isinstance(step, Call) else _Piece(step, graph, types, cache) for step in steps]
        self._constants = self._resident(graph)

    def _resident(self, graph: Graph) -> dict[str, Any]:
        """Constants that stand in no model: large ones, those that a call reads, and those that are outputs."""
        read = {name for step in self._steps for name in step.inputs} | set(self._outputs)
        names = [name for name in graph.initializers if name in read and name not in graph.inputs]
        return {name: _value(graph.initializers[name].numpy()) for name in names}

    def run(self, feeds: Mapping[str, Array], call: CallBack) -> dict[str, Array]:
        """One step: values for the inputs in, the graph's outputs out.

        A state that is not fed has its stored value. Outputs are memory of their own, but for those that are inputs
        or constants of the graph, which may be the very arrays that were fed. ``call`` is asked for every collective
        in file order; it may give no outputs where they are undefined (Reduce off its root). Raises RunError on
        feeds that do not fit, and when a segment fails.
        """
        values = self._start(feeds)
        for step, dead in zip(self._steps, self._dropped, strict=True):
            if isinstance(step, Call):
                made = self._call(step, values, call)
            else:
                made = dict(zip(step.outputs, step.run(values), strict=True))
            values.update(made)
            for name in dead:
                values.pop(name, None)
        return {name: _array(values[name]) for name in self._outputs}

    def _start(self, feeds: Mapping[str, Array]) -> dict[str, Any]:
        unknown = sorted(set(feeds) - set(self._inputs))
        if unknown:
            raise RunError(f"the graph has no input {unknown[0]!r}")
        values = dict(self._constants)
        for name, type in self._inputs.items():
            if name in feeds:
                array = np.asarray(feeds[name])
            elif name in self._initial:
                array = self._initial[name].numpy()
            else:
                raise RunError(f"input {name!r} ({type}) was not fed, and the file stores no value")
            _check_fed(name, type, array)
            values[name] = _value(array)
        return values

    def _call(self, step: Call, values: Mapping[str, Any], call: CallBack) -> dict[str, Any]:
        missing = [name for name in step.inputs if name not in values]
        if missing:
            raise RunError(f"{missing[0]!r} is undefined on this rank, and {step.node.op_type} reads it")
        results = call(step.index, step.node, [_array(values[name]) for name in step.inputs])
        names = step.node.outputs
        if results and len(results) != len(names):
            raise RunError(f"{step.node.op_type} {step.node.label!r} gave {len(results)} values, not {len(names)}")
        return {name: _value(array) for name, array in zip(names, results) if name}


def _check_fed(name: str, type: TensorType, array: Array) -> None:
    fits = type.shape is None or (
        len(type.shape) == array.ndim
        and all(size == due for size, due in zip(array.shape, type.shape) if isinstance(due, int))
    )
    if not fits or (known(type.dtype) and array_dtype(array) != type.dtype):
        raise RunError(f"input {name!r} is {type}, but was fed {array.dtype}{list(array.shape)}")


# --- whole graphs ---------------------------------------------------------------------------------------------------


def run_graph(graph: Graph, feeds: Mapping[str, Array], cache: SessionCache | None = None) -> dict[str, Array]:
    """One step of a graph without collectives; by the reference evaluator where the runtime has no kernel."""
    for node in graph.nodes:
        if node.domain == COMM:
            raise RunError(f"the graph holds the collective {node.op_type} {node.label!r}: it needs all its ranks")
    try:
        program = Program(graph, cache or SessionCache())
    except NoKernelError:
        return evaluate(graph, feeds)
    return program.run(feeds, _no_call)


def _no_call(index: int, node: Node, inputs: list[Array]) -> list[Array]:
    raise RunError(f"nobody runs call {index}, {node.op_type} {node.label!r}")


def evaluate(graph: Graph, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """One step by onnx's reference evaluator: slow, but it knows every type. For float64, above all."""
    from onnx.reference import ReferenceEvaluator

    given = {name: np.asarray(array) for name, array in feeds.items()}
    small = []
    types = dict(graph.inputs)
    for name, tensor in graph.initializers.items():
        if name not in given and is_constant(graph, name) and is_small(tensor):
            small.append(stored(name, tensor))
        elif name not in given:
            types[name], given[name] = tensor.type, tensor.numpy()
    for name in graph.inputs:
        if name not in given:
            raise RunError(f"input {name!r} was not fed, and the file stores no value")
    model = build_model(graph.header, graph.nodes, types, graph.outputs, small)
    try:
        with np.errstate(all="ignore"):
            results = ReferenceEvaluator(model).run(None, given)
    except GoptError:
        raise
    except Exception as error:  # it raises whatever NumPy does
        raise RunError(f"the reference evaluator failed: {_first_line(error)}") from error
    return {name: np.asarray(result) for name, result in zip(graph.outputs, results, strict=True)}


def check_halves(cache: SessionCache | None = None) -> None:
    """Raise RunError if this runtime removes the rounding between operators on halves: 2048 + 1 - 2048 must be 0.

    1 is lost when added to 2048 in either half. A few milliseconds; worth it before halves are compared.
    """
    for word, number in (("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)):
        feeds = {name: np.full(3, value, number) for name, value in (("a", 2048), ("b", 1))}
        result = run_graph(_self_test(word), feeds, cache)["d"].astype(np.float32)
        if result.any():
            raise RunError(f"this ONNX Runtime does not round {word} between operators: 2048 + 1 - 2048 = {result[0]}")


def _self_test(dtype: str) -> Graph:
    type = TensorType(dtype, (3,))
    nodes = [Node("Add", ["a", "b"], ["c"]), Node("Identity", ["c"], ["c2"]), Node("Sub", ["c2", "a"], ["d"])]
    header = onnx.ModelProto(ir_version=8, opset_import=[onnx.helper.make_opsetid("", 17)])
    types = dict.fromkeys(("a", "b", "c", "c2", "d"), type)
    return Graph("self_test", nodes, {"a": type, "b": type}, {"d": type}, {}, types, header)
