"""The program of the servers: each updates its units from pushed gradients, once a round.

Servers are the members of an axis. A unit is on one member; scalars that units share are on all; a reduction over units
of several servers, such as a global norm, is completed by one call among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from onnx.numpy_helper import from_array

from gopt.analysis.loss_reduction import LossRule
from gopt.analysis.training import StateKind, TrainingGraph
from gopt.analysis.updates import UpdateMode
from gopt.collectives.layout import format_shape
from gopt.errors import UnsupportedError
from gopt.ir.graph import COMM
from gopt.ir.rewriter import GraphRewriter
from gopt.ir.types import TensorType, scalar_of
from gopt.parameter_server.delay import compensate
from gopt.parameter_server.lazy_rows import TouchedRows
from gopt.parameter_server.node_placement import NodePlacement
from gopt.parameter_server.options import SplitOptions
from gopt.parameter_server.plan import KeyBucket, ServerPlan
from gopt.parameter_server.table_choice import ServedTable
from gopt.parameter_server.units import ServerUnit
from gopt.parameter_server.views import ROUND, role_view
from gopt.passes.shard.gradient_reduction import ReducedValue
from gopt.passes.shard.plan import ParameterGroup, WholeBucket
from gopt.passes.shard.scalar_reductions import PartialScalar, ScalarReductions
from gopt.passes.shard.split import GroupEmitter
from gopt.passes.shard.whole import partial_scalars
from gopt.records.mesh import AxisKind, Mesh
from gopt.records.placements import FULLY_REPLICATED, FlatShard, OnMember, Sharding
from gopt.records.tables import Rows
from gopt.spmd.pass_records import PassResult
from gopt.spmd.program import BucketSlice, ShardedState, SpmdProgram
from gopt.text.sanitize import and_more, show

SERVER = "server"
"""The axis of the servers, and the group of calls among them."""
PASS = "parameter-server"


@dataclass(frozen=True, slots=True)
class ServerKey:
    """A server's key: a unit, or one parameter of a whole unit. It names the merged gradient, and the states before and
    after the update, the parameter first."""

    unit: ServerUnit | None
    """None for a part of a table."""
    number: int
    """Of a whole unit: the number of its subgraph; of a table: the server."""
    gradient: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    type: TensorType
    ids: str = ""
    """Of a table: the name of the merged rows' numbers."""
    sharding: Sharding = FULLY_REPLICATED
    """Of the nodes of its update."""


@dataclass(slots=True)
class ServerProgram:
    """The servers' program and the keys. ``result``: the reasons why a node of the source is missing on servers, and
    the replacement."""

    program: SpmdProgram
    keys: dict[int, list[ServerKey]] = field(default_factory=dict)
    """Bucket -> its keys."""
    tables: dict[int, list[ServerKey]] = field(default_factory=dict)
    """Table -> its parts."""
    merged: dict[str, int] = field(default_factory=dict)
    """Value that servers read as a merge over trainers -> its bucket."""
    result: PassResult = field(default_factory=PassResult)


def server_program(
    training: TrainingGraph, plan: ServerPlan, placement: NodePlacement, options: SplitOptions
) -> ServerProgram:
    """Write the servers' program. Raises UnsupportedError for an output that only one server could compute."""
    _check_metrics(training, plan, placement)
    view = role_view(training, placement.server_nodes, placement.served, placement.metrics, ())
    mesh = Mesh(((SERVER, options.servers),), ((SERVER, AxisKind.DATA),))
    program = SpmdProgram(view, view.graph.copy(), mesh, [])
    emitter = _Emitter(program, plan, options)
    for bucket in plan.buckets:
        emitter.bucket(bucket)
    for output in placement.merged:
        emitter.value(output)
    for served in plan.tables.served:
        emitter.table(served)
    emitter.read_merged()
    emitter.scalars.complete(emitter.partials)
    emitter.rewriter.finish()
    _drop_lone_calls(program)
    program.set_states([*emitter.states, *_shared_states(view, placement)])
    return emitter.out


def _check_metrics(training: TrainingGraph, plan: ServerPlan, placement: NodePlacement) -> None:
    for name in placement.metrics:
        if training.graph.types[name].elements != 1:
            raise UnsupportedError(
                f"output {show(name)} is computed in the update and has several elements: only numbers come back from "
                "servers",
                "take it out of the model's outputs; checkpoints have all states",
            )


def _shared_states(view: TrainingGraph, placement: NodePlacement) -> list[ShardedState]:
    """Return the states of every server."""
    shared, types = set(placement.shared), view.graph.types
    return [
        ShardedState(
            state.tensor, state.updated, types[state.tensor].dtype,
            (BucketSlice(state.tensor, 0, types[state.tensor].elements),),
        )
        for state in view.states if state.tensor in shared
    ]  # fmt: skip


def _drop_lone_calls(program: SpmdProgram) -> None:
    """Remove calls in a group of one server."""
    if program.mesh.ranks > 1:
        return
    rewriter = GraphRewriter(program.graph, PASS)
    for node in [node for node in program.graph.nodes if node.domain == COMM and node.op_type == "AllReduce"]:
        for old, new in zip(node.inputs, node.outputs):
            rewriter.add("Identity", [old], {new: program.graph.types[new]}, before=node)
        rewriter.discard(node.outputs[0])
    rewriter.finish()


class _Emitter:
    def __init__(self, program: SpmdProgram, plan: ServerPlan, options: SplitOptions) -> None:
        self.program, self.options = program, options
        self.rewriter = GraphRewriter(program.graph, PASS)
        self.scalars = ScalarReductions(self.rewriter, program.training.graph, plan.updates, SERVER)
        self.partials: list[PartialScalar] = []
        self.states: list[ShardedState] = []
        rewriter = self.rewriter
        result = PassResult(rewriter.removed)  # filled as nodes are removed
        self.out = ServerProgram(program, result=result)
        self._next = len(plan.buckets)
        self._renamed: dict[str, str] = {}
        """Gradient -> its merged value, where updates read whole tensors."""

    def bucket(self, bucket: KeyBucket) -> None:
        """Add the merged gradients of a bucket, and the updates of the units."""
        types = self.program.graph.types
        merged: dict[str, TensorType] = {}
        names: list[str] = []
        keys = self.out.keys.setdefault(bucket.number, [])
        for unit in bucket.units:
            root = f"gopt.ps.k{unit.number}"
            if unit.split:
                type = TensorType(unit.dtypes[0], (unit.elements,))
                merged[self._pushed(f"{root}.gradient")] = type
                names.append(key_name(unit, 0))
                keys.append(self._run(bucket, unit, root))
                continue
            for gradient in unit.gradients:
                output = f"{root}.gradient{len(self._renamed)}"
                merged[self._pushed(output)] = types[gradient]
                self._renamed[gradient] = output
            names += [key_name(unit, number) for number, _ in enumerate(unit.subgraphs)]
            keys += self._whole(unit)
        self._aggregate(bucket.number, names, merged, on_server(bucket.server))
        self._compensate(bucket, names, keys)
        self._keep(bucket)

    def _pushed(self, gradient: str) -> str:
        """Return the name of the pushed value for a gradient read by updates."""
        return gradient if self.options.compensation is None else f"{gradient}.pushed"

    def _compensate(self, bucket: KeyBucket, names: Sequence[str], keys: Sequence[ServerKey]) -> None:
        """With delay compensation, make the gradients read by updates from pushed and pulled values."""
        strength = self.options.compensation
        dense_keys = [key for key in keys if key.gradient]  # blocks refuse the others
        if strength is None or not dense_keys:
            return
        gradients = [key.gradient.removesuffix(".pushed") for key in dense_keys]
        pulled = {f"{gradient}.pulled": key.type for gradient, key in zip(gradients, dense_keys)}
        self._receive("Pulled", bucket.number, names, pulled, on_server(bucket.server))
        for gradient, key, before in zip(gradients, dense_keys, pulled):
            compensate(self.rewriter, gradient, key.gradient, key.inputs[0], before, strength, key.sharding)

    def _keep(self, bucket: KeyBucket) -> None:
        """Add the new values of states keeping a gradient unchanged: trainers make the gradient, servers have the
        merged one."""
        types, names = self.program.graph.types, self.program.graph.outputs.keys() & self._renamed.keys()
        for unit in bucket.units if names else ():
            for gradient in dict.fromkeys(unit.gradients) if not unit.split else ():
                if gradient in names:
                    output, where = self._renamed[gradient], on_server(unit.server)
                    self.rewriter.add("Identity", [output], {gradient: types[gradient]}, sharding=where)

    def table(self, served: ServedTable) -> None:
        """Add the parts of a table, each on its server."""
        parts = [self._table_part(served, index) for index in range(len(served.layout.servers))]
        self.out.tables[served.number] = parts

    def _table_part(self, served: ServedTable, index: int) -> ServerKey:
        table, server = served.table, served.layout.servers[index]
        rows, columns = served.layout.local_rows(server), len(served.layout.columns(server))
        root, where = f"gopt.ps.t{served.number}.part{index}", on_server(server)
        dtype = self.program.graph.types[table.gradient].dtype
        add = self.rewriter.add
        reduce = (self.options.loss_reduction.rule if self.options.mode.rounds else LossRule.MEAN).value
        merged = {f"{root}.ids": TensorType("int64", (None,)), f"{root}.rows": TensorType(dtype, (None, columns))}
        attributes = {
            "table": served.number, "parameter": table.parameter, "dtype": dtype, "width": columns, "reduce": reduce,
        }  # fmt: skip
        add("AggregateRows", [ROUND], merged, domain=COMM, attributes=attributes, sharding=where)
        last = {f"{root}.places": TensorType("int64", (None, 1))}
        add("Unsqueeze", [f"{root}.ids", self.scalars.constant("last_axis", [1])], last, sharding=where)
        start = sum(served.elements(server) for server in served.layout.servers[:index])
        if served.rows is Rows.LAZY:
            group = self._part_group(served, server, start, rows * columns)
            emitter: GroupEmitter = self._touched(root, group, (rows, columns), where)
        else:
            self._dense_gradient(root, dtype, (rows, columns), where)
            emitter = self._update_part(root, self._part_group(served, server, start, rows * columns))
        emitter.remove_sources("the update runs on parts of the table")
        self.partials += emitter.partials
        states = list(emitter.states.values())
        self.states += states
        inputs, outputs = tuple(state.input for state in states), tuple(state.output for state in states)
        type = TensorType(served.table.dtype, (rows * columns,))
        return ServerKey(None, server, f"{root}.rows", inputs, outputs, type, f"{root}.ids")

    def _dense_gradient(self, root: str, dtype: str, part: tuple[int, int], where: Sharding) -> None:
        """Add the dense gradient of all rows of a part."""
        rows, columns = part
        add, whole = self.rewriter.add, TensorType(dtype, part)
        shape = self.scalars.constant(f"shape{rows}_{columns}", [rows, columns])
        zeros = {"value": from_array(scalar_of(0.0, dtype).reshape(1))}
        add("ConstantOfShape", [shape], {f"{root}.zeros": whole}, attributes=zeros, sharding=where)
        inputs = [f"{root}.zeros", f"{root}.places", f"{root}.rows"]
        add("ScatterND", inputs, {f"{root}.dense": whole}, sharding=where)
        flat = {f"{root}.gradient": TensorType(dtype, (rows * columns,))}
        add("Reshape", [f"{root}.dense", self.scalars.constant("one", [-1])], flat, sharding=where)

    def _part_group(self, served: ServedTable, server: int, start: int, elements: int) -> ParameterGroup:
        """Return the group of a part. ``start``: elements of the parts before this one; the manifest maps them to the
        tensor."""
        cuts = (0,) * (server + 1) + (elements,) * (self.options.servers - server)
        where = Sharding.along(SERVER, FlatShard(cuts, 0, elements))
        return ParameterGroup((served.subgraph,), (0,), where, ((start, start + elements),))

    def _update_part(self, root: str, group: ParameterGroup) -> GroupEmitter:
        """Add the update of all rows of a part, also of those without a gradient."""
        emitter = GroupEmitter(self.rewriter, group, root, self.scalars, {}, owned=True)
        emitter.run(ReducedValue(f"{root}.gradient"), single=True)
        return emitter

    def _touched(self, root: str, group: ParameterGroup, part: tuple[int, int], where: Sharding) -> TouchedRows:
        """Add the update of the pushed rows of a part."""
        emitter = TouchedRows(self.rewriter, group, root, self.scalars, part, where)
        emitter.update(f"{root}.ids", f"{root}.places", f"{root}.rows")
        return emitter

    def value(self, output: str) -> None:
        """Add a merged scalar of the trainers' forward, on every server."""
        type = self.program.graph.types[output]
        self._aggregate(self._next, [output], {output: type}, FULLY_REPLICATED)
        self.out.merged[output] = self._next
        self._next += 1

    def _aggregate(self, bucket: int, names: Sequence[str], merged: dict[str, TensorType], where: Sharding) -> None:
        reduce = self.options.loss_reduction.rule if self.options.mode.rounds else LossRule.MEAN
        self._receive("Aggregate", bucket, names, merged, where, reduce=reduce.value)

    def _receive(
        self, op_type: str, bucket: int, names: Sequence[str], out: dict[str, TensorType], where: Sharding, **more: str
    ) -> None:  # fmt: skip
        attributes = {
            "bucket": bucket, "keys": list(names), "dtype": next(iter(out.values())).dtype, **more,
            "shapes": [format_shape(type.dims) for type in out.values()],
        }  # fmt: skip
        self.rewriter.add(op_type, [ROUND], out, domain=COMM, attributes=attributes, sharding=where)

    def _run(self, bucket: KeyBucket, unit: ServerUnit, root: str) -> ServerKey:
        """Add a unit as a class over a run on a single server."""
        assert unit.server is not None
        starts = [0]
        for piece in unit.pieces:
            starts.append(starts[-1] + piece.elements)
        cuts = (0,) * (unit.server + 1) + (starts[-1],) * (self.options.servers - unit.server)
        where = Sharding.along(SERVER, FlatShard(cuts, 0, starts[-1]))
        ranges = tuple((piece.start, piece.stop) for piece in unit.pieces)
        group = ParameterGroup(unit.subgraphs, tuple(starts[:-1]), where, ranges)
        emitter = GroupEmitter(self.rewriter, group, root, self.scalars, {}, owned=True)
        emitter.run(ReducedValue(f"{root}.gradient"), single=True)
        self.partials += emitter.partials
        states = list({id(state): state for state in emitter.states.values()}.values())
        self.states += states
        emitter.remove_sources("the update runs on pieces of it")
        inputs, outputs = [state.input for state in states], [state.output for state in states]
        type = TensorType(unit.dtypes[1], (starts[-1],))
        pushed = self._pushed(f"{root}.gradient")
        return ServerKey(unit, 0, pushed, tuple(inputs), tuple(outputs), type, sharding=where)

    def _whole(self, unit: ServerUnit) -> list[ServerKey]:
        """Add updates of whole tensors on their server, or on every one."""
        where, types = on_server(unit.server), self.program.graph.types
        keys, pushed = [], set[str]()
        for number, subgraph in enumerate(unit.subgraphs):
            for node in subgraph.nodes if unit.server is not None else ():
                self.rewriter.counterpart(node).sharding = where
                self.rewriter.annotate(node, f"server {unit.server} alone updates it", of=subgraph.parameter.tensor)
            states = [
                ShardedState(
                    state.tensor, state.updated, types[state.tensor].dtype,
                    (BucketSlice(state.tensor, 0, types[state.tensor].elements),),
                    where if state.kind is not StateKind.SCALAR else FULLY_REPLICATED,
                )
                for state in subgraph.states
            ]  # fmt: skip
            self.states += states
            gradient = self._pushed(self._renamed[subgraph.gradient]) if subgraph.gradient not in pushed else ""
            pushed.add(subgraph.gradient)
            inputs, outputs = tuple(state.input for state in states), tuple(state.output for state in states)
            type = types[subgraph.parameter.tensor]
            keys.append(ServerKey(unit, number, gradient, inputs, outputs, type, sharding=where))
        if unit.server is not None:
            self._partial_scalars(unit, unit.server)
        return keys

    def _partial_scalars(self, unit: ServerUnit, server: int) -> None:
        """Mark reductions of whole updates read by others as partial sums of a server."""
        sizes = [self.program.graph.types[subgraph.gradient].elements for subgraph in unit.subgraphs]
        total, count = sum(sizes), self.options.servers
        offsets = tuple(sum(sizes[:index]) for index in range(len(sizes) + 1))
        cuts = (0,) * (server + 1) + (total,) * (count - server)
        name = f"ps.k{unit.number}"
        bucket = WholeBucket(name, SERVER, unit.subgraphs, (server,) * len(sizes), offsets, cuts, "")
        for position, subgraph in enumerate(unit.subgraphs):
            # What every owner computes for itself is no partial sum.
            if subgraph.reductions and subgraph.mode is not UpdateMode.REPLICATED:
                self.partials += partial_scalars(self.rewriter, bucket, position, self.scalars)

    def read_merged(self) -> None:
        """Let unchanged nodes read merged gradients."""
        for node in self.program.graph.nodes:
            if any(name in self._renamed for name in node.inputs):
                node.inputs = [self._renamed.get(name, name) for name in node.inputs]


def on_server(server: int | None) -> Sharding:
    return FULLY_REPLICATED if server is None else Sharding.along(SERVER, OnMember(server))


def key_name(unit: ServerUnit, number: int) -> str:
    """Return a key's readable name: parameter, number of the piece if several, and count of others."""
    if not unit.split:
        return unit.subgraphs[number].parameter.tensor
    piece = unit.pieces[0]
    name = piece.parameter if piece.whole else f"{piece.parameter}.block{piece.index}"
    return name + and_more(len(unit.pieces) - 1)
