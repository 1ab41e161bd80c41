"""Removes layout operators without effect, so that role recovery sees through them.

A value behind such an operator is an alias of its root. Role recovery works on a view without aliases; the graph itself
loses only the aliases of the update, so that no alias keeps an update from being split."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass, replace

from gopt.analysis.layout_aliases import LAYOUT_OPERATORS, find_aliases, identity, of_operator
from gopt.analysis.reshapes import MOVED
from gopt.analysis.role_map import RoleMap
from gopt.analysis.training import Phase, TrainingGraph
from gopt.ir.graph import Graph, Node, clone
from gopt.ir.types import dtype_code, known
from gopt.operators.kinds import TYPED


@dataclass(frozen=True, slots=True)
class AliasFreeView:
    """``graph`` without the aliases of ``source``: readers of an alias read the root instead.

    An alias that is a graph output becomes an Identity of the root. An alias captured by a control-flow body is
    kept."""

    source: Graph
    graph: Graph
    aliases: dict[str, str]
    origin: tuple[int, ...]
    """For each node of the view, the place of the source's node that it is."""

    def roles(self, roles: RoleMap) -> RoleMap:
        """The user's map with gradients called by their roots."""
        return replace(roles, params={name: self.aliases.get(value, value) for name, value in roles.params.items()})

    def restore(self, training: TrainingGraph) -> TrainingGraph:
        """The same roles over the source; only the update, and readers of joins made there, lose aliases."""
        viewed = dict(zip(self.origin, self.graph.nodes))
        graph = self.source
        stand_ins = dict(zip(self.origin, training.graph.nodes))
        bare = self._reads_roots(stand_ins, training.gradients.values())
        phases = self._phases(stand_ins, bare)
        nodes: list[Node] = []
        dropped: list[Node] = []
        for position, node in enumerate(graph.nodes):
            phase = phases.get(position)
            if phase is None:
                dropped += [node] if node.made_by != MOVED else []  # the file has no moved one
                continue
            restored = viewed.get(position, node) if position in bare else node
            restored.phase = phase
            nodes.append(restored)
        if dropped or not all(new is old or _same(new, old) for new, old in zip(nodes, graph.nodes)):
            graph = replace(graph, nodes=nodes, file_nodes=graph.file_nodes or graph.nodes)
        return replace(training, graph=graph, looked_through=dropped)

    def _reads_roots(self, viewed: dict[int, Node], gradients: Iterable[str]) -> set[int]:
        """Return the positions of nodes that read roots: nodes of the update, and readers of a join with values that
        the update makes of gradients. A backward may end behind such a join, where the update of another gradient
        began."""
        followed, joined, readers = set(gradients), set[str](), set[int]()
        for position, node in enumerate(self.source.nodes):
            update = position in viewed and viewed[position].phase is Phase.UPDATE
            behind = not joined.isdisjoint(node.reads)
            if update or behind:
                readers.add(position)
            if behind or (update and any(self.aliases.get(name, name) in followed for name in node.reads)):
                followed.update(node.outputs)
                joined.update(node.outputs if update or position not in viewed else ())
        return readers

    def _phases(self, viewed: dict[int, Node], bare: Set[int]) -> dict[int, Phase]:
        """Return the phase of each remaining node, by node index: the phase in the view, or the phase of an earlier
        reader.

        Nodes at the ``bare`` places read roots, the others the original names, aliases included.
        """
        order = tuple(Phase)
        never, update = len(order), order.index(Phase.UPDATE)
        due: dict[str, int] = {}
        """Value -> place of the phase in which forward or backward first read it."""
        phases: dict[int, Phase] = {}
        for position in range(len(self.source.nodes) - 1, -1, -1):
            node = self.source.nodes[position]
            phase = viewed[position].phase if position in viewed else None
            at = never if phase is None else order.index(phase)
            for name in node.outputs:
                at = min(at, due.get(name, never))
            if at == never:
                continue
            phases[position] = order[at]
            if at != update:
                for name in (viewed.get(position, node) if position in bare else node).reads:
                    if due.get(name, never) > at:
                        due[name] = at
        return phases


def mark_rewritten(training: TrainingGraph) -> TrainingGraph:
    """Mark the nodes of the update that replace another operator of the file, and note that operator as looked
    through."""
    graph = training.graph
    originals = set(map(id, graph.file_nodes or graph.nodes))
    rewritten = {
        node.outputs[0]: node for node in graph.nodes
        if id(node) not in originals and node.origin is None and node.made_by in ("", MOVED)
    }  # fmt: skip
    for old in graph.file_nodes or () if rewritten else ():
        new = rewritten.get(old.first_output)
        if new is not None and (new.made_by or new.op_type != old.op_type):
            new.made_by, new.proto = MOVED, None
            new.proto = new.to_proto()
            training.looked_through.append(old)
    return training


def _same(new: Node, old: Node) -> bool:
    return new.op_type == old.op_type and new.inputs == old.inputs and new.outputs == old.outputs


def without_aliases(graph: Graph, named: Collection[str] = ()) -> AliasFreeView | None:
    """The graph with aliases looked through; None without any alias. ``named``: gradients that the user named."""
    aliases = find_aliases(graph, named)
    if not aliases and not any(node.is_in(TYPED) for node in graph.nodes):
        return None
    needed = {*graph.outputs, *named, *(name for node in graph.nodes for name in node.captures)}
    # What becomes an opaque operator again reads what the file's operator reads.
    outer = {name for node in graph.nodes if node.origin is None for name in node.outputs}
    needed.update(name for node in graph.nodes if node.origin is not None for name in node.inputs if name in outer)
    nodes: list[Node] = []
    origin: list[int] = []
    bypassed: set[str] = set()
    for position, node in enumerate(graph.nodes):
        outputs = () if aliases.keys().isdisjoint(node.outputs) else [name for name in node.outputs if name]
        if outputs and all(name in aliases for name in outputs):
            bypassed.update((node.inputs[0], aliases.get(node.inputs[0], "")))
            if needed.isdisjoint(outputs):
                continue
            node = _identity(node, aliases[outputs[0]]) if len(outputs) == 1 else node
        else:
            node = _cast(graph, node) if node.origin is None else node
            if not aliases.keys().isdisjoint(node.inputs):
                node = _past_aliases(node, aliases, set() if node.origin is None else outer)
        nodes.append(node)
        origin.append(position)
    live = _live(nodes, needed, bypassed)
    live_nodes = [node for node, alive in zip(nodes, live) if alive]
    positions = tuple(position for position, alive in zip(origin, live) if alive)
    return AliasFreeView(graph, replace(graph, nodes=live_nodes), aliases, positions)


def _past_aliases(node: Node, aliases: Mapping[str, str], outside: Set[str]) -> Node:
    """A node that reads roots instead of aliases, except for names in ``outside``."""
    inputs = [name if name in outside else aliases.get(name, name) for name in node.inputs]
    if inputs == node.inputs:
        return node
    node = clone(node)
    node.inputs = inputs
    return node


def _cast(graph: Graph, node: Node) -> Node:
    """A CastLike without the operand read for the type alone."""
    dtype = graph.type_of(node.outputs[0]).dtype if node.is_in(TYPED) else "undefined"
    if not known(dtype):
        return node
    cast = Node("Cast", node.inputs[:1], node.outputs, name=node.name, attributes={"to": dtype_code(dtype)})
    cast.proto = cast.to_proto()
    return cast


def _live(nodes: list[Node], outer: set[str], bypassed: set[str]) -> list[bool]:
    """Return, per node, whether the node stays: the first node of a bypassed pair is dropped unless another node reads
    the result."""
    read = set(outer)
    live = [True] * len(nodes)
    for position in range(len(nodes) - 1, -1, -1):
        node = nodes[position]
        layout = node.is_in(LAYOUT_OPERATORS) and not of_operator(node)
        live[position] = not layout or not read.isdisjoint(node.outputs) or bypassed.isdisjoint(node.outputs)
        (read if live[position] else bypassed).update(node.inputs)
    return live


def _identity(node: Node, root: str) -> Node:
    if node.is_a("Identity") and node.inputs == [root]:
        return node
    return identity(node, root)
