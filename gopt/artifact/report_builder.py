"""The report of a sharded step (contract section 4)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from gopt.analysis.coupling import COUPLINGS, analyse_couplings, notes
from gopt.analysis.coupling.samples_axis import samples_axis
from gopt.analysis.training import StateKind, TrainingGraph
from gopt.artifact.additions import added
from gopt.artifact.cost_report import figures
from gopt.artifact.manifest_builder import phases_by_rank
from gopt.artifact.manifest_entries import MeshEntry
from gopt.artifact.open_couplings import open_couplings
from gopt.artifact.optimizer_report import removed_optimizer_values, removed_optimizers
from gopt.artifact.removals import classes_of, find_removals
from gopt.artifact.report_groups import OpGroup, RemovedVarGroup
from gopt.artifact.report_record import CallEntry, RankBytes, RankUsage, Report, SourceEntry
from gopt.artifact.report_tables import OpTables, RemovedVarTables, group_added_ops, group_added_vars
from gopt.artifact.serialize import FILE_NODES, file_nodes
from gopt.artifact.step_size import before_after
from gopt.collectives.table import COLLECTIVES
from gopt.ir.graph import COMM, Node
from gopt.lower.carried_values import FOLLOWED, find_followed
from gopt.lower.rank_graph import RankGraph, RankState
from gopt.operators.kinds import CASTS, MASKS, SCALES
from gopt.records.checks import Check
from gopt.records.mesh import PIPELINE
from gopt.spmd.program import SpmdProgram
from gopt.spmd.step_memory import SOURCE_PEAKS, live_in_source, stage_runs
from gopt.spmd.traffic import calls_of
from gopt.system.background import Task
from gopt.text.amounts import balance, format_bytes
from gopt.text.sanitize import listed


@dataclass(frozen=True, slots=True)
class RemovedItems:
    """Operators and values of the source missing on some ranks, in groups."""

    ops: tuple[OpGroup, ...]
    variables: tuple[RemovedVarGroup, ...]


def begin_source_figures(training: TrainingGraph) -> None:
    """Begin with the parts of checks and report that need the source alone, beside the passes."""
    training.begin({
        FOLLOWED: lambda: find_followed(training), COUPLINGS: lambda: analyse_couplings(training),
        SOURCE_PEAKS: lambda: live_in_source(training), FILE_NODES: lambda: file_nodes(training),
    })  # fmt: skip


def find_removed(program: SpmdProgram, ranks: Sequence[int]) -> RemovedItems:
    """Find the items of the source missing on some of ``ranks``, for the report, after the passes."""
    classes = classes_of(program, ranks)
    ops, variables = OpTables(), RemovedVarTables()
    for variant, on in classes:
        for fact in removed_optimizers(variant, program.passes, on):
            ops.add(fact[:4], fact.of, fact.name, fact.op_type, fact.replaced_by)
        for value in removed_optimizer_values(variant, on):
            variables.add(value[:4], value.of, value.name, value, value.replaced_by)
    find_removals(program, classes, ops, variables)
    return RemovedItems(ops.groups(), variables.groups())


def build_report(
    program: SpmdProgram,
    source: SourceEntry,
    gone: Task[RemovedItems],
    checks: Sequence[Check],
    common: Sequence[RankState],
    ranks: Sequence[RankGraph],
) -> Report:
    """Build the report of removed, added and moved items.

    Its size grows with the graph, not with graph times ranks.
    """
    classes = classes_of(program, list(phases_by_rank(ranks)))
    calls = calls_of(program)
    added_ops, added_vars = added(program, classes, ranks, calls)
    usages = _usages(program, common, ranks)
    couplings = open_couplings(program)
    sizes = before_after(program, source, common, ranks, usages)
    bounds = figures(program, program.passes, common, ranks, calls)
    items = gone.result()  # last: this runs in the background meanwhile
    return Report(
        source=source,
        mesh=MeshEntry.of(program.mesh),
        pipeline=tuple(run.record for run in program.passes),
        notes=(
            *program.source.notes,
            *program.warnings,
            *_notes(program),
            *_saved_notes(program),
            *notes(couplings),
        ),
        couplings=tuple(couplings),
        before_after=sizes,
        removed_ops=items.ops,
        removed_vars=items.variables,
        added_ops=group_added_ops(added_ops),
        added_vars=group_added_vars(added_vars),
        ranks=tuple(usages),
        balance=_balances([usage.nbytes.by_kind for usage in usages]),
        figures=bounds,
        checks=tuple(checks),
    )


def _notes(program: SpmdProgram) -> list[str]:
    elements = sum(program.source.graph.types[s.tensor].elements for s in program.source.parameters)
    notes = []
    if samples_axis(program.source):
        notes.append(
            "dimension 1 of the batch inputs counts the samples: give gopt run whole batches, stacked along an axis in "
            "front; of other arrays ranks take rows of dimension 0"
        )
    if program.mesh.ranks > elements:
        notes.append(f"{program.mesh.ranks} ranks share {elements} elements: some own nothing")
    if program.mesh.data_ranks > 1 and not program.mesh.shard_axis:
        states = "all of them" if program.stages is None else "all of its pipeline stage"
        notes.append(f"no axis of the mesh {program.mesh} shards states: every rank holds {states}, at any stage")
    used = {axis for group in _groups(program) for axis in program.mesh.live(group)}
    for name, size in program.mesh.axes:
        if size > 1 and name not in used and not (name == PIPELINE and program.stages is not None):
            notes.append(f"no call goes along mesh axis {name}: its ranks hold and compute the same")
    moving = [state.tensor for state in program.source.states if state.kind is StateKind.STATISTIC]
    if any(run.record.options.get("loss_reduction") == "auto" for run in program.passes):
        notes.append(f"--loss-reduction auto: {program.loss_reduction}")
    if program.micro_steps > 1 and moving:
        notes.append(
            f"with --accumulate {program.micro_steps} a statistic moves {program.micro_steps} times a step, once by "
            f"each micro-step: {listed(moving)}"
        )
    behind: set[str] = set()
    for node in program.graph.nodes:
        # neither a gather of parameters nor a reduction in the source's forward is a reduction of gradients
        reduces = node.domain == COMM and node.made_by and COLLECTIVES[node.op_type].reduces
        if reduces or any(name in behind for name in node.reads):
            behind.update(node.outputs)
    for inside, forms in (
        (True, ("follows", "follow", "the reduced gradients")),
        (False, ("is", "are", "the rank's own")),
    ):
        names = [name for name in program.source.metrics if (name in behind) is inside]
        if names:
            notes.append(f"metric{'s' * (len(names) > 1)} {listed(names)} {forms[len(names) > 1]} {forms[2]}")
    return notes


def _saved_notes(program: SpmdProgram) -> list[str]:
    """The saved values of several micro-batches at once, which the peak of live values includes."""
    plan = program.stages
    if plan is None or plan.schedule is None:
        return []
    texts = [
        f"{forwards} on member {member} ({format_bytes(run.saved)})"
        for member, (forwards, run) in enumerate(zip(plan.peak_live, stage_runs(program)))
    ]
    return [
        f"schedule {plan.schedule.name} keeps saved values of at most so many forwards at once: {', '.join(texts)}; "
        "the peak of live values has them"
    ]


def _groups(program: SpmdProgram) -> set[str]:
    return {str(node.attributes["group"]) for node in program.graph.nodes if node.domain == COMM}


def _balances(rows: Sequence[Mapping[str, int]]) -> dict[str, float]:
    """By kind of bytes, the largest over the mean over the ranks."""
    return {kind: balance([row[kind] for row in rows]) for kind in rows[0]} if rows else {}


def _usages(program: SpmdProgram, common: Sequence[RankState], ranks: Sequence[RankGraph]) -> list[RankUsage]:
    """Return each rank's bytes, held and sent in an update with all micro-steps."""
    by_rank = phases_by_rank(ranks)
    usage_of: dict[int, RankUsage] = {}
    for variant, members in classes_of(program, list(by_rank)):
        reducible, sent = _reducible(variant), dict[tuple[int, int], int]()
        alike: dict[tuple[int, ...], RankUsage] = {}
        for rank in members:
            content = tuple(part.kind for part in by_rank[rank])
            if content not in alike:
                nbytes = _rank_bytes(variant, common, by_rank[rank], reducible)
                alike[content] = RankUsage(rank, nbytes, _calls(variant, by_rank[rank], sent))
            usage_of[rank] = replace(alike[content], rank=rank)
    if not any(
        row.nbytes.gradients for row in usage_of.values()
    ):  # no call reduces any: an update reads the rank's own
        for variant, members in classes_of(program, list(by_rank)):
            for rank in members:
                held = {piece.tensor for state in (*common, *by_rank[rank][0].states) for piece in state.pieces}
                names = {name for of, name in variant.training.gradients.items() if of in held}
                nbytes = replace(usage_of[rank].nbytes, gradients=_nbytes(variant, by_rank[rank][0], names))
                usage_of[rank] = replace(usage_of[rank], nbytes=nbytes)
    return [usage_of[rank] for rank in by_rank]


def _rank_bytes(
    program: SpmdProgram, common: Sequence[RankState], parts: Sequence[RankGraph], reducible: set[str]
) -> RankBytes:
    """Bytes that one rank holds; ``parts`` are its phases."""
    kinds = {state.tensor: state.kind for state in program.source.states}
    parameters = optimizer_states = host = 0
    hosted = set(program.host.states)
    for state in (*common, *parts[0].states):
        kind = kinds[state.pieces[0].tensor] if state.pieces else None
        if kind is StateKind.PARAMETER:
            parameters += state.type.nbytes
        elif kind in (StateKind.OPTIMIZER_STATE, StateKind.ACCUMULATOR):
            optimizer_states += state.type.nbytes
        host += state.type.nbytes if state.input in hosted else 0
    gradients = sum(accumulator.type.nbytes for accumulator in parts[0].accumulators)
    for part, node in _comm_nodes(parts):
        if any(name in reducible for name in node.inputs) and _defined(program, part, node):
            outputs = node.outputs
            if len(outputs) == len(node.inputs):  # a fused call may carry statistics and scalars as well
                outputs = [new for old, new in zip(node.inputs, outputs) if old in reducible]
            gradients += _nbytes(program, part, outputs)
    return RankBytes(parameters, optimizer_states, gradients, host)


def _nbytes(program: SpmdProgram, part: RankGraph, names: Iterable[str]) -> int:
    """Bytes of values on a rank."""
    return sum(part.types.get(name, program.graph.type_of(name)).nbytes for name in names)


def _calls(
    program: SpmdProgram, parts: Sequence[RankGraph], bytes_of: dict[tuple[int, int], int]
) -> tuple[CallEntry, ...]:
    """Return the calls of one rank by collective and group, in the order of the first call of each.

    ``bytes_of``: id of a call over a bucket and elements of a member's shard -> the bytes sent.
    """
    sent_by: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for part, node in _comm_nodes(parts):
        group, cuts = str(node.attributes["group"]), node.attributes.get("cuts")
        if cuts is None:
            sent = call_bytes(program, part, node)
        else:
            member = program.mesh.index(group, part.rank)
            key = id(node), cuts[member + 1] - cuts[member]
            if key not in bytes_of:
                bytes_of[key] = call_bytes(program, part, node)
            sent = bytes_of[key]
        sent_by.setdefault((node.op_type, group), []).append((part.phase.times, part.phase.times * sent))
    return tuple(
        CallEntry(op, group, sum(times for times, _ in calls), sum(sent for _, sent in calls))
        for (op, group), calls in sent_by.items()
    )


def _comm_nodes(parts: Sequence[RankGraph]) -> list[tuple[RankGraph, Node]]:
    return [(part, node) for part in parts for node in part.calls]


def _reducible(program: SpmdProgram) -> set[str]:
    """Local gradients, and values made of gradients by passes on the way into a call."""
    reducible = set(program.training.gradients.values())
    for node in program.graph.nodes:
        if node.made_by and node.is_in(CASTS | SCALES | MASKS) and not reducible.isdisjoint(node.inputs):
            reducible.update(node.outputs)
    return reducible


def _defined(program: SpmdProgram, part: RankGraph, node: Node) -> bool:
    """Return whether the rank gets the results of a call."""
    root = node.attributes.get("root")
    return root is None or root == program.mesh.index(str(node.attributes["group"]), part.rank)


def call_bytes(program: SpmdProgram, rank: RankGraph, node: Node) -> int:
    """Bytes sent by the rank in a call, by the call's own record."""
    group = str(node.attributes["group"])
    size, index = program.mesh.size(group), program.mesh.index(group, rank.rank)
    if node.op_type == "AllGather" and "cuts" in node.attributes:
        dtype, cuts = program.graph.types[node.outputs[0]].dtype, node.attributes["cuts"]
        types: list[tuple[str, tuple[int, ...]]] = [(dtype, (cuts[index + 1] - cuts[index],))]
    elif node.op_type == "Broadcast":
        # What a member gets: the root's inputs have the same types.
        types_sent = [program.graph.types[name] for name in node.outputs]
        types = [(type.dtype, type.dims) for type in types_sent] if node.inputs else []
    else:
        types_sent = [rank.types.get(name, program.graph.types[name]) for name in node.inputs]
        types = [(type.dtype, type.dims) for type in types_sent]
    return COLLECTIVES[node.op_type].bytes_sent(node.attributes, types, size, index)
