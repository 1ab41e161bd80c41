"""Where parts of a state lie, rank by rank; ``test_merge.py`` exchanges files of whole folders."""

from __future__ import annotations

import pytest

from gopt.artifact.manifest import Piece
from gopt.artifact.manifest_entries import LocalState
from gopt.errors import InputError
from gopt.ir.tensor import Tensor
from gopt.ir.types import TensorType
from gopt.offline.part_order import check_part_order


def part(rank: int, start: int, stop: int, offset: int, *, box: int | None = None, file: str = "states.bin"):
    """A rank's elements of ``w``, in a box or a whole tensor, which lie at an offset of a file."""
    held = ((box, box + 1),) if box is not None else None
    state = LocalState("s", "s_out", (Piece("w", start, stop, box=held),))
    return rank, state, Tensor(TensorType("float32", (stop - start,)), path=f"/a/folder/{file}", offset=offset)


def refused(*parts) -> str:
    with pytest.raises(InputError) as caught:
        check_part_order(parts)
    return caught.value.message


@pytest.mark.parametrize(
    "parts",
    [
        [part(0, 0, 4, 64), part(1, 4, 8, 80)],
        [part(0, 0, 4, 64), part(1, 4, 8, 128)],
        [part(0, 0, 4, 64), part(1, 0, 4, 64), part(2, 4, 8, 80), part(3, 4, 8, 80)],
        [part(0, 0, 4, 64), part(1, 4, 8, 80), part(2, 0, 4, 64), part(3, 4, 8, 80)],
        [part(0, 0, 4, 64, box=0), part(1, 0, 4, 32, box=1)],
        [part(0, 0, 4, 64), part(1, 4, 4, 0)],
        [part(0, 0, 4, 64, file="mine.bin"), part(1, 4, 8, 16, file="mine.bin")],
    ],
    ids=["in order", "with a gap", "replicas beside", "replicas behind", "boxes", "empty", "another file"],
)
def test_parts_of_ranks_that_are_theirs(parts):
    check_part_order(parts)


def test_parts_of_other_ranks():
    assert refused(part(0, 0, 4, 80), part(1, 4, 8, 64)).startswith("ranks 0 and 1 do not hold their own parts of 's'")
    assert refused(part(0, 0, 4, 64), part(1, 4, 8, 64)).startswith("ranks 0 and 1 ")
    assert refused(part(0, 0, 4, 64), part(1, 4, 8, 80), part(2, 0, 4, 80)).startswith("ranks 0 and 2 ")
    assert refused(part(0, 0, 4, 64), part(1, 4, 8, 80), part(2, 8, 12, 72)).startswith("ranks 1 and 2 ")
    assert refused(part(0, 0, 4, 64, box=0), part(1, 4, 8, 32, box=0)).startswith("ranks 0 and 1 ")
