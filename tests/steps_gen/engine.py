"""Run rank files in one process, after the contract's section 5 alone: nothing of gopt is imported here."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import ModelProto, NodeProto, helper, numpy_helper

from steps_gen.graphs import reads

Values = dict[str, np.ndarray]
COMM = "gopt.comm"
KNOWN_OPSET = 26
"""The newest that the runtime knows: tests write nothing that a newer one changed."""
OPTIONS = onnxruntime.SessionOptions()
OPTIONS.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
OPTIONS.intra_op_num_threads = OPTIONS.inter_op_num_threads = 1
OPTIONS.log_severity_level = 3


def session(model: ModelProto) -> onnxruntime.InferenceSession:
    """A session that changes nothing of the graph."""
    return onnxruntime.InferenceSession(model.SerializeToString(), OPTIONS, providers=["CPUExecutionProvider"])


class Stuck(Exception):
    """Ranks wait for calls that never meet."""


class Rank:
    """One rank's graph, in pieces between its calls."""

    def __init__(self, path: Path) -> None:
        self.model = onnx.load(str(path))
        self.model.ir_version = min(self.model.ir_version, 10)  # newer files hold nothing that the runtime reads
        for each in self.model.opset_import:
            if each.domain in ("", "ai.onnx"):
                each.version = min(each.version, KNOWN_OPSET)
        graph = self.model.graph
        self.stored = {each.name: numpy_helper.to_array(each) for each in graph.initializer}
        self.inputs = [each.name for each in graph.input]
        self.outputs = [each.name for each in graph.output]
        self.pieces: list[NodeProto | list[NodeProto]] = []
        for is_call, nodes in itertools.groupby(graph.node, lambda node: node.domain == COMM):
            found = list(nodes)
            self.pieces.extend(found if is_call else [found])
        self.sessions: dict[int, tuple[onnxruntime.InferenceSession, list[str], list[str]]] = {}

    def run(self, feeds: Values) -> Iterator[tuple[NodeProto, list[np.ndarray]]]:
        """Yields every call with its inputs, and is sent its outputs; returns the graph's outputs."""
        values = {**self.stored, **feeds}
        for place, piece in enumerate(self.pieces):
            if isinstance(piece, NodeProto):
                results = yield piece, [values[name] for name in piece.input]
                values.update(zip(piece.output, results or [], strict=False))
            else:
                values.update(self._piece(place, piece, values))
        return {name: values[name] for name in self.outputs}

    def _piece(self, place: int, nodes: list[NodeProto], values: Values) -> Values:
        if place not in self.sessions:
            made = [name for node in nodes for name in node.output if name]
            read = sorted({name for node in nodes for name in reads(node)} - set(made))
            later = {name for piece in self.pieces[place + 1 :] for name in _read_by(piece)} | set(self.outputs)
            kept = [name for name in made if name in later]
            if not kept:
                return {}
            inside = [name for name in read if name in self.stored and values[name].dtype.isbuiltin != 1]
            read = [name for name in read if name not in inside]  # ONNX Runtime is fed no types that NumPy has not
            infos = [
                helper.make_tensor_value_info(
                    name, helper.np_dtype_to_tensor_dtype(values[name].dtype), values[name].shape
                )
                for name in read
            ]
            outs = [onnx.ValueInfoProto(name=name) for name in kept]
            part = ModelProto()
            part.CopyFrom(self.model)
            kept_inside = [numpy_helper.from_array(self.stored[name], name) for name in inside]
            part.graph.CopyFrom(helper.make_graph(nodes, "piece", infos, outs, kept_inside))
            self.sessions[place] = session(part), read, kept
        runner, read, kept = self.sessions[place]
        return dict(zip(kept, runner.run(kept, {name: values[name] for name in read}), strict=True))


def _read_by(piece: NodeProto | list[NodeProto]) -> set[str]:
    return reads(piece) if isinstance(piece, NodeProto) else {name for node in piece for name in reads(node)}


@dataclass
class World:
    """The ranks of one output folder, and which tensor's elements each holds."""

    folder: Path

    def __post_init__(self) -> None:
        self.manifest: dict[str, Any] = json.loads((self.folder / "manifest.json").read_text())
        self.axes: list[tuple[str, int]] = [(name, size) for name, size in self.manifest["mesh"]["axes"]]
        self.records = sorted(self.manifest["ranks"], key=lambda record: record["rank"])
        listed = self.manifest.get("phases", [{"name": "step", "times": 1}])
        self.phases: list[tuple[str, int]] = [(each["name"], each["times"]) for each in listed]
        """The files of a rank in their order, and how often each runs in a step."""
        self.programs = {
            name: [Rank(self.folder / record["files"][name]) for record in self.records] for name, _ in self.phases
        }
        self.ranks = range(len(self.records))
        self.sums = [record.get("accumulators", []) for record in self.records]
        self.last: list[Values] = [{} for _ in self.records]
        """What each rank's files last gave."""
        common = self.manifest["common"]["state"]
        self.held = [[*common, *record["state"]] for record in self.records]

    def coordinates(self, rank: int) -> dict[str, int]:
        found = {}
        for name, size in reversed(self.axes):
            rank, found[name] = divmod(rank, size)
        return found

    def members(self, rank: int, group: str) -> tuple[int, ...]:
        """The ranks that share every coordinate but the group's, in order."""
        mine, moving = self.coordinates(rank), set(group.split("+"))
        return tuple(
            other
            for other in self.ranks
            if all(at == mine[name] for name, at in self.coordinates(other).items() if name not in moving)
        )

    def feeds(self, rank: int, states: Mapping[str, np.ndarray]) -> Values:
        """What a rank reads of its states, from whole tensors; its accumulators at zero."""
        programs = [ranks[rank] for ranks in self.programs.values()]
        types = {each.name: each.type.tensor_type for program in programs for each in program.model.graph.input}
        fed = {each["input"]: np.zeros(each["shape"], each["dtype"]) for each in self.sums[rank]}
        for state in self.held[rank]:
            parts = [held(states[p["tensor"]], p) for p in state["pieces"]]
            type = types[state["input"]]
            dtype = helper.tensor_dtype_to_np_dtype(type.elem_type)
            shape = [each.dim_value for each in type.shape.dim]
            fed[state["input"]] = np.concatenate(parts).astype(dtype).reshape(shape)
        return fed

    def whole(self, values: Sequence[Values]) -> Values:
        """Tensors, flat, as their pieces on all ranks say; equal pieces must agree."""
        found: dict[str, dict[int, np.ndarray]] = {}
        for listed, mine in zip(self.held, values, strict=True):
            for state in listed:
                flat, place = mine[state["input"]].reshape(-1), 0
                for piece in state["pieces"] if not state.get("copy") else ():
                    count = piece["stop"] - piece["start"]
                    part = flat[place : place + count]
                    before = found.setdefault(piece["tensor"], {}).setdefault(piece["start"], part)
                    np.testing.assert_array_equal(before, part)
                    place += count
        return {name: np.concatenate([parts[start] for start in sorted(parts)]) for name, parts in found.items()}

    def part(self, rank: int, batch: Values) -> Values:
        """What a rank is fed of a whole batch."""
        boxes = {each["input"]: each["box"] for each in self.records[rank].get("fed", [])}
        return {name: boxed(each, boxes[name]) if name in boxes else each for name, each in batch.items()}

    def step(self, held: Sequence[Values], settings: Sequence[Sequence[Values]]) -> None:
        """All ranks through one step; ``held``, what each has of states, follows.

        ``settings``: by micro-step and rank, what else a rank is fed.
        """
        for name, times in self.phases:
            for turn in range(times):
                feeds = [{**mine, **given} for mine, given in zip(held, settings[turn], strict=True)]
                for rank, output in enumerate(self._phase(self.programs[name], feeds)):
                    self.last[rank].update(output)
                    for each in (*self.held[rank], *self.sums[rank]):
                        if each["output"] in output:
                            held[rank][each["input"]] = output[each["output"]]

    def _phase(self, ranks: Sequence[Rank], feeds: Sequence[Values]) -> list[Values]:
        """All ranks through one of their files."""
        running = [
            rank.run({k: v for k, v in feed.items() if k in rank.inputs})
            for rank, feed in zip(ranks, feeds, strict=True)
        ]
        waiting: dict[int, tuple[NodeProto, list[np.ndarray]]] = {}
        done: dict[int, Values] = {}

        def advance(rank: int, results: list[np.ndarray] | None) -> None:
            try:
                waiting[rank] = running[rank].send(results)
            except StopIteration as end:
                done[rank] = end.value

        for rank in range(len(running)):
            advance(rank, None)
        while waiting:
            ready = next(filter(None, (self._ready(rank, waiting) for rank in sorted(waiting))), None)
            if ready is None:
                raise Stuck({rank: str(node.op_type) for rank, (node, _) in waiting.items()})
            calls = [waiting.pop(rank) for rank in ready]
            for rank, results in zip(ready, perform(calls), strict=True):
                advance(rank, results)
        return [done[rank] for rank in range(len(running))]

    def _ready(self, rank: int, waiting: Mapping[int, tuple[NodeProto, list[np.ndarray]]]) -> tuple[int, ...] | None:
        node = waiting[rank][0]
        group = attributes(node)["group"]
        members = self.members(rank, group)
        same = all(
            other in waiting
            and waiting[other][0].op_type == node.op_type
            and attributes(waiting[other][0])["group"] == group
            for other in members
        )
        return members if same else None


def boxed(whole: np.ndarray, box: Sequence[Sequence[int]]) -> np.ndarray:
    """The part of an array in a box: of each dimension one range or several, ``[start, stop, start, stop, …]``."""
    for dim, ends in enumerate(box):
        places = [place for start, stop in zip(ends[::2], ends[1::2]) for place in range(start, stop)]
        whole = whole.take(places, dim)
    return whole


def drawn(model: ModelProto) -> Values:
    """A value for every input: the stored one, small positive numbers, ids of 0 and 1."""
    stored = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
    generator, found = np.random.default_rng(3), {}
    for each in model.graph.input:
        type = each.type.tensor_type
        dtype, shape = helper.tensor_dtype_to_np_dtype(type.elem_type), [size.dim_value for size in type.shape.dim]
        wide = generator.uniform(0.01, 0.5, shape) if dtype.kind in "fV" else generator.integers(0, 2, shape)
        found[each.name] = stored.get(each.name, np.asarray(wide).astype(dtype)).reshape(shape)
    return found


def held(whole: np.ndarray, piece: Mapping[str, Any]) -> np.ndarray:
    """The elements of a piece, flat."""
    part = boxed(whole, piece["box"]) if "box" in piece else whole
    return part.reshape(-1)[piece["start"] : piece["stop"]]


def attributes(node: NodeProto) -> dict[str, Any]:
    found = {each.name: helper.get_attribute_value(each) for each in node.attribute}
    return {
        name: value.decode() if isinstance(value, bytes)
        else [each.decode() if isinstance(each, bytes) else each for each in value] if isinstance(value, list)
        else value
        for name, value in found.items()
    }  # fmt: skip


def perform(calls: Sequence[tuple[NodeProto, list[np.ndarray]]]) -> list[list[np.ndarray]]:
    """One collective for all members of its group, in order."""
    about = attributes(calls[0][0])
    kind, given = calls[0][0].op_type, [inputs for _, inputs in calls]
    if kind in ("AllReduce", "Reduce", "ReduceScatter"):
        whole = [_combined(arrays, about.get("reduce", "sum")) for arrays in zip(*given, strict=True)]
        if kind == "AllReduce":
            return [whole for _ in given]
        if kind == "Reduce":
            return [whole if place == about["root"] else [] for place in range(len(given))]
        if "axis" in about:
            ends = np.cumsum(about["sizes"])[:-1]
            return [[part] for part in np.split(whole[0], ends, about["axis"])]
        flat = np.concatenate([each.reshape(-1) for each in whole])
        cuts = about["cuts"]
        return [[flat[start:stop]] for start, stop in itertools.pairwise(cuts)]
    if kind == "Broadcast":
        return [given[about["root"]] for _ in given]
    if kind == "AllToAll":
        ends = np.cumsum(about["split_sizes"])[:-1]
        cut = [np.split(each[0], ends, about["split_axis"]) for each in given]
        return [[np.concatenate([parts[place] for parts in cut], about["concat_axis"])] for place in range(len(given))]
    assert kind == "AllGather", kind
    if "axis" in about:
        return [[np.concatenate([each[0] for each in given], about["axis"])] for _ in given]
    shapes = [tuple(int(size) for size in text.split(",") if size) for text in about["shapes"]]
    flat, parts, start = np.concatenate([each[0] for each in given]), [], 0
    for shape in shapes:
        count = int(np.prod(shape, dtype=int))
        parts.append(flat[start : start + count].reshape(shape))
        start += count
    return [parts for _ in given]


def _combined(arrays: Sequence[np.ndarray], how: str) -> np.ndarray:
    first = arrays[0]
    wide = [each.astype(np.float32) if first.dtype == np.float16 else each for each in arrays]
    with np.errstate(all="ignore"):
        if how in ("sum", "mean"):
            total = sum(wide[1:], wide[0])
            total = total / np.asarray(len(wide), total.dtype) if how == "mean" else total
        else:
            total = np.max(wide, 0) if how == "max" else np.min(wide, 0)
        return np.asarray(total).astype(first.dtype)
