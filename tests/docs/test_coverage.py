"""Every pass, command, placement and operator of gopt's own is in the docs."""

from __future__ import annotations

import re
import typing
from pathlib import Path

import pytest
from gopt.cli.main import COMMANDS

import gopt.records.placements as placements
from gopt.passes import PASSES
from gopt.spmd.calls import CONVERSIONS
from gopt.spmd.layouts import LAYOUTS

ROOT = Path(__file__).parents[2]
PAGES = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")}
README = (ROOT / "README.md").read_text(encoding="utf-8")
ALL = "\n".join([README, *PAGES.values()])


@pytest.mark.parametrize("name", PASSES)
def test_every_pass_is_in_the_docs(name):
    assert f"`{name}`" in ALL or f"[pass.{name}]" in ALL


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_is_in_the_docs(name):
    assert re.search(rf"`gopt {name}\b", ALL)


PLACEMENTS = [
    "Replicated", "PerMember", "Shard", "Window", "WindowTerms", "FlatShard", "Partial", "FlagCount", "OnMember",
]  # fmt: skip


@pytest.mark.parametrize("name", PLACEMENTS)
def test_every_placement_is_in_the_docs(name):
    assert hasattr(placements, name) and f"| `{name}" in PAGES["sharding.md"]


def test_no_placement_is_missing():
    assert {each.__name__ for each in typing.get_args(placements.Placement)} == set(PLACEMENTS)


@pytest.mark.parametrize("name", [*CONVERSIONS, *LAYOUTS])
def test_every_operator_of_gopt_is_in_the_docs(name):
    assert re.search(rf"\b{name}\b", PAGES["sharding.md"] + PAGES["collectives.md"] + PAGES["architecture.md"])


def test_no_term_of_the_glossary_stands_twice():
    table = PAGES["glossary.md"].partition("## Passes")[0]
    terms = re.findall(r"^\| ([^|]+) \|", table, re.M)[1:]
    single = [term.strip() for row in terms for term in row.split(",")]
    assert len(single) > 30 and len(single) == len(set(single))
