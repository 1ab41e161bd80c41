"""Reads manifest and report of an output folder: validates the schema, then conditions that a schema cannot express.

The schema checks keys and types. All other conditions that readers rely on are checked here, and only here: ranks fit
the mesh, file names have no path, types are known, pieces are ranges of their tensors, no name is listed twice.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from gopt import documents, limits
from gopt.artifact.manifest import (
    MANIFEST_FILE,
    FedInput,
    InputEntry,
    InputKind,
    LocalState,
    Manifest,
    OutputEntry,
    Piece,
    RankEntry,
    Shape,
)
from gopt.artifact.report_groups import Group
from gopt.artifact.report_record import REPORT_FILE, Report
from gopt.artifact.server_entries import Mode
from gopt.artifact.server_plan_check import check_server_plan
from gopt.collectives.messages import MESSAGES, ROUND_INPUT
from gopt.collectives.table import COLLECTIVES
from gopt.documents.records import from_document
from gopt.errors import GoptError, InputError, OptionError
from gopt.ir.graph import COMM, Graph, Node
from gopt.ir.types import TensorType, known
from gopt.mesh import Mesh, Sees
from gopt.sanitize import show
from gopt.sharding.boxes import Box, box_elements, box_shape


def read_manifest(folder: str | os.PathLike[str]) -> tuple[Manifest, Mesh]:
    """The manifest of an output folder and its mesh; raises InputError."""
    path = Path(folder, MANIFEST_FILE)
    return parse_manifest(documents.read_bytes(path, documents.MANIFEST.most), str(path))


def parse_manifest(data: bytes, name: str) -> tuple[Manifest, Mesh]:
    """The manifest in the bytes of a file, and its mesh; ``name`` is the file in messages. Raises InputError."""
    manifest = from_document(Manifest, documents.parse_json(data, documents.MANIFEST, name))
    return manifest, _Checker(name, manifest).check()


def read_report(folder: str | os.PathLike[str], manifest: Manifest) -> Report:
    """The report beside a manifest; raises InputError where it is damaged or describes another mesh."""
    path = Path(folder, REPORT_FILE)
    report = from_document(Report, documents.read_json(path, documents.REPORT))
    _check_groups(path, report)
    if manifest.parameter_server is not None:
        _check_split_report(path, report, manifest.parameter_server.servers)
        return report
    if report.mesh.axes != manifest.mesh.axes:  # kinds were not always written
        raise InputError(f"{path}: mesh: it differs from the mesh of the manifest")
    if [each.rank for each in report.ranks] != [each.rank for each in manifest.ranks]:
        raise InputError(f"{path}: ranks: they differ from the ranks of the manifest")
    return report


def _check_groups(path: Path, report: Report) -> None:
    """Refuse groups whose rows have not as many names as there are columns, or which count others."""
    lists: dict[str, Sequence[Group]] = {
        "removed_ops": report.removed_ops, "removed_vars": report.removed_vars,
        "added_ops": report.added_ops, "added_vars": report.added_vars,
    }  # fmt: skip
    for key, groups in lists.items():
        for place, group in enumerate(groups):
            if (wrong := group.fault()) is not None:
                raise InputError(f"{path}: {key}[{place}]: {wrong}")


def _check_split_report(path: Path, report: Report, servers: int) -> None:
    """Refuse a report of other servers; a run may have had another number of trainers."""
    trainers = report.mesh.ranks
    if [each.rank for each in report.ranks] != list(range(min(trainers, limits.RANKS) + servers)):
        raise InputError(f"{path}: ranks: they are not {trainers} trainers and the {servers} servers of the manifest")


def check_source(manifest: Manifest, graph: Graph, home: str | os.PathLike[str], what: str = "the kept source") -> None:
    """Compare a manifest with its source; ``what`` is the word for the source in messages. Raises InputError."""
    name = str(Path(home, MANIFEST_FILE))
    for index, state in enumerate(manifest.states):
        where = f"states[{index}]"
        if state.tensor not in graph.inputs or state.updated not in graph.outputs:
            _refuse(name, where, f"{what} has no state {show(state.tensor)} -> {show(state.updated)}")
        if graph.inputs[state.tensor] != state.type:
            _refuse(name, where, f"{state.type} is {graph.inputs[state.tensor]} in {what}")
    for index, entry in enumerate(manifest.common.inputs):
        if graph.inputs.get(entry.name) != entry.type:
            _refuse(name, f"common.inputs[{index}]", f"{what} has no input {show(entry.name)} of this type")
    for index, output in enumerate(manifest.common.outputs):
        if output.name not in graph.outputs:
            _refuse(name, f"common.outputs[{index}]", f"{what} has no output {show(output.name)}")
    listed = {state.tensor for state in manifest.states} | {entry.name for entry in manifest.common.inputs}
    for key in graph.inputs:
        if key not in listed and key not in graph.initializers:  # a frozen weight needs no entry
            _refuse(name, "common.inputs", f"{show(key)}, an input of {what}, is missing")


def check_rank(manifest: Manifest, rank: RankEntry, graphs: Mapping[str, Graph], home: str | os.PathLike[str]) -> None:
    """Compare the manifest's entry of a rank with the rank's graphs, by phase; raises InputError on a difference."""
    name, where = str(Path(home, MANIFEST_FILE)), f"rank {rank.rank}"
    inputs = {key: type for graph in graphs.values() for key, type in graph.inputs.items()}
    outputs = {key for graph in graphs.values() for key in graph.outputs}
    dtypes = {state.tensor: state.dtype for state in manifest.states}
    states = manifest.states_of(rank)
    for state in states:
        type = inputs.get(state.input)
        if type is None or type.elements != state.elements or state.output not in outputs:
            _refuse(name, where, f"its files and the manifest disagree on {show(state.input)}")
        if not state.copy and {dtypes[piece.tensor] for piece in state.pieces} - {type.dtype}:
            _refuse(name, where, f"its files and the manifest disagree on the type of {show(state.input)}")
    for each in rank.accumulators:
        if inputs.get(each.input) != each.type or each.output not in outputs:
            _refuse(name, where, f"its files and the manifest disagree on {show(each.input)}")
    parts = {each.input: box_shape(each.box) for each in rank.fed}
    for index, entry in enumerate(manifest.common.inputs):
        type = TensorType(entry.dtype, parts.get(entry.name, entry.shape))
        if inputs.get(entry.name, type) != type:
            _refuse(name, f"common.inputs[{index}]", f"{where} has {show(entry.name)} of another type")
    listed = {*rank.inputs, *(state.input for state in manifest.common.state)}
    listed |= {ROUND_INPUT} if manifest.parameter_server is not None else set()
    listed |= {entry.name for entry in manifest.common.inputs}
    frozen = {key for graph in graphs.values() for key in graph.initializers}  # weights that no update touches
    if unlisted := inputs.keys() - listed - frozen:
        _refuse(name, "common.inputs", f"{show(min(unlisted))}, an input of {where}, is missing")
    if manifest.loss not in outputs and rank.role != "server":
        _refuse(name, "loss", f"{where} has no output {show(manifest.loss)}")
    mesh, member = manifest.mesh.mesh(), rank.rank
    if rank.role == "server" and manifest.parameter_server is not None:
        servers = manifest.parameter_server.servers
        mesh, member = Mesh((("server", servers),), (("server", Sees.DATA),)), rank.rank - mesh.ranks
    for graph in graphs.values():
        for node in graph.nodes:
            if node.domain == COMM and node.op_type in MESSAGES:
                _check_message(name, rank, graph, node)
            elif node.domain == COMM:
                _check_call(name, mesh, member, graph, node)


def _check_message(name: str, rank: RankEntry, graph: Graph, node: Node) -> None:
    """Refuse a message whose attributes and operands do not fit one another."""
    types = [graph.type_of(each) for each in node.inputs]
    given = [(type.dtype, type.shape) if each else ("", None) for each, type in zip(node.inputs, types)]
    try:
        MESSAGES[node.op_type].infer(node.attributes, given)
    except GoptError as error:
        _refuse(name, f"rank {rank.rank}", f"its file has {show(node.label)}: {error.message}")


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


def _refuse(name: str, key: str, what: str) -> NoReturn:
    raise InputError(f"{name}: {key}: {what}")


class _Checker:
    """Checks one manifest for consistency; ``name`` is its file."""

    def __init__(self, name: str, manifest: Manifest) -> None:
        self.name, self.manifest = name, manifest
        self.elements: dict[str, int | None] = {}
        self.shapes: dict[str, Shape | None] = {}
        """State of the source -> its elements, None where they are not known."""

    def check(self) -> Mesh:
        """The mesh of the manifest; raises InputError."""
        mesh = self._mesh()
        self._plain("source", self.manifest.source)
        self._states()
        self._common()
        self._phases()
        self._ranks(mesh)
        check_server_plan(self.name, self.manifest)
        return mesh

    def _mesh(self) -> Mesh:
        entry = self.manifest.mesh
        try:
            mesh = entry.mesh()
        except OptionError as error:
            _refuse(self.name, "mesh", error.message)
        if mesh.ranks != entry.ranks:
            _refuse(self.name, "mesh.ranks", f"{entry.ranks}, but its axes have {mesh.ranks} ranks")
        return mesh

    def _states(self) -> None:
        states = self.manifest.states
        self._once("states", [state.tensor for state in states])
        self._once("states", [state.updated for state in states])
        for index, state in enumerate(states):
            self._typed(f"states[{index}]", state.dtype, state.shape)
            type = state.type
            self.shapes[state.tensor] = state.shape
            self.elements[state.tensor] = type.elements if type.static else None
        for index, state in enumerate(states):
            if state.of is not None and state.of not in self.elements:
                _refuse(self.name, f"states[{index}].of", f"{show(state.of)} is not a state")

    def _common(self) -> None:
        common = self.manifest.common
        lists: dict[str, Sequence[InputEntry | OutputEntry]] = {"inputs": common.inputs, "outputs": common.outputs}
        for key, entries in lists.items():
            self._once(f"common.{key}", [each.name for each in entries])
            for index, each in enumerate(entries):
                self._typed(f"common.{key}[{index}]", each.dtype, each.shape)
        for index, entry in enumerate(common.inputs):
            if entry.name in self.elements:
                _refuse(self.name, f"common.inputs[{index}].name", f"{show(entry.name)} is a state")
        if self.manifest.loss not in [each.name for each in common.outputs]:
            _refuse(self.name, "loss", f"{show(self.manifest.loss)} is not an output")
        self._pieces("common.state", common.state)

    def _phases(self) -> None:
        phases, accumulate = self.manifest.phases, self.manifest.accumulate
        if phases is None:
            if accumulate > 1:
                _refuse(self.name, "phases", "it is required beside accumulate")
            return
        self._once("phases", [each.name for each in phases])
        entry = self.manifest.parameter_server
        geo = entry is not None and entry.mode is Mode.GEO
        times = entry.every if entry is not None and geo else accumulate
        if (accumulate == 1 and not geo) or not phases or max(each.times for each in phases) != times:
            _refuse(self.name, "phases", "the number of runs is not that of accumulate")

    def _ranks(self, mesh: Mesh) -> None:
        common = self._once("common.state", [state.input for state in self.manifest.common.state])
        phases, last = list(self.manifest.schedule), -1
        servers = self.manifest.parameter_server.servers if self.manifest.parameter_server is not None else 0
        for index, rank in enumerate(self.manifest.ranks):
            where = f"ranks[{index}]"
            if not last < rank.rank < mesh.ranks + servers:
                _refuse(self.name, f"{where}.rank", f"{rank.rank} behind {last}, of {mesh.ranks + servers} ranks")
            last = rank.rank
            if (rank.role == "server") != (rank.rank >= mesh.ranks):
                _refuse(
                    self.name, f"{where}.role", f"{show(rank.role)}, of {mesh.ranks} trainers and {servers} servers"
                )
            due = phases if rank.rank < mesh.ranks else ["step"]
            if list(rank.files) != due:
                _refuse(self.name, f"{where}.files", f"the keys are not the phases {', '.join(map(show, due))}")
            for phase, file in rank.files.items():
                self._plain(f"{where}.files.{phase}", file)
            self._pieces(f"{where}.state", rank.state)
            for number, each in enumerate(rank.accumulators):
                self._typed(f"{where}.accumulators[{number}]", each.dtype, each.shape)
            self._fed(f"{where}.fed", rank.fed)
            own = self._once(f"{where}.state", rank.inputs)
            if own & common:
                _refuse(self.name, f"{where}.state", f"{show(min(own & common))} is one of common.state")

    def _fed(self, where: str, fed: Sequence[FedInput]) -> None:
        batch = {each.name: each.shape for each in self.manifest.inputs_of(InputKind.BATCH)}
        self._once(where, [each.input for each in fed])
        for number, each in enumerate(fed):
            if each.input not in batch:
                _refuse(self.name, f"{where}[{number}].input", f"{show(each.input)} is no input of the batch")
            self._box(f"{where}[{number}].box", each.input, batch[each.input], each.box)

    def _pieces(self, where: str, states: Sequence[LocalState]) -> None:
        for number, state in enumerate(states):
            for index, piece in enumerate(state.pieces):
                if piece.tensor not in self.elements:
                    key = f"{where}[{number}].pieces[{index}].tensor"
                    _refuse(self.name, key, f"{show(piece.tensor)} is not a state of the source")
                elements = self.elements[piece.tensor]
                if piece.box is not None:
                    elements = self._box(
                        f"{where}[{number}].pieces[{index}].box", piece.tensor, self.shapes[piece.tensor], piece.box
                    )  # fmt: skip
                if piece.every is not None:
                    elements = self._every(f"{where}[{number}].pieces[{index}]", piece)
                if piece.stop < piece.start or elements is None or piece.stop > elements:
                    key = f"{where}[{number}].pieces[{index}]"
                    what = f"[{piece.start}, {piece.stop}) is not a range of its elements"
                    _refuse(self.name, key, f"{what}: {show(piece.tensor)} has {elements}")

    def _every(self, where: str, piece: Piece) -> int:
        """The elements of every so many rows; raises InputError where a tensor has no such rows."""
        shape = self.shapes[piece.tensor] or ()
        first, step = piece.every or (0, 1)
        rows = shape[0] if shape else None
        if self.manifest.parameter_server is None or piece.box is not None or self.elements[piece.tensor] is None:
            _refuse(self.name, f"{where}.every", "only parts of tables on servers have it, in place of a box")
        if not isinstance(rows, int) or not 0 <= first < step <= max(rows, 1):
            _refuse(self.name, f"{where}.every", f"{first} and {step} are no rows of {show(piece.tensor)}")
        return len(range(first, rows, step)) * ((self.elements[piece.tensor] or 0) // max(rows, 1))

    def _box(self, where: str, tensor: str, shape: Shape | None, box: Box) -> int:
        """Return the number of elements of a box; raises InputError if it is not inside the tensor."""
        if shape is None or len(box) != len(shape):
            _refuse(self.name, where, f"{len(box)} dimensions, {show(tensor)} has {len(shape or ())}")
        for size, ends in zip(shape or (), box):
            inside = isinstance(size, int) and ends[-1] <= size
            if len(ends) % 2 or list(ends) != sorted(ends) or not inside:
                _refuse(self.name, where, f"its {len(ends)} ends are no ranges of a dimension of {size}, in order")
        return box_elements(box)

    def _typed(self, where: str, dtype: str, shape: Shape | None) -> None:
        if not known(dtype) or dtype == "string":
            _refuse(self.name, f"{where}.dtype", f"{show(dtype)} is not a numeric type")
        size = 16
        for each in shape or ():
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
                _refuse(self.name, where, f"{show(name)} is listed twice")
            seen.add(name)
        return seen
