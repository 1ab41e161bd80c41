"""Ranks of an output folder run by NumPy and ONNX Runtime alone, without a line of gopt's runtime.

Reads ``manifest.json`` and the rank files, runs the operators between two calls in ONNX Runtime, makes the calls of
``gopt.comm`` as docs/collectives.md defines them, and writes new states into ``states.bin``.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import ModelProto, NodeProto, helper, numpy_helper

Values = dict[str, Any]
REDUCE = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}


@dataclass(frozen=True)
class Call:
    """A call of one rank: its node and the values that it gives."""

    node: NodeProto
    given: list[Any]

    @property
    def attributes(self) -> dict[str, Any]:
        found = {each.name: helper.get_attribute_value(each) for each in self.node.attribute}
        return {name: value.decode() if isinstance(value, bytes) else value for name, value in found.items()}


def members(mesh: list[list[Any]], group: str, rank: int) -> tuple[int, ...]:
    """The ranks that differ from a rank along the axes of a group alone."""
    sizes = [size for _, size in mesh]
    own = np.unravel_index(rank, sizes)
    places = [range(size) if name in group.split("+") else [at] for (name, size), at in zip(mesh, own)]
    return tuple(int(np.ravel_multi_index(place, sizes)) for place in itertools.product(*places))


def answer(calls: list[Call]) -> list[list[Any]]:
    """What each member of a group gets."""
    op, said = calls[0].node.op_type, [call.attributes for call in calls]
    count, first = len(calls), said[0]
    if op == "AllReduce":
        sums = [_reduced(values, first) for values in zip(*(call.given for call in calls))]
        return [sums] * count
    if op == "ReduceScatter" and "cuts" in first:
        flat = _reduced([np.concatenate([each.ravel() for each in call.given]) for call in calls], first)
        return [[flat[first["cuts"][place] : first["cuts"][place + 1]]] for place in range(count)]
    if op == "ReduceScatter":
        whole = _reduced([call.given[0] for call in calls], first)
        return [[part] for part in np.split(whole, np.cumsum(first["sizes"])[:-1], first["axis"])]
    if op == "AllGather" and "cuts" in first:
        flat, found = np.concatenate([call.given[0] for call in calls]), []
        for text in first["shapes"]:
            shape = [int(each) for each in text.decode().split(",") if each]
            found.append(flat[: int(np.prod(shape))].reshape(shape))
            flat = flat[int(np.prod(shape)) :]
        return [found] * count
    if op == "AllGather":
        return [[np.concatenate([call.given[0] for call in calls], first["axis"])]] * count
    if op == "AllToAll":
        parts = [np.split(call.given[0], np.cumsum(each["split_sizes"])[:-1], each["split_axis"])
                 for call, each in zip(calls, said)]  # fmt: skip
        return [[np.concatenate([part[place] for part in parts], first["concat_axis"])] for place in range(count)]
    raise NotImplementedError(op)


def _reduced(values: Any, said: Mapping[str, Any]) -> Any:
    """Halves are summed in float32 and rounded once."""
    wide = [each.astype(np.float32) if each.dtype == np.float16 else each for each in values]
    return np.asarray(REDUCE[said.get("reduce", "sum")](np.stack(wide), axis=0), values[0].dtype)


class Segments:
    """A rank file cut at its calls."""

    def __init__(self, model: ModelProto) -> None:
        self.model = model
        self.constants = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
        self.parts: list[list[NodeProto] | NodeProto] = []
        for node in model.graph.node:
            if node.domain == "gopt.comm":
                self.parts.append(node)
            elif self.parts and isinstance(self.parts[-1], list):
                self.parts[-1].append(node)
            else:
                self.parts.append([node])
        self.sessions: dict[int, tuple[ort.InferenceSession, list[str], list[str]]] = {}

    def step(self, given: Values) -> Generator[Call, list[Any], Values]:
        """One step: yields each call and is sent its results; returns the outputs of the graph."""
        values = self.constants | given
        for place, part in enumerate(self.parts):
            if isinstance(part, NodeProto):
                got = yield Call(part, [values[name] for name in part.input])
                values |= zip(part.output, got)
            else:
                session, names, made = self._session(place, part, values)
                if made:  # a rank may have scalars that none of its own nodes reads
                    values |= zip(made, session.run(made, {name: values[name] for name in names}))
        return {each.name: values[each.name] for each in self.model.graph.output}

    def _session(self, place: int, nodes: list[NodeProto], values: Values) -> Any:
        if place not in self.sessions:
            made = [name for node in nodes for name in node.output if name]
            read = [name for node in nodes for name in _reads(node)]
            names = list(dict.fromkeys(name for name in read if name and name in values and name not in made))
            later = {name for part in self.parts[place + 1 :] for node in (part if isinstance(part, list) else [part])
                     for name in _reads(node)} | {each.name for each in self.model.graph.output}  # fmt: skip
            kept = [name for name in made if name in later]
            inputs = [_info(name, np.asarray(values[name])) for name in names]
            graph = helper.make_graph(nodes, "part", inputs, [onnx.ValueInfoProto(name=name) for name in kept])
            model = helper.make_model(
                graph, opset_imports=[each for each in self.model.opset_import if each.domain != "gopt.comm"],
                functions=self.model.functions, ir_version=min(self.model.ir_version, 10),
            )  # fmt: skip
            options = ort.SessionOptions()
            options.log_severity_level, options.intra_op_num_threads = 3, 1
            session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
            self.sessions[place] = session, names, kept
        return self.sessions[place]


def _info(name: str, value: Any) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)


def _reads(node: NodeProto) -> set[str]:
    """Names that a node reads, in its subgraphs too."""
    inner = [each for attribute in node.attribute if attribute.HasField("g") for each in attribute.g.node]
    return {*node.input}.union(*map(_reads, inner))


def data_parts(mesh: list[list[Any]]) -> list[int]:
    """For every rank, which part of the samples it sees: ranks along ``dp`` and ``shard`` see different ones."""
    sizes = [size for _, size in mesh]
    data = [place for place, (name, _) in enumerate(mesh) if name in ("dp", "shard")]
    own = [tuple(np.unravel_index(rank, sizes)[place] for place in data) for rank in range(int(np.prod(sizes)))]
    order = list(dict.fromkeys(own))
    return [order.index(each) for each in own]


def train(folder: Path, feeds: Sequence[Sequence[Values]]) -> None:
    """Run every rank for some steps; the new states stand in ``states.bin`` afterwards.

    ``feeds``: of each step, the inputs of each part of the samples, as ``data_parts`` numbers them.
    """
    manifest = json.loads((folder / "manifest.json").read_text())
    mesh, shared = manifest["mesh"]["axes"], manifest["common"]
    ranks, states = [], []
    for entry in manifest["ranks"]:
        ranks.append(Segments(onnx.load(folder / entry["files"]["step"])))
        states.append([*shared["state"], *entry["state"]])
    held = [{each["input"]: rank.constants[each["input"]] for each in own} for rank, own in zip(ranks, states)]
    parts = data_parts(mesh)
    for of_step in feeds:
        steps_of = [rank.step(of_step[part] | own) for rank, part, own in zip(ranks, parts, held)]
        outputs = _lockstep(mesh, steps_of)
        held = [{each["input"]: found[each["output"]] for each in own} for found, own in zip(outputs, states)]
    with open(folder / "states.bin", "r+b") as file:
        for entry, own in zip(manifest["ranks"], held):
            model = onnx.load(folder / entry["files"]["step"], load_external_data=False)
            for each in model.graph.initializer:
                if each.name in own:
                    where = {pair.key: pair.value for pair in each.external_data}
                    file.seek(int(where.get("offset", 0)))
                    file.write(np.ascontiguousarray(own[each.name]).tobytes())


def _lockstep(mesh: list[list[Any]], ranks: list[Generator[Call, list[Any], Values]]) -> list[Values]:
    """Drive all ranks; a call is made when every member of its group waits at it."""
    waiting: dict[int, Call] = {}
    done: dict[int, Values] = {}

    def go_on(rank: int, got: list[Any] | None) -> None:
        try:
            waiting[rank] = ranks[rank].send(got)  # type: ignore[arg-type]
        except StopIteration as end:
            done[rank] = end.value

    for rank in range(len(ranks)):
        go_on(rank, None)
    while len(done) < len(ranks):
        groups = [members(mesh, call.attributes["group"], rank) for rank, call in waiting.items()]
        group = next(
            each for each in groups if all(rank in waiting for rank in each)
            and len({(waiting[rank].node.op_type, waiting[rank].attributes["group"]) for rank in each}) == 1
        )  # fmt: skip
        for rank, got in zip(group, answer([waiting.pop(rank) for rank in group])):
            go_on(rank, got)
    return [done[rank] for rank in range(len(ranks))]
