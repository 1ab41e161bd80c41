"""``states.bin``: every value once, however many ranks refer to it."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from gopt.disk.files import create
from gopt.errors import InputError, InvariantError, RunError
from gopt.ir.tensor import Tensor
from gopt.ir.types import TensorType, nbytes
from gopt.lower.rank_graph import RankState
from gopt.program import SpmdProgram
from gopt.sharding.boxes import Box, all_boxes, box_shape, take
from gopt.sharding.placements import Sharding

STATES_FILE = "states.bin"
INLINE = 1024
"""Constants of at most so many bytes stay inside the graphs."""
ALIGN = 64
CHUNK = 1 << 24
BESIDE = 1 << 20
"""Chunks of at least so many bytes are hashed while they are written."""


@dataclass(frozen=True, slots=True)
class Digests:
    """SHA-256, in hexadecimal, of what was written: of the file, empty where there is none, and of tensors by name."""

    file: str = ""
    tensors: dict[str, str] = field(default_factory=dict)


class StatesFile:
    """``states.bin``: every value once, in the order ranks read them; knows where each tensor starts."""

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
        """The name under which a state is stored: its own where it has a place of its own."""
        if state.input in self.offset and not any(piece.box for piece in state.pieces):
            return state.input
        return stored(state.stored, state.pieces[0].box)

    def without(self, names: Container[str]) -> StatesFile:
        """Return the same file without the values of some names."""
        other = StatesFile()
        other._order, other.size = self._order, self.size
        other.offset = {name: offset for name, offset in self.offset.items() if name not in names}
        return other

    def write(self, path: Path, wanted: Container[str] = ()) -> Digests:
        """All of it as a new file, or none where there is nothing; returns digests, of ``wanted`` tensors too.

        Raises OSError, RunError.
        """
        if not self._order:
            return Digests()
        with create(path) as file:
            return self.write_to(file, wanted)

    def write_to(self, file: BinaryIO, wanted: Container[str] = ()) -> Digests:
        """All of it into an open file; returns digests, of ``wanted`` tensors too. Raises OSError, RunError."""
        whole, own = hashlib.sha256(), dict[str, Any]()
        with ThreadPoolExecutor(2) as beside:
            for name, chunk in self._named_chunks():
                hashes = [whole, own.setdefault(name, hashlib.sha256())] if name in wanted else [whole]
                if len(chunk) < BESIDE:
                    for each in hashes:
                        each.update(chunk)
                    file.write(chunk)
                    continue
                hashed = [beside.submit(each.update, chunk) for each in hashes]
                file.write(chunk)
                for done in hashed:
                    done.result()
        return Digests(whole.hexdigest(), {name: each.hexdigest() for name, each in own.items()})

    def chunks(self) -> Iterator[bytes | memoryview]:
        """The bytes, with the gaps, piece by piece."""
        return (chunk for _, chunk in self._named_chunks())

    def _named_chunks(self) -> Iterator[tuple[str, bytes | memoryview]]:
        """Pieces of the file with the name of their tensor, which is empty for a gap."""
        place = 0
        for name, tensor, offset in self._order:
            yield "", b"\0" * (offset - place)
            for chunk in _chunks(tensor):
                yield name, chunk
            place = offset + tensor.nbytes


def digest_of_tensor(tensor: Tensor) -> str:
    """SHA-256, in hexadecimal, of a tensor's little-endian bytes. Raises OSError, RunError."""
    seen = hashlib.sha256()
    for chunk in _chunks(tensor):
        seen.update(chunk)
    return seen.hexdigest()


def _add(values: StatesFile, tensors: Sequence[tuple[str, Tensor]], shardings: Sequence[Sharding | None]) -> None:
    """Put tensors one after the other: whole, or the parts of them that ranks have, for one rank after another.

    Raises InvariantError where one is whole on every rank, and others are not: ranks could not hold them as one.
    """
    split = [each for each in shardings if each is not None]
    if not split:
        values.add(tensors)
        return
    if len(split) < len(tensors):
        name = next(name for (name, _), each in zip(tensors, shardings) if each is None)
        raise InvariantError(f"{name!r} is whole on every rank, and stands in a bucket with parts of others")
    boxes = [all_boxes(sharding, tensor.type.dims) for sharding, (_, tensor) in zip(split, tensors)]
    for member in zip(*boxes):
        values.add([(stored(name, box), _part(tensor, box)) for (name, tensor), box in zip(tensors, member)])


def stored(name: str, box: Box | None) -> str:
    """The name under which a part of a state is stored."""
    return name if box is None else f"{name}/{box}"


def _part(tensor: Tensor, box: Box | None) -> Tensor:
    if box is None:
        return tensor
    type = TensorType(tensor.type.dtype, box_shape(box))
    return Tensor(type, reader=lambda: np.ascontiguousarray(take(np.asarray(tensor.read()), box)))


def _chunks(tensor: Tensor) -> Iterator[bytes | memoryview]:
    if tensor.parts:
        for part in tensor.parts:
            yield from _chunks(part)
    elif tensor.path and tensor.nbytes:
        with open(tensor.path, "rb") as file:
            file.seek(tensor.offset)
            left = tensor.nbytes
            while left:
                chunk = file.read(min(left, CHUNK))
                if not chunk:
                    raise RunError(f"{tensor.path} ended while it was read", "run this command again")
                left -= len(chunk)
                yield chunk
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
        held = [(name, source.initializers[name]) for name in names if name in source.initializers]
        if held and len(held) < len(names):
            missing = next(name for name in names if name not in source.initializers)
            raise InputError(
                f"state {held[0][0]!r} has a value and {missing!r} has none, and ranks hold both as one tensor",
                "give values to all of them with --state FILE, or to none",
            )
        _add(values, held, [program.parts.get(name) for name, _ in held])
        placed.update(name for name, _ in held)
    states = {state.tensor for state in program.source.states}
    constants = {
        name: tensor for variant in program.variants for name, tensor in variant.training.graph.initializers.items()
        if name not in states
    }  # fmt: skip
    for name, tensor in (source.initializers | constants).items():
        if name not in placed and (name in states or tensor.nbytes > INLINE):
            _add(values, [(name, tensor)], [program.parts.get(name)])
    for parameter, copy in program.copies().items():
        if parameter in source.initializers:
            type = TensorType(copy.dtype, source.types[parameter].shape)
            whole = Tensor(type, cast_of=source.initializers[parameter])
            _add(values, [(copy.input, whole)], [program.parts.get(parameter)])
    return values
