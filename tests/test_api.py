"""What a notebook or a debugger shows of the library's objects: a short line, however large the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import FIXTURES

import gopt
from gopt.offline.call_search import CallSearch
from gopt.offline.diff import diff
from gopt.offline.inspect import inspect_model
from gopt.offline.inspect_folder import inspect_folder
from gopt.offline.plan_ranking import rank_choices
from gopt.passes.shard.plan import ShardPlan
from gopt.records.mesh import Mesh
from gopt.verification.verify import Verifier

MOST = 200


@pytest.fixture(scope="module")
def shown(tmp_path_factory) -> dict[str, str]:
    """Name of an object -> its repr."""
    folder = tmp_path_factory.mktemp("reprs") / "gpt.ranks"
    return {name: repr(each) for name, each in objects(folder)}


def objects(folder: Path) -> Iterator[tuple[str, Any]]:
    source = gopt.load(FIXTURES / "gpt_adamw.onnx")
    sharded = gopt.shard(source, 2)
    sharded.write(folder)
    yield from {
        "source": source, "training": source.training, "graph": source.training.graph,
        "tensor": next(iter(source.training.graph.initializers.values())), "sharded": sharded,
        "program": sharded.program,
        "rank": sharded.ranks[0], "plan": ShardPlan((), 4), "folder": inspect_folder(folder),
        "verification": gopt.verify(folder, steps=1), "inspection": inspect_model(source),
        "verifier": Verifier(folder), "mesh": sharded.program.mesh,
        "diff": diff(FIXTURES / "mlp_sgd.onnx", FIXTURES / "gpt_adamw.onnx"),
        "ran": next(each for each in sharded.ran if each.record.name == "prune"),
    }.items()  # fmt: skip
    found = list(CallSearch(caps=[None]).whole(source.training, Mesh.parse("shard=2"), None))
    yield from (("choice", found[0]), ("ranked", rank_choices(found, None)[0]))


def test_each_is_one_short_line(shown):
    long = {name: len(text) for name, text in shown.items() if len(text) > MOST or "\n" in text}
    assert not long


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("source", "<Source gpt_adamw.onnx: 792 nodes, 28 parameters, 85 states>"),
        ("graph", "<Graph gpt_adamw: 792 nodes, 88 inputs, 86 outputs>"),
        ("sharded", "<Sharded gpt_adamw.onnx on shard=2: 2 ranks, 7 checks passed>"),
        ("inspection", "<Inspection gpt_adamw.onnx: 28 parameters, AdamW>"),
        ("folder", "<FolderInspection gpt.ranks: 2 ranks, 85 states>"),
    ],
)
def test_it_says_what_one_looks_at(name, said, shown):
    assert shown[name] == said


def test_a_verification_says_how_it_ended(shown):
    assert shown["verification"].startswith("<Verification equal: ")
    assert "tolerance 0.0001" in shown["verification"]
