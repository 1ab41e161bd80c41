"""The values of one rank file of another tool, related to the values of the source by a relation file."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from math import prod
from typing import NoReturn

from gopt.analysis.training import TrainingGraph
from gopt.artifact.manifest_entries import LocalState
from gopt.artifact.pieces import Piece, place_shape
from gopt.errors import InputError, OptionError
from gopt.ir.graph import Graph
from gopt.ir.types import TensorType
from gopt.records.boxes import Box, box_elements, box_shape
from gopt.records.mesh import Mesh
from gopt.text.sanitize import listed, show
from gopt.text.suggestions import did_you_mean
from gopt.verification.proof.relation import RankRelation, SourcePart
from gopt.verification.proof.relation_file import (
    InputRelation,
    OutputRelation,
    RankOverrides,
    RelationFile,
)

NAMED = 8
"""Values that a hint names."""


def check_known(entries: Iterable[str], names: Collection[str], where: str, fault: str) -> None:
    for key in entries:
        if key not in names:
            raise InputError(f"{where}: {show(key)}: {fault}", did_you_mean(key, names) or there_are(names))


def there_are(names: Iterable[str]) -> str:
    return f"there are {listed([*map(show, names)], NAMED)}"


class RankReader:
    """Relates the values of a rank's graph to the source."""

    def __init__(
        self, training: TrainingGraph, document: RelationFile, mesh: Mesh, rank: int, graph: Graph, path: str, name: str
    ) -> None:
        self.training, self.mesh, self.rank, self.graph, self.path, self.name = training, mesh, rank, graph, path, name
        entry = next((entry for entry in document.ranks if entry.rank == rank), RankOverrides(rank=rank))
        self.inputs = {**(document.inputs or {}), **(entry.inputs or {})}
        self.outputs = {**(document.outputs or {}), **(entry.outputs or {})}
        self.pairs = {**(document.states or {}), **(entry.states or {})}
        self.states = training.state_of()
        self.readable = {**training.graph.initializers, **training.graph.inputs}
        """Values of the source that may be an input or a stored value of a rank."""

    def names(self, table: str) -> set[str]:
        """The values for a table of the relation."""
        graph = self.graph
        return {*graph.outputs} if table == "outputs" else {*graph.inputs, *graph.initializers}

    def read(self) -> RankRelation:
        """The parts of the source's values on the rank. Raises InputError."""
        states, inputs = [], dict[str, SourcePart]()
        for name in dict.fromkeys([*self.graph.inputs, *(key for key in self.inputs if key in self.names("inputs"))]):
            if name not in self.inputs and name not in self.readable:
                if name not in self.graph.initializers:
                    self._refuse_unrelated(name)
                continue
            part = self._part(f"inputs.{name}", name, self.inputs.get(name, InputRelation()), self.readable)
            pieces = part.pieces or (Piece(part.value, 0, self.training.graph.types[part.value].elements),)
            own = name in self.inputs and self.inputs[name].own is not None
            if own and part.value not in self.training.batch:
                raise InputError(
                    f"{self.name}: inputs.{name}: {show(part.value)} does not belong to the batch of the source: own "
                    "says nothing",
                    "leave own out; roles.batch says which inputs belong to the batch",
                )
            if any(piece.tensor in self.states for piece in pieces):
                states.append(self._state(name, pieces))
            elif name in self.graph.initializers and part.value not in self.training.graph.initializers:
                raise InputError(
                    f"{self.path} stores a value of {show(name)}, and the source none of {show(part.value)}",
                    "store the value in the source too, or make it an input of the rank",
                )
            else:
                inputs[name] = part
        replaced = {state.output for state in states}
        outputs = {
            name: self._output(name, self.outputs.get(name, OutputRelation()))
            for name in self.graph.outputs
            if name not in replaced and (name in self.outputs or name in self.training.shown)
        }
        return RankRelation(self.rank, {"step": self.graph}, tuple(states), inputs, outputs)

    def _refuse_unrelated(self, name: str) -> NoReturn:
        raise InputError(
            f"{self.path} reads {show(name)}, which is no input of the source, and {self.name} does not say what it is",
            *filter(None, [did_you_mean(name, self.readable)]),
            f'write [inputs.{name}] with of = "NAME", a value of the source; {there_are(self.readable)}',
        )

    def _part(
        self, where: str, name: str, entry: InputRelation | OutputRelation, values: Collection[str]
    ) -> SourcePart:
        """The part of the source's values behind a value of the rank."""
        value, where = entry.of or name, f"{self.name}: {where}"
        if sum(map(bool, (entry.split, entry.box, entry.pieces))) > 1:
            raise InputError(f"{where}: of split, box and pieces, one says which part it is", "keep one of them")
        for tensor in [piece.tensor for piece in entry.pieces] or [value]:
            if tensor not in values:
                raise InputError(
                    f"{where}: the source has no such value {show(tensor)}",
                    did_you_mean(tensor, values) or there_are(values),
                )
        if entry.pieces:
            self._check_pieces(where, entry.pieces)
            self._check_type(where, name, TensorType("", (sum(piece.elements for piece in entry.pieces),)), value)
            return SourcePart(entry.pieces[0].tensor, entry.pieces)
        source = self.training.graph.types[value]
        box = entry.box or self._split(where, entry.split, source)
        if box is None:
            self._check_type(where, name, source, value)
            return SourcePart(value)
        piece = Piece(value, 0, box_elements(box), box)
        self._check_pieces(where, (piece,))
        self._check_type(where, name, TensorType(source.dtype, box_shape(box)), value)
        return SourcePart(value, (piece,))

    def _split(self, where: str, split: Sequence[str], source: TensorType) -> Box | None:
        """The rank's box of a value shared out along axes."""
        if not split:
            return None
        if not source.static or len(split) != len(source.dims):
            raise InputError(
                f"{where}: split has {len(split)} dimensions, the source's value is {source}",
                "write a text for each dimension, '' for one that a rank has whole",
            )
        box = []
        for axes, size in zip(split, source.dims):
            count = self._size(where, axes) if axes else 1
            if size % count:
                raise InputError(
                    f"{where}: {axes} has {count} members, which cannot share {size} out evenly",
                    "say in ranks which box each rank has",
                )
            index = self.mesh.index(axes, self.rank) if axes else 0
            box.append((index * size // count, (index + 1) * size // count))
        return tuple(box)

    def _size(self, where: str, axes: str) -> int:
        try:
            return self.mesh.size(axes)
        except OptionError as error:
            raise InputError(f"{where}: {error.message}", "name axes of its mesh, in their order") from None

    def _check_pieces(self, where: str, pieces: Sequence[Piece]) -> None:
        """Raise InputError for a piece beyond the tensor."""
        for piece in pieces:
            type = self.training.graph.types[piece.tensor]
            if not type.static:
                raise InputError(f"{where}: {show(piece.tensor)} is {type}: parts need a known shape", "fix the shapes")
            inside = piece.box is None or (
                len(piece.box) == len(type.dims)
                and all(
                    len(ends) % 2 == 0 and _ascend(ends) and ends[-1] <= size
                    for ends, size in zip(piece.box, type.dims)
                )
            )
            if not inside or not piece.start <= piece.stop <= prod(place_shape(piece.place, type.dims)):
                raise InputError(
                    f"{where}: the part is not inside of {show(piece.tensor)}, which is {type}",
                    "ranges ascend and end with the dimension; start and stop count elements",
                )

    def _check_type(self, where: str, name: str, due: TensorType, value: str) -> None:
        """Raise InputError for a value of the rank of another shape or, but for a state, another type."""
        type = self.graph.types.get(name)
        if type is None or type.shape is None:
            return
        flat = type.static and due.static and len(type.dims) == 1 and type.elements == due.elements
        fits = type.may_have_shape_of(due) or flat or (not due.dtype and type.elements == due.elements)
        alike = value in self.states or not due.dtype or type.dtype == due.dtype
        if not fits or not alike:
            raise InputError(
                f"{self.path}: {show(name)} is {type}, and by {where} it is {due} of {show(value)}",
                'say which part of it the rank has: split = ["", "AXIS"], with a mesh axis for a dimension that is '
                "shared out, or box = [[START, STOP], …]",
            )

    def _state(self, name: str, pieces: tuple[Piece, ...]) -> LocalState:
        tensors = {piece.tensor for piece in pieces}
        missing = next((tensor for tensor in tensors if tensor not in self.states), None)
        usual = self.states[pieces[0].tensor].updated if len(tensors) == 1 and missing is None else ""
        output = self.pairs.get(name, usual)
        if missing is not None or output not in self.graph.outputs:
            fault = f"{show(missing)} is no state" if missing else f"no output {show(output)} replaces {show(name)}"
            raise InputError(
                f"{self.path}: {fault}, and {show(name)} has pieces of states",
                f'write in {self.name} which output replaces it: states.{name} = "OUTPUT"; '
                + there_are(self.graph.outputs),
            )
        copy = self.graph.types[name].dtype != self.training.graph.types[pieces[0].tensor].dtype
        return LocalState(name, output, pieces, copy=copy)

    def _output(self, name: str, entry: OutputRelation) -> SourcePart:
        where = f"{self.name}: outputs.{name}"
        part = self._part(f"outputs.{name}", name, entry, self.training.shown)
        if entry.sum and entry.mean:
            raise InputError(f"{where}: it is a sum and a mean", "keep one of them")
        over = entry.sum or entry.mean
        if over:
            self._size(where, over)
        return replace(part, how="sum" if entry.sum else "mean", over=tuple(over.split("+"))) if over else part


def _ascend(ends: Sequence[int]) -> bool:
    """Return whether ranges ascend and are apart; a single range may be empty."""
    return list(ends) == sorted(set(ends)) or (len(ends) == 2 and ends[0] == ends[1])
