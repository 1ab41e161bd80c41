"""The user's server map: which pieces its entries name, which entry wins, and the mistakes that it refuses."""

from __future__ import annotations

import re

import pytest

from gopt.errors import OptionError
from gopt.parameter_server.server_map import assigned

PIECES = [("W", 0), ("W", 1), ("W", 2), ("W2", 0), ("b", 0), ("layer/b[0]", 0)]


def named(given, pieces=PIECES, servers=4):
    found = assigned(pieces, servers, given)
    return {f"{pieces[place][0]}#{pieces[place][1]}": server for place, server in sorted(found.items())}


@pytest.mark.parametrize(
    "given, wanted",
    [
        ({}, {}),
        ({"b": 3}, {"b#0": 3}),
        ({"W": 1}, {"W#0": 1, "W#1": 1, "W#2": 1}),
        ({"W#1": 2}, {"W#1": 2}),
        ({"W*": 1}, {"W#0": 1, "W#1": 1, "W#2": 1, "W2#0": 1}),
        ({"W*#0": 1}, {"W#0": 1, "W2#0": 1}),
        ({"*0": 1, "W?": 2}, None),  # no tensor's name ends in 0: pieces are named behind a # alone
        ({"[bW]": 2}, {"W#0": 2, "W#1": 2, "W#2": 2, "b#0": 2}),
        ({"layer/b[0]": 1}, {"layer/b[0]#0": 1}),
        ({"layer/b[0]#0": 1}, {"layer/b[0]#0": 1}),
        ({"W#0": 0, "W": 1}, {"W#0": 0, "W#1": 1, "W#2": 1}),
        ({"W#00": 0}, {"W#0": 0}),
        ({"W2": 0, "W*": 1, "*": 2}, {"W#0": 1, "W#1": 1, "W#2": 1, "W2#0": 0, "b#0": 2, "layer/b[0]#0": 2}),
    ],
)
def test_the_first_entry_that_fits_a_piece_wins(given, wanted):
    if wanted is None:
        with pytest.raises(OptionError):
            named(given)
    else:
        assert named(given) == wanted


@pytest.mark.parametrize(
    "given, message, hint",
    [
        ({"W": 4}, r"puts 'W' on server 4; there are servers 0 to 3", "number servers from 0"),
        ({"W": -1}, r"puts 'W' on server -1; there are servers 0 to 3", "number servers from 0"),
        ({"w2": 0}, r"names 'w2', which matches no tensor", "did you mean 'W2'|there are 'W', 'W2'"),
        ({"embedding": 0}, r"names 'embedding', which matches no tensor", r"there are 'W', 'W2', 'b', 'layer/b\[0\]'$"),
        ({"x*": 0}, r"names 'x\*', which matches no tensor", "there are 'W'"),
        ({"x*#1": 0}, r"names 'x\*#1', which matches no tensor", "there are 'W'"),
        ({"W#3": 0}, r"names piece 3 of 'W', which has pieces 0 to 2", "number pieces from 0"),
        ({"W*#3": 0}, r"names piece 3 of 'W', which has pieces 0 to 2", "number pieces from 0"),
        ({"b#1": 0}, r"names piece 1 of 'b', which has one piece, 0", "leave out #PIECE"),
        ({"*": 0, "W": 1}, r"entry 'W' has no effect", "put it before them"),
        ({"W#0": 0, "W#00": 1}, r"entry 'W#00' has no effect", "put it before them"),
        ({"W": 0, "W#1": 1}, r"entry 'W#1' has no effect", "put it before them"),
    ],
)
def test_mistakes_are_refused_and_say_what_fits(given, message, hint):
    with pytest.raises(OptionError, match=message) as refused:
        named(given)
    assert re.search(hint, refused.value.hints[0])


def test_one_server_is_named_as_such():
    with pytest.raises(OptionError, match="there is server 0 alone"):
        named({"W": 1}, servers=1)


def test_a_hint_lists_few_of_many():
    many = [(f"layer{number}", 0) for number in range(9)]
    with pytest.raises(OptionError) as refused:
        named({"?": 0}, pieces=many)
    assert refused.value.hints == ("there are 'layer0', 'layer1', 'layer2', 'layer3', 'layer4' and 4 more",)


def test_names_with_a_number_sign():
    only = [("W#1", 0), ("b", 0)]
    assert named({"W#1": 1}, only) == {"W#1#0": 1}
    assert named({"W#1#0": 1}, only) == {"W#1#0": 1}
    assert named({"W#7": 1}, [("W", 0), ("W#7", 0)]) == {"W#7#0": 1}
    both = [("W", 0), ("W", 1), ("W#1", 0)]
    with pytest.raises(OptionError, match=r"'W#1', which is a tensor, and piece 1 of 'W'") as refused:
        named({"W#1": 1}, both)
    assert refused.value.hints == ("write W[#]1 for the tensor, or [W]#1 for the piece",)
    assert named({"W[#]1": 1}, both) == {"W#1#0": 1}
    assert named({"[W]#1": 1}, both) == {"W#1": 1}
    assert named({"W#0": 1}, both) == {"W#0": 1}
    with pytest.raises(OptionError) as refused:
        named({"a*[0]#1": 1}, [("a*[0]", 0), ("a*[0]", 1), ("a*[0]#1", 0)])
    assert refused.value.hints == ("write a[*][[]0][#]1 for the tensor, or [a][*][[]0]#1 for the piece",)
    with pytest.raises(OptionError) as refused:
        named({"W*#1": 1}, [*both, ("W*#1", 0)])
    assert refused.value.hints == ("write W[*][#]1 for the tensor",)
