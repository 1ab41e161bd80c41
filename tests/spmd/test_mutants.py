"""A step in which a call is lost, moved to other axes or asked of another value: what the verifier accepts, runs equal.

Each mutant changes one thing at random. One that is accepted is written and held against the source by ``gopt verify``:
an unequal one would be a hole in the rules.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers import FIXTURES
from plants import change_attributes, hand_on, planted_pipeline, substitute
from products import part

import gopt
from gopt.errors import GoptError
from gopt.ir.graph import COMM, Node
from gopt.records.mesh import Mesh
from gopt.spmd.program import SpmdProgram
from gopt.verification.verify import Verifier

Random = np.random.Generator
Mutation = Callable[[SpmdProgram, Random], bool]
"""Changes a step; says whether it could."""


def one(nodes: list[Node], random: Random) -> Node | None:
    return nodes[int(random.integers(len(nodes)))] if nodes else None


def lost_call(step: SpmdProgram, random: Random) -> bool:
    """A reduction or a broadcast hands on what it is given."""
    kinds = ("AllReduce", "Reduce", "Broadcast")
    node = one([each for each in step.graph.nodes if each.domain == COMM and each.op_type in kinds], random)
    if node is None:
        return False
    hand_on(step, node)
    return True


def other_axes(step: SpmdProgram, random: Random) -> bool:
    """A call runs over other axes of the mesh."""
    axes = [name for name, size in step.mesh.axes if size > 1]
    groups = [*axes, "+".join(axes)]
    calls = [each for each in step.graph.nodes if each.domain == COMM and each.op_type in ("AllReduce", "Reduce")]
    node = one(calls, random)
    if node is None or len(axes) < 2:
        return False
    change_attributes(step, node, group=groups[int(random.integers(len(groups)))])
    return True


def called_twice(step: SpmdProgram, random: Random) -> bool:
    """What a call makes goes through the same call once more."""
    node = one([each for each in step.graph.nodes if each.domain == COMM and each.op_type == "AllReduce"], random)
    if node is None:
        return False
    results, once = node.outputs, [f"{name}.once" for name in node.outputs]
    step.graph.types.update({new: step.graph.types[name] for new, name in zip(once, results)})
    node.outputs = once
    again = Node("AllReduce", once, results, domain=COMM, attributes=dict(node.attributes), made_by="plant")
    again.sharding = node.sharding
    substitute(step, node, [node, again])
    return True


DISTRIBUTED: list[Mutation] = [lost_call, other_axes, called_twice]
"""What they break is where values are; all of it must be seen."""
WORLDS = [
    ("mlp_mom_clip_sched", "dp=2,shard=2", 2, 1), ("mlp_mom_clip_sched", "shard=2", 1, 1),
    ("mlp_adamw", "dp=2,shard=2", 0, 1), ("mlp_adamw", "dp=2,shard=2", 3, 2), ("cnn_mom_fp16", "dp=2,shard=2", 2, 1),
    ("mlp_muon", "dp=2,shard=2", 2, 1), ("mlp_lamb", "shard=2", 2, 1), ("gpt_adamw", "dp=2,cp=2", 0, 1),
    ("gpt_adamw", "shard=2,tp=2", 2, 1), ("families/moe_adamw", "dp=2,ep=2", 2, 1), ("cnn_sgd", "shard=2,h=2", 2, 1),
]  # fmt: skip


def judged(seed: int, folder: Path) -> str:
    """``refused``, ``equal``, ``unequal``, ``does not run``, or ``nothing``: no such mutant of this step."""
    random = np.random.default_rng(seed)
    name, mesh, stage, accumulate = WORLDS[seed % len(WORLDS)]
    mutation = DISTRIBUTED[int(random.integers(len(DISTRIBUTED)))]
    changed: list[bool] = []
    pipeline = planted_pipeline(lambda step: changed.append(mutation(step, random)), stage)
    source = gopt.load(FIXTURES / f"{name}.onnx")
    try:
        made = gopt.shard(source, Mesh.parse(mesh), accumulate=accumulate, pipeline=pipeline)
    except GoptError:
        return "refused"
    if not changed[0]:
        return "nothing"
    made.write(folder / "out", force=True)
    try:
        return "equal" if Verifier(folder / "out").run(steps=2, confirm=False).equal else "unequal"
    except GoptError:
        return "does not run"


@pytest.mark.parametrize("seed", part(range(22), 10, first=1))
def test_what_is_accepted_is_equal(seed, tmp_path):
    assert judged(seed, tmp_path) in ("refused", "equal", "nothing")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 400))
def test_more_of_them(seed, tmp_path):
    assert judged(seed, tmp_path) in ("refused", "equal", "nothing")
