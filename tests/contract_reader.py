"""What an output folder says and what its files have, read after docs/formats.md and docs/collectives.md alone: nothing
of gopt is imported here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, helper, numpy_helper

Record = dict[str, Any]


def label(node: NodeProto) -> str:
    """The name of a node in a report."""
    return node.name or next(name for name in node.output if name)


def metadata(entries: Any) -> dict[str, str]:
    return {entry.key: entry.value for entry in entries}


def numbers(text: str) -> set[int]:
    """The ranks in a text such as 0-3,6."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def elements(shape: Sequence[int], piece: Mapping[str, Any]) -> np.ndarray:
    """The places, in the flattened tensor, of a piece's elements."""
    places = np.arange(int(np.prod(shape, dtype=np.int64))).reshape(shape)
    for dim, ends in enumerate(piece.get("box", ())):
        kept = [place for start, stop in zip(ends[::2], ends[1::2]) for place in range(start, stop)]
        places = places.take(kept, dim)
    return places.reshape(-1)[piece["start"] : piece["stop"]]


@dataclass
class Rank:
    """What all files of one rank have together."""

    nodes: list[NodeProto]
    values: set[str]
    outputs: set[str]
    starts: dict[str, np.ndarray]
    types: dict[str, np.dtype]
    constants: set[str]


class Folder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest: Record = json.loads((path / "manifest.json").read_text())
        self.report: Record = json.loads((path / "report.json").read_text())
        self.source = onnx.load(str(path / self.manifest["source"]), load_external_data=False).graph
        self.states: dict[str, Record] = {each["tensor"]: each for each in self.manifest["states"]}
        self.records: dict[int, Record] = {each["rank"]: each for each in self.manifest["ranks"]}
        self.ranks = {number: self._rank(number) for number in self.records}

    def _rank(self, number: int) -> Rank:
        rank = Rank([], set(), set(), {}, {}, set())
        for file in self.records[number]["files"].values():
            model = onnx.load(str(self.path / file))
            about = metadata(model.metadata_props)
            mesh = ",".join(f"{axis}={size}" for axis, size in self.manifest["mesh"]["axes"])
            assert (about["gopt.rank"], about["gopt.mesh"]) == (str(number), mesh) and about["gopt.format"]
            assert not any(function.domain == "gopt.comm" for function in model.functions)
            graph = model.graph
            made = [name for node in graph.node for name in node.output if name]
            stored = {each.name: numpy_helper.to_array(each) for each in graph.initializer}
            read = {each.name: helper.tensor_dtype_to_np_dtype(each.type.tensor_type.elem_type) for each in graph.input}
            assert len({*made, *stored, *read}) == len(made) + len(stored.keys() | read.keys()), "a name made twice"
            rank.nodes.extend(graph.node)
            rank.values |= {*made, *read}
            rank.outputs |= {each.name for each in graph.output}
            rank.starts |= {name: stored[name] for name in stored.keys() & read.keys()}
            rank.constants |= stored.keys() - read.keys()
            rank.types |= read
        return rank

    def source_nodes(self) -> dict[str, NodeProto]:
        return {label(node): node for node in self.source.node}

    def source_values(self) -> set[str]:
        named = [each.name for each in (*self.source.input, *self.source.initializer)]
        return {*named, *(name for node in self.source.node for name in node.output if name)}

    def held(self, number: int) -> list[Record]:
        return [*self.manifest["common"]["state"], *self.records[number]["state"]]

    def told(self, what: str, number: int) -> set[str]:
        """The names that a list of the report gives for a rank."""
        return {name for name, _ in self.names(what, number)}

    def names(self, what: str, number: int) -> list[tuple[str, str]]:
        """The same one by one, with the phase, which is empty for all phases."""
        found: list[tuple[str, str]] = []
        for group in self.report[what]:
            assert group["count"] == sum(len(row["names"]) for row in group["rows"])
            entries = group.get("per_rank", [group])
            if any(number in numbers(entry["ranks"]) for entry in entries):
                phases = group.get("phases", [""])
                found += [(name, phase) for row in group["rows"] for name in row["names"] for phase in phases]
        return found

    def pieces(self, number: int) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        """Of each state that a rank holds: the tensor, the places of a piece's elements, and their start values."""
        for state in self.held(number):
            flat, place = self.ranks[number].starts[state["input"]].reshape(-1), 0
            for piece in state["pieces"] if not state.get("copy") else ():
                places = elements(self.states[piece["tensor"]]["shape"], piece)
                yield piece["tensor"], places, flat[place : place + len(places)]
                place += len(places)
