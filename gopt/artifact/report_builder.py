"""The report of a sharded step (contract section 4)."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from gopt.analysis.coupling import notes, open_couplings
from gopt.analysis.training import StateKind
from gopt.artifact.cost_report import figures
from gopt.artifact.manifest import MeshEntry
from gopt.artifact.manifest_builder import phases_by_rank
from gopt.artifact.optimizer_report import removed_optimizers
from gopt.artifact.report import OpRecord, PassRun, VarRecord, balance, rank_ranges
from gopt.artifact.report_record import CallEntry, RankBytes, RankUsage, Report, SourceEntry
from gopt.collectives.table import COLLECTIVES
from gopt.ir.graph import COMM, Node, origin
from gopt.ir.types import TensorType
from gopt.lower.invariants import Check
from gopt.lower.rank_graph import Block, RankGraph, RankState
from gopt.program import SpmdProgram
from gopt.sharding.placements import Sharding


def build_report(
    program: SpmdProgram,
    source: SourceEntry,
    ran: Sequence[PassRun],
    checks: Sequence[Check],
    common: Sequence[RankState],
    ranks: Sequence[RankGraph],
) -> Report:
    """What was removed, added and moved; grows with the graph, not with graph times ranks."""
    reasons = {key: (each.record.name, why) for each in ran for key, why in each.result.removed.items()}
    removed_ops, removed_vars = _removed(program, reasons, ranks)
    every = list(phases_by_rank(ranks))
    optimizers = [
        row for variant, members in _classes(program, every) for row in removed_optimizers(variant, ran, members)
    ]
    added_ops, added_vars = _added(program, common, ranks)
    usages = _usages(program, common, ranks)
    couplings = open_couplings(program)
    return Report(
        source=source,
        mesh=MeshEntry.of(program.mesh),
        pipeline=tuple(each.record for each in ran),
        notes=(*program.source.notes, *program.warnings, *_notes(program), *notes(couplings)),
        couplings=tuple(couplings),
        removed_ops=(*optimizers, *removed_ops),
        removed_vars=tuple(removed_vars),
        added_ops=tuple(added_ops),
        added_vars=tuple(added_vars),
        ranks=tuple(usages),
        balance=_balances([each.nbytes.by_kind for each in usages]),
        figures=figures(program, ran, common, ranks),
        checks=tuple(checks),
    )


def _notes(program: SpmdProgram) -> list[str]:
    elements = sum(program.source.graph.types[s.tensor].elements for s in program.source.parameters)
    notes = []
    if program.mesh.ranks > elements:
        notes.append(f"{program.mesh.ranks} ranks share {elements} elements: some own nothing")
    if program.mesh.data_ranks > 1 and not program.mesh.shard_axis:
        notes.append(f"no axis of the mesh {program.mesh} shards states: every rank holds all of them, at any stage")
    used = {axis for group in _groups(program) for axis in program.mesh.live(group)}
    for name, size in program.mesh.axes:
        if size > 1 and name not in used:
            notes.append(f"no call goes along mesh axis {name}: its ranks hold and compute the same")
    behind: set[str] = set()
    for node in program.graph.nodes:
        # neither a gather of parameters nor a reduction in the source's forward is a reduction of gradients
        reduces = node.domain == COMM and node.made_by and COLLECTIVES[node.op_type].reduces
        if reduces or any(name in behind for name in node.reads):
            behind.update(node.outputs)
    for name in program.source.metrics:
        what = "follows the reduced gradients" if name in behind else "is the rank's own"
        notes.append(f"metric {name} {what}")
    return notes


def _groups(program: SpmdProgram) -> set[str]:
    return {str(node.attributes["group"]) for node in program.graph.nodes if node.domain == COMM}


def _balances(rows: Sequence[Mapping[str, int]]) -> dict[str, float]:
    """By kind of bytes, the largest over the mean over the ranks."""
    return {kind: balance([row[kind] for row in rows]) for kind in rows[0]} if rows else {}


def _removed(
    program: SpmdProgram, reasons: Mapping[str, tuple[str, str]], ranks: Sequence[RankGraph]
) -> tuple[list[OpRecord], list[VarRecord]]:
    source = program.source.graph
    every = list(phases_by_rank(ranks))
    classes = _classes(program, every)
    left = [_left(variant) for variant, _ in classes]
    coordinates = {rank: program.mesh.coordinates(rank) for rank in every}
    on_every = rank_ranges(every)

    @functools.cache
    def missing_on(*places: Sharding | None) -> str:
        """The ranks that lack something; ``places``: where the ranks of each variant have it, None: nowhere."""
        gone = [
            rank for place, (_, ranks) in zip(places, classes) for rank in ranks
            if place is None or not place.covers(coordinates[rank])
        ]  # fmt: skip
        return rank_ranges(sorted(gone))

    ops: list[OpRecord] = []
    variables: list[VarRecord] = []
    for node in source.nodes:
        if node.origin is not None:
            continue  # part of an opaque operator, which has its own record
        kept = [nodes.get(id(node)) for nodes in left]
        if all(each is not None and not each.sharding.by_axis for each in kept):
            continue
        where = missing_on(*(None if each is None else each.sharding for each in kept))
        if not where:
            continue
        key = next(name for name in node.outputs if name)
        owner, why = reasons.get(key, ("prune", "nothing reads it any more"))
        ops.append(OpRecord(node.label, node.op_type, owner, why, where))
        for name in node.outputs:
            if name and name not in source.outputs and name not in program.graph.inputs:
                type = source.type_of(name)
                variables.append(VarRecord(name, type.dtype, type.shape, type.nbytes, owner, why, where))
    for node in program.source.looked_through:
        why = "it changes nothing: its readers read what it reads"
        ops.append(OpRecord(node.label, node.op_type, "load", why, on_every))
        for name in node.outputs:
            type = source.type_of(name)
            variables.append(VarRecord(name, type.dtype, type.shape, type.nbytes, "load", why, on_every))
    for held in zip(*(variant.states for variant, _ in classes)):  # alike but for sizes: see check_variants
        state = held[0]
        if state.sharded and state.input not in source.types:
            why = f"held as runs of {state.input}"
            for part in state.slices:
                type = source.types[part.tensor]
                variables.append(VarRecord(part.tensor, type.dtype, type.shape, type.nbytes, "shard", why, on_every))
        elif state.sharded:
            type = source.types[state.input]
            if where := missing_on(*(each.sharding for each in held)):
                variables.append(
                    VarRecord(
                        state.input, type.dtype, type.shape, type.nbytes, "shard", "held by its owner", where
                    )
                )  # fmt: skip
    return ops, variables


def _added(
    program: SpmdProgram, common: Sequence[RankState], ranks: Sequence[RankGraph]
) -> tuple[list[OpRecord], list[VarRecord]]:
    where: dict[tuple[str, str], dict[int, None]] = {}
    nodes: dict[tuple[str, str], Node] = {}
    known: set[int] = set()
    for variant, members in _classes(program, list(phases_by_rank(ranks))):
        for node in variant.graph.nodes:
            if not node.sharding.by_axis and node.made_by and _real(node):
                known.add(id(node))
                where.setdefault((node.label, node.op_type), {}).update(dict.fromkeys(members))
                nodes.setdefault((node.label, node.op_type), node)
    states: dict[str, dict[int, None]] = {}
    renamed: dict[Block, list[Node]] = {}  # of blocks that all ranks have: what a phase gave other names
    for rank in ranks:
        for block in rank.blocks:
            if block.shared and block not in renamed:
                renamed[block] = [node for node in block.nodes if node.made_by and id(node) not in known]
        for node in (node for block in rank.blocks for node in renamed.get(block, block.nodes)):
            if node.made_by and id(node) not in known:
                key = (node.label, node.op_type)
                where.setdefault(key, {})[rank.rank] = None
                nodes.setdefault(key, node)
        for state in rank.own:
            if state.input not in program.source.graph.types:
                states.setdefault(state.input, {})[rank.rank] = None
    accumulators = {held.input for held in program.accumulators}
    ops, variables = [], []
    for key, held in where.items():
        node, places = nodes[key], rank_ranges(sorted(held))
        ops.append(OpRecord(key[0], _full_name(node), node.made_by, _purpose(node), places))
        for name in node.outputs:
            if name and (name not in program.source.graph.types or name.startswith("gopt.")):
                type = _common_type(program, name)
                variables.append(
                    VarRecord(name, type.dtype, type.shape, type.nbytes, node.made_by, _purpose(node), places)
                )
    for name, held in states.items():
        type = _common_type(program, name)
        why = "the rank's sum of gradients" if name in accumulators else "the rank's run of a bucket's states"
        variables.append(VarRecord(name, type.dtype, type.shape, 0, "shard", why, rank_ranges(sorted(held))))
    return ops, variables


def _common_type(program: SpmdProgram, name: str) -> TensorType:
    """The type of a value on every rank; of a bucket, and of what is split, ranks have parts of their own lengths."""
    type, sharding = program.graph.type_of(name), program.sharded.get(name)
    if sharding is not None and sharding.flat is not None:
        return TensorType(type.dtype, (None,))
    for other in program.others:
        theirs = other.graph.types.get(name, type)
        if theirs != type:
            same = zip(type.shape or (), theirs.shape or ())
            type = TensorType(type.dtype, tuple(one if one == two else None for one, two in same))
    return type


def _real(node: Node) -> bool:
    return node.domain != "gopt.spmd"


def _full_name(node: Node) -> str:
    return f"{node.domain}.{node.op_type}" if node.domain else node.op_type


def _purpose(node: Node) -> str:
    if node.domain == COMM:
        return f"communication over {node.attributes['group']}"
    return "update on the rank's shard, or its layout"


def _usages(program: SpmdProgram, common: Sequence[RankState], ranks: Sequence[RankGraph]) -> list[RankUsage]:
    """What each rank holds, and what it sends in one update: all its micro-steps included."""
    by_rank = phases_by_rank(ranks)
    found: dict[int, RankUsage] = {}
    for variant, members in _classes(program, list(by_rank)):
        reducible = _reducible(variant)
        for rank in members:
            held = _rank_bytes(variant, common, by_rank[rank], reducible)
            found[rank] = RankUsage(rank, held, _calls(variant, by_rank[rank]))
    return [found[rank] for rank in by_rank]


def _classes(program: SpmdProgram, ranks: Sequence[int]) -> list[tuple[SpmdProgram, list[int]]]:
    """The variants of a program, each with those of the ``ranks`` that run it."""
    if not program.others:
        return [(program, list(ranks))]
    of = {rank: program.of(rank) for rank in ranks}
    return [(variant, [rank for rank in ranks if of[rank] is variant]) for variant in program.variants]


def _left(program: SpmdProgram) -> dict[int, Node]:
    """Nodes of the source that are left, by id -> what they are in the program."""
    return {id(root): node for node in program.graph.nodes if (root := origin(node)) is not None}


def _rank_bytes(
    program: SpmdProgram, common: Sequence[RankState], parts: Sequence[RankGraph], reducible: set[str]
) -> RankBytes:
    """Bytes that one rank holds; ``parts`` are its phases."""
    kinds = {state.tensor: state.kind for state in program.source.states}
    parameters = optimizer_states = 0
    for state in (*common, *parts[0].states):
        kind = kinds[state.pieces[0].tensor] if state.pieces else None
        if kind is StateKind.PARAMETER:
            parameters += state.type.nbytes
        elif kind in (StateKind.OPTIMIZER_STATE, StateKind.ACCUMULATOR):
            optimizer_states += state.type.nbytes
    gradients = sum(each.type.nbytes for each in parts[0].accumulators)
    for part, node in _comm_nodes(parts):
        if any(name in reducible for name in node.inputs) and _defined(program, part, node):
            outputs = node.outputs
            if len(outputs) == len(node.inputs):  # a fused call may carry statistics and scalars as well
                outputs = [new for old, new in zip(node.inputs, outputs) if old in reducible]
            gradients += sum(part.types.get(name, program.graph.type_of(name)).nbytes for name in outputs)
    return RankBytes(parameters, optimizer_states, gradients)


def _calls(program: SpmdProgram, parts: Sequence[RankGraph]) -> tuple[CallEntry, ...]:
    """What one rank sends, by collective and group, in the order of the first call of each."""
    found: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for part, node in _comm_nodes(parts):
        sent = part.phase.times * call_bytes(program, part, node)
        found.setdefault((node.op_type, str(node.attributes["group"])), []).append((part.phase.times, sent))
    return tuple(
        CallEntry(op, group, sum(times for times, _ in calls), sum(sent for _, sent in calls))
        for (op, group), calls in found.items()
    )


def _comm_nodes(parts: Sequence[RankGraph]) -> list[tuple[RankGraph, Node]]:
    return [(part, node) for part in parts for node in part.calls]


def _reducible(program: SpmdProgram) -> set[str]:
    """Local gradients, and what passes make of them on their way into a call."""
    found = set(program.training.gradients.values())
    for node in program.graph.nodes:
        if node.made_by and node.domain != COMM and node.is_a("Cast") and node.inputs[0] in found:
            found.update(node.outputs)
    return found


def _defined(program: SpmdProgram, part: RankGraph, node: Node) -> bool:
    """Whether the rank gets the results of a call."""
    root = node.attributes.get("root")
    return root is None or root == program.mesh.index(str(node.attributes["group"]), part.rank)


def call_bytes(program: SpmdProgram, rank: RankGraph, node: Node) -> int:
    """Bytes the rank sends in one call, by the call's own record."""
    group = str(node.attributes["group"])
    size, index = program.mesh.size(group), program.mesh.index(group, rank.rank)
    if node.op_type == "AllGather" and "cuts" in node.attributes:
        dtype, cuts = program.graph.types[node.outputs[0]].dtype, node.attributes["cuts"]
        types: list[tuple[str, tuple[int, ...]]] = [(dtype, (cuts[index + 1] - cuts[index],))]
    elif node.op_type == "Broadcast":
        # What a member gets: the root's inputs have the same types.
        held = [program.graph.types[name] for name in node.outputs]
        types = [(type.dtype, type.dims) for type in held] if node.inputs else []
    else:
        held = [rank.types.get(name, program.graph.types[name]) for name in node.inputs]
        types = [(type.dtype, type.dims) for type in held]
    return COLLECTIVES[node.op_type].bytes_sent(node.attributes, types, size, index)
