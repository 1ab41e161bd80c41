"""Two splits: what moved, who holds how much, what travels, which values differ."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers import source

import gopt
from gopt import api
from gopt.offline.diff import diff
from gopt.parameter_server.options import SplitOptions
from gopt.parameter_server.slicing import Slicing
from gopt.records.roles import Roles

pytestmark = pytest.mark.usefixtures("unchecked")


def split(folder: Path, **given: object) -> Path:
    options = SplitOptions(**{"trainers": 2, "servers": 2, "slicing": Slicing.OFF, **given})  # type: ignore[arg-type]
    api.split(source("mlp_adamw"), options).write(folder)
    return folder


def lines(a: Path, b: Path) -> list[str]:
    return [str(line) for line in diff(a, b).lines]


def test_a_split_is_equal_to_itself(tmp_path: Path) -> None:
    assert diff(split(tmp_path / "a"), split(tmp_path / "b")).equal


def test_a_piece_that_moved_is_one_line(tmp_path: Path) -> None:
    found = lines(split(tmp_path / "a", given={"*": 0}), split(tmp_path / "b", given={"fc1.bias": 1, "*": 0}))
    assert "record fc1.bias: server 0 -> server 1" in found and not any("fc1.weight:" in each for each in found)
    assert any(each.startswith("bytes server 1: 0 B ->") for each in found)
    assert not any(each.startswith("source") for each in found)


def test_other_pieces_servers_and_roles_are_told(tmp_path: Path) -> None:
    other = split(tmp_path / "b", servers=3, slicing=Slicing.BALANCED, minimum=16, roles=Roles.default(2, 3))
    found = lines(split(tmp_path / "a"), other)
    assert "record servers: 2 -> 3" in found and "record slicing: off -> balanced" in found
    assert any("fc1.weight: 1 piece on server 0 -> 3 pieces on servers 0-2" in each for each in found)
    assert any(each.startswith("bytes server 2: absent ->") for each in found)
    assert "record roles: trainers first -> trainer:0-1;server:2-4" in found


def test_half_precision_is_less_traffic(tmp_path: Path) -> None:
    found = lines(split(tmp_path / "a"), split(tmp_path / "b", wire="float16"))
    assert "record wire: none -> float16" in found
    assert any(each.startswith("bytes each trainer pulls 10.8 KiB -> 5.4 KiB") for each in found)


def test_a_value_that_differs_is_found_whatever_the_split(tmp_path: Path) -> None:
    first, second = split(tmp_path / "a"), split(tmp_path / "b", servers=3)
    stored = second / "states.bin"
    values = np.fromfile(stored, "<u1")
    values[:4] += 1
    values.tofile(stored)
    assert sum(each.startswith("source: value") for each in lines(first, second)) == 1


def test_ranks_and_trainers_are_not_equal(tmp_path: Path) -> None:
    gopt.shard(source("mlp_adamw"), 2).write(tmp_path / "ranks")
    assert not diff(split(tmp_path / "a"), tmp_path / "ranks").equal
