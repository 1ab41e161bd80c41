"""Mode geo: trainers update on their own, and exchange their changes every few steps.

Every trainer runs the source's own step, with its update and its optimizer states, and keeps the value it last knew of
the servers (``last``). After every few steps it runs the phase ``sync``:

delta = (local - last) / trainers pushed; the server adds it to its value on arrival mark = last + delta the server's
value if no other trainer pushed local = local - (mark - pulled) adds the changes of the others last = pulled

What was pulled is compared with ``mark``, which has the trainer's own delta. Compared with ``last``, every delta would
count twice, and grow from sync to sync. With one trainer ``pulled`` is ``mark`` to the bit, and local values are
the source's own.

Optimizer states, statistics and counters stay local; the chief's count. Servers hold parameters alone. The number of
trainers is part of the files.
"""

from __future__ import annotations

from dataclasses import replace

from gopt.analysis.training import State, StateKind, TrainingGraph
from gopt.analysis.update_subgraphs import find_updates
from gopt.collectives.layout import format_shape
from gopt.errors import UnsupportedError
from gopt.ir.graph import COMM
from gopt.ir.graph_index import GraphIndex, walk
from gopt.ir.rewriter import GraphRewriter
from gopt.ir.types import TensorType, scalar_of
from gopt.lower.lowering import LoweredProgram, lower
from gopt.parameter_server.node_placement import NodePlacement
from gopt.parameter_server.options import SplitOptions
from gopt.parameter_server.placement import PieceSize, place
from gopt.parameter_server.plan import ServerPlan, make_buckets
from gopt.parameter_server.servers import PASS, SERVER, ServerKey, ServerProgram, key_name, on_server
from gopt.parameter_server.slicing import pieces, static_shape
from gopt.parameter_server.table_choice import choose_tables
from gopt.parameter_server.trainers import TrainerScalars, TrainerWriter
from gopt.parameter_server.units import PlacedPiece, ServerUnit
from gopt.parameter_server.views import DONE, ROUND, ROUND_TYPE, role_view
from gopt.records.mesh import AxisKind, Mesh
from gopt.records.placements import FlatShard, Sharding
from gopt.spmd.program import BucketSlice, ShardedState, SpmdProgram
from gopt.text.sanitize import show

SYNC = "sync"
"""The phase of the exchange."""
NOTHING = TrainerScalars({}, {}, {})


def place_geo_nodes(training: TrainingGraph) -> NodePlacement:
    """Return the placement of nodes: servers hold the parameters with gradients, trainers hold everything.

    Raises UnsupportedError where each step makes a parameter anew from another state, such as a half-precision copy
    from its master: the value from the servers would be lost.
    """
    if not training.gradients:
        raise UnsupportedError(
            "no parameter has a gradient: there is nothing to put on servers",
            "gopt inspect shows the roles; --params INPUT=GRADIENT names a gradient",
        )
    if training.shared:
        name = next(iter(training.shared.values()))
        raise UnsupportedError(f"mode geo: the update reads the trainers' mean of {show(name)}", "take --mode sync")
    index, states = GraphIndex(training.graph), training.state_of()
    cut = set(training.gradients.values())
    for name in training.gradients:
        if not _reads(index, states[name].updated, name, cut):
            raise UnsupportedError(
                f"mode geo: the update makes {show(name)} from other states, and not from its own value: what servers "
                "send would be lost",
                "take --mode async",
            )
    served = frozenset(training.gradients)
    return NodePlacement((), tuple(training.graph.nodes), served, (), served, (), {})


def _reads(index: GraphIndex, value: str, wanted: str, cut: set[str]) -> bool:
    """Return whether a value is computed from another one in the update."""
    return wanted in walk([value], lambda name: () if name in cut else index.operands(name))


def geo_plan(training: TrainingGraph, options: SplitOptions) -> ServerPlan:
    """Place the parameters. Each may be cut, because servers only add."""
    types = training.graph.types
    sizes: list[PieceSize] = []
    cut: list[tuple[str, int, int, bool]] = []
    for name in training.gradients:
        shape = static_shape(name, types[name].shape)
        ranges = pieces(shape, options.slicing, options.servers, options.minimum)
        for index, (start, stop) in enumerate(ranges):
            sizes.append(PieceSize(name, index, types[name].nbytes * (stop - start) // max(types[name].elements, 1)))
            cut.append((name, start, stop, len(ranges) == 1))
    servers = place(sizes, options.servers, options.placement, options.given)
    owners: dict[str, list[PlacedPiece]] = {}
    units = []
    for number, (size, (name, start, stop, whole), server) in enumerate(zip(sizes, cut, servers)):
        piece = PlacedPiece(name, size.index, start, stop, server, whole)
        owners.setdefault(name, []).append(piece)
        dtype = types[name].dtype
        kinds = dtype, dtype, options.travels(dtype)
        units.append(ServerUnit(number, server, True, (), (piece,), number, size.nbytes, kinds))
    updates = find_updates(training, whole_accumulators=False)
    tables = choose_tables(training, updates, options)  # no tables without rounds
    placed = {name: tuple(parts) for name, parts in owners.items()}
    return ServerPlan(updates, tuple(make_buckets(units, options)), placed, tables)


# --- servers --------------------------------------------------------------------------------------------------------


def geo_servers(
    training: TrainingGraph, plan: ServerPlan, placement: NodePlacement, options: SplitOptions
) -> ServerProgram:
    """Return the program of the servers: each adds the deltas of its pieces."""
    view = role_view(training, (), placement.served, (), ())
    mesh = Mesh(((SERVER, options.servers),), ((SERVER, AxisKind.DATA),))
    program = SpmdProgram(view, view.graph.copy(), mesh, [])
    rewriter, types = GraphRewriter(program.graph, PASS), program.graph.types
    servers = ServerProgram(program)
    states = []
    for bucket in plan.buckets:
        deltas: dict[str, TensorType] = {}
        for unit in bucket.units:
            root, (piece,) = f"gopt.ps.k{unit.number}", unit.pieces
            type = TensorType(unit.dtypes[0], (piece.elements,))
            names = f"{root}.gradient", f"{root}.parameter", f"{root}.parameter_out"
            assert unit.server is not None
            cuts = (0,) * (unit.server + 1) + (piece.elements,) * (options.servers - unit.server)
            where = Sharding.along(SERVER, FlatShard(cuts, 0, piece.elements))
            types[names[1]] = deltas[names[0]] = type
            rewriter.add("Add", [names[1], names[0]], {names[2]: type}, sharding=where)
            part = BucketSlice(piece.parameter, 0, piece.elements, piece.start)
            states.append(ShardedState(names[1], names[2], type.dtype, (part,), where))
            key = ServerKey(unit, 0, names[0], names[1:2], names[2:], type)
            servers.keys.setdefault(bucket.number, []).append(key)
        attributes = {
            "bucket": bucket.number, "keys": [key_name(unit, 0) for unit in bucket.units], "reduce": "sum",
            "dtype": bucket.units[0].dtypes[0], "shapes": [format_shape(type.dims) for type in deltas.values()],
        }  # fmt: skip
        rewriter.add(
            "Aggregate", [ROUND], deltas, domain=COMM, attributes=attributes, sharding=on_server(bucket.server)
        )
    rewriter.finish()
    program.set_states(states)
    return servers


# --- trainers -------------------------------------------------------------------------------------------------------


def geo_trainers(
    training: TrainingGraph, plan: ServerPlan, placement: NodePlacement, options: SplitOptions
) -> tuple[SpmdProgram, SpmdProgram, LoweredProgram]:
    """Return the local step, the exchange, and both lowered: the step runs ``every`` times."""
    step = SpmdProgram.start(replace(training, notes=[]), Mesh((("dp", 1),)))
    kinds = {state.tensor: state.kind for state in training.states}
    step.set_states([replace(state, local=kinds[state.input] is StateKind.STATISTIC) for state in step.states])
    sync = _sync(training, plan, placement, options)
    stepping, second = lower(step, [0]), lower(sync, [0])
    (one,), (syncing,) = stepping.ranks, second.ranks
    ranks = [
        replace(one, phase=replace(one.phase, times=options.every)),
        replace(syncing, phase=replace(syncing.phase, name=SYNC)),
    ]
    inputs = {state.input for state in stepping.common}
    common = [*stepping.common, *(state for state in second.common if state.input not in inputs)]
    # There are many trainers, and each has its own; what a trainer last knew starts as the parameter itself.
    of = {state.tensor: state.of for state in sync.training.states}
    common = [
        replace(state, local=True, pieces=tuple(replace(p, tensor=of.get(p.tensor) or p.tensor) for p in state.pieces))
        for state in common
    ]
    return step, sync, LoweredProgram(ranks, common, [*stepping.checks, *second.checks], stepping.beside)


def _sync(training: TrainingGraph, plan: ServerPlan, placement: NodePlacement, options: SplitOptions) -> SpmdProgram:
    types, state_by_name = training.graph.types, training.state_of()
    names = list(plan.owners)
    last = {name: State(f"gopt.geo.last{n}", f"gopt.geo.last{n}_out", StateKind.OPTIMIZER_STATE, name)
            for n, name in enumerate(names)}  # fmt: skip
    view = role_view(training, (), placement.served, [], ())
    for name, state in last.items():
        for value in (state.tensor, state.updated):
            view.graph.types[value] = types[name]
        view.graph.inputs[state.tensor], view.graph.outputs[state.updated] = types[name], types[name]
    view.states += last.values()
    view.metrics.append(DONE)
    view.graph.types[DONE] = view.graph.outputs[DONE] = ROUND_TYPE
    view.gradients = {}
    program = SpmdProgram(view, view.graph.copy(), Mesh((("dp", 1),)), [])
    # The writer takes a delta for a gradient, and pulls under a name of its own.
    deltas = {name: f"gopt.geo.delta{n}" for n, name in enumerate(names)}
    pulled = {name: f"gopt.geo.pulled{n}" for n, name in enumerate(names)}
    mirrored = replace(training, gradients=deltas)
    program.graph.types.update({pulled[name]: types[name] for name in names})
    writer = TrainerWriter(program, mirrored, plan, placement, options)
    add = writer.rewriter.add
    for n, name in enumerate(names):
        moved, count = f"gopt.geo.moved{n}", f"gopt.geo.trainers{n}"
        add("Sub", [name, last[name].tensor], {moved: types[name]})
        writer.rewriter.constant(count, scalar_of(float(options.trainers), types[name].dtype))
        add("Div", [moved, count], {deltas[name]: types[name]})
    done = writer.push({}, NOTHING)
    done = writer.pull_at_end(NOTHING, done, pulled)
    for n, name in enumerate(names):
        mark, behind = f"gopt.geo.mark{n}", f"gopt.geo.behind{n}"
        add("Add", [last[name].tensor, deltas[name]], {mark: types[name]})
        add("Sub", [mark, pulled[name]], {behind: types[name]})
        # Subtracted, so that no difference leaves every bit, also the sign of a zero.
        add("Sub", [name, behind], {state_by_name[name].updated: types[name]})
        add("Identity", [pulled[name]], {last[name].updated: types[name]})
    add("Identity", [done], {DONE: ROUND_TYPE})
    writer.rewriter.finish()
    program.set_states([
        ShardedState(
            state.tensor, state.updated, view.graph.types[state.tensor].dtype,
            (BucketSlice(state.tensor, 0, view.graph.types[state.tensor].elements),),
        )
        for state in view.states
    ])  # fmt: skip
    return program
