"""The report of a split: operators removed and added by role, state on servers, and traffic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gopt.analysis.coupling import notes as coupling_notes
from gopt.analysis.coupling import without_advice
from gopt.analysis.coupling.marks import Coupling, CouplingKind
from gopt.analysis.training import StateKind, TrainingGraph
from gopt.artifact.additions import bucket_of
from gopt.artifact.local_types import UNKNOWN, LocalTypes
from gopt.artifact.manifest_entries import MeshEntry
from gopt.artifact.open_couplings import open_couplings
from gopt.artifact.pass_facts import RoleSize, SplitFacts, SplitSettings
from gopt.artifact.report_groups import AddedVarFact, LocalShape, OpFact
from gopt.artifact.report_record import (
    CallCounts,
    CallEntry,
    CastCounts,
    Figures,
    RankBytes,
    RankUsage,
    Report,
    SourceEntry,
    Traffic,
)
from gopt.artifact.report_tables import group_added_ops, group_added_vars, group_removed_ops, group_removed_vars
from gopt.collectives.table import COLLECTIVES
from gopt.documents.records import to_document
from gopt.ir.graph import COMM, Node, origin
from gopt.ir.graph_index import GraphIndex, ancestors
from gopt.ir.node_kinds import record_of
from gopt.ir.phase import Phase
from gopt.ir.types import LOW_PRECISION, TensorType
from gopt.lower.rank_graph import RankGraph
from gopt.operators.kinds import CASTS
from gopt.parameter_server.report_removed import Removed
from gopt.parameter_server.role_sizes import role_sizes
from gopt.parameter_server.servers import PASS
from gopt.parameter_server.split import SplitStep
from gopt.parameter_server.views import ROUND, ROUND_TYPE
from gopt.records.mesh import Mesh
from gopt.records.pass_facts import PassRecord
from gopt.records.tables import Rows
from gopt.spmd.program import SpmdProgram
from gopt.spmd.traffic import Overlap
from gopt.text.amounts import balance, format_bytes, rank_ranges
from gopt.text.sanitize import show

_REASONS = {
    Phase.FORWARD: "the layout of pulled parameters",
    Phase.BACKWARD: "the layout of pulled parameters, for the backward",
    Phase.UPDATE: "the update of pieces, or their layout",
}
"""Why a node that is not a message was added."""


def build_split_report(split: SplitStep, source: SourceEntry) -> Report:
    """Return the report of a split; ranks are the trainers, followed by the servers."""
    removed = Removed(split)
    added_ops, added_vars = _added(split)
    usages = list(_usages(split))
    servers = usages[split.options.trainers :]
    couplings = _couplings(split)
    balances = {kind: balance([server.nbytes.by_kind[kind] for server in servers]) for kind in _KINDS}
    return Report(
        source=source,
        mesh=MeshEntry((("dp", split.options.trainers),), split.options.trainers),
        pipeline=(PassRecord(PASS, _options(split), _facts(split, tuple(role_sizes(split, source, usages)))),),
        notes=(*split.training.notes, *_notes(split, couplings)),
        couplings=couplings,
        removed_ops=group_removed_ops(removed.ops),
        removed_vars=group_removed_vars(removed.variables),
        added_ops=group_added_ops(added_ops),
        added_vars=group_added_vars(added_vars),
        ranks=tuple(usages),
        balance=balances,
        figures=_figures(split, usages),
        checks=split.checks,
    )


_KINDS = ("parameters", "optimizer_states", "gradients")


def _options(split: SplitStep) -> dict[str, Any]:
    options = split.options
    return to_document(
        SplitSettings(
            trainers=options.trainers, servers=options.servers, mode=options.mode.value, pull=options.pulls.value,
            slicing=options.slicing.value, minimum=options.minimum, placement=options.placement.value,
            server_map=options.given, loss_reduction=str(options.loss_reduction), accumulate=options.accumulate,
            wire=options.wire, bucket_bytes=options.cap, every=options.every, compensation=options.compensation,
            count=options.count, fixed_trainers=options.fixed_trainers, tables=options.tables,
            tables_off=options.tables_off, table_memory=options.table_memory,
            rows=options.rows, init=options.init,
        )
    )  # fmt: skip


def _facts(split: SplitStep, sizes: tuple[RoleSize, ...]) -> dict[str, Any]:
    pieces = [piece for pieces in split.plan.owners.values() for piece in pieces]
    servers = range(split.options.servers)
    pushed, pulled = _traffic(split)
    return to_document(
        SplitFacts(
            parameters=len(split.plan.owners), pieces=len(pieces), keys=len(split.keys),
            buckets=len(split.plan.buckets),
            pieces_by_server=tuple(sum(piece.server == server for piece in pieces) for server in servers),
            pushed_by_server=tuple(pushed.get(server, (0, 0))[1] for server in servers),
            pulled_by_server=tuple(pulled.get(server, (0, 0))[1] for server in servers),
            rows_by_server=split.plan.tables.row_traffic(split.training, split.options),
            sizes=sizes,
        )
    )  # fmt: skip


def _notes(split: SplitStep, couplings: Sequence[Coupling]) -> list[str]:
    owners = {piece.server for pieces in split.plan.owners.values() for piece in pieces}
    owners |= {server for served in split.plan.tables.served for server in served.layout.servers}
    idle = [server for server in range(split.options.servers) if server not in owners]
    notes = [*_of_tables(split), *coupling_notes(couplings)]
    if idle:
        what = f"server {idle[0]} holds" if len(idle) == 1 else f"servers {rank_ranges(idle)} hold"
        notes.append(f"{what} no parameter: fewer servers do, or a smaller --minimum")
    return notes


def _of_tables(split: SplitStep) -> Iterator[str]:
    """Yield notes on tables: where their rows are, and why other parameters with lookups stay dense."""
    for served in split.plan.tables.served:
        table, layout = served.table, served.layout
        servers = ", ".join(map(str, layout.servers))
        where = f"on server {servers}" if len(layout.servers) == 1 else f"on servers {servers} by {layout.layout.value}"
        lazy = "; updates run on rows that were pushed" if served.rows is Rows.LAZY else ""
        drawn = "".join(f"; {show(name)} starts with {init}" for name, init in served.init.items())
        yield f"table {show(table.parameter)}: {table.rows} rows of {table.width} lie {where}{lazy}{drawn}"
    rows = split.plan.tables.row_traffic(split.training, split.options)
    if rows:
        lookups = sum(split.plan.tables.lookups(split.training))
        yield (
            f"{lookups} look-ups of a trainer in a step move about {format_bytes(sum(rows))} of rows and numbers, both "
            "ways, if no row is looked up twice"
        )
    for name, why in split.plan.tables.dense:
        yield f"{show(name)} is looked up by rows and travels whole: {why}"


def _couplings(split: SplitStep) -> tuple[Coupling, ...]:
    """Return the reasons why a step of all trainers differs from the step of one large batch."""
    if not split.options.mode.rounds:
        return ()
    mesh = Mesh((("dp", split.options.trainers),))
    program = SpmdProgram.start(split.training, mesh, split.options.accumulate)
    program.loss_reduction = split.options.loss_reduction
    couplings = open_couplings(program)
    for option in ("--statistics sync", "--loss-reduction auto"):
        couplings = without_advice(couplings, option)
    if split.options.trainers == split.options.accumulate == 1:
        return couplings
    return (*couplings, *_own_statistics(split.training))


def _own_statistics(training: TrainingGraph) -> Iterator[Coupling]:
    """Yield the statistics the loss reads: each trainer keeps its own samples' statistics.

    A BatchNormalization that is trained only carries its running statistics on."""
    index = GraphIndex(training.graph)
    _, read = ancestors(index, training.losses)
    read.difference_update(node.inputs[slot] for node in training.graph.nodes for slot in record_of(node).running)
    for state in training.states:
        if state.kind is StateKind.STATISTIC and state.tensor in read:
            node = index.producers.get(state.updated)
            yield Coupling(
                CouplingKind.STATISTICS, state.updated, "" if node is None else node.op_type,
                f"the loss reads the statistic {state.tensor!r}, and each trainer keeps its own",
            )  # fmt: skip


def _added(split: SplitStep) -> tuple[list[OpFact], list[AddedVarFact]]:
    """Return the nodes and values that messages and pieces add to each role."""
    trainers = list(range(split.options.trainers))
    local_types = LocalTypes(split.servers)
    types = split.trainer_types()
    runs: dict[int, tuple[Node, list[int]]] = {}
    shapes: dict[str, dict[TensorType, list[int]]] = {}
    for graph in split.trainer_graphs.ranks:
        for node in _own(graph):
            runs[id(node)] = (node, trainers)
            for name in node.outputs:
                shapes.setdefault(name, {})[types.get(name, UNKNOWN)] = trainers
    for graph in split.server_graphs.ranks:
        placed_on, number = local_types.on(graph), split.options.trainers + graph.rank
        for node in _own(graph):
            runs.setdefault(id(node), (node, []))[1].append(number)
            for name, type in zip(node.outputs, placed_on.results(node)):
                shapes.setdefault(name, {}).setdefault(type, []).append(number)
    ops: list[OpFact] = []
    variables: list[AddedVarFact] = []
    for node, ranks in runs.values():
        role, why = _purpose(node)
        of = bucket_of([*node.outputs, *node.inputs])
        kind = f"{node.domain}.{node.op_type}".lstrip(".")
        ops.append(OpFact(PASS, why, rank_ranges(sorted(set(ranks))), role, of, node.label, kind))
        for name in filter(None, node.outputs):
            if (shape := shapes.pop(name, None)) is not None:
                per_rank = tuple(
                    LocalShape(rank_ranges(sorted(set(ranks))), t.shape, t.nbytes) for t, ranks in shape.items()
                )
                variables.append(AddedVarFact(PASS, why, role, of, name, next(iter(shape)).dtype, per_rank))
    return ops, [*variables, *_added_inputs(split)]


def _added_inputs(split: SplitStep) -> Iterator[AddedVarFact]:
    """Yield the inputs the files of roles have and the source has not: states in pieces, sums, the round."""
    trainers_count, types, trainer = split.options.trainers, split.training.graph.types, split.trainer_graphs
    kinds = {state.tensor: state.kind.value for state in split.training.states}
    trainers = rank_ranges(list(range(trainers_count)))
    every = rank_ranges([*range(trainers_count), *(trainers_count + graph.rank for graph in split.server_graphs.ranks)])
    states_of = [(trainers, state, "what a trainer keeps of servers") for state in trainer.common]
    states_of += [
        (rank_ranges([trainers_count + graph.rank]), state, "states of pieces, as the server holds them")
        for graph in split.server_graphs.ranks for state in graph.states
    ]  # fmt: skip
    for ranks, state, why in states_of:
        if state.input not in types and state.pieces:
            tensor, type = state.pieces[0].tensor, state.type
            shape = LocalShape(ranks, type.shape, type.nbytes)
            yield AddedVarFact(PASS, why, kinds.get(tensor, "state"), tensor, state.input, type.dtype, (shape,))
    # a sequence of the source has no type
    names_known = types.keys() | {name for node in split.training.graph.nodes for name in node.outputs}
    for graph in split.server_graphs.ranks:  # a partial result has a name of its own until servers have completed it
        nodes = (node for node in _nodes(graph) if not _made(node))
        names = [name for node in nodes for name in node.outputs if name and name not in names_known]
        parts = {name: graph.types.get(name) or split.servers.graph.types[name] for name in names}
        for name, type in parts.items():
            shape = LocalShape(rank_ranges([trainers_count + graph.rank]), type.shape, type.nbytes)
            yield AddedVarFact(PASS, "one server's part of a reduction", "update", None, name, type.dtype, (shape,))
    for accumulator in trainer.ranks[0].accumulators:
        shape = LocalShape(trainers, accumulator.type.shape, accumulator.type.nbytes)
        why = "the sum of the gradients of micro-steps"
        yield AddedVarFact(PASS, why, "accumulator", None, accumulator.input, accumulator.type.dtype, (shape,))
    shape = LocalShape(every, ROUND_TYPE.shape, ROUND_TYPE.nbytes)
    yield AddedVarFact(PASS, "the number of the round", "communication", None, ROUND, ROUND_TYPE.dtype, (shape,))


def _own(graph: RankGraph) -> Iterator[Node]:
    return filter(_made, _nodes(graph))


def _nodes(graph: RankGraph) -> Iterator[Node]:
    return (node for block in graph.blocks for node in block.nodes)


def _made(node: Node) -> bool:
    return bool(node.made_by) or origin(node) is None


def _purpose(node: Node) -> tuple[str, str]:
    """Return role and reason of an added node."""
    if node.domain == COMM:
        among = node.op_type in COLLECTIVES
        return "communication", "a call among servers" if among else "a message between trainers and servers"
    phase = node.phase or Phase.UPDATE
    return phase.value, _REASONS[phase]


def _usages(split: SplitStep) -> Iterator[RankUsage]:
    kinds = {state.tensor: state.kind for state in split.training.states}
    pushed, pulled = _traffic(split)
    calls, size = (sum(column) for column in zip((0, 0), *pushed.values()))  # a step of tables alone pushes no bucket
    sent = (CallEntry("Push", "server", calls, size),)
    common = split.trainer_graphs.common
    for trainer in range(split.options.trainers):
        parameters = sum(state.type.nbytes for state in common if kinds[state.pieces[0].tensor] is StateKind.PARAMETER)
        yield RankUsage(trainer, RankBytes(parameters, 0, sent[0].bytes_sent), sent)
    for graph in split.server_graphs.ranks:
        mine = [state for state in graph.states if state.pieces] + split.server_graphs.common
        parameters = sum(state.type.nbytes for state in mine if kinds[state.pieces[0].tensor] is StateKind.PARAMETER)
        states = sum(state.type.nbytes for state in mine if kinds[state.pieces[0].tensor] is StateKind.OPTIMIZER_STATE)
        types = {**split.servers.graph.types, **graph.types}
        merged = sum(types[n].nbytes for node in graph.calls if node.op_type == "Aggregate" for n in node.outputs)
        calls, size = pulled.get(graph.rank, (0, 0))
        answers = CallEntry("Pull", "trainer", calls * split.options.trainers, size * split.options.trainers)
        yield RankUsage(split.options.trainers + graph.rank, RankBytes(parameters, states, merged), (answers,))


def _traffic(split: SplitStep) -> tuple[dict[int, tuple[int, int]], dict[int, tuple[int, int]]]:
    """Return by server: messages and bytes pushed by one trainer in a step, and messages and bytes pulled."""
    types = split.trainer_types()
    pushed: dict[int, tuple[int, int]] = {}
    pulled: dict[int, tuple[int, int]] = {}
    for graph in split.trainer_graphs.ranks:
        for node in graph.calls:
            if node.op_type == "Push":
                totals, values = pushed, node.inputs[2:]
            elif node.op_type == "Pull":
                totals, values = pulled, node.outputs
            else:
                continue
            count, size = totals.get(node.attributes["server"], (0, 0))
            times = graph.phase.times
            nbytes = sum(types[name].nbytes for name in values)
            totals[node.attributes["server"]] = (count + times, size + times * nbytes)
    return pushed, pulled


def _casts_left(split: SplitStep) -> int:
    """Return how many casts of trained parameters to half precision a trainer makes in a step."""
    graph = split.trainer.graph
    nodes = [node for node in graph.nodes if node.is_in(CASTS) and node.inputs[0] in split.training.gradients]
    return sum(graph.types[node.outputs[0]].dtype in LOW_PRECISION for node in nodes)


def _figures(split: SplitStep, usages: Sequence[RankUsage]) -> Figures:
    """Return the figures. A trainer sends each gradient once and receives each parameter once: that is the minimum."""
    types = split.training.graph.types
    bound = sum(types[split.training.gradients[name]].nbytes for name in split.plan.owners)
    sent = usages[0].bytes_sent
    calls = sum(entry.calls for entry in usages[0].communication)
    least = -(-bound // split.options.cap)
    return Figures(
        Traffic(sent, {"gradients": sent}, bound, round(sent / bound, 6) if bound else 1.0),
        CallCounts(calls, max(least, 1), split.options.cap),
        CastCounts(0, len(split.plan.narrow), _casts_left(split)),
        Overlap(0.0, {}, 0),
    )
