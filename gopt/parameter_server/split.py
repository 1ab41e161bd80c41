"""Split a training step into the programs of trainers and servers, checked and ready to be written."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from gopt.analysis.training import Phase, StateKind, TrainingGraph
from gopt.artifact.pieces import Piece
from gopt.artifact.server_entries import (
    KeyEntry,
    KeyKind,
    Mode,
    PullAt,
    RowInitEntry,
    ServerPlanEntry,
    TableEntry,
    TablePartStates,
)
from gopt.errors import InvariantError, OptionError, UnsupportedError
from gopt.ir.graph_index import GraphIndex, ancestors
from gopt.ir.types import TensorType
from gopt.lower.lowering import LoweredProgram, lower
from gopt.lower.rank_graph import RankGraph
from gopt.parameter_server.blocks import find_blocks
from gopt.parameter_server.geo import NOTHING, geo_plan, geo_servers, geo_trainers, place_geo_nodes
from gopt.parameter_server.message_check import check_trainer_messages
from gopt.parameter_server.narrow import narrow_types
from gopt.parameter_server.node_placement import NodePlacement, of_one_trainer, place_nodes
from gopt.parameter_server.options import SplitOptions
from gopt.parameter_server.plan import ServerPlan, make_plan
from gopt.parameter_server.servers import ServerKey, ServerProgram, key_name, server_program
from gopt.parameter_server.table_choice import ServedTable
from gopt.parameter_server.trainers import TrainerScalars, trainer_program
from gopt.records.checks import Check
from gopt.records.roles import RolesEntry
from gopt.records.tables import TableLayout
from gopt.spmd.pass_records import PassResult
from gopt.spmd.program import SpmdProgram
from gopt.text.sanitize import listed, show


@dataclass(frozen=True, slots=True)
class SplitStep:
    """A step split between trainers and servers. Nothing is written; ``folder`` does that."""

    training: TrainingGraph
    options: SplitOptions
    plan: ServerPlan
    placement: NodePlacement
    trainer: SpmdProgram
    servers: SpmdProgram
    trainer_graphs: LoweredProgram
    server_graphs: LoweredProgram
    keys: tuple[KeyEntry, ...]
    tables: tuple[TableEntry, ...]
    table_states: Mapping[str, tuple[TableLayout, int]]
    """State of a table's part, by its name on the server -> the table's layout, and the server."""
    result: PassResult
    checks: tuple[Check, ...]
    sync: SpmdProgram | None = None
    """In mode geo, the program that trainers run every few steps; ``trainer`` is then the local step."""

    def __repr__(self) -> str:
        count = f"{self.options.trainers} trainers and {self.options.servers} servers"
        return f"<SplitStep of {self.training.graph.name} for {count}: {len(self.keys)} keys>"

    def trainer_files(self) -> list[tuple[SpmdProgram, list[RankGraph]]]:
        """Return the programs of a trainer, with the phases."""
        ranks = self.trainer_graphs.ranks
        return [(self.trainer, ranks)] if self.sync is None else [(self.trainer, ranks[:1]), (self.sync, ranks[1:])]

    def trainer_types(self) -> dict[str, TensorType]:
        """Return the types of all values of a trainer's programs."""
        return self.trainer.graph.types if self.sync is None else self.trainer.graph.types | self.sync.graph.types

    def entry(self) -> ServerPlanEntry:
        """Return the manifest's record of the split."""
        options = self.options
        fixed = options.fixed_trainers or self.sync is not None  # their number divides every delta
        return ServerPlanEntry(
            servers=options.servers, mode=options.mode, pull=options.pulls, fixed_trainers=fixed,
            every=options.every, compensation=options.compensation, count=options.count,
            roles=None if options.roles is None else RolesEntry.of(options.roles),
            slicing=options.slicing.value, minimum=options.minimum, placement=options.placement.value, keys=self.keys,
            tables=self.tables,
        )  # fmt: skip


def split_step(training: TrainingGraph, options: SplitOptions) -> SplitStep:
    """Split a step. Raises OptionError and UnsupportedError for a step that cannot be split so, InvariantError where a
    check of the result fails."""
    if options.mode is Mode.GEO:
        return _geo_step(training, options)
    options.loss_reduction.check(training)
    if options.accumulate > 1 and training.shared:
        name = next(iter(training.shared.values()))
        raise OptionError(
            f"--accumulate: the update reads {show(name)} of the forward, and every micro-step has its own",
            "leave out --accumulate, or take the value out of the update",
        )
    _check_chosen(training, options)
    live = _without_dead(training)
    plan, placement = place_step(live, options)
    beside = pulled_beside(live, plan, placement)
    _check_late(placement, options)
    _check_apart(placement, beside, options)
    _check_own(plan, placement)
    servers = server_program(training, plan, placement, options)
    scalars = _scalars(plan, placement, beside, servers)
    trainer = trainer_program(training, plan, placement, options, scalars)
    trainer_graphs = lower(trainer, [0])
    server_graphs = lower(servers.program, range(options.servers))
    keys = tuple(_keys(training, plan, servers, scalars, options))
    followed = check_trainer_messages(trainer, plan, options)
    checks = (
        *_checks(training, plan, placement, trainer_graphs, server_graphs),
        Check("pieces in messages", "every push and pull has the elements of its keys", followed),
    )
    tables = tuple(_table(served, servers.tables[served.number]) for served in plan.tables.served)
    table_states = {
        name: (served.layout, part.number)
        for served in plan.tables.served for part in servers.tables[served.number] for name in part.inputs
    }  # fmt: skip
    step = SplitStep(
        training, options, plan, placement, trainer, servers.program, trainer_graphs, server_graphs, keys, tables,
        table_states, servers.result, checks,
    )  # fmt: skip
    return step if options.mode.rounds else replace(step, checks=(*checks, _check_blocks(step)))


def _check_chosen(training: TrainingGraph, options: SplitOptions) -> None:
    """Refuse statistics behind a check of the gradients of all trainers: each trainer has a share of the gradients."""
    single = options.trainers == options.accumulate == 1 or not options.mode.rounds
    name = next((name for name in training.chosen if not single), None)
    if name is not None:
        raise UnsupportedError(
            f"the statistic {show(name)} stays as it was where a check of the gradients of all trainers fails, and a "
            "trainer sees gradients of its own alone",
            "let the statistic move in every step, as batch norm of PyTorch does, or shard the step with gopt shard",
        )


def _geo_step(training: TrainingGraph, options: SplitOptions) -> SplitStep:
    placement, plan = place_geo_nodes(training), geo_plan(training, options)
    servers = geo_servers(training, plan, placement, options)
    step, sync, trainer_graphs = geo_trainers(training, plan, placement, options)
    server_graphs = lower(servers.program, range(options.servers))
    keys = tuple(_keys(training, plan, servers, NOTHING, options))
    checks = _checks(training, plan, placement, trainer_graphs, server_graphs)
    split = SplitStep(
        training, options, plan, placement, step, servers.program, trainer_graphs, server_graphs, keys, (), {},
        PassResult(), checks, sync,
    )  # fmt: skip
    return replace(split, checks=(*checks, _check_blocks(split)))


def _check_blocks(split: SplitStep) -> Check:
    """Cut every server's graph into the blocks of its keys, as a run does."""
    count, plan = 0, split.entry()
    common = {state.input: state.output for state in split.server_graphs.common}
    for part in split.server_graphs.ranks:
        states = common | {state.input: state.output for state in part.states}
        count += len(find_blocks(part.graph(), plan, part.rank, states, split.training.hyper))
    return Check("blocks", "every key is updated by itself", count)


def _without_dead(training: TrainingGraph) -> TrainingGraph:
    """Return the step without dead nodes: they belong to no role."""
    graph = training.graph
    needed = ancestors(GraphIndex(graph), [*graph.outputs, *(state.updated for state in training.states)])[1]
    nodes = [node for node in graph.nodes if not needed.isdisjoint(node.outputs)]
    return replace(training, graph=replace(graph, nodes=nodes)) if len(nodes) < len(graph.nodes) else training


def _without_own(training: TrainingGraph) -> TrainingGraph:
    """Return the step without nodes of the update serving statistics and outputs of one trainer alone."""
    graph = training.graph
    follow = [state.updated for state in training.states if state.kind is not StateKind.STATISTIC]
    names, _ = of_one_trainer(training, follow)
    ends = [*follow, *training.gradients.values(), *(name for name in training.metrics if name not in names)]
    needed, _ = ancestors(GraphIndex(graph), ends)
    nodes = [node for node in graph.nodes if id(node) in needed or node.phase is not Phase.UPDATE]
    return replace(training, graph=replace(graph, nodes=nodes)) if len(nodes) < len(graph.nodes) else training


def _check_own(plan: ServerPlan, placement: NodePlacement) -> None:
    """Refuse nodes outside every update reading values of one server alone, in pieces or as a tensor."""
    ids = {id(node) for subgraph in plan.updates.subgraphs.values() for node in subgraph.nodes}
    placed: dict[str, str] = {}
    for unit in plan.units:
        if unit.server is None:
            continue
        for subgraph in unit.subgraphs:
            placed[subgraph.gradient] = subgraph.parameter.tensor
            for state in subgraph.states:
                placed[state.tensor] = placed[state.updated] = subgraph.parameter.tensor
    for node in placement.server_nodes:
        read = next((name for name in node.reads if name in placed), None)
        if read is not None and id(node) not in ids:
            raise UnsupportedError(
                f"servers need {show(node.label)}, which reads {show(read)} outside of the update of "
                f"{show(placed[read])}: only one server has that",
                "let each update read its own gradient and parameter alone",
            )


def place_step(training: TrainingGraph, options: SplitOptions) -> tuple[ServerPlan, NodePlacement]:
    """Return the plan and the placement of nodes. A parameter stays whole where trainers read one of the states, and is
    sent in half precision where they read it so alone."""
    mine = _without_own(training)
    plan = make_plan(mine, options)
    placement = place_nodes(training, plan.updates, options.loss_reduction.value, plan.tables)
    read = placement.pulled - plan.owners.keys()
    whole = frozenset(
        subgraph.parameter.tensor for unit in plan.units if unit.split for subgraph in unit.subgraphs
        if not read.isdisjoint(state.tensor for state in subgraph.states)
    )  # fmt: skip
    narrow = narrow_types(training, placement, options)
    if not whole and not narrow:
        return plan, placement
    plan = make_plan(mine, options, whole, narrow)
    return plan, place_nodes(training, plan.updates, options.loss_reduction.value, plan.tables)


def pulled_beside(training: TrainingGraph, plan: ServerPlan, placement: NodePlacement) -> dict[str, int | None]:
    """Return the states, beside parameters, read by trainers, each with its server, None where every server has it."""
    where: dict[str, int | None] = dict.fromkeys(placement.shared)
    for unit in plan.units:
        where.update((state.tensor, unit.server) for subgraph in unit.subgraphs for state in subgraph.states)
    parameters = {*plan.owners, *plan.tables.parameters}
    states = [state for state in training.states if state.tensor in placement.pulled - parameters]
    for state in states:
        if state.tensor not in where:
            raise UnsupportedError(
                f"trainers read {show(state.tensor)}, a state with rows of table {show(state.of or '')}: servers send "
                "rows of the table alone",
                f"--table {state.of}=dense sends the whole parameter",
            )
    return {state.tensor: where[state.tensor] for state in states}


def _check_late(placement: NodePlacement, options: SplitOptions) -> None:
    """Refuse outputs computed from the batch and from new values where trainers do not have both together."""
    if placement.late and options.accumulate > 1:
        raise UnsupportedError(
            f"output {show(placement.late[0])} reads the batch beside new values: each micro-step has its own batch",
            "leave out --accumulate, or take it out of the model's outputs",
        )
    if placement.late and options.pulls is PullAt.START:
        raise UnsupportedError(
            f"output {show(placement.late[0])} reads the batch beside new values, which trainers pull in the next step",
            "take --pull end, with which trainers compute it, or take it out of the model's outputs",
        )


def _check_apart(placement: NodePlacement, beside: Collection[str], options: SplitOptions) -> None:
    """Refuse updates needing rounds in a mode without rounds, with all causes."""
    if options.mode.rounds:
        return
    causes = [
        f"{what} {_listed(names)}{rest}" for what, names, rest in (
            ("the update reads the trainers' mean of", placement.merged.values(), ""),
            ("trainers read", beside, ", which servers update beside parameters"),
            ("the update computes output", placement.metrics, ""),
        ) if names
    ]  # fmt: skip
    if causes:
        only = (
            "" if placement.merged or beside else f", or take {_listed(placement.metrics)} out of the model's outputs"
        )
        raise UnsupportedError(
            f"mode {options.mode} has no rounds, after which all have the same: {'; '.join(causes)}",
            f"take --mode sync{only}",
        )


def _listed(names: Iterable[str]) -> str:
    return listed([*map(show, names)])


def _scalars(
    plan: ServerPlan, placement: NodePlacement, states: Mapping[str, int | None], servers: ServerProgram
) -> TrainerScalars:  # fmt: skip
    number = len(plan.buckets) + len(servers.merged)
    return TrainerScalars(
        {name: (number + index, server) for index, (name, server) in enumerate(states.items())},
        dict(servers.merged),
        {name: number + len(states) + index for index, name in enumerate(placement.metrics)},
    )


def _keys(
    training: TrainingGraph, plan: ServerPlan, servers: ServerProgram, scalars: TrainerScalars, options: SplitOptions
) -> Sequence[KeyEntry]:  # fmt: skip
    entries = []
    for bucket in plan.buckets:
        entries += [_parameter_key(key, bucket.number, options) for key in servers.keys[bucket.number]]
    types = training.graph.types
    updated = {state.tensor: state.updated for state in training.states}
    entries += [_key_beside(name, KeyKind.VALUE, number, types[name], name) for name, number in scalars.values.items()]
    for name, (number, server) in scalars.states.items():
        one = types[name].elements == 1 and server is None
        kind, states = KeyKind.SCALAR if one else KeyKind.STATE, ((name,), (updated[name],))
        entries.append(_key_beside(name, kind, number, types[name], "", *states, server=server))
    entries += [
        _key_beside(name, KeyKind.METRIC, number, types[name], "", (), (name,))
        for name, number in scalars.metrics.items()
    ]
    return entries


def _key_beside(
    name: str, kind: KeyKind, bucket: int, type: TensorType, gradient: str, inputs: tuple[str, ...] = (),
    outputs: tuple[str, ...] = (), server: int | None = None,
) -> KeyEntry:  # fmt: skip
    return KeyEntry(name, kind, server, bucket, type.dtype, type.dtype, type.dims, (), gradient, inputs, outputs)


def _parameter_key(key: ServerKey, bucket: int, options: SplitOptions) -> KeyEntry:
    unit = key.unit
    assert unit is not None
    placed = unit.pieces if unit.split else unit.pieces[key.number : key.number + 1]
    pieces = tuple(Piece(piece.parameter, piece.start, piece.stop) for piece in placed)
    return KeyEntry(
        key_name(unit, key.number), KeyKind.PARAMETER, unit.server, bucket, key.type.dtype,
        unit.dtypes[2], key.type.dims, pieces, key.gradient, key.inputs, key.outputs,
    )  # fmt: skip


def _table(served: ServedTable, parts: Sequence[ServerKey]) -> TableEntry:
    table, layout = served.table, served.layout
    return TableEntry(
        table.parameter, layout.layout.value, table.rows, table.width, table.dtype, layout.servers, layout.cuts,
        tuple(part.inputs[0] for part in parts), tuple(part.outputs[0] for part in parts),
        tuple(part.gradient for part in parts), served.rows.value, tuple(part.ids for part in parts),
        tuple(TablePartStates(part.inputs, part.outputs) for part in parts),
        tuple(RowInitEntry(name, str(init)) for name, init in served.init.items()),
    )  # fmt: skip


def _checks(
    training: TrainingGraph,
    plan: ServerPlan,
    placement: NodePlacement,
    trainers: LoweredProgram,
    servers: LoweredProgram,
) -> tuple[Check, ...]:
    """Return the checks of the whole split: pieces tile, states are held, and each push has a receiver."""
    tiled = 0
    for name, pieces in plan.owners.items():
        end = 0
        for piece in pieces:
            if piece.start != end or piece.stop < end:
                raise InvariantError(f"pieces of {name!r} omit or repeat elements at {min(end, piece.start)}")
            end, tiled = piece.stop, tiled + 1
        if end != training.graph.types[name].elements:
            raise InvariantError(f"pieces of {name!r} end at {end} of {training.graph.types[name].elements}")
    names = {state.input for state in trainers.common} - placement.served
    lost = [s.tensor for s in training.states if s.tensor not in names and s.tensor not in placement.served]
    if lost:
        raise InvariantError(f"state {lost[0]!r} is on no trainer and on no server")
    checks = [
        Check("pieces of servers", "the pieces of every parameter with a gradient tile it", tiled),
        Check("messages", "every push has a server that merges it, every pull one that has the value",
              _check_messages(trainers, servers)),
    ]  # fmt: skip
    named = [replace(check, name=f"trainers: {check.name}") for check in trainers.checks]
    named += [replace(check, name=f"servers: {check.name}") for check in servers.checks]
    return (*checks, *named)


def _check_messages(trainers: LoweredProgram, servers: LoweredProgram) -> int:
    """Check R10: each push has one Aggregate of the same bucket and sizes on its server, and each Aggregate has its
    pushes."""
    expected = {
        (rank.rank, node.attributes["bucket"]): tuple(node.attributes["keys"])
        for rank in servers.ranks for node in rank.calls if node.op_type == "Aggregate"
    }  # fmt: skip
    pushed = [
        ((node.attributes["server"], node.attributes["bucket"]), tuple(node.attributes["keys"]))
        for rank in trainers.ranks for node in rank.calls if node.op_type == "Push"
    ]  # fmt: skip
    if sorted(pushed) != sorted(expected.items()):
        wrong = next(iter(set(pushed) ^ set(expected.items())))
        raise InvariantError(f"bucket {wrong[0][1]} of server {wrong[0][0]} is pushed or merged, but not both")
    return len(pushed)
