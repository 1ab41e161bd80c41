"""Runs graphs on ONNX Runtime's CPU: one session per segment, shared by all ranks with an equal segment.

The only file that imports onnxruntime, and only when something is to run.

A session never writes into its inputs. Binding a new state to the memory of the old value would save a copy, but ONNX
Runtime does not see when the old value is still read, and returns wrong results without an error."""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Mapping, Sequence, Set
from typing import Any, TypeAlias

import numpy.typing as npt
import onnx

from gopt.errors import RunError, UnsupportedError
from gopt.ir.graph import Graph
from gopt.ir.types import TensorType, known
from gopt.runtime.automatic_pads import with_pads
from gopt.runtime.partition import Segment
from gopt.runtime.proto import build_model, is_embedded, stored
from gopt.runtime.runtime_errors import node_error

Array: TypeAlias = npt.NDArray[Any]

CPU = "CPUExecutionProvider"
WRONG = frozenset({"Pad_Fusion", "MatMul_BatchNormalization_Fusion", "DoubleQDQPairsRemover"})
"""Rewrites that compute another function: the zeros of a Pad become the infinities with which a MaxPool pads (and a
pool whose kernel is not larger is refused); a scale for each channel becomes one for each column of the product, also
where a Transpose stands between them; of two quantisations one is left, with a scale that neither of them had.
``tests/engine_gen`` looks for further ones."""
WRONG_EMPTY = frozenset({"MatMulAddFusion"})
"""Rewrites that are wrong about values without elements: a product of [2, 0, 3] and its bias are reshaped to [0, 3],
where a zero stands for the length that was there."""
_OTHER_BITS = frozenset({"TransposeOptimizer", "DivMulFusion", "NoopElimination", "NotWhereFusion"})
"""Rewrites of level basic that change bits: (1 / a) · b becomes b / a; 0 + a, and a Where after a Not, give zeros of
another sign; a Transpose that moves past a reduction changes the order of its sum. A node would then have another
result in a session than alone, or than when it is cut from its neighbours."""
_INSTALL = "install exactly one of onnxruntime and onnxruntime-gpu: they share a folder, and removing one breaks both"


class NoKernelError(RunError):
    """The operator has no kernel for these types in ONNX Runtime."""


# --- the runtime ----------------------------------------------------------------------------------------------------


@functools.cache
def runtime() -> Any:
    """The module onnxruntime; raises RunError for an unusable installation."""
    try:
        import onnxruntime
    except ImportError as error:
        if error.name == "onnxruntime":
            raise RunError(
                "running graphs needs ONNX Runtime, which is not installed", "pip install 'gopt[run]'"
            ) from None
        raise RunError(f"ONNX Runtime cannot be imported: {error}", _INSTALL) from error
    if not hasattr(onnxruntime, "InferenceSession"):
        # What is left when one of two wheels that share the folder was uninstalled.
        raise RunError("ONNX Runtime is installed, but empty", _INSTALL)
    memory = onnxruntime.OrtMemoryInfo(
        "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
    )
    # Grow by the requested size, not by powers of two.
    onnxruntime.create_and_register_allocator(memory, onnxruntime.OrtArenaCfg({"arena_extend_strategy": 1}))
    return onnxruntime


class SessionCache:
    """Sessions by the bytes of models. Threads may share a cache; a session may run on several threads at once."""

    def __init__(self, deadline: float | None = None, keep: bool = True) -> None:
        self.device: Any = None
        """The device that sessions are for; None: the host."""
        self.deadline, self.keep = deadline, keep
        """Seconds after which a run is ended; None: never. Whether memory that a run frees is kept for the next."""
        self.built = 0
        self.reused = 0
        self._sessions: dict[bytes, Any] = {}
        self._lock = threading.Lock()

    def get(self, model: bytes, *, empty: bool = False) -> Any:
        """The session of a model, built on first use; ``empty``: some value has no elements. Raises NoKernelError
        where a kernel is missing, RunError on any other error."""
        key = hashlib.sha256(model).digest() + bytes([empty])
        with self._lock:
            if key in self._sessions:
                self.reused += 1
            else:
                self._sessions[key] = self.build(model, empty=empty)
                self.built += 1
            return self._sessions[key]

    def build(self, model: bytes, *, empty: bool = False) -> Any:
        """Build a new session; raises as ``get`` does."""
        session = make_session(model, [CPU], empty=empty, disabled=_OTHER_BITS, keep=self.keep)
        return session if self.deadline is None else _DeadlineSession(session, self.deadline)


class _DeadlineSession:
    """A session with runs that end after a deadline, because the loops of a file may not terminate."""

    def __init__(self, session: Any, deadline: float) -> None:
        self._session, self._deadline = session, deadline

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run_with_iobinding(self, binding: Any) -> None:
        """Run. Raises RunError when the time is up; ONNX Runtime checks between two operators, also in loops."""
        options = runtime().RunOptions()
        over = threading.Event()

        def end() -> None:
            over.set()
            options.terminate = True

        timer = threading.Timer(self._deadline, end)
        timer.daemon = True
        timer.start()
        try:
            self._session.run_with_iobinding(binding, options)
        except Exception as error:
            if not over.is_set():
                raise
            name = self._session.get_outputs()[0].name
            what = f"what makes {name!r} still ran after {self._deadline:g} s (--deadline)"
            raise RunError(what, "a loop of the model may be endless; raise --deadline if it is only slow") from error
        finally:
            timer.cancel()


def make_session(
    model: bytes, providers: Sequence[Any], *, empty: bool = False, disabled: Set[str] = frozenset(),
    rewrites: bool = True, keep: bool = True, **more: Any,
) -> Any:  # fmt: skip
    """Build a session: the one place where gopt does. ONNX Runtime's rewrites known to be wrong are off.

    ``empty``: some value has no elements; ``disabled``: further rewrites to switch off; without ``rewrites`` all are
    off. ``keep``: freed memory is kept for the next run. ``more``: further arguments of InferenceSession. Raises as
    ``SessionCache.get`` does."""
    ort = runtime()
    options = ort.SessionOptions()
    options.log_severity_level = 4  # fatal errors are raised as well
    # Ranks are the threads. A pool per session costs milliseconds each, and its size could show in the results.
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    # Basic: nothing that swaps an operator for an approximation, or depends on the processor's layout.
    levels = ort.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_BASIC if rewrites else levels.ORT_DISABLE_ALL
    if not keep:
        options.enable_cpu_mem_arena = options.enable_mem_pattern = False
    elif providers == [CPU]:
        # One arena for all: fresh pages cost more than most operators, and an arena per session would hold on to the
        # memory of every value that leaves a segment.
        options.add_session_config_entry("session.use_env_allocators", "1")
    else:
        options.use_deterministic_compute = True
    off = WRONG | disabled | (WRONG_EMPTY if empty else frozenset())
    try:
        return ort.InferenceSession(with_pads(model), options, providers=providers, disabled_optimizers=off, **more)
    except RunError:
        raise
    except Exception as error:  # its exceptions have no common base
        raise refusal(error) from error


def shrink_arena() -> None:
    """Give the memory of the sessions' arena that no value has back to the system: what runs next needs other sizes."""
    options = runtime().RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    _idle_session().run(None, {}, options)


@functools.cache
def _idle_session() -> Any:
    """A session of one constant: the arena is shrunk behind a run."""
    node = onnx.helper.make_node("Constant", [], ["one"], value_float=1.0)
    output = onnx.helper.make_tensor_value_info("one", onnx.TensorProto.FLOAT, [])
    model = onnx.helper.make_model(
        onnx.helper.make_graph([node], "idle", [], [output]),
        ir_version=8,
        opset_imports=[onnx.helper.make_opsetid("", 17)],
    )
    return make_session(model.SerializeToString(), [CPU])


def refusal(error: Exception) -> RunError:
    """Return the RunError for a session that cannot be built."""
    kind = NoKernelError if type(error).__name__ == "NotImplemented" else RunError
    if "under development and support for this is limited" in str(error):
        return RunError(
            "this ONNX Runtime does not know the operator set that the step is written for",
            "install a newer onnxruntime-gpu, or export for an older operator set",
        )
    return kind(f"ONNX Runtime refuses a segment: {first_line(error)}")


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:500]


# --- segments -------------------------------------------------------------------------------------------------------


def session_of(
    segment: Segment, graph: Graph, types: dict[str, TensorType], cache: SessionCache, rows: Sequence[str] = ()
) -> tuple[tuple[str, ...], Any]:
    """The segment inputs outside the session's constants, and the session. ``rows`` have an open length.

    ``types`` gets the types of the segment's results.
    """
    embedded = [name for name in segment.inputs if is_embedded(graph, name)]
    inputs = tuple(name for name in segment.inputs if name not in set(embedded))
    typed = {name: _boundary_type(name, types) for name in inputs}
    typed |= {name: TensorType(typed[name].dtype, ("rows",)) for name in rows}
    model = build_model(
        graph.header,
        segment.nodes,
        typed,
        # A declared output shape that is off would be a warning, and no shape is needed.
        {name: TensorType(types[name].dtype if name in types else "undefined", None) for name in segment.outputs},
        [stored(name, graph.initializers[name]) for name in embedded],
    )
    read = {name for node in segment.nodes for name in node.reads}
    empty = any(name in types and 0 in (types[name].shape or ()) for name in read)
    session = cache.get(model.SerializeToString(deterministic=True), empty=empty)
    for info in session.get_outputs():
        types.setdefault(info.name, _runtime_type(info.type))
    return inputs, session


def run_bound(session: Any, binding: Any) -> None:
    """Run a session on a binding; raises RunError."""
    try:
        session.run_with_iobinding(binding)
    except RunError:
        raise
    except Exception as error:  # its exceptions have no common base
        raise node_error(error) from error


def results_of(binding: Any) -> list[Any]:
    """The results of a run, each by itself. One of ``get_outputs`` keeps the binding alive, with all other results and
    the operands made by other runs; so all results of a chain of runs would stay until the last result goes."""
    vector = binding.get_outputs_as_ortvaluevector()
    new, value_of = type(vector), runtime().OrtValue
    results = []
    for value in vector:
        single = new()
        single.push_back(value)
        results.append(value_of(single[0]))
    return results


def _boundary_type(name: str, types: Mapping[str, TensorType]) -> TensorType:
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
