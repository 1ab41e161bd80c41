"""Servers of pieces: each placement by its rule, the same every time, and what a server map changes of it."""

from __future__ import annotations

import random
import secrets
from collections import Counter
from collections.abc import Sequence

import pytest

from gopt.errors import InvariantError, OptionError
from gopt.parameter_server.placement import PieceSize, Placement, place
from gopt.parameter_server.slicing import Slicing, pieces


def bytes_per_server(pieces: Sequence[PieceSize], owners: Sequence[int], servers: int) -> tuple[int, ...]:
    """Return the bytes of the pieces that each server owns."""
    held = [0] * servers
    for piece, server in zip(pieces, owners, strict=True):
        held[server] += piece.nbytes
    return tuple(held)


def sized(**tensors):
    """``W=[8, 4]`` -> the pieces of W, of 8 and 4 bytes."""
    return [PieceSize(name, index, nbytes) for name, found in tensors.items() for index, nbytes in enumerate(found)]


def drawn(r):
    """Pieces of some random tensors, sliced for some servers, and the number of servers."""
    servers = r.randint(1, 7)
    tensors = {}
    for number in range(r.randint(0, 12)):
        shape = [r.randint(1, 40) for _ in range(r.randint(0, 3))]
        cut = pieces(shape, r.choice(list(Slicing)), servers, r.randint(1, 64))
        tensors[f"t{number}"] = [4 * (stop - start) for start, stop in cut]
    return sized(**tensors), servers


@pytest.mark.parametrize(
    "tensors, servers, wanted",
    [
        ({"fc_b": [4], "fc_w": [8, 8]}, 2, (0, 1, 0)),
        ({"a": [1], "b": [1], "c": [1], "d": [5, 5, 5]}, 4, (0, 1, 2, 3, 0, 1)),
        ({"a": [1], "b": [900, 1]}, 1, (0, 0, 0)),
        ({}, 3, ()),
    ],
)
def test_round_robin_by_its_examples(tensors, servers, wanted):
    assert place(sized(**tensors), servers, Placement.ROUND_ROBIN) == wanted


def test_the_hash_is_the_first_eight_bytes_of_the_keys_digest():
    digests = {  # printf '%s' KEY | sha256sum
        ("W", 0): 0x618B39BC8F8B0EDB,
        ("W", 1): 0x8386623F3E397EE9,
        ("W.block1", 0): 0xADA859CA1571A337,
        ("x:y", 12): 0x46B543400D7E0CF5,
        ("ü", 3): 0xBB1A6C4D762239E5,
        ("a#1", 0): 0xD361F12CA1EEFCFE,
    }
    found = [PieceSize(tensor, index, 4) for tensor, index in digests]
    for servers in (1, 2, 3, 5, 64):
        assert place(found, servers, Placement.HASH) == tuple(digest % servers for digest in digests.values())
    assert place(found, 5, Placement.HASH) == (1, 4, 4, 3, 1, 3)


def test_no_two_pieces_have_one_key():
    names = ["W", "W#1", "W#", "#", "W:1", "W.block1", "W#1#1", "1", "x.trainer_0"]
    keys = {PieceSize(name, index, 4).key for name in names for index in (0, 1, 11)}
    assert len(keys) == 3 * len(names)


def test_by_bytes_the_largest_goes_to_the_least_loaded():
    found = sized(a=[10], b=[70], c=[40], d=[30], e=[30])
    # 70 | 40, 70 | 40 + 30, then the second 30 on server 0 as both are equal, and 10 on the other.
    assert place(found, 2, Placement.BYTES) == (1, 0, 1, 1, 0)
    assert bytes_per_server(found, place(found, 2, Placement.BYTES), 2) == (100, 80)


def test_by_bytes_equal_pieces_keep_their_order():
    assert place(sized(a=[8], b=[8], c=[8], d=[8]), 3, Placement.BYTES) == (0, 1, 2, 0)


def test_of_servers_with_equal_bytes_the_one_with_least_of_the_tensor_is_taken():
    # W#0 on 0, V on 1 and U on 2; all have 8 bytes when W#1 comes: 0 has a piece of W, so it goes to 1.
    assert place(sized(W=[8, 2], V=[8], U=[8]), 3, Placement.BYTES) == (0, 1, 1, 2)
    # The server that is passed over stays: x goes there.
    assert place(sized(W=[8, 2], V=[8], x=[1]), 2, Placement.BYTES) == (0, 1, 1, 0)
    assert place(sized(W=[8, 8, 8], V=[8, 8, 8]), 3, Placement.BYTES) == (0, 1, 2, 0, 1, 2)
    # Both have some of W: the one with fewer pieces.
    given = {"W#0": 0, "W#1": 0, "W#2": 1}
    assert place(sized(W=[4, 4, 8, 2]), 2, Placement.BYTES, given) == (0, 0, 1, 1)


def test_bytes_count_before_the_spread_of_a_tensor():
    assert place(sized(V=[100], W=[10, 10]), 2, Placement.BYTES) == (0, 1, 1)


@pytest.mark.parametrize("placement", Placement)
def test_a_piece_without_bytes_goes_to_the_first_server_and_takes_no_turn(placement):
    with_empty = sized(a=[8], e=[0], b=[8], f=[0], c=[4])
    owners = place(with_empty, 3, placement)
    assert owners[1] == owners[3] == 0
    without = [piece for piece in with_empty if piece.nbytes]
    assert tuple(owner for owner, piece in zip(owners, with_empty) if piece.nbytes) == place(without, 3, placement)


def test_a_server_map_comes_first():
    found = sized(embed=[50, 50], W=[30], b=[10])
    assert place(found, 2, Placement.ROUND_ROBIN, {"W": 1}) == (0, 1, 1, 0)  # it takes no turn
    assert place(found, 2, Placement.BYTES, {"embed": 1}) == (1, 1, 0, 0)  # its bytes count
    assert place(found, 2, Placement.BYTES, {"embed#1": 0, "*": 1}) == (1, 0, 1, 1)
    assert place(sized(e=[0], a=[4]), 2, Placement.BYTES, {"e": 1}) == (1, 0)


def test_what_holds_of_any_placement():
    seed = secrets.randbits(32)
    r = random.Random(seed)
    for _ in range(100):
        found, servers = drawn(r)
        case = (seed, found, servers)
        for placement in Placement:
            owners = place(found, servers, placement)
            assert len(owners) == len(found) and set(owners) <= set(range(servers)), case
            assert owners == place(list(found), servers, placement), case
            assert sum(bytes_per_server(found, owners, servers)) == sum(piece.nbytes for piece in found), case
        _holds_of_round_robin(found, servers, case)
        _holds_of_bytes(found, servers, case)
        _holds_of_hash(found, servers, case)


def _holds_of_round_robin(found, servers, case):
    owners = place(found, servers, Placement.ROUND_ROBIN)
    counts = Counter(owners)
    assert not found or max(counts.values()) - min(counts[server] for server in range(servers)) <= 1, case
    pairs = Counter((piece.tensor, owner) for piece, owner in zip(found, owners))
    assert not pairs or max(pairs.values()) == 1, case  # two pieces of a tensor never meet


def _holds_of_bytes(found, servers, case):
    """The bound of largest first: no server is fuller than the mean and one piece."""
    held = bytes_per_server(found, place(found, servers, Placement.BYTES), servers)
    most = max((piece.nbytes for piece in found), default=0)
    assert max(held) <= sum(held) / servers + most, case


def _holds_of_hash(found, servers, case):
    """A piece stays where it is when others come or go, in any order."""
    alone = [place([piece], servers, Placement.HASH)[0] for piece in reversed(found)]
    assert tuple(reversed(alone)) == place(found, servers, Placement.HASH), case


def test_what_cannot_be_placed_is_refused():
    with pytest.raises(OptionError, match="number of servers cannot be 0"):
        place(sized(W=[4]), 0, Placement.BYTES)
    with pytest.raises(InvariantError):
        place([PieceSize("W", 0, 4), PieceSize("W", 0, 4)], 2, Placement.BYTES)
