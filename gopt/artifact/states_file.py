"""``states.bin``: every value once, for any number of ranks."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

import numpy as np

from gopt.artifact.integrity import Inventory
from gopt.artifact.pieces import Piece, cut_stored
from gopt.errors import InputError, InvariantError
from gopt.ir.file_reads import read_chunks
from gopt.ir.tensor import Tensor
from gopt.ir.types import TensorType, nbytes
from gopt.lower.rank_graph import RankState
from gopt.records.boxes import Box, all_boxes, box_shape
from gopt.records.placements import Sharding
from gopt.spmd.program import SpmdProgram

STATES_FILE = "states.bin"
INLINE = 1024
"""Constants of at most so many bytes stay inside the graphs."""
ALIGN = 64
CHUNK = 1 << 24


class StatesFile:
    """``states.bin``: every value once, in the order of reading, with the offset of each tensor."""

    def __init__(self) -> None:
        self.offset: dict[str, int] = {}
        self._order: list[tuple[str, Tensor, int]] = []
        self.size = 0

    def add(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Put tensors one after the other, without a gap, on an aligned start."""
        if not tensors:
            return
        self.size += -self.size % ALIGN
        for name, tensor in tensors:
            self._order.append((name, tensor, self.size))
            self.offset[name] = self.size
            self.size += tensor.nbytes

    def has(self, state: RankState) -> bool:
        """Return whether the value of a rank's state is stored."""
        return self._key(state) in self.offset

    def start_of(self, state: RankState) -> int:
        """The place of the value of a rank's state, in bytes."""
        key = self._key(state)
        return self.offset[key] + (0 if key == state.input else nbytes(state.type.dtype, state.pieces[0].start))

    def _key(self, state: RankState) -> str:
        """The name under which a state is stored: the state's own name for a state with a place of its own."""
        if state.input in self.offset and not any(piece.box for piece in state.pieces):
            return state.input
        return stored(state.stored, state.pieces[0].box)

    def without(self, names: Container[str]) -> StatesFile:
        """Return the same file without the values of some names."""
        rest = StatesFile()
        rest._order, rest.size = self._order, self.size
        rest.offset = {name: offset for name, offset in self.offset.items() if name not in names}
        return rest

    def write(self, files: Inventory) -> None:
        """Write everything as a file of a folder, or no file if empty. Raises OSError, RunError."""
        if self._order:
            with files.create(STATES_FILE) as file:
                file.writelines(self.chunks())

    def chunks(self) -> Iterator[bytes | memoryview]:
        """The bytes, with the gaps, piece by piece."""
        end = 0
        for _, tensor, offset in self._order:
            yield b"\0" * (offset - end)
            yield from _chunks(tensor)
            end = offset + tensor.nbytes


def _add(values: StatesFile, tensors: Sequence[tuple[str, Tensor]], shardings: Sequence[Sharding | None]) -> None:
    """Put tensors one after the other: whole, or the parts of each rank, rank by rank.

    Raises InvariantError for a mixture of whole and sharded tensors, which no rank could hold as a unit.
    """
    split = [sharding for sharding in shardings if sharding is not None]
    if not split:
        values.add(tensors)
        return
    if len(split) < len(tensors):
        name = next(name for (name, _), sharding in zip(tensors, shardings) if sharding is None)
        raise InvariantError(f"{name!r} is whole on every rank, and stands in a bucket with parts of others")
    boxes = [all_boxes(sharding, tensor.type.dims) for sharding, (_, tensor) in zip(split, tensors)]
    for member in zip(*boxes):
        values.add([(stored(name, box), _part(tensor, box)) for (name, tensor), box in zip(tensors, member)])


def stored(name: str, box: Box | None) -> str:
    """The name of a stored part of a state."""
    return name if box is None else f"{name}/{box}"


def _part(tensor: Tensor, box: Box | None) -> Tensor:
    if box is None:
        return tensor
    type = TensorType(tensor.type.dtype, box_shape(box))
    return Tensor(type, reader=lambda: cut_stored(Piece("", 0, type.elements, box), tensor).reshape(type.dims))


def _chunks(tensor: Tensor) -> Iterator[bytes | memoryview]:
    if tensor.parts:
        for part in tensor.parts:
            yield from _chunks(part)
    elif tensor.path:
        yield from read_chunks(tensor.path, tensor.offset, tensor.nbytes, CHUNK)
    elif tensor.proto is not None and tensor.proto.HasField("raw_data"):
        yield tensor.proto.raw_data
    else:
        yield np.ascontiguousarray(tensor.read()).tobytes()


def plan_states_file(program: SpmdProgram) -> StatesFile:
    """Assign an offset to every stored value: the buckets' states in bucket order, then the others whole."""
    source = program.source.graph
    values = StatesFile()
    placed: set[str] = set()
    for names in program.layout:
        tensors = [(name, source.initializers[name]) for name in names if name in source.initializers]
        if tensors and len(tensors) < len(names):
            missing = next(name for name in names if name not in source.initializers)
            raise InputError(
                f"state {tensors[0][0]!r} has a value and {missing!r} has none, and ranks hold both as one tensor",
                "give values to all of them with --state FILE, or to none",
            )
        _add(values, tensors, [program.parts.get(name) for name, _ in tensors])
        placed.update(name for name, _ in tensors)
    states = {state.tensor for state in program.source.states}
    constants = {
        name: tensor for variant in program.variants for name, tensor in variant.training.graph.initializers.items()
        if name not in states
    }  # fmt: skip
    for name, tensor in (source.initializers | constants).items():
        if name not in placed and (name in states or tensor.nbytes > INLINE):
            _add(values, [(name, tensor)], [program.parts.get(name)])
    for copy in (state for state in program.states if state.copy):
        parameter = copy.slices[0].tensor
        if parameter in source.initializers:
            type = TensorType(copy.dtype, source.types[parameter].shape)
            whole = Tensor(type, cast_of=source.initializers[parameter])
            _add(values, [(copy.input, whole)], [program.parts.get(parameter)])
    return values
