"""Checks made by all ranks together before the first step: the mesh, the calls, and shared memory."""

from __future__ import annotations

import hashlib
import json
from bisect import insort
from collections import Counter
from collections.abc import Mapping, Sequence

from gopt.collectives.table import COLLECTIVES
from gopt.errors import RunError
from gopt.ir.graph import COMM, Graph, Node
from gopt.records.mesh import Mesh
from gopt.runtime.engines.base import Engine
from gopt.runtime.execution_plan import ExecutionPlan
from gopt.runtime.shared_memory import Key, SharedMemory


def check_calls(engine: Engine, mesh: Mesh, graphs: Mapping[str, Graph]) -> None:
    """Check that all ranks have one mesh, prepare the groups of all calls, and check that members of a group make the
    same calls in the same order.

    ``graphs``: by phase. Raises RunError with the first call that differs."""
    calls: dict[str, list[str]] = {}
    transfers: dict[tuple[int, int], list[str]] = {}
    for phase, graph in graphs.items():
        for node in graph.nodes:
            if node.domain != COMM:
                continue
            texts = calls.setdefault(str(node.attributes["group"]), [])
            if COLLECTIVES[node.op_type].pairwise:  # an action sends, and perhaps a later one receives
                ends = engine.rank, int(node.attributes["peer"])
                texts = transfers.setdefault(ends if node.op_type == "Send" else ends[::-1], [])
                insort(texts, _call_text(node, graph))
            else:
                texts.append(f"{phase}: {_call_text(node, graph)}")
    digests_of = [{key: _digest(texts) for key, texts in table.items()} for table in (calls, transfers)]
    everything = engine.gather((str(mesh), *digests_of))
    meshes = [text for text, *_ in everything]
    if len(set(meshes)) > 1:
        raise RunError(
            f"ranks run different meshes: {' and '.join(sorted(set(meshes)))}",
            "start all ranks with the same folder",
        )
    groups = sorted({group for _, digests, _ in everything for group in digests})
    engine.prepare(groups)
    differs = any(
        digests.get(group) != everything[mesh.first(group, rank)][1].get(group)
        for rank, (_, digests, _) in enumerate(everything) for group in groups
    )  # fmt: skip
    if differs:
        _raise_difference(mesh, engine.gather(calls), groups)
    for source, target in sorted({ends for *_, ends_of in everything for ends in ends_of}):
        if everything[source][2].get((source, target)) != everything[target][2].get((source, target)):
            raise RunError(
                f"what rank {source} sends is not what rank {target} receives from it",
                "all ranks need the files of one gopt shard",
            )


def _raise_difference(mesh: Mesh, calls: Sequence[Mapping[str, list[str]]], groups: Sequence[str]) -> None:
    for group in groups:
        for rank, texts in enumerate(calls):
            leader = mesh.first(group, rank)
            actual, expected = texts.get(group, []), calls[leader].get(group, [])
            for number in range(max(len(actual), len(expected))):
                actual_call = actual[number] if number < len(actual) else "no more calls"
                expected_call = expected[number] if number < len(expected) else "no more calls"
                if actual_call != expected_call:
                    raise RunError(
                        f"ranks {leader} and {rank} differ at call {number} over {group}: "
                        f"{expected_call}; {actual_call}",
                        "all ranks need the files of one gopt shard",
                    )


def share_memory(engine: Engine, plans: Sequence[ExecutionPlan]) -> list[SharedMemory]:
    """The shared memory agreed on by all ranks, for each plan by call index."""
    keys: list[dict[int, Key]] = []
    counts: Counter[str] = Counter()
    for plan in plans:
        keys.append({})
        for number, group in enumerate(plan.calls()):
            keys[-1][number] = (group, counts[group])
            counts[group] += 1
    shared = engine.share(
        {of[number]: request for plan, of in zip(plans, keys) for number, request in plan.send_requests().items()},
        {of[number]: request for plan, of in zip(plans, keys) for number, request in plan.gather_requests().items()},
    )
    return [
        SharedMemory(
            {number: shared.sends[key] for number, key in of.items() if key in shared.sends},
            {number: shared.gathers[key] for number, key in of.items() if key in shared.gathers},
        )
        for of in keys
    ]


def _call_text(node: Node, graph: Graph) -> str:
    """The text of a call, to be equal on all members of the group."""
    record = COLLECTIVES[node.op_type]
    if record.pairwise:
        moved = node.inputs or node.outputs
        return f"tag {node.attributes['tag']} {', '.join(str(graph.type_of(name)) for name in moved)}"
    attributes = {key: value for key, value in sorted(node.attributes.items()) if key not in ("group", "peer")}
    types = [str(graph.types[name]) for name in node.outputs if name in graph.types and graph.types[name].static]
    shown = "" if record.shares else " " + ", ".join(types)
    return f"{node.op_type} {json.dumps(attributes)}{shown}"


def _digest(calls: list[str]) -> str:
    return hashlib.sha256("\n".join(calls).encode()).hexdigest()
