"""The text of a golden: its sections, and how long facts are wrapped."""

from __future__ import annotations

import pytest
from helpers import source

import gopt
from gopt.offline.goldens.golden_text import SECTIONS, WIDTH, CaseRequest, golden_text, wrapped


@pytest.fixture(scope="module")
def made() -> gopt.Sharded:
    return gopt.shard(source("mlp_adamw"), 3)


def text(made: gopt.Sharded, *keep: str) -> list[str]:
    asked = CaseRequest("shard", ("--ranks", "3", "--verify-each"))
    graphs = {"all ranks": made.program.graph}
    training = made.source.training
    return golden_text(asked, training, made.manifest(), made.report(), graphs, keep or SECTIONS).splitlines()


def test_what_was_asked_comes_first_and_sections_in_order(made: gopt.Sharded) -> None:
    lines = text(made)
    assert lines[2:6] == ["asked", "  shard", "  --ranks 3", "  --verify-each"]
    assert [line for line in lines[6:] if line and line[0] != " "] == list(SECTIONS)
    assert max(map(len, lines)) <= WIDTH


def test_only_what_is_kept(made: gopt.Sharded) -> None:
    lines = text(made, "passes", "calls")
    assert [line for line in lines[1:] if line and line[0] != " "] == ["asked", "calls", "passes"]
    assert any(line.startswith("  ranks 0-1: 1 AllGather over shard, ") for line in lines)


def test_a_long_fact_is_wrapped_between_its_parts() -> None:
    parts = "; ".join(f"[{place}000, {place + 1}000) on rank {place}" for place in range(6))
    lines = wrapped(f"parameter float32[6,1000] some.weight: {parts}")
    assert lines[0] == "  parameter float32[6,1000] some.weight:"
    assert len(lines) == 3 and max(map(len, lines)) <= WIDTH and all(line[:5] == "    [" for line in lines[1:])
    assert " ".join(line.strip() for line in lines[1:]) == parts
    assert wrapped("x" * 200) == ["  " + "x" * 200]


def test_pieces_of_a_table_by_modulo_say_which_rows() -> None:
    split = gopt.split(source("emb_adamw"), gopt.SplitOptions(trainers=2, servers=2, tables={"emb.weight": "modulo"}))
    asked = CaseRequest("split", ())
    lines = golden_text(asked, split.source.training, split.manifest(), split.report(), {}, ["states"]).splitlines()
    table = " ".join(line.strip() for line in lines if "rows" in line)
    assert "[0, 320) of rows 0, 2, … on server 0" in table and "[0, 320) of rows 1, 3, … on server 1" in table
