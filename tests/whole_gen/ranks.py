"""Runs the ranks of a folder as the contract says, and the source; no line of gopt takes part.

ONNX Runtime runs the operators between two calls; NumPy makes the calls.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
from onnx import ModelProto, NodeProto, helper, numpy_helper

Values = dict[str, Any]
OPTIONS = onnxruntime.SessionOptions()
OPTIONS.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
OPTIONS.intra_op_num_threads = OPTIONS.inter_op_num_threads = 1
OPTIONS.log_severity_level = 4
HALVES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
DATA, PARTS = ("dp", "shard"), ("cp", "sp", "h", "w")


class Runner:
    """A model in ONNX Runtime; bfloat16 goes in and out as bits."""

    def __init__(self, model: ModelProto) -> None:
        self.outputs = [each.name for each in model.graph.output]
        self.inputs = [each.name for each in model.graph.input]
        self.session = onnxruntime.InferenceSession(
            model.SerializeToString(), OPTIONS, providers=["CPUExecutionProvider"]
        )

    def __call__(self, given: Mapping[str, Any]) -> Values:
        binding = self.session.io_binding()
        for name in self.inputs:
            array = np.ascontiguousarray(given[name]).reshape(np.shape(given[name]))
            code = helper.np_dtype_to_tensor_dtype(array.dtype)
            if code == onnx.TensorProto.BFLOAT16:
                held = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), code)
                binding.bind_ortvalue_input(name, held)
            else:
                binding.bind_cpu_input(name, array)
        for name in self.outputs:
            binding.bind_output(name, "cpu")
        self.session.run_with_iobinding(binding)
        return {name: _array(each) for name, each in zip(self.outputs, binding.get_outputs(), strict=True)}


def _array(value: Any) -> Any:
    if "bfloat16" not in value.data_type():
        return value.numpy()
    return (
        np.zeros(value.shape(), ml_dtypes.bfloat16)
        if 0 in value.shape()
        else np.array(_Bits(value)).view(ml_dtypes.bfloat16)
    )


class _Bits:
    """The memory of a value of bfloat16, for which NumPy has no name."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.__array_interface__ = {
            "data": (value.data_ptr(), False), "shape": tuple(value.shape()), "typestr": "<u2", "version": 3,
        }  # fmt: skip


def reads(node: NodeProto) -> set[str]:
    inner = [each for attribute in node.attribute if attribute.HasField("g") for each in attribute.g.node]
    outs = [each.name for attribute in node.attribute if attribute.HasField("g") for each in attribute.g.output]
    return {name for name in node.input if name}.union(outs, *map(reads, inner))


class Program:
    """One rank's file, cut at its calls."""

    def __init__(self, path: Path) -> None:
        self.model = onnx.load(str(path))
        self.model.ir_version = min(self.model.ir_version, 10)
        self.stored = {each.name: numpy_helper.to_array(each) for each in self.model.graph.initializer}
        self.parts: list[list[NodeProto]] = []
        for called, nodes in itertools.groupby(self.model.graph.node, lambda node: node.domain == "gopt.comm"):
            found = list(nodes)
            self.parts += [[each] for each in found] if called else [found]
        self.runners: dict[int, Runner | None] = {}

    def run(self, fed: Values) -> Generator[tuple[dict[str, Any], list[Any]], list[Any], Values]:
        values = {**self.stored, **fed}
        for place, nodes in enumerate(self.parts):
            if nodes[0].domain == "gopt.comm":
                got = yield _attributes(nodes[0]), [values[name] for name in nodes[0].input]
                values.update(zip(nodes[0].output, got))
                continue
            if place not in self.runners:
                self.runners[place] = self._runner(place, nodes, values)
            runner = self.runners[place]
            if runner is not None:
                values.update(runner(values))
        return {each.name: values[each.name] for each in self.model.graph.output}

    def _runner(self, place: int, nodes: list[NodeProto], values: Values) -> Runner | None:
        made = [name for node in nodes for name in node.output if name]
        read = sorted(set().union(*map(reads, nodes)) - set(made))
        read = [name for name in read if name in values]
        later = {name for part in self.parts[place + 1 :] for node in part for name in reads(node)}
        later |= {each.name for each in self.model.graph.output}
        kept = [name for name in made if name in later]
        if not kept:
            return None
        info = [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(values[n].dtype), values[n].shape)
                for n in read]  # fmt: skip
        outs = [onnx.ValueInfoProto(name=name) for name in kept]
        graph = helper.make_graph(nodes, "part", info, outs)
        sets = [each for each in self.model.opset_import if each.domain != "gopt.comm"]
        return Runner(helper.make_model(graph, opset_imports=sets, functions=self.model.functions, ir_version=9))


def _attributes(node: NodeProto) -> dict[str, Any]:
    found: dict[str, Any] = {"op": node.op_type}
    for each in node.attribute:
        value = helper.get_attribute_value(each)
        if isinstance(value, bytes):
            value = value.decode()
        elif isinstance(value, list):
            value = [part.decode() if isinstance(part, bytes) else part for part in value]
        found[each.name] = value
    return found


class World:
    """All ranks of a folder, and the states that they hold."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = json.loads((folder / "manifest.json").read_text())
        self.axes: list[tuple[str, int]] = [(name, size) for name, size in self.manifest["mesh"]["axes"]]
        self.ranks = sorted(self.manifest["ranks"], key=lambda each: each["rank"])
        phases = self.manifest.get("phases") or [{"name": "step", "times": 1}]
        self.phases = [(each["name"], each["times"]) for each in phases]
        self.programs = {name: [Program(folder / each["files"][name]) for each in self.ranks]
                         for name, _ in self.phases}  # fmt: skip
        common = self.manifest["common"]
        self.records = [[*common.get("state", []), *each.get("state", [])] for each in self.ranks]
        self.sums = [[*common.get("accumulators", []), *each.get("accumulators", [])] for each in self.ranks]
        self.held = [self._starts(place) for place in range(len(self.ranks))]
        self.outputs: list[Values] = [{} for _ in self.ranks]

    def _starts(self, place: int) -> Values:
        found: Values = {}
        for programs in self.programs.values():
            program = programs[place]
            for each in self.records[place]:
                if each["input"] in program.stored:
                    found[each["input"]] = program.stored[each["input"]]
        for each in self.sums[place]:
            found[each["input"]] = np.zeros(each["shape"], _dtype(each["dtype"]))
        return found

    def place(self, rank: int) -> dict[str, int]:
        sizes = [size for _, size in self.axes]
        return dict(zip((name for name, _ in self.axes), map(int, np.unravel_index(rank, sizes))))

    def sample_part(self, rank: int) -> int:
        """Which part of the samples a rank sees."""
        place, found = self.place(rank), 0
        for name, size in self.axes:
            if name in DATA:
                found = found * size + place[name]
        return found

    @property
    def sample_parts(self) -> int:
        return int(np.prod([size for name, size in self.axes if name in DATA], dtype=int))

    def step(self, batches: Sequence[Sequence[Values]], hyper: Values) -> None:
        """One update; ``batches`` by micro-step and part of the samples."""
        for name, times in self.phases:
            for turn in range(times):
                feeds = []
                for place, record in enumerate(self.ranks):
                    given = batches[turn % len(batches)][self.sample_part(record["rank"])]
                    boxes = {each["input"]: each["box"] for each in record.get("fed", [])}
                    given = {n: _boxed(v, boxes[n]) if n in boxes else v for n, v in given.items()}
                    feeds.append({**self.held[place], **given, **hyper})
                for place, got in enumerate(self._together(self.programs[name], feeds)):
                    self.outputs[place].update(got)
                    for each in (*self.records[place], *self.sums[place]):
                        if each["output"] in got:
                            self.held[place][each["input"]] = got[each["output"]]

    def _together(self, programs: list[Program], feeds: list[Values]) -> list[Values]:
        running = [each.run(fed) for each, fed in zip(programs, feeds)]
        waiting: dict[int, tuple[dict[str, Any], list[Any]]] = {}
        done: dict[int, Values] = {}

        def on(rank: int, got: Any) -> None:
            try:
                waiting[rank] = running[rank].send(got)
            except StopIteration as end:
                done[rank] = end.value

        for rank in range(len(running)):
            on(rank, None)
        while waiting:
            for rank in sorted(waiting):
                members = self._members(rank, waiting[rank][0]["group"])
                alike = {(waiting[m][0]["op"], waiting[m][0]["group"]) if m in waiting else None for m in members}
                if len(alike) == 1 and None not in alike:
                    break
            else:
                raise AssertionError(f"ranks wait for one another: { {r: c[0] for r, c in waiting.items()} }")
            calls = [waiting.pop(m) for m in members]
            for member, got in zip(members, answered(calls)):
                on(member, got)
        return [done[rank] for rank in range(len(running))]

    def _members(self, rank: int, group: str) -> list[int]:
        own, moving = self.place(rank), group.split("+")
        return [r for r in range(len(self.ranks))
                if all(at == own[name] for name, at in self.place(r).items() if name not in moving)]  # fmt: skip

    def whole(self) -> Values:
        """All tensors, from their pieces; pieces that several ranks hold must be equal."""
        found: dict[str, tuple[Any, Any]] = {}
        shapes = {each["tensor"]: (each["shape"], _dtype(each["dtype"])) for each in self.manifest["states"]}
        for records, held in zip(self.records, self.held):
            for each in records:
                if each.get("copy"):
                    continue
                flat, at = np.asarray(held[each["input"]]).reshape(-1), 0
                for piece in each["pieces"]:
                    shape, dtype = shapes[piece["tensor"]]
                    values, seen = found.setdefault(piece["tensor"], (np.zeros(shape, dtype), np.zeros(shape, bool)))
                    numbers = np.arange(values.size).reshape(shape)
                    numbers = _boxed(numbers, piece["box"]) if "box" in piece else numbers
                    numbers = numbers.reshape(-1)[piece["start"] : piece["stop"]]
                    part = flat[at : at + len(numbers)]
                    at += len(numbers)
                    assert part.dtype == dtype, (each["input"], part.dtype, dtype)
                    old, was = values.reshape(-1)[numbers], seen.reshape(-1)[numbers]
                    same = (old == part) | (old != old) & (part != part)
                    assert each.get("local") or (same | ~was).all(), f"{piece['tensor']}: ranks hold different values"
                    values.reshape(-1)[numbers[~was]] = part[~was]
                    seen.reshape(-1)[numbers] = True
                assert at == flat.size, f"{each['input']}: {flat.size} elements, pieces have {at}"
        missing = [name for name, (_, seen) in found.items() if not seen.all()]
        assert not missing and set(found) == set(shapes), f"no rank holds all of {missing or set(shapes) - set(found)}"
        return {name: values for name, (values, _) in found.items()}


def _dtype(name: str) -> Any:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def _boxed(whole: Any, box: Sequence[Sequence[int]]) -> Any:
    for dim, ends in enumerate(box):
        places = [place for start, stop in zip(ends[::2], ends[1::2]) for place in range(start, stop)]
        whole = whole.take(places, dim)
    return whole


def answered(calls: list[tuple[dict[str, Any], list[Any]]]) -> list[list[Any]]:
    """What each member of a group gets, in order."""
    said, given, n = calls[0][0], [each for _, each in calls], len(calls)
    op = said["op"]
    for other, _ in calls[1:]:
        assert other == said or op in ("Broadcast", "AllToAll", "AllGather"), (said, other)
    if op in ("AllReduce", "Reduce", "ReduceScatter"):
        whole = [_combined(list(each), said.get("reduce", "sum")) for each in zip(*given, strict=True)]
        if op == "AllReduce":
            return [list(whole) for _ in range(n)]
        if op == "Reduce":
            return [whole if r == said["root"] else [np.full_like(x, -9) for x in whole] for r in range(n)]
        if "axis" in said:
            ends = np.cumsum([0, *said["sizes"]])
            return [[whole[0].take(range(ends[r], ends[r + 1]), said["axis"])] for r in range(n)]
        flat, cuts = np.concatenate([each.reshape(-1) for each in whole]), said["cuts"]
        assert cuts[0] == 0 and cuts[-1] == flat.size and len(cuts) == n + 1
        return [[flat[cuts[r] : cuts[r + 1]]] for r in range(n)]
    if op == "Broadcast":
        return [list(given[said["root"]]) for _ in range(n)]
    if op == "AllGather" and "axis" in said:
        assert [each[0].shape[said["axis"]] for each in given] == list(said["sizes"])
        return [[np.concatenate([each[0] for each in given], said["axis"])]] * n
    if op == "AllGather":
        assert [each[0].size for each in given] == np.diff(said["cuts"]).tolist()
        flat, found, at = np.concatenate([each[0] for each in given]), [], 0
        for text in said["shapes"]:
            shape = [int(each) for each in text.split(",") if each]
            count = int(np.prod(shape, dtype=int))
            found.append(flat[at : at + count].reshape(shape))
            at += count
        assert at == flat.size
        return [found] * n
    assert op == "AllToAll", op
    cut = []
    for own, values in calls:
        ends = np.cumsum([0, *own["split_sizes"]])
        cut.append([values[0].take(range(ends[r], ends[r + 1]), own["split_axis"]) for r in range(n)])
    return [[np.concatenate([parts[r] for parts in cut], said["concat_axis"])] for r in range(n)]


def _combined(arrays: list[Any], how: str) -> Any:
    first = arrays[0]
    wide = [each.astype(np.float32) if each.dtype in HALVES else each for each in arrays]
    with np.errstate(all="ignore"):
        if how in ("sum", "mean"):
            total = sum(wide[1:], wide[0])
            total = total / np.asarray(len(wide), total.dtype) if how == "mean" else total
        else:
            total = (np.maximum if how == "max" else np.minimum).reduce(wide)
    return np.asarray(total).astype(first.dtype)
