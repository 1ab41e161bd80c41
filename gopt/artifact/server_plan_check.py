"""Checks the trainers and servers of a manifest beyond the schema, for conditions needed by readers.

Already checked: ranks fit the mesh, pieces of states are ranges of their tensors, and no name is listed twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NoReturn

from gopt import limits
from gopt.analysis.loss_reduction import LossReduction
from gopt.artifact.manifest import Manifest
from gopt.artifact.manifest_entries import LocalState, RankEntry
from gopt.artifact.server_entries import Mode, PullAt, ServerPlanEntry, TableEntry
from gopt.artifact.server_key_check import check_keys
from gopt.artifact.table_parts import part_piece, table_layout
from gopt.errors import InputError, OptionError
from gopt.records.row_init import RowInit
from gopt.records.tables import TableLayout
from gopt.text.sanitize import show

_PS = "parameter_server"
_APART = (Mode.ASYNC, Mode.HALF_ASYNC)


def check_server_plan(name: str, manifest: Manifest) -> None:
    """Refuse a manifest with contradictory trainers, servers and keys; ``name``: of the file.

    Raises InputError naming the key. Takes time linear in the manifest.
    """
    if manifest.parameter_server is not None:
        _Plan(name, manifest, manifest.parameter_server).check()


class _Plan:
    def __init__(self, name: str, manifest: Manifest, entry: ServerPlanEntry) -> None:
        self.name, self.manifest, self.entry = name, manifest, entry
        self.trainers = manifest.mesh.ranks
        self.states = {state.tensor: state for state in manifest.states}
        self.held: list[dict[str, LocalState]] = []
        """For each server: input -> the state that it holds."""
        self.layouts: dict[str, TableLayout] = {}
        """Tensor with the rows of a table -> the table's layout."""

    def check(self) -> None:
        self._options()
        self._roles()
        self._ranks()
        self._trainers()
        self._tables()
        self._servers()
        check_keys(self.name, self.manifest, self.entry, self.held)

    def _refuse(self, where: str, what: str) -> NoReturn:
        raise InputError(f"{self.name}: {where}: {what}")

    # --- the whole --------------------------------------------------------------------------------------------------

    def _options(self) -> None:
        entry = self.entry
        if self.trainers + entry.servers > limits.RANKS:
            self._refuse(f"{_PS}.servers", f"{entry.servers}, there are at most {limits.RANKS} ranks (RANKS)")
        for field, is_set, modes in (
            ("compensation", entry.compensation is not None, _APART),
            ("count", entry.count != "round", _APART),
            ("every", entry.every != 1, (Mode.GEO,)),
        ):
            if is_set and entry.mode not in modes:
                self._refuse(f"{_PS}.{field}", f"it has no effect in mode {entry.mode}")
        if entry.compensation is not None and not 0 <= entry.compensation < float("inf"):
            self._refuse(f"{_PS}.compensation", f"{entry.compensation} is not a number from 0")
        try:
            LossReduction.parse(self.manifest.loss_reduction)
        except OptionError as error:
            self._refuse("loss_reduction", error.message)
        if self.manifest.common.state:
            self._refuse("common.state", "trainers and servers hold no state alike")

    def _roles(self) -> None:
        if self.entry.roles is None:
            return
        try:
            roles = self.entry.roles.roles()
            if roles.is_open and roles.servers != self.entry.servers:
                raise OptionError(f"they are for {roles.servers} servers, there are {self.entry.servers}")
            if not roles.is_open:
                roles.check_counts(self.trainers, self.entry.servers)
        except OptionError as error:
            self._refuse(f"{_PS}.roles", error.message)

    def _ranks(self) -> None:
        due = self.trainers + self.entry.servers
        if len(self.manifest.ranks) != due:
            what = f"{len(self.manifest.ranks)} entries, {self.trainers} trainers and {self.entry.servers} servers"
            self._refuse("ranks", f"{what} need {due}")
        files: dict[str, int] = {}
        for rank in self.manifest.ranks[:1] + self.manifest.ranks[self.trainers :]:
            for file in rank.files.values():
                if files.setdefault(file, rank.rank) != rank.rank or list(rank.files.values()).count(file) > 1:
                    self._refuse(f"ranks[{rank.rank}].files", f"{show(file)} is the file of rank {files[file]} too")

    def _trainers(self) -> None:
        trainer, *rest = self.manifest.ranks[: self.trainers]
        for rank in rest:
            for field in ("files", "state", "accumulators"):
                if getattr(rank, field) != getattr(trainer, field):
                    self._refuse(f"ranks[{rank.rank}].{field}", "it differs from rank 0's: trainers are alike")
        served = {piece.tensor for rank in self._of_servers() for state in rank.state for piece in state.pieces}
        for index, state in enumerate(trainer.state):
            where = f"ranks[0].state[{index}]"
            if len(state.pieces) != 1 or not self._whole(state):
                self._refuse(f"{where}.pieces", f"trainers hold {show(state.input)} whole or not at all")
            if state.copy != (state.pieces[0].tensor in served):
                cause = "servers hold it too: it must be a copy" if not state.copy else "no server holds it"
                self._refuse(where, f"{show(state.pieces[0].tensor)}: {cause}")
            if state.copy and self.entry.pull is not PullAt.END:
                self._refuse(f"{where}.copy", f"trainers that pull at the start of a step keep no {show(state.input)}")
        covered = served | {state.pieces[0].tensor for state in trainer.state}
        lost = next((tensor for tensor in self.states if tensor not in covered), None)
        if lost is not None:
            self._refuse("ranks", f"neither trainers nor servers hold {show(lost)}")

    def _whole(self, state: LocalState) -> bool:
        piece = state.pieces[0]
        type = self.states[piece.tensor].type
        return (
            piece.box is None
            and piece.every is None
            and piece.start == 0
            and (not type.static or piece.stop == type.elements)
        )

    def _of_servers(self) -> Sequence[RankEntry]:
        return self.manifest.ranks[self.trainers :]

    def _tables(self) -> None:
        by_owner: dict[str, list[str]] = {}
        for state in self.manifest.states:
            by_owner.setdefault(state.of or state.tensor, []).append(state.tensor)
        for index, entry in enumerate(self.entry.tables):
            where = f"{_PS}.tables[{index}]"
            tensor_state = self.states.get(entry.parameter)
            if tensor_state is None or tensor_state.type.elements != entry.rows * entry.width:
                self._refuse(f"{where}.parameter", f"{show(entry.parameter)} is not a table of {entry.rows} rows")
            if entry.parameter in self.layouts:
                self._refuse(f"{where}.parameter", f"{show(entry.parameter)} is another table")
            if any(server >= self.entry.servers for server in entry.servers):
                self._refuse(f"{where}.servers", f"there are {self.entry.servers} servers")
            if not len(entry.inputs) == len(entry.outputs) == len(entry.gradients) == len(entry.servers):
                self._refuse(f"{where}.inputs", f"it has {len(entry.servers)} parts")
            try:
                layout = table_layout(entry)
            except InputError as error:
                self._refuse(where, error.message)
            self._table_states(where, entry)
            for tensor in by_owner[entry.parameter]:
                if self.states[tensor].type.elements == tensor_state.type.elements:
                    self.layouts[tensor] = layout
            for server, name in zip(entry.servers, entry.inputs):
                states = {state.input: state for state in self._of_servers()[server].state}
                if name not in states or states[name].pieces != (part_piece(layout, entry.parameter, server),):
                    self._refuse(f"{where}.inputs", f"server {server} does not hold its part as {show(name)}")
            for number, init in enumerate(entry.init):
                if self.layouts.get(init.tensor) is not layout:
                    self._refuse(f"{where}.init[{number}].tensor", f"{show(init.tensor)} has other rows")

    def _table_states(self, where: str, entry: TableEntry) -> None:
        """Check the servers' states of a table besides the table itself."""
        due, rounds = len(entry.servers), self.entry.mode.rounds
        if (entry.states or entry.update != "dense" or not rounds) and len(entry.states) != due:
            self._refuse(f"{where}.states", f"it has {due} parts")
        if (entry.ids or not rounds) and len(entry.ids) != due:
            self._refuse(f"{where}.ids", f"it has {due} parts")
        for position, (server, part) in enumerate(zip(entry.servers, entry.states)):
            outputs = {state.input: state.output for state in self._of_servers()[server].state}
            if part.inputs[:1] != entry.inputs[position : position + 1] or len(part.inputs) != len(part.outputs):
                self._refuse(f"{where}.states[{position}]", "the part of the table is the first of them")
            for name, new in zip(part.inputs, part.outputs):
                if outputs.get(name) != new:
                    self._refuse(f"{where}.states[{position}]", f"{show(name)} is not a state of server {server}")
        for number, init in enumerate(entry.init):
            try:
                RowInit.parse(init.rows)
            except OptionError as error:
                self._refuse(f"{where}.init[{number}].rows", error.message)

    def _servers(self) -> None:
        ranges: dict[str, set[tuple[int, int]]] = {}
        tables: dict[str, set[int]] = {}
        for rank in self._of_servers():
            self.held.append({state.input: state for state in rank.state})
            if rank.accumulators:
                self._refuse(f"ranks[{rank.rank}].accumulators", "servers have none")
            for number, state in enumerate(rank.state):
                if not state.elements and all(self.states[piece.tensor].type.elements for piece in state.pieces):
                    self._refuse(f"ranks[{rank.rank}].state[{number}].pieces", "it holds nothing")
                for piece in state.pieces:
                    layout = self.layouts.get(piece.tensor)
                    if layout is not None:
                        if piece != part_piece(layout, piece.tensor, rank.rank - self.trainers):
                            self._refuse(f"ranks[{rank.rank}].state[{number}].pieces", "it is not a part of its table")
                        tables.setdefault(piece.tensor, set()).add(rank.rank - self.trainers)
                        continue
                    if piece.box is not None or piece.every is not None:
                        self._refuse(f"ranks[{rank.rank}].state[{number}].pieces", "pieces of servers have no box")
                    ranges.setdefault(piece.tensor, set()).add((piece.start, piece.stop))
        for tensor, layout in self.layouts.items():
            if tables.get(tensor, set()) != set(layout.servers):
                self._refuse("ranks", f"some part of {show(tensor)} is on no server")
        for tensor, bounds in ranges.items():
            end = self._end(sorted(bounds))
            if end != self.states[tensor].type.elements:
                what = f"the pieces of {show(tensor)} on servers do not tile it"
                self._refuse("ranks", f"{what}: it has {self.states[tensor].type.elements} elements")

    @staticmethod
    def _end(ranges: Iterable[tuple[int, ...]]) -> int:
        """Return the end of ranges contiguous from 0; -1 for gaps or overlaps."""
        end = 0
        for start, stop, *_ in ranges:
            if start != end:
                return -1
            end = stop
        return end
