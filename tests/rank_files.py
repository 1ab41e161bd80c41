"""Files of ranks, run in pieces between their calls and messages. Nothing of gopt is imported here."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
from node_models import info, session
from onnx import ModelProto, NodeProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from steps_gen.graphs import reads

Array = np.ndarray
Values = dict[str, Array]
Call = tuple[NodeProto, list[Array | None]]
Run = Generator[Call, list[Array], Values]
Answers = Mapping[int, list[Array]]

COMM = "gopt.comm"
KNOWN_OPSET, KNOWN_IR = 26, 10
"""The newest that the runtime knows: tests write nothing that a newer one changed."""
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
HALVES = (np.dtype(np.float16), BFLOAT16)
CODES = frozenset({onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT16})


def attributes(node: NodeProto) -> dict[str, Any]:
    """Attributes, texts decoded."""

    def read(value: Any) -> Any:
        if isinstance(value, bytes):
            return value.decode()
        return [read(each) for each in value] if isinstance(value, list) else value

    return {each.name: read(helper.get_attribute_value(each)) for each in node.attribute}


def shape_of(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(",") if size)


def dtype_of(text: str) -> np.dtype[Any]:
    return BFLOAT16 if text == "bfloat16" else np.dtype(text)


class Runner:
    """A model in ONNX Runtime; bfloat16 goes in and out as bits."""

    def __init__(self, model: ModelProto) -> None:
        self.session = session(model)
        self.inputs = [each.name for each in model.graph.input]
        self.outputs = [each.name for each in model.graph.output]
        ends = (*self.session.get_inputs(), *self.session.get_outputs())
        self.bits = any("bfloat16" in each.type for each in ends)

    def __call__(self, given: Mapping[str, Any]) -> Values:
        fed = {name: np.asarray(given[name], order="C") for name in self.inputs}
        return self._bound(fed) if self.bits else dict(zip(self.outputs, self.session.run(self.outputs, fed)))

    def _bound(self, fed: Values) -> Values:
        binding = self.session.io_binding()
        for name, array in fed.items():
            if array.dtype == BFLOAT16:
                code = onnx.TensorProto.BFLOAT16
                held = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), code)
                binding.bind_ortvalue_input(name, held)
            else:
                binding.bind_cpu_input(name, array)
        for name in self.outputs:
            binding.bind_output(name, "cpu")
        self.session.run_with_iobinding(binding)
        return {name: _array(each) for name, each in zip(self.outputs, binding.get_outputs(), strict=True)}


def _array(value: Any) -> Array:
    if "bfloat16" not in value.data_type():
        return value.numpy()
    return np.zeros(value.shape(), BFLOAT16) if 0 in value.shape() else np.array(_Bits(value)).view(BFLOAT16)


class _Bits:
    """The memory of a value of bfloat16, for which NumPy has no name."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.__array_interface__ = {
            "data": (value.data_ptr(), False), "shape": tuple(value.shape()), "typestr": "<u2", "version": 3,
        }  # fmt: skip


class Block:
    """Nodes without messages, run by ONNX Runtime; ``halves``: by the reference evaluator.

    ONNX Runtime leaves roundings out between halves: it drops a cast down and up again around what it runs in float32.
    """

    def __init__(
        self, model: ModelProto, nodes: Sequence[NodeProto], wanted: Iterable[str], halves: bool = False
    ) -> None:
        self.model, self.nodes, self.halves = model, list(nodes), halves
        made = {name for node in nodes for name in node.output if name}
        self.read = sorted({name for node in nodes for name in reads(node)} - made)
        self.kept = [name for name in dict.fromkeys(wanted) if name in made]
        self._runner: Any = None

    def run(self, values: Mapping[str, Array]) -> Values:
        """What it makes of ``values``."""
        if not self.kept:
            return {}
        given = {name: values[name] for name in self.read if name in values}
        if self._runner is None:
            self._runner = self._start(given)
        return dict(zip(self.kept, self._runner.run(self.kept, given))) if self.halves else self._runner(given)

    def _start(self, given: Mapping[str, Array]) -> Any:
        inside = [name for name, value in given.items() if value.dtype.isbuiltin != 1 and value.dtype != BFLOAT16]
        infos = [info(name, value, None) for name, value in given.items() if name not in inside]
        stored = [numpy_helper.from_array(given[name], name) for name in inside]  # the runtime is not fed these types
        outs = [onnx.ValueInfoProto(name=name) for name in self.kept]
        graph = helper.make_graph(self.nodes, "block", infos, outs, stored)
        part = helper.make_model(
            graph, opset_imports=self.model.opset_import, functions=self.model.functions,
            ir_version=self.model.ir_version,
        )  # fmt: skip
        return ReferenceEvaluator(part, new_ops=[MaxPool]) if self.halves else Runner(part)


class MaxPool(OpRun):  # type: ignore[misc]
    """MaxPool of images: indices of the evaluator's own lie beside the input where there are pads."""

    op_domain = ""

    def _run(self, x: Array, **given: Any) -> tuple[Array, ...]:
        kernel, pads, strides = given["kernel_shape"], given["pads"] or [0] * 4, given["strides"] or [1, 1]
        n, c, *size = x.shape
        out = [(size[a] + pads[a] + pads[a + 2] - kernel[a]) // strides[a] + 1 for a in range(2)]
        best = np.full((n, c, *out), -np.inf, np.float64)
        at = np.zeros((n, c, *out), np.int64)
        for row, column in np.ndindex(*kernel):
            rows = np.arange(out[0]) * strides[0] + row - pads[0]
            columns = np.arange(out[1]) * strides[1] + column - pads[1]
            inside = ((rows >= 0) & (rows < size[0]))[:, None] & ((columns >= 0) & (columns < size[1]))
            seen = x[:, :, rows.clip(0, size[0] - 1)][:, :, :, columns.clip(0, size[1] - 1)].astype(np.float64)
            better = inside & (seen > best)
            flat = rows[:, None] * size[1] + columns + np.arange(n * c).reshape(n, c, 1, 1) * size[0] * size[1]
            best, at = np.where(better, seen, best), np.where(better, flat, at)
        return best.astype(x.dtype), at


def has_halves(folder: Path) -> bool:
    """Whether a folder's files compute with float16 or bfloat16."""
    models = [onnx.load(str(path), load_external_data=False) for path in sorted(folder.glob("*.onnx"))]
    nodes = [node for model in models for node in model.graph.node]
    held = [each.data_type for model in models for each in model.graph.initializer]
    held += [each.type.tensor_type.elem_type for model in models for each in model.graph.input]
    return not CODES.isdisjoint(held) or any(map(_makes_half, nodes))


def _makes_half(node: NodeProto) -> bool:
    return any(each.i in CODES if each.name == "to" else each.t.data_type in CODES for each in node.attribute)


class Program:
    """One file of a role. Runs of nodes without a call are blocks."""

    def __init__(self, path: Path, halves: bool = False) -> None:
        self.model = onnx.load(str(path))
        self.model.ir_version = min(self.model.ir_version, KNOWN_IR)
        for each in self.model.opset_import:
            if each.domain in ("", "ai.onnx"):
                each.version = min(each.version, KNOWN_OPSET)
        graph = self.model.graph
        self.stored = {each.name: numpy_helper.to_array(each) for each in graph.initializer}
        self.inputs = [each.name for each in graph.input]
        self.outputs = [each.name for each in graph.output]
        groups = [(comm, list(run)) for comm, run in itertools.groupby(graph.node, lambda node: node.domain == COMM)]
        self.parts: list[NodeProto | Block] = []
        later = set(self.outputs)
        for comm, nodes in reversed(groups):
            self.parts[:0] = nodes if comm else [Block(self.model, nodes, sorted(later), halves)]
            later |= {name for node in nodes for name in reads(node)}

    @cached_property
    def types(self) -> dict[str, onnx.TypeProto.Tensor]:
        return {each.name: each.type.tensor_type for each in self.model.graph.input}

    @property
    def messages(self) -> list[NodeProto]:
        return [part for part in self.parts if isinstance(part, NodeProto)]

    def run(self, feeds: Mapping[str, Array]) -> Run:
        """Yields every call with its operands and is sent its results; returns the outputs."""
        values: Values = {**self.stored, **feeds}
        for part in self.parts:
            if isinstance(part, NodeProto):
                results = yield part, [values[name] if name else None for name in part.input]
                values.update(zip(part.output, results, strict=True))
            else:
                values.update(part.run(values))
        return {name: values[name] for name in self.outputs}


class Stuck(Exception):
    """Programs wait for calls that never meet."""


def run_together(runs: Mapping[int, Run], answers: Callable[[Mapping[int, Call]], Answers]) -> dict[int, Values]:
    """The outputs of programs that wait for each other, by number; ``answers``: to some of the calls that wait."""
    waiting: dict[int, Call] = {}
    done: dict[int, Values] = {}
    results: Mapping[int, Any] = dict.fromkeys(runs)
    while results:
        for number, values in results.items():
            waiting.pop(number, None)
            try:
                waiting[number] = runs[number].send(values)
            except StopIteration as end:
                done[number] = end.value
        results = answers(waiting) if waiting else {}
    if waiting:
        raise Stuck({number: str(node.op_type) for number, (node, _) in waiting.items()})
    return done
