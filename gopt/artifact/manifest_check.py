"""Reads the manifest of an output folder: validates the schema, then conditions beyond the schema.

The schema checks keys and types. All other conditions needed by readers are checked here, and only here: ranks fit the
mesh, file names have no path, types are known, pieces are ranges of their tensors, no name is listed twice.
``graph_check`` compares a manifest with graphs, ``report_check`` a report with the manifest.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from gopt import documents
from gopt.artifact.integrity import check_files, check_seal
from gopt.artifact.manifest import MANIFEST_FILE, Manifest, Piece
from gopt.artifact.manifest_entries import FedInput, InputEntry, InputKind, LocalState, OutputEntry, Shape
from gopt.artifact.server_entries import Mode
from gopt.artifact.server_plan_check import check_server_plan
from gopt.artifact.states_file import STATES_FILE
from gopt.collectives import schemas
from gopt.documents.records import from_document
from gopt.errors import InputError, OptionError
from gopt.ir.types import known, overflows
from gopt.records.boxes import Box, box_elements
from gopt.records.mesh import Mesh
from gopt.text.sanitize import show

_RANK_LINE = re.compile(
    rb'^\{"rank": ([0-9]{1,9}), "role": "trainer", "files": \{[^{}\n]*\}, ("state": .*)\},?$', re.MULTILINE
)
"""A rank in a line, as gopt writes ranks: the number, and the text behind the files."""


def read_manifest(folder: str | os.PathLike[str]) -> tuple[Manifest, Mesh]:
    """The manifest of an output folder and the mesh; raises InputError for a damaged manifest or a broken seal."""
    path = Path(folder, MANIFEST_FILE)
    data = documents.read_bytes(path, "MANIFEST_BYTES")
    manifest, mesh = parse_manifest(data, str(path))
    check_seal(data, str(path), manifest.seal, path.parent)
    return manifest, mesh


def check_graphs(folder: Path, manifest: Manifest) -> None:
    """Raise InputError for a changed file of a folder; values, not read by all commands, are left out."""
    files = manifest.files
    check_files(folder, files, files and files.keys() - {STATES_FILE})


def check_all_ranks(manifest: Manifest, folder: Path) -> None:
    """Raise InputError for a folder of some ranks. From now on, onnx checks nodes behind calls as well."""
    schemas.register()
    if len(manifest.ranks) != manifest.total_ranks:
        raise InputError(
            f"{folder} holds {len(manifest.ranks)} of {manifest.total_ranks} ranks", "shard without --only-ranks"
        )


def parse_manifest(data: bytes, name: str) -> tuple[Manifest, Mesh]:
    """The manifest in the bytes of a file, and the mesh; ``name`` is the file in messages. Raises InputError."""
    text, repeated = _said_once(data)
    manifest = from_document(Manifest, documents.parse_json(text, documents.MANIFEST, name))
    said = {rank.rank: rank for rank in manifest.ranks}
    ranks = (replace(said[repeated.get(rank.rank, rank.rank)], rank=rank.rank, files=rank.files)
             for rank in manifest.ranks)  # fmt: skip
    manifest = replace(manifest, ranks=tuple(ranks))
    return manifest, _Checker(name, manifest).check()


def _said_once(data: bytes) -> tuple[bytes, dict[int, int]]:
    """A manifest without repeated words of ranks, as of replicas; number of a rank -> the earlier rank with the words.
    The limits of documents are on the remaining text."""
    first: dict[bytes, int] = {}
    repeated: dict[int, int] = {}
    parts, position = [], 0
    for line in _RANK_LINE.finditer(data):
        rank, words = int(line[1]), line[2]
        if rank not in repeated and (before := first.setdefault(words, rank)) != rank:
            repeated[rank] = before
            parts += [data[position : line.start(2)], b'"state": []']
            position = line.end(2)
    return b"".join([*parts, data[position:]]) if parts else data, repeated


def _refuse(name: str, key: str, what: str) -> NoReturn:
    raise InputError(f"{name}: {key}: {what}")


class _Checker:
    """Checks a manifest for consistency; ``name``: of the file."""

    def __init__(self, name: str, manifest: Manifest) -> None:
        self.name, self.manifest = name, manifest
        self.elements: dict[str, int | None] = {}
        self.shapes: dict[str, Shape | None] = {}
        """State of the source -> its elements, None where they are not known."""

    def check(self) -> Mesh:
        """The mesh of the manifest; raises InputError."""
        mesh = self._mesh()
        self._plain("source", self.manifest.source)
        if self.manifest.startup is not None:
            self._plain("startup", self.manifest.startup)
        for name in self.manifest.files or ():
            self._plain("files", name)
        self._states()
        self._common()
        self._phases()
        self._ranks(mesh)
        self._reductions()
        self._host()
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
            self._once(f"common.{key}", [entry.name for entry in entries])
            for index, border in enumerate(entries):
                self._typed(f"common.{key}[{index}]", border.dtype, border.shape)
        for index, entry in enumerate(common.inputs):
            if entry.name in self.elements:
                _refuse(self.name, f"common.inputs[{index}].name", f"{show(entry.name)} is a state")
            if entry.draw is not None and (fault := entry.draw.fault(entry.dtype, entry.shape == ())):
                _refuse(self.name, f"common.inputs[{index}].draw", f"{entry.draw}: {fault}")
        shown = {output.name for output in common.outputs}
        self._once("loss", self.manifest.losses)
        for loss in self.manifest.losses:
            if loss not in shown:
                _refuse(self.name, "loss", f"{show(loss)} is not an output")
        self._pieces("common.state", common.state)

    def _reductions(self) -> None:
        """Rules of statistics say what their points, or the records of local states, say as well."""
        entries = self.manifest.reductions
        self._once("reductions", [entry.tensor for entry in entries])
        lists = [self.manifest.common.state, *{id(rank.state): rank.state for rank in self.manifest.ranks}.values()]
        local = {piece.tensor for states in lists for state in states if state.local for piece in state.pieces}
        for index, entry in enumerate(entries):
            due = "+".join(dict.fromkeys(point.reduce for point in entry.points))
            if entry.rule not in ([due] if due else ["local"] if entry.tensor in local else ["mean", "root"]):
                what = f"{show(entry.rule)} is not how the ranks of the manifest combine {show(entry.tensor)}"
                _refuse(self.name, f"reductions[{index}].rule", what)

    def _host(self) -> None:
        """Values on the host are states of ranks and values of a step without inputs, each named once."""
        host, lists = self.manifest.host, [self.manifest.common.state, *(rank.state for rank in self.manifest.ranks)]
        inputs = {state.input for states in {id(states): states for states in lists}.values() for state in states}
        whole = len(self.manifest.ranks) == self.manifest.total_ranks
        self._once("host", [*host.states, *host.activations])
        for index, name in enumerate(host.states):
            if whole and name not in inputs:
                _refuse(self.name, f"host.states[{index}]", f"{show(name)} is not a state of a rank")
        fed = inputs | {entry.name for entry in self.manifest.common.inputs}
        for index, name in enumerate(host.activations):
            if name in fed:
                _refuse(self.name, f"host.activations[{index}]", f"{show(name)} is an input of a step")

    def _phases(self) -> None:
        phases, accumulate = self.manifest.phases, self.manifest.accumulate
        if phases is None:
            if accumulate > 1:
                _refuse(self.name, "phases", "it is required beside accumulate")
            return
        self._once("phases", [phase.name for phase in phases])
        entry = self.manifest.parameter_server
        geo = entry is not None and entry.mode is Mode.GEO
        times = entry.every if entry is not None and geo else accumulate
        runs = [phase.times for phase in phases]
        if (accumulate == 1 and not geo) or max(runs, default=0) != times:
            _refuse(self.name, "phases", "the number of runs differs from accumulate")
        if runs != sorted(runs, reverse=True) or {*runs} - {1, times}:
            _refuse(self.name, "phases", "each runs for every micro-step, or once behind these")

    def _ranks(self, mesh: Mesh) -> None:
        common = self._once("common.state", [state.input for state in self.manifest.common.state])
        phases, last, seen = list(self.manifest.schedule), -1, set[int]()
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
            if rank.startup is not None:
                self._plain(f"{where}.startup", rank.startup)
                if self.manifest.startup is None:
                    _refuse(self.name, f"{where}.startup", "the source has no start-up graph")
            if id(rank.state) not in seen:
                self._pieces(f"{where}.state", rank.state)
                seen.add(id(rank.state))
            for number, accumulator in enumerate(rank.accumulators):
                self._typed(f"{where}.accumulators[{number}]", accumulator.dtype, accumulator.shape)
            for number, value in enumerate(rank.saved):
                self._typed(f"{where}.saved[{number}]", value.dtype, value.shape)
            self._fed(f"{where}.fed", rank.fed)
            inputs = self._once(f"{where}.state", rank.inputs)
            if inputs & common:
                _refuse(self.name, f"{where}.state", f"{show(min(inputs & common))} is one of common.state")

    def _fed(self, where: str, fed: Sequence[FedInput]) -> None:
        batch = {entry.name: entry.shape for entry in self.manifest.inputs_of(InputKind.BATCH)}
        self._once(where, [part.input for part in fed])
        for number, fed_part in enumerate(fed):
            if fed_part.input not in batch:
                _refuse(self.name, f"{where}[{number}].input", f"{show(fed_part.input)} is not an input of the batch")
            self._box(f"{where}[{number}].box", fed_part.input, batch[fed_part.input], fed_part.box)

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
        start, step = piece.every or (0, 1)
        rows = shape[0] if shape else None
        if self.manifest.parameter_server is None or piece.box is not None or self.elements[piece.tensor] is None:
            _refuse(self.name, f"{where}.every", "only parts of tables on servers have it, in place of a box")
        if not isinstance(rows, int) or not 0 <= start < step <= max(rows, 1):
            _refuse(self.name, f"{where}.every", f"{start} and {step} are not rows of {show(piece.tensor)}")
        return len(range(start, rows, step)) * ((self.elements[piece.tensor] or 0) // max(rows, 1))

    def _box(self, where: str, tensor: str, shape: Shape | None, box: Box) -> int:
        """Return the number of elements of a box; raises InputError for a box outside the tensor."""
        if shape is None or len(box) != len(shape):
            _refuse(self.name, where, f"{len(box)} dimensions, {show(tensor)} has {len(shape or ())}")
        for size, ends in zip(shape or (), box):
            inside = isinstance(size, int) and ends[-1] <= size
            if len(ends) % 2 or list(ends) != sorted(ends) or not inside:
                _refuse(self.name, where, f"its {len(ends)} ends are not ranges of a dimension of {size}, in order")
        return box_elements(box)

    def _typed(self, where: str, dtype: str, shape: Shape | None) -> None:
        if not known(dtype) or dtype == "string":
            _refuse(self.name, f"{where}.dtype", f"{show(dtype)} is not a numeric type")
        if overflows(shape):
            _refuse(self.name, f"{where}.shape", "a tensor of 2**63 bytes or more")

    def _plain(self, where: str, name: str) -> None:
        if not name or name in (".", "..") or set(name) & set("/\\\0") or len(name.encode()) > 255:
            _refuse(self.name, where, f"{show(name)} is not the name of a file in the folder")

    def _once(self, where: str, names: Iterable[str]) -> set[str]:
        names_before: set[str] = set()
        for name in names:
            if name in names_before:
                _refuse(self.name, where, f"{show(name)} is listed twice")
            names_before.add(name)
        return names_before
