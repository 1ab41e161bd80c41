"""What several tests share: small training steps written by hand, scrambled names, reading and editing rank files."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

if TYPE_CHECKING:
    from gopt.api import Source
    from gopt.ir.graph import Graph, Node
    from gopt.runtime.session import SessionCache

ROOT = Path(__file__).parents[1]
FIXTURES = ROOT / "fixtures"


def script_of(path: str) -> Any:
    """A script of the repository as a module; its name is no other module's."""
    name = f"script_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def last_reads(nodes: Sequence[Node]) -> tuple[dict[str, str], dict[str, int]]:
    """View -> the value whose memory it is, and value -> the position of the last reader, of a view of it too."""
    from gopt.operators.kinds import VIEWS

    owner: dict[str, str] = {}
    last: dict[str, int] = {}
    for number, node in enumerate(nodes):
        if node.is_in(VIEWS) and node.inputs[0]:
            owner[node.outputs[0]] = owner.get(node.inputs[0], node.inputs[0])
        last.update((owner.get(name, name), number) for name in node.reads)
    return owner, last


NAMES = sorted(path.stem for path in FIXTURES.glob("*.onnx"))


@functools.cache
def _loaded(name: str) -> tuple[Source, tuple[int, ...]]:
    import gopt

    found = gopt.load(FIXTURES / f"{name}.onnx")
    return found, _extent(found)


def _extent(of: Source) -> tuple[int, ...]:
    training, graph = of.training, of.training.graph
    return tuple(map(len, (training.states, training.metrics, training.batch, graph.nodes, graph.types, graph.outputs)))


def source(name: str) -> Source:
    """A fixture as it is loaded, once for all tests of a process: nobody changes it."""
    found, extent = _loaded(name)
    assert _extent(found) == extent, f"an earlier test changed the shared source {name}"
    return found


def run_graph(
    graph: Graph, feeds: Mapping[str, np.ndarray], cache: SessionCache | None = None
) -> dict[str, np.ndarray]:
    """Run a graph without collectives once; by the reference evaluator where ONNX Runtime has no kernel."""
    from gopt.runtime.executor import Executor
    from gopt.runtime.reference_eval import evaluate
    from gopt.runtime.session import NoKernelError, SessionCache

    try:
        program = Executor(graph, cache or SessionCache())
    except NoKernelError:
        return evaluate(graph, feeds)
    return program.run(feeds)


CODES = {"float32": 1, "int64": 7, "bool": 9, "float16": 10}


def executed_lines(action: Callable[[], object]) -> int:
    """How many lines of Python an action runs, comprehensions included: what it costs on any machine."""
    count, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        nonlocal count
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


def is_clean(text: str) -> bool:
    """Whether a terminal obeys nothing of a text but line breaks."""
    return all(each == "\n" or each.isprintable() for each in text)


class Builder:
    """Writes an ONNX graph node by node. Every method returns the name of the value it makes."""

    def __init__(self, seed: int = 0) -> None:
        self.nodes: list[NodeProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.stored: list[TensorProto] = []
        self.renamed: dict[str, str] = {}
        self.generator = np.random.default_rng(seed)
        self.extra_domains: list[str] = []

    def op(self, op_type: str, *inputs: str, outputs: int = 1, domain: str = "", **attributes: Any) -> Any:
        """Add a node; its output's name, or the list of them."""
        names = [f"v{len(self.nodes)}_{slot}" for slot in range(outputs)]
        self.nodes.append(
            helper.make_node(op_type, inputs, names, name=f"n{len(self.nodes)}", domain=domain, **attributes)
        )
        return names[0] if outputs == 1 else names

    def const(self, value: Any, dtype: str = "float32") -> str:
        name = f"c{len(self.stored)}"
        self.stored.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def input(self, name: str, shape: Sequence[int | str], dtype: str = "float32") -> str:
        self.inputs.append(helper.make_tensor_value_info(name, CODES[dtype], shape))
        return name

    def state(self, name: str, value: np.ndarray, *, stored: bool = True) -> str:
        """An input that also has a value."""
        value = np.asarray(value)
        self.input(name, value.shape, str(value.dtype))
        if stored:
            self.stored.append(numpy_helper.from_array(value, name))
        return name

    def parameter(self, name: str, shape: Sequence[int]) -> str:
        return self.state(name, (0.4 * self.generator.standard_normal(shape)).astype(np.float32))

    def small(self, name: str, shape: Sequence[int]) -> str:
        """An optimizer state: small and positive."""
        return self.state(name, self.generator.uniform(1e-3, 1e-2, shape).astype(np.float32))

    def output(self, name: str, value: str, shape: Sequence[int | str] | None, dtype: str = "float32") -> str:
        """Let ``value`` be a graph output of that name; a value that is one already goes through an Identity.

        ``shape`` None: as onnx infers it.
        """
        if value in self.renamed or not any(value in node.output for node in self.nodes):
            value = self.op("Identity", value)
        self.renamed[value] = name
        self.outputs.append(helper.make_tensor_value_info(name, CODES[dtype], shape))
        return name

    def model(self) -> ModelProto:
        for node in self.nodes:
            for names in (node.input, node.output):
                names[:] = [self.renamed.get(name, name) for name in names]
        graph = helper.make_graph(self.nodes, "step", self.inputs, self.outputs, self.stored)
        opsets = [helper.make_opsetid("", 20), *(helper.make_opsetid(domain, 1) for domain in self.extra_domains)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        if not all(info.type.tensor_type.HasField("shape") for info in self.outputs):
            inferred = onnx.shape_inference.infer_shapes(model).graph.output
            del model.graph.output[:]
            model.graph.output.extend(inferred)
        return model

    def save(self, path: Path) -> Path:
        path.write_bytes(self.model().SerializeToString(deterministic=True))
        return path


@dataclass
class Network:
    """A multilayer perceptron with its backward, as far as the gradients."""

    builder: Builder
    params: dict[str, tuple[int, ...]] = field(default_factory=dict)
    gradients: dict[str, str] = field(default_factory=dict)
    """Parameter -> the value that is its gradient, in float32 and without a loss scale."""
    raw: dict[str, str] = field(default_factory=dict)
    """Parameter -> its gradient as the backward makes it."""
    loss: str = ""
    count: str = ""


def perceptron(
    b: Builder, widths: Sequence[int] = (3, 5, 2), *, batch: int = 4, bias: bool = True, tied: bool = False,
    half: bool = False, scale: str = "", loss: str = "mean",
) -> Network:  # fmt: skip
    """x → tanh(x W + b) … → squared error, with the backward written out.

    ``loss``: the mean over samples and outputs, the ``sum`` over samples, or ``weighted`` by an input ``mask``: the sum
    over samples divided by the sum of the mask, which is the value ``Network.count``.

    ``tied``: neighbouring layers of equal shape share one weight. ``half``: forward and backward run in float16.
    ``scale``: a scalar value by which the loss is multiplied before the backward.
    """
    net = Network(b)
    compute = "float16" if half else "float32"

    def narrow(name: str) -> str:
        return b.op("Cast", name, to=CODES["float16"]) if half else name

    def const(value: float) -> str:
        return b.const(value, compute)

    x = narrow(b.input("x", (batch, widths[0])))
    y = narrow(b.input("y", (batch, widths[-1])))
    layers: list[tuple[str, str, str, str]] = []
    weights: dict[tuple[int, int], str] = {}
    h = x
    for place, (rows, columns) in enumerate(itertools.pairwise(widths)):
        weight = weights.get((rows, columns)) if tied else None
        if weight is None:
            weight = weights[rows, columns] = b.parameter(f"w{place}", (rows, columns))
            net.params[weight] = (rows, columns)
        used = narrow(weight)
        z = b.op("MatMul", h, used)
        offset = ""
        if bias:
            offset = b.parameter(f"b{place}", (columns,))
            net.params[offset] = (columns,)
            z = b.op("Add", z, narrow(offset))
        layers.append((weight, used, offset, h))
        h = b.op("Tanh", z) if place < len(widths) - 2 else z
    difference = b.op("Sub", h, y)
    square = b.op("Mul", difference, difference)
    if loss == "mean":
        found_loss = b.op("ReduceMean", square, keepdims=0)
        delta = b.op("Mul", difference, const(2.0 / (batch * widths[-1])))
    else:
        each = b.op("ReduceMean", square, b.const([1], "int64"), keepdims=1)
        if loss == "weighted":
            mask = b.input("mask", (batch, 1))
            net.count = b.op("ReduceSum", mask, keepdims=0)
            each, difference = b.op("Mul", each, narrow(mask)), b.op("Mul", difference, narrow(mask))
        found_loss = b.op("ReduceSum", each, keepdims=0)
        delta = b.op("Mul", difference, const(2.0 / widths[-1]))
        if loss == "weighted":
            found_loss = b.op("Div", found_loss, narrow(net.count))
            delta = b.op("Div", delta, narrow(net.count))
    net.loss = b.op("Cast", found_loss, to=1) if half else found_loss
    if scale:
        delta = b.op("Mul", delta, b.op("Cast", scale, to=CODES["float16"]) if half else scale)
    found: dict[str, str] = {}
    for weight, used, offset, h in reversed(layers):
        if offset:
            found[offset] = b.op("ReduceSum", delta, b.const([0], "int64"), keepdims=0)
        own = b.op("MatMul", b.op("Transpose", h, perm=[1, 0]), delta)
        found[weight] = b.op("Add", found[weight], own) if weight in found else own
        if h != x:
            back = b.op("MatMul", delta, b.op("Transpose", used, perm=[1, 0]))
            delta = b.op("Mul", back, b.op("Sub", const(1.0), b.op("Mul", h, h)))
    for name in net.params:
        net.raw[name] = found[name]
    for name in net.params:
        gradient = b.op("Cast", found[name], to=1) if half else found[name]
        net.gradients[name] = b.op("Div", gradient, scale) if scale else gradient
    return net


def sgd(b: Builder, net: Network, rate: float = 0.1, skip: Iterable[str] = ()) -> None:
    """Loss and plain updates as outputs."""
    b.output("loss", net.loss, ())
    for name, shape in net.params.items():
        if name not in set(skip):
            new = b.op("Sub", name, b.op("Mul", net.gradients[name], b.const(rate)))
            b.output(f"{name}_out", new, shape)


# --- scrambling -----------------------------------------------------------------------------------------------------


def scramble(model: ModelProto, seed: int = 0) -> tuple[ModelProto, dict[str, str]]:
    """The same graph with every value and node renamed at random, and the map from old names to new ones."""
    model = ModelProto.FromString(model.SerializeToString())
    generator = random.Random(seed)
    table: dict[str, str] = {"": ""}

    def new(name: str) -> str:
        if name not in table:
            table[name] = f"q{generator.getrandbits(64):x}"
        return table[name]

    def graph(body: onnx.GraphProto) -> None:
        for each in (*body.input, *body.output, *body.value_info, *body.initializer):
            each.name = new(each.name)
        for node in body.node:
            node.name = new(f"node:{node.name}:{len(table)}")
            node.input[:] = [new(name) for name in node.input]
            node.output[:] = [new(name) for name in node.output]
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    graph(attribute.g)

    graph(model.graph)
    return model, table


# --- rank files -----------------------------------------------------------------------------------------------------


def stage_on(mesh: str, stage: int) -> int | None:
    """A drawn stage; None, the default, on a mesh whose ranks share out no states: gopt refuses any but 0 there."""
    axes = {axis.partition("=")[0] for axis in mesh.split(",")}
    return stage if not stage or "shard" in axes or "dp" not in axes else None


def mpiexec() -> str:
    """The launcher of a user: MPICH's, beside this interpreter or on the PATH."""
    beside = Path(sys.prefix, "bin", "mpiexec")
    return str(beside) if beside.is_file() else "mpiexec"


def job_code(done: subprocess.CompletedProcess[str]) -> int:
    """The code that a rank ended the job with: MPICH's own is that, or SIGKILL where it had to end another rank."""
    aborted = re.search(r"MPI_Abort\(comm=\w+, (\d+)\)", done.stderr)
    return int(aborted[1]) if aborted and done.returncode == signal.SIGKILL else done.returncode


def rank_path(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:04d}.onnx"


def edit_rank(folder: Path, rank: int, edit: Callable[[ModelProto], object]) -> None:
    """Change one rank's file in place; values stay in states.bin."""
    edit_file(rank_path(folder, rank), edit)


def edit_file(path: Path, edit: Callable[[ModelProto], object]) -> None:
    model = onnx.load(str(path), load_external_data=False)
    edit(model)
    path.write_bytes(model.SerializeToString(deterministic=True))
    accept(path.parent)


def edit_ranks(folder: Path, edit: Callable[[ModelProto], object]) -> None:
    for path in sorted(folder.glob("rank_*.onnx")):
        edit_rank(folder, int(path.stem.split("_")[1]), edit)


def edit_manifest(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "manifest.json"
    record = json.loads(path.read_text())
    edit(record)
    path.write_text(json.dumps(record))
    accept(folder)


def accept(folder: Path) -> None:
    """Seal a folder that a test has edited, unless it is none, or its documents are too damaged for that."""
    import gopt

    with suppress(gopt.GoptError):
        gopt.seal(folder)


def calls(model: ModelProto, *op_types: str) -> list[NodeProto]:
    """The collectives of a rank file, in order."""
    return [
        node for node in model.graph.node
        if node.domain == "gopt.comm" and (not op_types or node.op_type in op_types)
    ]  # fmt: skip


def op_counts(model: ModelProto) -> dict[str, int]:
    counts: dict[str, int] = {}
    for node in model.graph.node:
        key = f"{node.domain}.{node.op_type}"
        counts[key] = counts.get(key, 0) + 1
    return dict(sorted(counts.items()))


def folder_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
