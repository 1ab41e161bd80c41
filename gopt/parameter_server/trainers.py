"""The program of a trainer: pull parameters, compute gradients, push them. All trainers run the same file.

Each message passes the round's number on to the next. This token keeps messages in order under any sorting, and the
last one is an output, so no pruning removes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from onnx.numpy_helper import from_array

from gopt.analysis.loss_reduction import LossRule
from gopt.analysis.training import State, StateKind, TrainingGraph
from gopt.artifact.server_entries import PullAt
from gopt.collectives.layout import format_shape
from gopt.ir.graph import COMM, Node
from gopt.ir.graph_index import GraphIndex
from gopt.ir.rewriter import GraphRewriter
from gopt.ir.types import TensorType, dtype_code, scalar_of
from gopt.operators.kinds import CASTS
from gopt.parameter_server.node_placement import NodePlacement
from gopt.parameter_server.options import SplitOptions
from gopt.parameter_server.plan import KeyBucket, ServerPlan
from gopt.parameter_server.servers import PASS, key_name
from gopt.parameter_server.slicing import piece_shape
from gopt.parameter_server.table_pulls import TableWriter
from gopt.parameter_server.trainer_nodes import TrainerNodes
from gopt.parameter_server.units import PlacedPiece, ServerUnit
from gopt.parameter_server.views import DONE, ROUND, ROUND_TYPE, role_view
from gopt.passes.shard.gradient_reduction import accumulated_dtype
from gopt.records.mesh import Mesh
from gopt.spmd.program import Accumulator, BucketSlice, ShardedState, SpmdProgram


@dataclass(frozen=True, slots=True)
class TrainerScalars:
    """Values that travel beside parameters: buckets of pulled states, each with the only server of the bucket or
    None, buckets of pushed values, and buckets of metrics."""

    states: Mapping[str, tuple[int, int | None]]
    values: Mapping[str, int]
    metrics: Mapping[str, int]


def trainer_program(
    training: TrainingGraph, plan: ServerPlan, placement: NodePlacement, options: SplitOptions, scalars: TrainerScalars
) -> SpmdProgram:
    """Write the trainers' program. The states are the local ones, and with pulls at the end also the pulled ones."""
    local = [state.tensor for state in training.states if state.tensor not in placement.served]
    metrics = [name for name in training.metrics if name not in placement.metrics]
    view = role_view(training, placement.trainer_nodes, local, metrics, training.losses)
    at_end = options.pulls is PullAt.END
    late = _held(training, placement) if at_end else []
    view.metrics.append(DONE)
    view.graph.types[DONE] = view.graph.outputs[DONE] = ROUND_TYPE
    view.metrics += placement.metrics
    view.graph.outputs.update((name, training.graph.types[name]) for name in placement.metrics)
    pulled = {state.tensor: _as_read(state, plan) for state in late}
    view.states += (state for name, state in pulled.items() if name not in plan.narrow)
    for name, state in pulled.items():
        if name not in plan.narrow:
            view.graph.inputs[name] = training.graph.types[name]
            view.graph.outputs[state.updated] = view.graph.types[state.updated] = training.graph.types[name]
    program = SpmdProgram(view, view.graph.copy(), Mesh((("dp", 1),)), [], micro_steps=options.accumulate)
    for name in plan.narrow if at_end else ():
        type = plan.read_type(name, training.graph.types[name])
        program.graph.types.update(dict.fromkeys((pulled[name].tensor, pulled[name].updated), type))
    writer = TrainerWriter(program, training, plan, placement, options)
    writer.remove_casts()
    tables = TableWriter(writer.rewriter, {name: options.wire for name in ("float32", "float64") if options.wire})
    for served in plan.tables.served:
        tables.pull(served)
    if not at_end:
        writer.pull_at_start(scalars)
    pushed = writer.accumulate() if options.accumulate > 1 else {}
    done = writer.push(pushed, scalars)
    for served in plan.tables.served:
        done = tables.push(served, done, writer.weight)
    if at_end:
        done = writer.pull_at_end(scalars, done, {name: state.updated for name, state in pulled.items()})
    done = writer.metrics(scalars, done)
    writer.rewriter.add("Identity", [done], {DONE: ROUND_TYPE})
    writer.rewriter.finish()
    types = program.graph.types
    states = [
        ShardedState(
            state.tensor, state.updated, types[state.tensor].dtype, _whole(state.tensor, types[state.tensor]),
            local=state.kind is StateKind.STATISTIC,
        )
        for state in view.states
    ]  # fmt: skip
    states += [
        ShardedState(state.tensor, state.updated, plan.narrow[name], _whole(name, types[state.tensor]), copy=True)
        for name, state in pulled.items() if name in plan.narrow
    ]  # fmt: skip
    program.set_states(states)
    return program


def _whole(name: str, type: TensorType) -> tuple[BucketSlice, ...]:
    return (BucketSlice(name, 0, type.elements),)


def _as_read(state: State, plan: ServerPlan) -> State:
    """Return a state as kept by trainers: a narrow state under other names, because of its other type."""
    if state.tensor not in plan.narrow:
        return state
    name = plan.read_name(state.tensor)
    return replace(state, tensor=name, updated=f"{name}_out")


def _held(training: TrainingGraph, placement: NodePlacement) -> list[State]:
    """Return the states that trainers pull at the end, with the names of the new values. Where a trainer computes the
    source's one for itself, such as the number of the step a schedule reads, what it pulls has another name."""
    nodes = {name for node in placement.trainer_nodes for name in node.outputs}
    pulled = [state for state in training.states if state.tensor in placement.pulled]
    return [
        replace(state, updated=f"gopt.ps.next{index}") if state.updated in nodes else state
        for index, state in enumerate(pulled)
    ]


class TrainerWriter:
    """Writes messages into a trainer's graph."""

    def __init__(
        self, program: SpmdProgram, training: TrainingGraph, plan: ServerPlan, placement: NodePlacement,
        options: SplitOptions,
    ) -> None:  # fmt: skip
        self.program, self.training, self.plan = program, training, plan
        self.placement, self.options = placement, options
        self.rewriter = GraphRewriter(program.graph, PASS)
        self.types = program.graph.types
        self.nodes = TrainerNodes(self.rewriter, options)

    def remove_casts(self) -> None:
        """Remove casts of parameters pulled in the type of the casts."""
        users = self.program.graph.users()
        for node in self.program.training.graph.nodes:
            if node.is_in(CASTS) and node.inputs[0] in self.plan.narrow:
                output, name = node.outputs[0], self.plan.read_name(node.inputs[0])
                self.rewriter.remove(node, "the parameter is pulled in this type", of=node.inputs[0], by={output: name})
                for reader in users.get(output, ()):
                    self.rewriter.rewire(reader, output, name)

    # --- pulls ------------------------------------------------------------------------------------------------------

    def pull_at_start(self, scalars: TrainerScalars) -> None:
        """Pull the values the forward reads, in the order, under the source's names."""
        index = GraphIndex(self.program.graph)
        reads: dict[str, int] = {}
        for node in self.program.graph.nodes:
            for name in node.reads:
                if name in self.placement.pulled:
                    reads.setdefault(name, index.position[id(node)])
        head = self.program.graph.nodes[0] if self.program.graph.nodes else None
        last = len(reads)
        order = {name: index for index, name in enumerate(sorted(reads, key=lambda name: reads[name]))}
        buckets = sorted(
            self.plan.buckets,
            key=lambda bucket: min(
                (order.get(p.parameter, last) for u in bucket.units for p in u.pieces), default=last
            ),
        )
        self._pull(buckets, scalars.states, ROUND, "before", {name: self.plan.read_name(name) for name in reads}, head)

    def pull_at_end(self, scalars: TrainerScalars, done: str, names: Mapping[str, str]) -> str:
        """Pull values after the update; return the token. ``names``: state -> pulled value."""
        return self._pull(self.plan.buckets, scalars.states, done, "after", names, None)

    def _pull(
        self, buckets: Sequence[KeyBucket], states: Mapping[str, tuple[int, int | None]], round: str, version: str,
        names: Mapping[str, str], before: Node | None,
    ) -> str:  # fmt: skip
        """Pull values; ``names``: wanted value -> name. Returns the token, unchanged by a pull."""
        parts: dict[str, list[tuple[PlacedPiece, str]]] = {}
        for bucket in buckets:
            units = [unit for unit in bucket.units if any(piece.parameter in names for piece in unit.pieces)]
            if not units:
                continue
            outputs: dict[str, TensorType] = {}
            for unit in bucket.units:  # a message has all of its keys: servers look nothing up
                for index, piece in enumerate(unit.pieces):
                    value = f"gopt.ps.k{unit.number}.pulled{index}"
                    outputs[value] = self._pulled_type(unit, piece)
                    parts.setdefault(piece.parameter, []).append((piece, value))
            keys = [name for unit in bucket.units for name in _key_names(unit)]
            self._pull_node(bucket.server or 0, bucket.number, keys, round, version, outputs, before)
        for name, values in parts.items():
            if name in names:
                type = self.plan.read_type(name, self.types[name])
                self._join(names[name], type, sorted(values, key=lambda item: item[0].index), before)
        for name, (number, server) in states.items():
            # In its own type: a loss scale of 65536 is infinite in half precision.
            self._pull_node(server or 0, number, [name], round, version, {names[name]: self.types[name]}, before)
        return round

    def _pull_node(
        self, server: int, bucket: int, keys: Sequence[str], round: str, version: str,
        outputs: Mapping[str, TensorType], before: Node | None,
    ) -> None:  # fmt: skip
        dtype = next(iter(outputs.values())).dtype
        attributes = {
            "server": server, "bucket": bucket, "keys": list(keys), "dtype": dtype, "version": version,
            "shapes": [format_shape(type.dims) for type in outputs.values()],
        }  # fmt: skip
        self.rewriter.add("Pull", [round], outputs, domain=COMM, attributes=attributes, before=before)

    def _pulled_type(self, unit: ServerUnit, piece: PlacedPiece) -> TensorType:
        type = self.plan.read_type(piece.parameter, self.types[piece.parameter])
        shape = piece_shape(type.dims, piece.start, piece.stop)
        return self.nodes.on_wire(TensorType(type.dtype, shape))

    def _join(self, name: str, type: TensorType, parts: Sequence[tuple[PlacedPiece, str]], before: Node | None) -> None:
        """Join a parameter from the parts."""
        values, wired = [value for _, value in parts], self.nodes.on_wire(type)
        joined = name if wired == type else f"gopt.ps.joined.{name}"
        shapes = [self.types[value].dims for value in values]
        if len(values) == 1 and shapes[0] == type.dims:
            self.rewriter.add("Identity", values, {joined: wired}, before=before)
        elif all(len(shape) == len(type.dims) for shape in shapes) and type.dims:
            self.rewriter.add("Concat", values, {joined: wired}, attributes={"axis": 0}, before=before)
        else:
            flat = [self.nodes.reshaped(value, (-1,), before) for value in values]
            whole = f"gopt.ps.flat.{name}"
            output = {whole: TensorType(wired.dtype, (type.elements,))}
            self.rewriter.add("Concat", flat, output, attributes={"axis": 0}, before=before)
            self.rewriter.add("Reshape", [whole, self.nodes.shape(type.dims, before)], {joined: wired}, before=before)
        if joined != name:
            self.nodes.cast(joined, name, type, before)

    # --- pushes -----------------------------------------------------------------------------------------------------

    def accumulate(self) -> dict[str, str]:
        """Sum gradients over micro-steps; return gradient -> their mean, or the sum, in the update. Halves are summed
        in float32 and rounded once. A weighted mean is divided by the sum of the weights, which is pushed with it."""
        sums: dict[str, str] = {}
        merged = dict.fromkeys(self.training.gradients[name] for name in self.plan.owners)
        mean = self.options.loss_reduction.rule is not LossRule.SUM
        for index, gradient in enumerate(merged):
            gradient_type, root = self.types[gradient], f"gopt.ps.sum{index}"
            type = TensorType(accumulated_dtype(gradient_type.dtype), gradient_type.shape)
            accumulator = Accumulator(root, f"{root}_out", f"{root}_next", type)
            self.types[accumulator.input] = type
            term = self._as(gradient, type, f"{root}_term")
            if self.weighted:
                term = self._weighed(term, type, f"{root}_weighed")
            self.rewriter.add("Add", [accumulator.input, term], {accumulator.added: type})
            zeros = {"value": from_array(scalar_of(0.0, type.dtype).reshape(1))}
            self.rewriter.add(
                "ConstantOfShape", [self.nodes.shape(type.dims, None)], {accumulator.output: type}, attributes=zeros
            )
            self.program.accumulators.append(accumulator)
            sums[gradient] = accumulator.input
            if self.weighted:
                divisor = self._as(self._divisor, TensorType(type.dtype, ()), f"{root}_weights")
                self.rewriter.add("Div", [accumulator.input, divisor], {f"{root}_mean": type})
                sums[gradient] = f"{root}_mean"
            elif mean:
                self.rewriter.constant(f"{root}_count", scalar_of(float(self.options.accumulate), type.dtype))
                self.rewriter.add("Div", [accumulator.input, f"{root}_count"], {f"{root}_mean": type})
                sums[gradient] = f"{root}_mean"
            sums[gradient] = self._as(sums[gradient], gradient_type, f"{root}_rounded")
        return sums

    def _weighed(self, value: str, type: TensorType, name: str) -> str:
        """Return a value of a micro-step times its weight; zeros where it is zero: 0 / 0 weighs nothing."""
        weight = self._as(self._own_weight, TensorType(type.dtype, ()), f"{name}_by")
        self.rewriter.add("Mul", [value, weight], {f"{name}_times": type})
        zero = self.rewriter.constant(f"gopt.ps.zero.{type.dtype}", scalar_of(0.0, type.dtype))
        self.rewriter.add("Where", [self._weighs_nothing, zero, f"{name}_times"], {name: type})
        return name

    @cached_property
    def _weighs_nothing(self) -> str:
        """Return whether a micro-step has a weight of zero."""
        name = "gopt.ps.weighs_nothing"
        zero = self.rewriter.constant("gopt.ps.zero.float32", scalar_of(0.0, "float32"))
        self.rewriter.add("Equal", [self._own_weight, zero], {name: TensorType("bool", ())})
        return name

    @cached_property
    def _weights(self) -> str:
        """Return the sum of the weights of all micro-steps, in the update."""
        type, root = TensorType("float32", ()), "gopt.ps.weights"
        accumulator = Accumulator(root, f"{root}_out", f"{root}_next", type)
        self.types[accumulator.input] = type
        self.rewriter.add("Add", [accumulator.input, self._own_weight], {accumulator.added: type})
        self.rewriter.constant(accumulator.output, scalar_of(0.0, "float32"))
        self.program.accumulators.append(accumulator)
        return accumulator.input

    @cached_property
    def _divisor(self) -> str:
        """Return the sum of the weights, or 1 for zero: then the sum of the gradients is zero, too."""
        type, flag = TensorType("float32", ()), TensorType("bool", ())
        for name, value in (("zero", 0.0), ("one", 1.0)):
            self.rewriter.constant(f"gopt.ps.weights.{name}", scalar_of(value, "float32"))
        self.rewriter.add("Equal", [self._weights, "gopt.ps.weights.zero"], {"gopt.ps.weights.none": flag})
        operands = ["gopt.ps.weights.none", "gopt.ps.weights.one", self._weights]
        self.rewriter.add("Where", operands, {"gopt.ps.weights.divisor": type})
        return "gopt.ps.weights.divisor"

    def _as(self, value: str, type: TensorType, name: str) -> str:
        """Return a value in another type; itself if of this type."""
        if self.types[value].dtype != type.dtype:
            self.rewriter.add("Cast", [value], {name: type}, attributes={"to": dtype_code(type.dtype)})
            return name
        return value

    def push(self, instead: Mapping[str, str], scalars: TrainerScalars) -> str:
        """Push each bucket once its gradients are complete; return the token. ``instead``: gradient -> the value sent
        in its place."""
        token, weight = ROUND, self.weight
        for merged, bucket in scalars.values.items():
            gradient_name = self.placement.merged[merged]
            for server in range(self.options.servers):
                token = self._push_node(server, bucket, [merged], token, weight, [gradient_name])
        for bucket_sent in self.plan.buckets:
            sent: list[str] = []
            for unit in bucket_sent.units:
                sent += self._sent(unit, instead)
            keys = [name for unit in bucket_sent.units for name in _key_names(unit)]
            servers = range(self.options.servers) if bucket_sent.server is None else (bucket_sent.server,)
            for server in servers:
                token = self._push_node(server, bucket_sent.number, keys, token, weight, sent)
        return token

    def _push_node(
        self, server: int, bucket: int, keys: Sequence[str], token: str, weight: str, sent: Sequence[str]
    ) -> str:
        attributes = {"server": server, "bucket": bucket, "keys": list(keys)}
        token_sent = f"gopt.ps.sent{bucket}_{server}"
        self.rewriter.add(
            "Push", [token, weight, *sent], {token_sent: ROUND_TYPE}, domain=COMM, attributes=attributes,
            after=self.rewriter.latest(list(sent)),
        )  # fmt: skip
        return token_sent

    def _sent(self, unit: ServerUnit, instead: Mapping[str, str]) -> list[str]:
        """Return the pieces of a unit's gradients in transit."""
        if not unit.split:
            return [self.nodes.narrow(instead.get(name, name)) for name in unit.gradients]
        sent_names = []
        for index, piece in enumerate(unit.pieces):
            gradient = self.training.gradients[piece.parameter]
            value = instead.get(gradient, gradient)
            sent_names.append(self.nodes.narrow(self._cut(unit, index, piece, value)))
        return sent_names

    def _cut(self, unit: ServerUnit, index: int, piece: PlacedPiece, value: str) -> str:
        """Return a piece of a gradient: whole rows, or a range of the flattened tensor."""
        type = self.types[value]
        if piece.whole:
            return value
        name = f"gopt.ps.k{unit.number}.piece{index}"
        shape = piece_shape(type.dims, piece.start, piece.stop)
        due = self.rewriter.latest([value])
        rows = len(shape) == len(type.dims)
        row = type.elements // type.dims[0] if rows and type.dims[0] else 1
        source = value if rows else self.nodes.reshaped(value, (-1,), None, due)
        bounds = [self.nodes.shape((piece.start // row,), None), self.nodes.shape((piece.stop // row,), None)]
        self.rewriter.add("Slice", [source, *bounds], {name: TensorType(type.dtype, shape)}, after=due)
        return name

    def metrics(self, scalars: TrainerScalars, done: str) -> str:
        """Pull the scalars servers compute; return the token."""
        for name, bucket in scalars.metrics.items():
            type = self.training.graph.types[name]
            self._pull_node(0, bucket, [name], done, "after", {name: type}, None)
        return done

    @property
    def weighted(self) -> bool:
        return self.options.loss_reduction.rule is LossRule.WEIGHTED

    @property
    def weight(self) -> str:
        """Return this trainer's weight in merges, or ''."""
        if not self.weighted:
            return ""
        return self._weights if self.options.accumulate > 1 else self._own_weight

    @cached_property
    def _own_weight(self) -> str:
        """Return the weight of the batch at hand, a float32 scalar."""
        value, weight = self.options.loss_reduction.value, "gopt.ps.weight"
        due = self.rewriter.latest([value])
        self.rewriter.add(
            "Cast", [value], {f"{weight}.wide": TensorType("float32", self.types[value].shape)},
            attributes={"to": dtype_code("float32")}, after=due,
        )  # fmt: skip
        self.rewriter.add(
            "Reshape", [f"{weight}.wide", self.nodes.shape((), None)], {weight: TensorType("float32", ())}, after=due
        )
        return weight


def _key_names(unit: ServerUnit) -> list[str]:
    return [key_name(unit, index) for index in range(1 if unit.split else len(unit.subgraphs))]
