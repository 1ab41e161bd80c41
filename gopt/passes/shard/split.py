"""Emit a split bucket: scatter the gradients, run each class once on the rank's run of it, gather the parameters."""

from __future__ import annotations

from dataclasses import dataclass, field

from gopt.analysis.operators import LAYOUT, elementwise
from gopt.analysis.updates import Cone
from gopt.errors import InvariantError
from gopt.graph.edit import Draft
from gopt.graph.model import Node
from gopt.graph.types import TensorType, dtype_code
from gopt.passes.shard import emit
from gopt.passes.shard.gradient_reduction import GradientReduction
from gopt.passes.shard.parameter_gather import GatherBucket, OwnedParameter, ParameterGather
from gopt.passes.shard.plan import ParameterGroup, SplitBucket
from gopt.passes.shard.scalar_reductions import ScalarReductions
from gopt.program import BucketSlice, ShardedState


@dataclass(slots=True)
class Emitted:
    """What a bucket leaves behind: the holdings of its states by source tensor, and the order of stored values."""

    states: dict[str, ShardedState] = field(default_factory=dict)
    layout: list[tuple[str, ...]] = field(default_factory=list)


def emit_split(
    draft: Draft, bucket: SplitBucket, scalars: ScalarReductions, reduction: GradientReduction, gather: ParameterGather
) -> Emitted:
    """Rewrite the updates of a split bucket."""
    out = Emitted()
    gradients = [cone.gradient for cone in bucket.cones]
    shard = ""
    if bucket.whole_gradient:
        reduction.everywhere(bucket.name, gradients)
    else:
        shard = reduction.to_shard(bucket.name, gradients, bucket.cuts)
    parts = []
    for number, group in enumerate(bucket.groups):
        name = f"{bucket.name}.c{number}"
        emitter = _Run(draft, group, name, scalars, reduction, gather.owned(bucket.cones[0]))
        parts.append(emitter.run(shard, alone=len(bucket.groups) == 1))
        out.states.update(emitter.states)
    gather.add(GatherBucket(bucket.name, bucket.cones, tuple(parts), bucket.cuts))
    slots = max(len(cone.states) for cone in bucket.cones)
    out.layout.append(tuple(cone.parameter.tensor for cone in bucket.cones))
    for slot in range(1, slots):
        # One run of values per class and slot, so that any rank's run of a class is one range of the file.
        for part in bucket.groups:
            if slot < len(part.cones[0].states):
                out.layout.append(tuple(cone.states[slot].tensor for cone in part.cones))
    for cone in bucket.cones:
        for node in cone.nodes:
            draft.remove(node, f"{bucket.name}: the update runs on the rank's shard of the bucket")
    return out


class _Run:
    """One class of a bucket: its first cone, written over 1-D runs in place of the tensors."""

    def __init__(
        self,
        draft: Draft,
        group: ParameterGroup,
        name: str,
        scalars: ScalarReductions,
        reduction: GradientReduction,
        owned: bool,
    ) -> None:
        self.draft, self.group, self.name, self.scalars, self.reduction = draft, group, name, scalars, reduction
        self.owned = owned
        """Whether the wide parameter is held as the rank's run alone, as the other states are."""
        self.cone: Cone = group.cones[0]
        self.local: dict[str, str] = {}
        self.unrounded = ""
        """The run of the gradient before it was cast to its own type, where it was."""
        self.results = {state.updated: f"state{slot}_out" for slot, state in enumerate(self.cone.states)}
        self.results[self.cone.parameter.updated] = "parameter_out"
        self.states: dict[str, ShardedState] = {}

    def _named(self, role: str) -> str:
        return emit.named(self.name, role)

    def run(self, shard: str, *, alone: bool) -> OwnedParameter:
        """Emit the class; returns its part of the parameters, before and after the update."""
        draft, cone, span = self.draft, self.cone, self.group.span
        types = draft.graph.types
        if shard:
            self.local[cone.gradient] = shard if alone else self._segment(shard, "gradient")
            unrounded = self.reduction.unrounded.get(shard, "")
            self.unrounded = unrounded if alone or not unrounded else self._segment(unrounded, "exact")
        parameter = self._named("parameter")
        self.local[cone.parameter.tensor] = parameter
        if self.owned:
            types[parameter] = emit.flat(types[cone.parameter.tensor].dtype)
        else:
            sources = [each.parameter.tensor for each in self.group.cones]
            emit.local_slice(draft, sources, self.group.starts, span, parameter, types[sources[0]].dtype)
        for slot in range(1, len(cone.states)):
            self.local[cone.states[slot].tensor] = self._named(f"state{slot}")
            types[self._named(f"state{slot}")] = emit.flat(types[cone.states[slot].tensor].dtype)
        for place, node in enumerate(cone.nodes):
            self._emit(place, node)
        self._add_states()
        return OwnedParameter(parameter, self.local[cone.parameter.updated], span, span.stop - span.start)

    def _segment(self, shard: str, role: str) -> str:
        """The rank's run of this class, out of its shard of the bucket."""
        name = self._named(role)
        emit.shard_slice(self.draft, shard, self.group.span, name, self.draft.graph.types[shard].dtype)
        return name

    def _add_states(self) -> None:
        types = self.draft.graph.types
        for slot in range(0 if self.owned else 1, len(self.cone.states)):
            parts = tuple(
                BucketSlice(cone.states[slot].tensor, start, types[cone.states[slot].tensor].elements)
                for cone, start in zip(self.group.cones, self.group.starts)
            )
            state = self.cone.states[slot]
            holding = ShardedState(
                self.local[state.tensor], self.local[state.updated], types[state.tensor].dtype, parts, self.group.span
            )
            self.states.update((part.tensor, holding) for part in parts)

    def _emit(self, place: int, node: Node) -> None:
        draft, types = self.draft, self.draft.graph.types
        if node in self.cone.reductions:
            self._reduce(place, node)
            return
        if node.is_a(*LAYOUT) and node.outputs[0] not in self.results:
            # Only a full reduction reads it (``cones``), and that does not mind the order of elements.
            self.local[node.outputs[0]] = self._operand(node.inputs[0], place, 0)
            return
        if not elementwise(node):
            raise InvariantError(f"{node.op_type} {node.label!r} cannot run on a piece of a tensor")
        operands = [self._operand(name, place, slot) for slot, name in enumerate(node.inputs)]
        if self.unrounded and node.is_a("Cast") and node.inputs[0] == self.cone.gradient:
            operands = [self.unrounded]  # not rounded in between
        outputs: dict[str, TensorType] = {}
        for slot, name in enumerate(node.outputs):
            if name:
                role = self.results.get(name) or (f"v{place}" if slot == 0 else f"v{place}_{slot}")
                self.local[name] = self._named(role)
                outputs[self.local[name]] = emit.flat(types[name].dtype)
        draft.repeat(node, operands, outputs, self.group.span)

    def _operand(self, name: str, place: int, slot: int) -> str:
        """A full-shaped operand as the rank's run of it; a one-element operand as a value of rank at most 1."""
        if not name or name in self.local:
            return self.local.get(name, "")
        type = self.draft.graph.types[name]
        if type.elements > 1:
            output = self._named(f"x{place}_{slot}")
            sources = [self._twin(cone, place, slot) for cone in self.group.cones]
            emit.local_slice(self.draft, sources, self.group.starts, self.group.span, output, type.dtype)
            return output
        return self.scalars.flat(name) if len(type.dims) > 1 else name

    def _twin(self, cone: Cone, place: int, slot: int) -> str:
        name = cone.nodes[place].inputs[slot]
        return self.reduction.reduced.get(name, name)

    def _reduce(self, place: int, node: Node) -> None:
        """A reduction of the run, as this class's share of the scalar."""
        draft = self.draft
        value = self._operand(node.inputs[0], place, 0)
        source = node.outputs[0]
        dtype = draft.graph.types[source].dtype
        op_type = "ReduceSumSquare" if node.is_a("ReduceL2") else node.op_type
        share = self._named(f"share{place}")
        if node.is_a("ReduceMean"):
            self._mean(value, share, self.draft.graph.types[node.inputs[0]].elements, dtype)
        else:
            self._add(op_type, [value], share, TensorType(dtype, ()), keepdims=0)
        self.scalars.share([cone.nodes[place].outputs[0] for cone in self.group.cones], share)

    def _mean(self, value: str, share: str, elements: int, dtype: str) -> None:
        """A mean is a sum of x/N, taken in float32 at least: N may be beyond the range of a half."""
        wide = "float64" if dtype == "float64" else "float32"
        scalar = TensorType(wide, ())
        self._add("Cast", [value], f"{share}.wide", emit.flat(wide), to=dtype_code(wide))
        self._add("ReduceSum", [f"{share}.wide"], f"{share}.sum", scalar, keepdims=0)
        self._add("Constant", [], f"{share}.count32", TensorType("float32", ()), value_float=float(elements))
        self._add("Cast", [f"{share}.count32"], f"{share}.count", scalar, to=dtype_code(wide))
        self._add("Div", [f"{share}.sum", f"{share}.count"], f"{share}.mean", scalar)
        self._add("Cast", [f"{share}.mean"], share, TensorType(dtype, ()), to=dtype_code(dtype))

    def _add(self, op_type: str, inputs: list[str], output: str, type: TensorType, **attributes: object) -> None:
        """A node that exists where the run does."""
        self.draft.add(op_type, inputs, {output: type}, attributes=attributes, place=self.group.span)
