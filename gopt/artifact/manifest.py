"""Manifest and report of an output folder as they are read: through the door, then held against themselves.

A schema says which keys there are and of what type; what else readers rely on is checked here, and only here: ranks fit
the mesh, files have plain names, types are known, pieces lie within their tensors, names are named once.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from gopt import documents, limits
from gopt.collectives.table import COLLECTIVES
from gopt.errors import GoptError, InputError, OptionError
from gopt.ir.graph import COMM, Graph, Node
from gopt.ir.types import TensorType, known
from gopt.mesh import Mesh
from gopt.sanitize import show

Record = dict[str, Any]


def read_manifest(folder: str | os.PathLike[str]) -> tuple[Record, Mesh]:
    """The manifest of an output folder and its mesh; raises InputError."""
    path = Path(folder, "manifest.json")
    record = documents.read_json(path, documents.MANIFEST)
    return record, _Manifest(str(path), record).check()


def read_report(folder: str | os.PathLike[str], manifest: Mapping[str, Any]) -> Record:
    """The report beside a manifest; raises InputError where it is damaged or tells of another mesh."""
    path = Path(folder, "report.json")
    record = documents.read_json(path, documents.REPORT)
    if record["mesh"]["axes"] != manifest["mesh"]["axes"]:  # kinds were not always written
        raise InputError(f"{path}: mesh: it is not the manifest's")
    ranks = [[each["rank"] for each in side["ranks"]] for side in (record, manifest)]
    if ranks[0] != ranks[1]:
        raise InputError(f"{path}: ranks: they are not the manifest's")
    return record


def check_source(
    manifest: Mapping[str, Any], graph: Graph, home: str | os.PathLike[str], what: str = "the kept source"
) -> None:
    """Hold a manifest against the source that is kept beside it, or ``what`` stands for it; raises InputError."""
    name = str(Path(home, "manifest.json"))
    states = manifest["states"]
    for place, state in enumerate(states):
        where = f"states[{place}]"
        if state["tensor"] not in graph.inputs or state["updated"] not in graph.outputs:
            _refuse(name, where, f"{what} has no state {show(state['tensor'])} -> {show(state['updated'])}")
        if graph.inputs[state["tensor"]] != _type(state):
            _refuse(name, where, f"{_type(state)} is {graph.inputs[state['tensor']]} in {what}")
    for place, each in enumerate(manifest["common"]["inputs"]):
        if graph.inputs.get(each["name"]) != _type(each):
            _refuse(name, f"common.inputs[{place}]", f"{what} has no input {show(each['name'])} of this type")
    for place, each in enumerate(manifest["common"]["outputs"]):
        if each["name"] not in graph.outputs:
            _refuse(name, f"common.outputs[{place}]", f"{what} has no output {show(each['name'])}")
    told = {state["tensor"] for state in states} | {each["name"] for each in manifest["common"]["inputs"]}
    for given in graph.inputs:
        if given not in told and given not in graph.initializers:  # a frozen weight needs no entry
            _refuse(name, "common.inputs", f"{show(given)}, an input of {what}, is missing")


def check_rank(
    manifest: Mapping[str, Any], record: Mapping[str, Any], graphs: Mapping[str, Graph], home: str | os.PathLike[str]
) -> None:
    """Hold what a manifest says of one rank against the rank's files, by phase; raises InputError."""
    name, rank = str(Path(home, "manifest.json")), record["rank"]
    inputs = {key: type for graph in graphs.values() for key, type in graph.inputs.items()}
    outputs = {key for graph in graphs.values() for key in graph.outputs}
    types = {state["tensor"]: state["dtype"] for state in manifest["states"]}
    for state in (*manifest["common"]["state"], *record["state"]):
        given = inputs.get(state["input"])
        held = sum(piece["stop"] - piece["start"] for piece in state["pieces"])
        if given is None or given.elements != held or state["output"] not in outputs:
            _refuse(name, f"rank {rank}", f"its files and the manifest disagree on {show(state['input'])}")
        wide = {types[piece["tensor"]] for piece in state["pieces"]}
        if not state.get("copy") and wide - {given.dtype}:
            _refuse(name, f"rank {rank}", f"its files and the manifest disagree on the type of {show(state['input'])}")
    for held_sum in record.get("accumulators", ()):
        if inputs.get(held_sum["input"]) != _type(held_sum) or held_sum["output"] not in outputs:
            _refuse(name, f"rank {rank}", f"its files and the manifest disagree on {show(held_sum['input'])}")
    for place, each in enumerate(manifest["common"]["inputs"]):
        if inputs.get(each["name"], _type(each)) != _type(each):
            _refuse(name, f"common.inputs[{place}]", f"rank {rank} has {show(each['name'])} of another type")
    told = {each["input"] for each in (*manifest["common"]["state"], *record["state"], *record.get("accumulators", ()))}
    frozen = {key for graph in graphs.values() for key in graph.initializers}  # weights that no update touches
    lost = inputs.keys() - told - frozen - {each["name"] for each in manifest["common"]["inputs"]}
    if lost:
        _refuse(name, "common.inputs", f"{show(min(lost))}, an input of rank {rank}, is missing")
    if manifest["loss"] not in outputs:
        _refuse(name, "loss", f"rank {rank} has no output {show(manifest['loss'])}")
    mesh = Mesh.from_record(manifest["mesh"])
    for graph in graphs.values():
        for node in graph.nodes:
            if node.domain == COMM:
                _check_call(name, mesh, rank, graph, node)


def _check_call(name: str, mesh: Mesh, rank: int, graph: Graph, node: Node) -> None:
    """Refuse a call that no group of this mesh can make."""
    types = [graph.type_of(each) for each in node.inputs]
    try:
        record = COLLECTIVES[node.op_type]
        group = str(record.resolve(node.attributes)["group"])
        size, index = mesh.size(group), mesh.index(group, rank)
        record.infer(node.attributes, [(type.dtype, type.shape) for type in types], size, index)
    except KeyError:
        _refuse(name, f"rank {rank}", f"its file calls {show(node.op_type)}, and {COMM} has no such operator")
    except OptionError as error:
        _refuse(name, "mesh.axes", f"rank {rank}: {error.message}")
    except GoptError as error:
        _refuse(name, f"rank {rank}", f"its file calls {show(node.label)}: {error.message}")


def _type(record: Mapping[str, Any]) -> TensorType:
    shape = record["shape"]
    return TensorType(record["dtype"], None if shape is None else tuple(shape))


def _refuse(name: str, key: str, what: str) -> NoReturn:
    raise InputError(f"{name}: {key}: {what}")


class _Manifest:
    """One manifest under examination."""

    def __init__(self, name: str, record: Record) -> None:
        self.name, self.record = name, record
        self.elements: dict[str, int | None] = {}
        """State of the source -> its elements, None where they are not known."""

    def check(self) -> Mesh:
        mesh = self._mesh()
        self._plain("source", self.record["source"])
        self._states()
        self._common()
        phases = self._phases()
        self._ranks(mesh, phases)
        return mesh

    def _mesh(self) -> Mesh:
        record = self.record["mesh"]
        try:
            mesh = Mesh.from_record(record)
        except OptionError as error:
            _refuse(self.name, "mesh", error.message)
        if mesh.ranks != record["ranks"]:
            _refuse(self.name, "mesh.ranks", f"{record['ranks']}, but its axes have {mesh.ranks} ranks")
        return mesh

    def _states(self) -> None:
        self._once("states", [state["tensor"] for state in self.record["states"]])
        self._once("states", [state["updated"] for state in self.record["states"]])
        for place, state in enumerate(self.record["states"]):
            self._typed(f"states[{place}]", state)
            type = _type(state)
            self.elements[state["tensor"]] = type.elements if type.static else None
        for place, state in enumerate(self.record["states"]):
            if state["of"] is not None and state["of"] not in self.elements:
                _refuse(self.name, f"states[{place}].of", f"{show(state['of'])} is no state")

    def _common(self) -> None:
        common = self.record["common"]
        for key in ("inputs", "outputs"):
            self._once(f"common.{key}", [each["name"] for each in common[key]])
            for place, each in enumerate(common[key]):
                self._typed(f"common.{key}[{place}]", each)
        for place, each in enumerate(common["inputs"]):
            if each["name"] in self.elements:
                _refuse(self.name, f"common.inputs[{place}].name", f"{show(each['name'])} is a state")
        if self.record["loss"] not in [each["name"] for each in common["outputs"]]:
            _refuse(self.name, "loss", f"{show(self.record['loss'])} is no output")
        self._pieces("common.state", common["state"])

    def _phases(self) -> list[str]:
        listed = self.record.get("phases")
        if listed is None:
            if "accumulate" in self.record:
                _refuse(self.name, "phases", "it is missing beside accumulate")
            return ["step"]
        names = [each["name"] for each in listed]
        self._once("phases", names)
        if not names or max(each["times"] for each in listed) != self.record.get("accumulate"):
            _refuse(self.name, "phases", "they do not run as often as accumulate says")
        return names

    def _ranks(self, mesh: Mesh, phases: Sequence[str]) -> None:
        inputs = self._once("common.state", [state["input"] for state in self.record["common"]["state"]])
        seen = -1
        for place, rank in enumerate(self.record["ranks"]):
            where = f"ranks[{place}]"
            if not seen < rank["rank"] < mesh.ranks:
                _refuse(self.name, f"{where}.rank", f"{rank['rank']} behind {seen}, of {mesh.ranks} ranks")
            seen = rank["rank"]
            if list(rank["files"]) != list(phases):
                _refuse(self.name, f"{where}.files", f"they are not those of the phases {', '.join(map(show, phases))}")
            for phase, file in rank["files"].items():
                self._plain(f"{where}.files.{phase}", file)
            self._pieces(f"{where}.state", rank["state"])
            for number, held in enumerate(rank.get("accumulators", ())):
                self._typed(f"{where}.accumulators[{number}]", held)
            own = self._once(
                f"{where}.state", [each["input"] for each in (*rank["state"], *rank.get("accumulators", ()))]
            )
            if own & inputs:
                _refuse(self.name, f"{where}.state", f"{show(min(own & inputs))} is one of common.state")

    def _pieces(self, where: str, states: Sequence[Mapping[str, Any]]) -> None:
        for number, state in enumerate(states):
            for place, piece in enumerate(state["pieces"]):
                start, stop, tensor = piece["start"], piece["stop"], piece["tensor"]
                if tensor not in self.elements:
                    key = f"{where}[{number}].pieces[{place}].tensor"
                    _refuse(self.name, key, f"{show(tensor)} is no state of the source")
                elements = self.elements[tensor]
                if stop < start or elements is None or stop > elements:
                    key, what = f"{where}[{number}].pieces[{place}]", f"[{start}, {stop}) is no range of its elements"
                    _refuse(self.name, key, f"{what}: {show(tensor)} has {elements}")

    def _typed(self, where: str, record: Mapping[str, Any]) -> None:
        if not known(record["dtype"]) or record["dtype"] == "string":
            _refuse(self.name, f"{where}.dtype", f"{show(record['dtype'])} is no type of numbers")
        size = 16
        for each in record["shape"] or ():
            size *= max(each, 1) if isinstance(each, int) else 1
        if size >= limits.ELEMENTS:
            _refuse(self.name, f"{where}.shape", "a tensor of 2**63 bytes or more")

    def _plain(self, where: str, name: str) -> None:
        if not name or name in (".", "..") or set(name) & set("/\\\0") or len(name.encode()) > 255:
            _refuse(self.name, where, f"{show(name)} is not the name of a file in the folder")

    def _once(self, where: str, names: Iterable[str]) -> set[str]:
        seen: set[str] = set()
        for name in names:
            if name in seen:
                _refuse(self.name, where, f"{show(name)} stands there twice")
            seen.add(name)
        return seen
