"""Update subgraphs: the nodes from a parameter's gradient and states to the new values, and the possible cuts.

A subgraph whose nodes act element by element, or reduce a whole tensor to one element, can run on any piece of the
parameter (split). Any other subgraph runs where the parameter is whole. Subgraphs of equal structure with the very same
scalar operands form a class: one run serves the neighbouring pieces of the whole class."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property

from gopt.analysis import isomorphism
from gopt.analysis.ownership import Ownership
from gopt.analysis.training import Phase, State, StateKind, TrainingGraph
from gopt.analysis.updates import ScalarReduction, UpdateMode, Updates, UpdateSubgraph
from gopt.errors import UnsupportedError
from gopt.ir.graph import COMM, SPMD, Node
from gopt.ir.graph_index import GraphIndex, ancestors, descendants
from gopt.ir.node_kinds import control_flow, elementwise, record_of
from gopt.operators.kinds import COMBINERS, CONTROL_FLOW, REDUCTIONS, RESHAPES

FLATTENING = RESHAPES | {"Transpose"}
"""Layout operators through which a full reduction may look."""


def find_updates(training: TrainingGraph, *, whole_accumulators: bool, uncut: bool | frozenset[str] = False) -> Updates:
    """The update of every parameter with a gradient; found once for a training, and not to be changed.

    ``whole_accumulators``: gradient accumulators stay whole on every rank (stage 1), content included. ``uncut``: no
    tensor is to be cut, or none of these, even where the update would allow a cut. Raises UnsupportedError for an
    unknown operator inside an update."""
    whole_accumulators = whole_accumulators and any(state.kind is StateKind.ACCUMULATOR for state in training.states)
    question = ("updates", whole_accumulators, uncut)
    return training.once(question, lambda: _find(training, whole_accumulators, uncut))


def _find(training: TrainingGraph, whole_accumulators: bool, uncut: bool | frozenset[str]) -> Updates:
    finder = _Finder(training, whole_accumulators)
    finder.collect()
    finder.settle()
    for name, subgraph in finder.subgraphs.items():
        if uncut is True or (uncut and name in uncut):
            subgraph.weaken(UpdateMode.WHOLE, "its owner updates it whole")
    finder.localise()
    updates = Updates(finder.subgraphs, *finder.scalar_reductions())
    isomorphism.assign_classes(training, updates, finder.unowned)
    return updates


class _Finder:
    def __init__(self, training: TrainingGraph, whole_accumulators: bool) -> None:
        self.training = training
        self.graph = training.graph
        self.index = GraphIndex(training.graph)
        self.nodes = [node for node in training.graph.nodes if node.phase is Phase.UPDATE]
        self.reachable = {name for state in training.states for name in (state.tensor, state.updated)}
        gradients = training.gradients
        updated = [s.updated for s in training.states if s.tensor not in gradients and s.of not in gradients]
        self.held_by_all = {name for name in updated if not self.index.one_element(name)}
        """New values of states that no parameter with a gradient owns."""
        shown = [name for name in self.graph.outputs if name not in self.reachable]
        self.shown = {name for name in shown if not self.index.one_element(name)}
        """Outputs that no state has, of more than one element."""
        self.told = self.held_by_all | self.shown
        self.subgraphs: dict[str, UpdateSubgraph] = {}
        full: dict[str, str] = {}
        self.own = self._own_values()
        """Values that each rank computes from its own batch, and not through a gradient."""
        self.flattened: set[str] = set()
        """Values that hold a parameter-shaped one in another shape, for a full reduction alone."""
        self.first: dict[str, str] = {}
        """Gradient -> the first parameter that has it."""
        self.unowned: list[Node] = []
        """Nodes of the update that read nothing of a parameter's shape."""
        accumulated = {state.of for state in training.states if state.kind is StateKind.ACCUMULATOR}
        for state in training.parameters:
            if state.tensor in training.gradients:
                self._open(state, whole_accumulators and state.tensor in accumulated, full)
        for state in training.states:
            if state.of in self.subgraphs and state.kind is not StateKind.SCALAR and state.tensor not in full:
                subgraph = self.subgraphs[state.of]
                if state.kind is StateKind.ACCUMULATOR and whole_accumulators:
                    continue
                subgraph.states.append(state)
                full[state.tensor] = state.of
        # A step counter of a parameter's own has one element, and is not a piece of it.
        self.owners = Ownership(self.graph, {name: of for name, of in full.items() if self._as_full(name, of)})

    def _as_full(self, name: str, parameter: str) -> bool:
        return not self.index.one_element(name) or self.graph.types[parameter].elements == 1

    def _open(self, state: State, whole_gradient: bool, full: dict[str, str]) -> None:
        name, gradient = state.tensor, self.training.gradients[state.tensor]
        subgraph = self.subgraphs[name] = UpdateSubgraph(state, gradient, [state])
        full[name] = name
        subgraph.whole_gradient = whole_gradient
        if self.graph.types[name].elements == 1:
            subgraph.weaken(UpdateMode.REPLICATED, "it has one element")
        if self.first.setdefault(gradient, name) != name:
            owner = self.subgraphs[self.first[gradient]]
            for member in (subgraph, owner):
                member.weaken(UpdateMode.REPLICATED, f"it shares its gradient {gradient}")
        elif not subgraph.whole_gradient:
            full[gradient] = name

    def collect(self) -> None:
        """Give every node of the update to the parameter whose full-shaped values the node handles."""
        for node in self.nodes:
            owners, reads_own = self.owners.note(node), bool(self.own) and self._reads_own(node)
            if node.domain or node.op_type in CONTROL_FLOW:
                self._judge_kind(node, owners)
            if not owners:
                self.unowned.append(node)
                continue
            if len(owners) > 1:
                for of in owners:
                    self.subgraphs[of].weaken(UpdateMode.REPLICATED, f"{node.label} mixes it with another parameter")
            if reads_own and id(node) not in self._needed:  # a metric, which every rank has its own of
                for of in owners:
                    self.subgraphs[of].weaken(UpdateMode.REPLICATED, f"{node.label} reads it beside a rank's own batch")
            subgraph = self.subgraphs[owners[0]]
            subgraph.nodes.append(node)
            if not self.told.isdisjoint(node.outputs):
                self._judge_results(subgraph, node)
            if not self._by_element(node, self.graph.types[owners[0]].shape):
                self._judge(subgraph, node)

    def _judge_kind(self, node: Node, owners: list[str]) -> None:
        """Judge a node that may be no standard operator."""
        joins = node.domain == SPMD or (node.made_by and node.domain == COMM)
        if joins:  # the computation is split, and parts meet here
            for of in owners:
                self.subgraphs[of].weaken(UpdateMode.REPLICATED, f"{node.label} joins or cuts parts of it")
        elif (node.domain not in ("", "ai.onnx") or control_flow(node)) and (owners or id(node) in self._needed):
            self._refuse_unknown(node)

    def _reads_own(self, node: Node) -> bool:
        """Return whether a node of the update, in order, reads a value of the rank's own batch."""
        reads = node.reads
        if self.own.isdisjoint(reads):
            return False
        self.own.update(node.outputs)
        return True

    def _own_values(self) -> set[str]:
        """The batch, and the values that forward and backward compute from the batch."""
        training, gradients = self.training, set(self.training.gradients.values())
        if not training.metrics:  # nothing but metrics may read them
            return set()
        drawn = [name for node in training.random for name in node.outputs]
        before = {name for node in self.graph.nodes if node.phase is not Phase.UPDATE for name in node.outputs}
        before.update(training.batch)
        return descendants(self.index, [*training.batch, *drawn]) & before - gradients - training.shared.keys()

    @cached_property
    def _needed(self) -> set[int]:
        """Nodes upstream of new values of states, by id."""
        return ancestors(self.index, (state.updated for state in self.training.states))[0]

    def _refuse_unknown(self, node: Node) -> None:
        if control_flow(node):
            if all(map(self.index.one_element, (*node.reads, *filter(None, node.outputs)))):
                return  # a schedule: every rank has what it reads, and runs it
            raise UnsupportedError(
                f"control flow around a parameter: {node.op_type} {node.label!r} is in the update",
                "export the step with the branch taken and the turns of a loop written out, or with Where in place of "
                "If: gopt does so itself where every operator of both branches has a result whatever the condition is, "
                "of a static shape",
            )
        if node.domain == COMM and all(map(self.index.one_element, node.reads)):
            return  # a scalar that members of another group complete: every rank has it, and makes the call
        if node.domain not in ("", "ai.onnx"):
            raise UnsupportedError(
                f"unknown operator {node.domain}.{node.op_type} ({node.label!r}) in the update",
                "express the update in standard operators",
            )

    def _judge_results(self, subgraph: UpdateSubgraph, node: Node) -> None:
        """Judge a node by results shown, or held by all ranks."""
        for name in node.outputs:
            if name in self.held_by_all:
                subgraph.weaken(UpdateMode.REPLICATED, f"{name}, a state of all ranks, is made of it")
            if name in self.shown:
                subgraph.weaken(UpdateMode.REPLICATED, f"output {name} is computed in its update")

    def _by_element(self, node: Node, shape: object) -> bool:
        """Return whether a node acts element by element on values of a shape, and on scalars."""
        types, scalars = self.graph.types, self.index.scalars
        for name in node.inputs:
            if name not in scalars and name and (name not in types or types[name].shape != shape):
                return False
        return elementwise(node) and self._have_shape(filter(None, node.outputs), shape)

    def _judge(self, subgraph: UpdateSubgraph, node: Node) -> None:
        """Judge a node that does not act element by element."""
        shape = self.graph.types[subgraph.parameter.tensor].shape
        full = [name for name in node.inputs if name and name not in self.index.scalars]
        alike = self._have_shape(node.inputs[:1] if node.is_in(FLATTENING) else full, shape)
        if node.is_in(FLATTENING) and alike and self._only_reduced(node):
            self.flattened.add(node.outputs[0])
            return
        source = node.inputs[0]
        whole = source in full and (self._have_shape([source], shape) or source in self.flattened)
        if node.is_in(REDUCTIONS) and whole and all(map(self.index.one_element, filter(None, node.outputs))):
            subgraph.reductions.append(node)
            return
        subgraph.weaken(UpdateMode.WHOLE, f"{node.op_type} {node.label} is not elementwise")

    def _have_shape(self, names: Iterable[str], shape: object) -> bool:
        types = self.graph.types
        for name in names:
            type = types.get(name)
            if type is None or type.shape != shape:
                return False
        return True

    def _only_reduced(self, node: Node) -> bool:
        """Return whether all readers of a node's result reduce the result to one element."""
        name = node.outputs[0]
        users = self.index.users.get(name, [])
        return (
            bool(users)
            and name not in self.graph.outputs
            and all(
                reader.is_in(REDUCTIONS)
                and reader.inputs[0] == name
                and all(map(self.index.one_element, reader.outputs))
                for reader in users
            )
        )

    def settle(self) -> None:
        """A state whose new value is computed outside of the subgraph cannot be cut with the subgraph."""
        for subgraph in self.subgraphs.values():
            outputs = {name for node in subgraph.nodes for name in node.outputs}
            for state in subgraph.states:
                if state.updated not in outputs:
                    subgraph.weaken(UpdateMode.REPLICATED, f"{state.updated} is no part of its update")

    def localise(self) -> None:
        """Scalars that a whole subgraph computes for itself alone belong to the subgraph and need no call."""
        whole = [subgraph for subgraph in self.subgraphs.values() if subgraph.mode is UpdateMode.WHOLE]
        if not whole:
            return
        member = {id(node): of for of, subgraph in self.subgraphs.items() for node in subgraph.nodes}
        for node in reversed(self.unowned):
            of = self.owners.reduced.get(node.outputs[0], "")
            if not of or self.subgraphs[of].mode is not UpdateMode.WHOLE:
                continue
            users = [reader for name in node.outputs for reader in self.index.users.get(name, ())]
            shown = any(name in self.graph.outputs for name in node.outputs)
            if not shown and all(member.get(id(reader)) == of for reader in users):
                member[id(node)] = of
                self.subgraphs[of].nodes.append(node)
        position = self.index.position
        for subgraph in whole:
            subgraph.nodes.sort(key=lambda node: position[id(node)])
            subgraph.reductions = [n for n in subgraph.nodes if self._crosses(n, member, subgraph.parameter.tensor)]

    def _crosses(self, node: Node, member: dict[int, str], of: str) -> bool:
        """Return whether a one-element value leaves the subgraph."""
        names = [name for name in node.outputs if name and self.index.one_element(name)]
        return any(
            name in self.graph.outputs or any(member.get(id(r)) != of for r in self.index.users.get(name, ()))
            for name in names
        )

    def scalar_reductions(self) -> tuple[dict[str, ScalarReduction], dict[str, str]]:
        """Group the reductions' outputs by the sums, maxima … downstream."""
        kind: dict[str, str] = {}
        for subgraph in self.subgraphs.values():
            if subgraph.mode is not UpdateMode.REPLICATED:
                for node in subgraph.reductions:
                    kind[node.outputs[0]] = self._kind(node, subgraph.mode)
        if not kind:
            return {}, {}
        leaves = dict(kind)
        whole = [subgraph for subgraph in self.subgraphs.values() if subgraph.mode is UpdateMode.WHOLE]
        owned = {id(node) for subgraph in whole for node in subgraph.nodes}  # by ``localise``
        joins: list[Node] = []
        for node in self.unowned:
            if id(node) in owned or len(node.outputs) != 1:
                continue
            kinds = {kind[name] for name in node.inputs if name in kind}
            if len(kinds) == 1 and node.is_in(COMBINERS.get(next(iter(kinds)), ())) and self._scalars(node):
                kind[node.outputs[0]] = next(iter(kinds))
                joins.append(node)
        root: dict[str, str] = {}
        sign: dict[str, int] = {}
        for node in reversed(joins):
            top = node.outputs[0]
            top = root.setdefault(top, top)
            for name, of_operand in _signed(node, sign):
                lone = len(self.index.users[name]) == 1 and name not in self.graph.outputs
                if name in kind and lone and node.inputs.count(name) == 1:
                    root[name], sign[name] = top, of_operand
        scalar_reductions: dict[str, ScalarReduction] = {}
        reduction_of: dict[str, str] = {}
        for name in leaves:
            reduction_of[name] = root.get(name, name)
            reduction = scalar_reductions.setdefault(
                reduction_of[name], ScalarReduction(reduction_of[name], kind[name])
            )
            reduction.leaves[name] = sign.get(name, 1)
        for node in joins:
            if root[node.outputs[0]] not in scalar_reductions:
                continue
            reduction = scalar_reductions[root[node.outputs[0]]]
            reduction.inner.append(node)
            reduction.epilogue += [term for term in _signed(node, sign) if root.get(term[0]) != reduction.root]
        return scalar_reductions, reduction_of

    def _scalars(self, node: Node) -> bool:
        return all(self.index.one_element(name) for name in (*node.inputs, *node.outputs))

    def _kind(self, node: Node, mode: UpdateMode) -> str:
        dtype = self.graph.type_of(node.outputs[0]).dtype
        if dtype == "bool":
            return "all" if record_of(node).pieces == "min" else "any"
        # A whole subgraph's scalar is complete on its owner; the others add nothing to it.
        return REDUCTIONS[node.op_type] if mode is UpdateMode.SPLIT else "sum"


def _signed(node: Node, sign: Mapping[str, int]) -> list[tuple[str, int]]:
    """The operands of a node with their signs in the sum that the result is a term of, of the result's ``sign``."""
    outer, record = sign.get(node.outputs[0], 1), record_of(node)
    return [(name, outer * record.sign(position)) for position, name in enumerate(node.inputs)]
