"""Files of ranks that were exchanged or copied: their parts of a state do not lie at the rank's offsets.

All parts of a state lie in ``states.bin`` once, in the order of the ranks; replicas share theirs.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from pathlib import Path

from gopt.artifact.manifest_entries import LocalState
from gopt.artifact.states_file import STATES_FILE
from gopt.errors import InputError
from gopt.ir.tensor import Tensor
from gopt.text.sanitize import show


def check_part_order(parts: Iterable[tuple[int, LocalState, Tensor]]) -> None:
    """Raise InputError where a part of a state belongs to another rank; ``parts``: ranks in order."""
    begins: dict[tuple[str, Hashable], tuple[int, int]] = {}
    """Pieces of a state -> where they begin in the file, and the first rank that holds them."""
    ends: dict[tuple[str, Hashable], tuple[int, int]] = {}
    """State, and the boxes of tensors that it is of -> where the last part of it ends, and the rank that holds it."""
    for rank, state, tensor in parts:
        if not tensor.type.elements or Path(tensor.path).name != STATES_FILE:
            continue
        pieces = tuple((piece.tensor, piece.place, piece.start) for piece in state.pieces)
        begin, holder = begins.setdefault((state.input, pieces), (tensor.offset, rank))
        if begin != tensor.offset:
            raise _exchanged(state, holder, rank)
        if holder == rank:
            boxes = tuple(piece.place for piece in state.pieces)
            end, before = ends.get((state.input, boxes), (0, rank))
            if tensor.offset < end:
                raise _exchanged(state, before, rank)
            ends[state.input, boxes] = tensor.offset + tensor.nbytes, rank


def _exchanged(state: LocalState, one: int, holder: int) -> InputError:
    return InputError(
        f"ranks {one} and {holder} do not hold their own parts of {show(state.input)}: one has a file of another "
        "rank or folder",
        "copy each rank's own file here, or write the folder again",
    )
