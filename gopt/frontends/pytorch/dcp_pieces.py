"""Pieces of a rank in checkpoints of ``torch.distributed.checkpoint``: a rank writes and reads them without the rest.

A piece is a range of a flattened tensor, or of a part of a tensor; a chunk of a checkpoint is a box of the tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch.distributed.checkpoint import default_planner, metadata, planner

from gopt.artifact.manifest_entries import LocalState
from gopt.artifact.pieces import Piece, place_runs, place_shape
from gopt.ir.types import TensorType, numpy_dtype
from gopt.runtime.pytorch.tensors import torch_dtype


def range_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[range, ...]]:
    """Boxes with elements ``start`` to ``stop`` of a tensor, row-major, in order: a part of a row, rows, a part of a
    row. At most twice as many as dimensions."""
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    width = math.prod(shape[1:])
    top, last = -(-start // width), stop // width
    if top * width > start:
        row = top - 1
        end = min(stop - row * width, width)
        yield from ((range(row, top), *box) for box in range_boxes(shape[1:], start - row * width, end))
    if top < last:
        yield (range(top, last), *map(range, shape[1:]))
    if last >= top and last * width < stop:
        yield from ((range(last, last + 1), *box) for box in range_boxes(shape[1:], 0, stop - last * width))


@dataclass(slots=True)
class TensorChunks:
    """The chunks of a tensor that a rank has: the offsets, and a view of the rank's memory."""

    type: TensorType
    chunks: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

    def add(self, piece: Piece, flat: torch.Tensor) -> None:
        """Add the chunks of a piece; ``flat``: the elements of the piece."""
        runs, start = place_runs(piece.place, self.type.dims), 0
        for box in range_boxes(place_shape(piece.place, self.type.dims), piece.start, piece.stop):
            sizes = [len(side) for side in box]
            block = flat[start : start + math.prod(sizes)].view(sizes)
            start += block.numel()
            for parts in product(*(_overlaps(side, of_side) for side, of_side in zip(box, runs))):
                view = block
                for dimension, (local, _, length) in enumerate(parts):
                    view = view.narrow(dimension, local, length)
                self.chunks[tuple(offset for _, offset, _ in parts)] = view

    def __create_write_items__(self, name: str, _: Any) -> list[planner.WriteItem]:
        return [
            planner.WriteItem(
                metadata.MetadataIndex(name, torch.Size(offsets)), planner.WriteItemType.SHARD,
                tensor_data=planner.TensorWriteData(
                    metadata.ChunkStorageMetadata(torch.Size(offsets), view.size()),
                    metadata.TensorProperties.create_from_tensor(view), torch.Size(self.type.dims),
                ),
            )
            for offsets, view in self.chunks.items()
        ]  # fmt: skip

    def __create_chunk_list__(self) -> list[metadata.ChunkStorageMetadata]:
        return [metadata.ChunkStorageMetadata(torch.Size(at), view.size()) for at, view in self.chunks.items()]


def _overlaps(side: range, runs: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """The parts of a range in runs: the start in the range, the start in the tensor, and the length."""
    parts = []
    for start, offset, length in runs:
        begin, end = max(side.start, start), min(side.stop, start + length)
        if begin < end:
            parts.append((begin - side.start, offset + begin - start, end - begin))
    return parts


def chunks_of(
    states: Sequence[LocalState], types: Mapping[str, TensorType], values: Mapping[str, torch.Tensor]
) -> dict[str, TensorChunks]:
    """Tensor of the source -> the chunks that a rank's states have of it, over their values."""
    tensors: dict[str, TensorChunks] = {}
    for state in states:
        flat, start = values[state.input].reshape(-1), 0
        for piece in state.pieces:
            if piece.elements:
                chunks = tensors.setdefault(piece.tensor, TensorChunks(types[piece.tensor]))
                chunks.add(piece, flat[start : start + piece.elements])
            start += piece.elements
    return tensors


def empty_values(states: Sequence[LocalState], types: Mapping[str, TensorType]) -> dict[str, torch.Tensor]:
    """Host memory for the values of states, flat, in the types of the source."""
    return {
        state.input: torch.empty(
            sum(piece.elements for piece in state.pieces),
            dtype=torch_dtype(numpy_dtype(types[state.pieces[0].tensor].dtype)),
        )
        for state in states if state.pieces
    }  # fmt: skip


class PiecesSave(default_planner.DefaultSavePlanner):
    """Writes chunks where a tensor has some."""

    def lookup_object(self, index: metadata.MetadataIndex) -> Any:
        chunk = _chunk(self.state_dict, index)
        return super().lookup_object(index) if chunk is None else chunk


class PiecesLoad(default_planner.DefaultLoadPlanner):
    """Reads ``chunks``, beside the state dict. PyTorch drops values of unknown types from a state dict."""

    def __init__(self, chunks: Mapping[str, TensorChunks]) -> None:
        super().__init__()
        self._chunks = chunks

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: metadata.Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self.state_dict |= {f"states.{name}": chunks for name, chunks in self._chunks.items()}

    def lookup_tensor(self, index: metadata.MetadataIndex) -> torch.Tensor:
        chunk = _chunk(self.state_dict, index)
        return super().lookup_tensor(index) if chunk is None else chunk


def _chunk(state_dict: Mapping[str, Any], index: metadata.MetadataIndex) -> torch.Tensor | None:
    chunks = state_dict.get(index.fqn)
    return chunks.chunks[tuple(index.offset or ())] if isinstance(chunks, TensorChunks) else None
