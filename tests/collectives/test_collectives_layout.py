"""Shapes as text, flat cuts, signatures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gopt.collectives.node import flat_cuts, format_shape, parse_shapes
from gopt.errors import InputError, InvariantError


@given(st.lists(st.lists(st.integers(0, 2**40), max_size=4).map(tuple), max_size=4))
def test_shapes_survive_text(shapes: list[tuple[int, ...]]) -> None:
    assert parse_shapes([format_shape(shape) for shape in shapes]) == shapes


@pytest.mark.parametrize("text", ["-1", "2,", ",", "2,x", " 2", "1_0", "+1", "²", "٣", "9" * 5000])
def test_odd_shapes_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="as a shape"):
        parse_shapes([text])


@given(st.integers(0, 10_000), st.integers(1, 70), st.sampled_from([1, 2, 16, 64]))
def test_flat_cuts_share_out_everything(elements: int, ranks: int, align: int) -> None:
    cuts = flat_cuts(elements, ranks, align)
    assert len(cuts) == ranks + 1 and cuts[0] == 0 and cuts[-1] == elements and cuts == sorted(cuts)
    assert all(cut % align == 0 or cut == elements for cut in cuts)


def test_flat_cuts_by_example() -> None:
    assert flat_cuts(100, 4) == [0, 32, 64, 96, 100]
    assert flat_cuts(17, 4) == [0, 16, 17, 17, 17]
    assert flat_cuts(0, 2) == [0, 0, 0]
    for bad in ((1, 0), (-1, 2)):
        with pytest.raises(InvariantError):
            flat_cuts(*bad)
