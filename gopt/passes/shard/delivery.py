"""How parameters get from the members that own their elements to the nodes that read them.

Behind the update (stages 1 and 2): every rank holds whole parameters, or their narrow copies, and the new ones are
gathered at the end. Before the use (stage 3): a rank holds its shard alone; each bucket is gathered before its first
reader in the forward and once more for the backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from gopt.analysis.cones import Cone
from gopt.analysis.spmd import Holding, Step
from gopt.analysis.training import Phase
from gopt.graph.edit import Draft
from gopt.graph.model import Node
from gopt.graph.place import Place
from gopt.graph.types import TensorType, dtype_code
from gopt.passes.shard import layout


@dataclass(frozen=True, slots=True)
class Part:
    """The flat piece of a bucket that a class or a tensor contributes: now, and after the update."""

    current: str
    updated: str
    place: Place


@dataclass(slots=True)
class Delivery:
    """Settled once per pass: ``sharded`` is stage 3, ``again`` whether the backward gathers anew."""

    step: Step
    draft: Draft
    groups: layout.Groups
    sharded: bool
    again: bool
    copies: dict[str, Holding] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)
    """Narrow copies that no rank keeps between steps."""
    _readers: dict[str, tuple[list[Node], list[Node]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.copies = self.step.copies()
        if self.sharded:
            names = {state.tensor for state in self.step.training.parameters}
            names |= {copy.input for copy in self.copies.values()}
            for node, phase in zip(self.step.training.graph.nodes, self.step.training.phases):
                for name in dict.fromkeys(node.reads) if phase is not Phase.UPDATE else ():
                    if name in names and (kept := self.draft.kept(node)) is not None:
                        self._readers.setdefault(name, ([], []))[phase is Phase.BACKWARD].append(kept)

    def narrow(self, cone: Cone) -> str:
        """The type in which a parameter travels when it is not its own, else ''."""
        copy = self.copies.get(cone.parameter.tensor)
        return copy.dtype if copy is not None else ""

    def owned(self, cone: Cone) -> bool:
        """Whether the wide parameter is held by its owner alone, as the other states are."""
        return self.sharded or bool(self.narrow(cone))

    def deliver(self, bucket: str, cuts: Sequence[int], cones: Sequence[Cone], parts: Sequence[Part]) -> None:
        """Gather a bucket's parameters where they are due."""
        if self.sharded:
            self._before_use(bucket, cuts, cones, parts)
        else:
            self._behind_update(bucket, cuts, cones, parts)

    def _behind_update(self, bucket: str, cuts: Sequence[int], cones: Sequence[Cone], parts: Sequence[Part]) -> None:
        outputs = []
        for cone in cones:
            copy = self.copies.get(cone.parameter.tensor)
            if copy is not None:
                self.draft.discard(copy.output)
            outputs.append(cone.parameter.updated if copy is None else copy.output)
        source = self._joined(bucket, cuts, cones, [(part.updated, part.place) for part in parts], None)
        layout.all_gather(self.draft, self.groups.shard, source, cuts, outputs)

    def _before_use(self, bucket: str, cuts: Sequence[int], cones: Sequence[Cone], parts: Sequence[Part]) -> None:
        names = []
        for cone in cones:
            copy = self.copies.get(cone.parameter.tensor)
            if copy is not None:
                self.draft.discard(copy.output)
                self.dropped.add(copy.input)
            names.append(cone.parameter.tensor if copy is None else copy.input)
        self._state_shapes(names)
        forward = [node for name in names for node in self._readers.get(name, ([], []))[0]]
        backward = [node for name in names for node in self._readers.get(name, ([], []))[1]]
        first = self.draft.earliest(forward or backward)
        source = self._joined(bucket, cuts, cones, [(part.current, part.place) for part in parts], first)
        layout.all_gather(self.draft, self.groups.shard, source, cuts, names, before=first)
        if not (self.again and forward and backward):
            return
        again = [layout.named(bucket, f"again{place}") for place in range(len(names))]
        for old, new in zip(names, again):
            self.draft.graph.types[new] = self.draft.graph.types[old]
            for node in self._readers.get(old, ([], []))[1]:
                self.draft.rewire(node, old, new)
        layout.all_gather(self.draft, self.groups.shard, source, cuts, again, before=self.draft.earliest(backward))

    def _state_shapes(self, names: Sequence[str]) -> None:
        """A reader of a shape alone needs no gather: it becomes a constant."""
        for name in names:
            for readers in self._readers.get(name, ()):
                for node in [each for each in readers if each.is_a("Shape") and not each.attributes]:
                    readers.remove(node)
                    output, dims = node.outputs[0], list(self.draft.graph.types[name].dims)
                    self.draft.remove(node, f"the shape of {name} is known")
                    made = {output: TensorType("int64", (len(dims),))}
                    self.draft.add("Constant", [], made, attributes={"value_ints": dims}, before=node)

    def _joined(
        self,
        bucket: str,
        cuts: Sequence[int],
        cones: Sequence[Cone],
        parts: Sequence[tuple[str, Place]],
        before: Node | None,
    ) -> str:
        """The rank's part of the bucket as it travels: narrow where it may be, present on every rank."""
        narrow, names = self.narrow(cones[0]), []
        for name, place in parts:
            if narrow:
                made = {f"{name}.narrow": layout.flat(narrow)}
                attributes = {"to": dtype_code(narrow)}
                self.draft.add("Cast", [name], made, attributes=attributes, place=place, before=before)
            names.append(f"{name}.narrow" if narrow else name)
        if len(names) == 1 and all(start < stop for start, stop in pairwise(cuts)):
            return names[0]
        joined = layout.named(bucket, "parameters")
        dtype = narrow or self.draft.graph.types[cones[0].parameter.tensor].dtype
        layout.join(self.draft, names, joined, dtype, before=before)
        return joined
