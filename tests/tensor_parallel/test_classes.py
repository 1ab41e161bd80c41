"""Which ranks run one program: those whose parts of all values have equal sizes."""

from __future__ import annotations

from gopt.records.placements import REPLICATED, Shard, Sharding, Window, WindowTerms
from gopt.tensor_parallel.classes import classes


def places(found: list[tuple[dict[str, int], ...]]) -> list[list[tuple[int, ...]]]:
    return [[tuple(at.values()) for at in each] for each in found]


def along(*sizes: tuple[int, ...]) -> list[Sharding]:
    return [Sharding.along("tp", Shard(0, each)) for each in sizes]


def test_even_sizes_make_one_class():
    assert places(classes(along((4, 4), (2, 2)), {"tp": 2})) == [[(0,), (1,)]]


def test_sizes_of_all_values_count():
    found = classes(along((22, 21, 21), (3, 3, 2)), {"tp": 3})
    assert places(found) == [[(0,)], [(1,)], [(2,)]]


def test_the_class_with_the_largest_parts_is_the_first():
    assert places(classes(along((5, 5, 7)), {"tp": 3})) == [[(2,)], [(0,), (1,)]]


def test_an_empty_part_is_a_size_as_well():
    assert places(classes(along((1, 1, 0, 0)), {"tp": 4})) == [[(0,), (1,)], [(2,), (3,)]]


def test_windows_of_other_lengths_are_sizes_as_well():
    """Between others a member reads on both sides: in a row of places that are not beside the dimension."""
    even, parts = Window(2, ((-1, 5), (3, 9)), 8), Shard(2, (4, 4))
    shardings = [Sharding.along("tp", parts), Sharding.along("tp", even)]
    assert places(classes(shardings, {"tp": 2})) == [[(0,), (1,)]]
    for other in (Window(2, ((0, 5), (2, 8)), 8), WindowTerms(2, ((0, 5), (2, 8)), 8)):
        assert places(classes([*shardings, Sharding.along("tp", other)], {"tp": 2})) == [[(1,)], [(0,)]]


def test_what_is_whole_makes_no_class():
    assert places(classes([Sharding.along("tp", REPLICATED)], {"tp": 2})) == [[(0,), (1,)]]


def test_places_on_several_axes():
    one, other = Sharding.along("tp", Shard(0, (2, 1))), Sharding.along("ep", Shard(1, (3, 3)))
    found = classes([one, other], {"ep": 2, "tp": 2})
    assert places(found) == [[(0, 0), (1, 0)], [(0, 1), (1, 1)]]
