"""Emit a split bucket: scatter the gradients, run each class once on the rank's run, gather the parameters."""

from __future__ import annotations

from collections.abc import Mapping

from gopt.analysis.updates import UpdateSubgraph
from gopt.errors import InvariantError
from gopt.ir.graph import Node
from gopt.ir.node_kinds import elementwise, record_of
from gopt.ir.rewriter import GraphRewriter, Removal
from gopt.ir.types import TensorType, dtype_code
from gopt.operators.kinds import CASTS, LAYOUT
from gopt.passes.shard import emit
from gopt.passes.shard.emitted_bucket import EmittedBucket
from gopt.passes.shard.gradient_reduction import GradientReduction, ReducedValue
from gopt.passes.shard.parameter_gather import GatherBucket, OwnedParameter
from gopt.passes.shard.plan import ParameterGroup, SplitBucket
from gopt.passes.shard.scalar_reductions import PartialScalar, ScalarReductions
from gopt.spmd.program import ShardedState


def emit_split(
    rewriter: GraphRewriter,
    bucket: SplitBucket,
    scalars: ScalarReductions,
    reduction: GradientReduction,
    *,
    owned: bool,
) -> EmittedBucket:
    """Rewrite the updates of a split bucket. ``owned``: ranks hold the parameters, too, as shards alone."""
    out = EmittedBucket()
    gradients = [subgraph.gradient for subgraph in bucket.subgraphs]
    shard: ReducedValue | None = None
    if bucket.whole_gradient:
        out.reduced = reduction.everywhere(bucket.name, gradients)
    else:
        shard = reduction.to_shard(bucket.name, gradients, bucket.cuts)
    parts = []
    why = f"{bucket.name}: the update runs on the rank's shard of the bucket"
    for number, group in enumerate(bucket.groups):
        name = emit.named(bucket.name, f"c{number}")
        emitter = GroupEmitter(rewriter, group, name, scalars, out.reduced.values, owned=owned)
        parts.append(emitter.run(shard, single=len(bucket.groups) == 1))
        emitter.remove_sources(why)
        out.states.update(emitter.states)
        out.scalars += emitter.partials
    out.parameters = GatherBucket(bucket.name, bucket.subgraphs, tuple(parts), bucket.cuts)
    slots = max(len(subgraph.states) for subgraph in bucket.subgraphs)
    out.layout.append(tuple(subgraph.parameter.tensor for subgraph in bucket.subgraphs))
    for slot in range(1, slots):
        # One run of values per class and slot, so that any rank's run of a class is one range of the file.
        for part in bucket.groups:
            if slot < len(part.subgraphs[0].states):
                out.layout.append(tuple(subgraph.states[slot].tensor for subgraph in part.subgraphs))
    return out


class GroupEmitter:
    """One class of a bucket: the first subgraph, written over 1-D runs in place of the tensors.

    ``name``: the prefix of new names, in front of the role."""

    def __init__(
        self,
        rewriter: GraphRewriter,
        group: ParameterGroup,
        name: str,
        scalars: ScalarReductions,
        reduced: Mapping[str, str],
        *,
        owned: bool,
    ) -> None:
        self.rewriter, self.group, self.name, self.scalars, self.reduced = rewriter, group, name, scalars, reduced
        self.owned = owned
        """True if only the rank's run of the master is stored, as for the other states."""
        self.where = group.sharding
        """The sharding of the group's nodes."""
        self._types: dict[str, TensorType] = {}
        self.subgraph: UpdateSubgraph = group.subgraphs[0]
        self.local: dict[str, str] = {}
        self.unrounded = ""
        """The run of the gradient before it was cast to its own type, where it was."""
        self.results = {state.updated: f"state{slot}_out" for slot, state in enumerate(self.subgraph.states)}
        self.results[self.subgraph.parameter.updated] = "parameter_out"
        self.states: dict[str, ShardedState] = {}
        self.partials: list[PartialScalar] = []
        self._shares: dict[str, str] = {}
        """Result of a reduction of the source -> the rank's partial value of it."""

    def _named(self, role: str) -> str:
        return f"{self.name}.{role}"

    def run_type(self, dtype: str) -> TensorType:
        """The type of a value with an element for each element of the run."""
        type = self._types.get(dtype)
        if type is None:
            type = self._types[dtype] = emit.run(dtype, self.where)
        return type

    def run(self, shard: ReducedValue | None, *, single: bool) -> OwnedParameter:
        """Emit the class; returns the class's part of the parameters, before and after the update.

        ``shard``: the rank's shard of the bucket's gradients, None for whole gradients; ``single``: the bucket has no
        other class."""
        rewriter, subgraph, run = self.rewriter, self.subgraph, self.group.sharding
        types = rewriter.graph.types
        if shard is not None:
            self.local[subgraph.gradient] = shard.name if single else self._segment(shard.name, "gradient")
            exact = shard.unrounded
            self.unrounded = exact if single or not exact else self._segment(exact, "exact")
        parameter = self._named("parameter")
        self.local[subgraph.parameter.tensor] = parameter
        if self.owned:
            types[parameter] = self.run_type(types[subgraph.parameter.tensor].dtype)
        else:
            slices = self.group.slices([subgraph.parameter.tensor for subgraph in self.group.subgraphs], types)
            emit.local_slice(rewriter, slices, run, parameter, types[slices[0].tensor].dtype)
        for slot in range(1, len(subgraph.states)):
            self.local[subgraph.states[slot].tensor] = self._named(f"state{slot}")
            types[self._named(f"state{slot}")] = self.run_type(types[subgraph.states[slot].tensor].dtype)
        self.emit_nodes()
        self.add_states()
        return OwnedParameter(parameter, self.local[subgraph.parameter.updated], run, types[parameter].elements)

    def remove_sources(self, why: str) -> None:
        """Remove the source updates of the class; each node is annotated with the replacements of its values."""
        replaced = self._shares | self.local
        replacements = [[replaced.get(name, "") for name in node.outputs] for node in self.subgraph.nodes]
        for subgraph in self.group.subgraphs:
            self.rewriter.remove_all(Removal(subgraph.nodes, why, subgraph.parameter.tensor, replacements))

    def _segment(self, shard: str, role: str) -> str:
        """The rank's run of this class, out of the shard of the bucket."""
        name = self._named(role)
        emit.shard_slice(self.rewriter, shard, self.group.sharding, name, self.rewriter.graph.types[shard].dtype)
        return name

    def emit_nodes(self) -> None:
        """The nodes of the update, with gradient and states named in ``local``."""
        for position, node in enumerate(self.subgraph.nodes):
            self._emit(position, node)

    def add_states(self) -> None:
        """List the states, with new values named in ``local``."""
        types = self.rewriter.graph.types
        for slot in range(0 if self.owned else 1, len(self.subgraph.states)):
            parts = self.group.slices([subgraph.states[slot].tensor for subgraph in self.group.subgraphs], types)
            state = self.subgraph.states[slot]
            holding = ShardedState(
                self.local[state.tensor],
                self.local[state.updated],
                types[state.tensor].dtype,
                parts,
                self.group.sharding,
            )
            self.states.update((part.tensor, holding) for part in parts)

    def _emit(self, index: int, node: Node) -> None:
        rewriter, types = self.rewriter, self.rewriter.graph.types
        if node in self.subgraph.reductions:
            self._reduce(index, node)
            return
        if node.is_in(LAYOUT) and node.outputs[0] not in self.results:
            # Only a full reduction reads it (``update_subgraphs``), and that does not mind the order of elements.
            self.local[node.outputs[0]] = self._operand(node.inputs[0], index, 0)
            return
        if not elementwise(node):
            raise InvariantError(f"{node.op_type} {node.label!r} cannot run on a piece of a tensor")
        operands = [self._operand(name, index, slot) for slot, name in enumerate(node.inputs)]
        if self.unrounded and node.is_in(CASTS) and node.inputs[0] == self.subgraph.gradient:
            operands = [self.unrounded, *operands[1:]]  # not rounded in between
        outputs: dict[str, TensorType] = {}
        for slot, name in enumerate(node.outputs):
            if name:
                role = self.results.get(name) or (f"v{index}" if slot == 0 else f"v{index}_{slot}")
                self.local[name] = self._named(role)
                outputs[self.local[name]] = self.run_type(types[name].dtype)
        rewriter.repeat(node, operands, outputs, self.where)

    def _operand(self, name: str, index: int, slot: int) -> str:
        """A full-shaped operand as the rank's run; a one-element operand as a value of rank at most 1."""
        if not name or name in self.local:
            return self.local.get(name, "")
        type = self.rewriter.graph.types[name]
        if type.elements > 1:
            output = self._named(f"x{index}_{slot}")
            sources = [self._twin(subgraph, index, slot) for subgraph in self.group.subgraphs]
            slices = self.group.slices(sources, self.rewriter.graph.types)
            emit.local_slice(self.rewriter, slices, self.group.sharding, output, type.dtype)
            return output
        return self.scalars.flat(name) if len(type.dims) > 1 else name

    def _twin(self, subgraph: UpdateSubgraph, index: int, slot: int) -> str:
        name = subgraph.nodes[index].inputs[slot]
        return self.reduced.get(name, name)

    def _reduce(self, index: int, node: Node) -> None:
        """A reduction of the run, as the class's partial value of the scalar."""
        rewriter = self.rewriter
        value = self._operand(node.inputs[0], index, 0)
        source = node.outputs[0]
        dtype = rewriter.graph.types[source].dtype
        op_type = "ReduceSumSquare" if record_of(node).pieces == "l2" else node.op_type
        share = self._shares[source] = self._named(f"share{index}")
        if record_of(node).pieces == "mean":
            self._mean(value, share, self.rewriter.graph.types[node.inputs[0]].elements, dtype)
        else:
            self._add(op_type, [value], share, TensorType(dtype, ()), keepdims=0)
        self.partials.append(
            self.scalars.partial([subgraph.nodes[index].outputs[0] for subgraph in self.group.subgraphs], share)
        )

    def _mean(self, value: str, share: str, elements: int, dtype: str) -> None:
        """A mean is a sum of x/N, taken in float32 at least: N may be beyond the range of a half."""
        wide = "float64" if dtype == "float64" else "float32"
        scalar = TensorType(wide, ())
        self._add("Cast", [value], f"{share}.wide", self.run_type(wide), to=dtype_code(wide))
        self._add("ReduceSum", [f"{share}.wide"], f"{share}.sum", scalar, keepdims=0)
        self.rewriter.constant(f"{share}.count32", float(elements), sharding=self.where)
        self._add("Cast", [f"{share}.count32"], f"{share}.count", scalar, to=dtype_code(wide))
        self._add("Div", [f"{share}.sum", f"{share}.count"], f"{share}.mean", scalar)
        self._add("Cast", [f"{share}.mean"], share, TensorType(dtype, ()), to=dtype_code(dtype))

    def _add(self, op_type: str, inputs: list[str], output: str, type: TensorType, **attributes: object) -> None:
        """A node on the ranks of the run."""
        self.rewriter.add(op_type, inputs, {output: type}, attributes=attributes, sharding=self.where)
