"""Recover the roles of a functional step from its data flow: loss, states, gradients, phases (contract section 2).

Names decide nothing here; a user's own map goes first and settles what the data flow leaves open.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gopt.analysis.gradients import Facts, Rawness, find_gradient, rawness
from gopt.analysis.operators import random
from gopt.analysis.pairs import match, reachable_states, refuse_dynamic, refuse_open
from gopt.analysis.sweeps import Index, ancestors, depth, descendants
from gopt.analysis.through import look_through
from gopt.analysis.training import Kind, Phase, State, Training
from gopt.errors import InputError, OptionError, UnsupportedError
from gopt.graph.model import Graph, Node
from gopt.graph.types import FLOATS, TensorType

ROUNDS = 8
"""How often a gradient may be moved towards the update after a value of one rank was found in it."""


@dataclass(frozen=True)
class RoleMap:
    """What the user says of the roles; it goes before every rule.

    ``params`` and ``gradients`` are input -> value ('' = find it), ``states`` input -> output.
    """

    loss: str = ""
    states: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, str] = field(default_factory=dict)
    batch: Sequence[str] = ()

    def check(self, graph: Graph) -> None:
        """Raise OptionError when the map names something the graph has not."""
        known = {*graph.inputs, *graph.initializers}
        for name in (*self.states, *self.params, *self.batch):
            if name not in known:
                raise OptionError(f"the role map names {name!r}, which is no input of the graph")
        for name in (*self.states.values(), *([self.loss] if self.loss else [])):
            if name not in graph.outputs:
                raise OptionError(f"the role map names {name!r}, which is no output of the graph")


@dataclass(slots=True)
class _Found:
    facts: Facts
    gradients: dict[str, str]
    backward: set[int]


def recover(graph: Graph, roles: RoleMap = RoleMap()) -> Training:
    """The training step in ``graph``; collectives are looked through.

    Raises InputError when there is no loss or no state, UnsupportedError when the data flow leaves a role open.
    """
    roles.check(graph)
    through = look_through(graph)
    return _recover(graph, roles) if through is None else through.restore(_recover(through.graph, roles), graph)


def _recover(graph: Graph, roles: RoleMap) -> Training:
    index = Index(graph)
    pairs = _pair_tensors(index, roles)
    losses = [roles.loss] if roles.loss else _loss_candidates(index, pairs)
    if not losses:
        if not pairs and graph.header.functions:
            name = graph.header.functions[0].name
            raise UnsupportedError(
                f"no state found, and the step calls functions of its own ({name!r}): gopt does not look inside them",
                "inline them first: onnx.inliner.inline_local_functions(model)",
            )
        if not pairs:
            raise InputError(
                "this is no training step: no output replaces an input, and no output is a loss",
                "gopt reads one step as a graph: forward, backward and update with states as inputs and outputs",
            )
        raise InputError(
            "no loss found: no output of one floating element depends on the batch and the parameters",
            "name it with --loss OUTPUT",
        )
    loss = losses[0]
    pairs |= _pair_scalars(index, pairs, loss, roles)
    if not pairs:
        raise InputError("no state found: no output replaces an input", "name the pairs with --states INPUT=OUTPUT")
    step = _Step(index, pairs, loss, roles)
    found = step.find_gradients()
    _settle_losses(index, losses, found, pairs, roles)
    return step.assemble(found)


def _pair_tensors(index: Index, roles: RoleMap) -> dict[str, str]:
    """Update pairs of more than rank 0, output -> input, the user's first."""
    graph = index.graph
    pairs = {output: name for name, output in roles.states.items()}
    free = set(graph.inputs) - set(pairs.values()) - set(roles.batch)
    reach = {
        output: reachable_states(index, output, free)
        for output, type in graph.outputs.items()
        if output not in pairs and type.shape != ()
    }
    found, unsettled = match(reach)
    refuse_open(unsettled)
    pairs |= found
    # States held as initializers only, with a matching updated output, count too.
    constants = {name for name, tensor in graph.initializers.items() if name not in graph.inputs and tensor.type.shape}
    rest = {
        output: reachable_states(index, output, constants)
        for output, type in graph.outputs.items()
        if output not in pairs and type.shape != () and type.dtype in FLOATS
    }
    found, unsettled = match(rest)
    refuse_open(unsettled)
    pairs |= found
    refuse_dynamic(index, pairs)
    return pairs


def _loss_candidates(index: Index, pairs: Mapping[str, str]) -> list[str]:
    """One-element floating outputs with a differentiable path from a state; the shallowest first."""
    graph = index.graph
    smooth = set(pairs.values())
    for node in graph.nodes:
        if any(name in smooth for name in node.inputs) and not node.is_a("ArgMax", "Sign", "Round", "Floor", "Ceil"):
            smooth.update(name for name in node.outputs if graph.type_of(name).dtype in (*FLOATS, "undefined"))
    paired = set(pairs.values())
    moving = descendants(index, [name for name in graph.inputs if name not in paired])
    outputs = [
        name
        for name, type in graph.outputs.items()
        if name not in pairs and name in smooth and name in moving and index.one_element(name) and type.dtype in FLOATS
    ]
    if len(outputs) > 1:
        steps = depth(index)
        outputs.sort(key=lambda name: steps.get(name, 0))
    return outputs


def _pair_scalars(index: Index, pairs: Mapping[str, str], loss: str, roles: RoleMap) -> dict[str, str]:
    """Update pairs of rank 0, output -> input; the loss takes no part."""
    graph = index.graph
    free = set(graph.inputs) - set(pairs.values()) - set(roles.batch)
    reach = {
        output: reachable_states(index, output, free)
        for output, type in graph.outputs.items()
        if output not in pairs and output != loss and type.shape == ()
    }
    found, unsettled = match(reach)
    refuse_open(unsettled)
    return found


def _settle_losses(index: Index, losses: list[str], found: _Found, pairs: Mapping[str, str], roles: RoleMap) -> None:
    """Refuse when another output could be the loss as well: neither paired nor computed from gradients."""
    if roles.loss:
        return
    behind = descendants(index, found.gradients.values())
    rivals = [name for name in losses[1:] if name not in pairs and name not in behind]
    if rivals:
        raise UnsupportedError(
            f"two outputs could be the loss: {losses[0]!r} and {rivals[0]!r}",
            f"name the one that the gradients belong to: --loss {losses[0]}",
        )


class _Step:
    """One attempt at reading the step, with the loss and the pairs settled."""

    def __init__(self, index: Index, pairs: Mapping[str, str], loss: str, roles: RoleMap) -> None:
        self.index, self.loss, self.roles = index, loss, roles
        graph = index.graph
        order = {name: place for place, name in enumerate([*graph.inputs, *graph.initializers])}
        self.updated = dict(sorted(((name, output) for output, name in pairs.items()), key=lambda p: order[p[0]]))
        self.forward, self.forward_values = ancestors(index, [loss])
        self.random = [node for node in graph.nodes if random(node)]
        self.batch = [name for name in graph.inputs if self._is_batch(name)]
        sources = [*self.batch, *(name for node in self.random for name in node.outputs)]
        self.tainted = descendants(index, sources)

    def _is_batch(self, name: str) -> bool:
        if name in self.updated:
            return False
        if name in self.roles.batch:
            return True
        graph = self.index.graph
        return name in self.forward_values and name not in graph.initializers and graph.inputs[name].shape != ()

    def find_gradients(self) -> _Found:
        facts = Facts(self.index, self.tainted, self.forward)
        read = [name for name in self.updated if name in self.forward_values]
        facts.model = self.forward_values | descendants(self.index, read)
        # One-element states and settings are left out: a loss scale is in every gradient.
        wide = [name for name in self.index.graph.inputs if not self.index.one_element(name)]
        made = [name for name in wide if name not in self.forward_values and name not in self.batch]
        facts.update_only = descendants(self.index, made)
        wanted = self._parameter_candidates()
        for _ in range(ROUNDS):
            gradients = self._walk(facts, wanted)
            backward = ancestors(self.index, gradients.values())[0] - self.forward
            check = rawness(facts, set(gradients.values()), backward)
            bad = self._reaching_states(check.mixed)
            local = [name for name in gradients if not self._reads_reduced(name, check)]
            fresh = {id(node) for node in bad}
            if local:
                # What stands between a gradient and another parameter's belongs to the backward.
                fresh |= self._behind(gradients, backward)
            fresh -= facts.barrier
            if not fresh:
                break
            facts.barrier |= fresh
        if local:
            raise UnsupportedError(
                f"the update of {local[0]!r} reads a local gradient: {gradients[local[0]]!r} feeds other gradients too",
                f"name its gradient: --params {local[0]}=VALUE",
            )
        if bad:
            raise UnsupportedError(
                f"the update reads {self._culprit(bad[0].inputs, check.raw)!r}, a value of one rank's own batch, "
                f"beside a gradient (in {bad[0].label!r})",
                "an update may depend on the batch through gradients alone",
            )
        return _Found(facts, gradients, backward)

    def _reads_reduced(self, name: str, check: Rawness) -> bool:
        """Whether a parameter's new value holds its gradient as reduced, and nothing of one rank alone."""
        updated = self.updated[name]
        return updated in check.reduced and updated not in check.raw

    def _behind(self, gradients: Mapping[str, str], backward: set[int]) -> set[int]:
        """Nodes of the backward that depend on a value chosen as a gradient."""
        behind, found = set(gradients.values()), set()
        for node in self.index.graph.nodes:
            if id(node) in backward and any(name in behind for name in node.reads):
                behind.update(node.outputs)
                found.add(id(node))
        return found

    def _culprit(self, inputs: Sequence[str], raw: set[str]) -> str:
        return next((name for name in inputs if name in raw), None) or next(
            name for name in inputs if name in self.tainted
        )

    def _parameter_candidates(self) -> list[str]:
        """Floating states that the loss depends on and whose new value depends on the batch; scalars last."""
        types = self.index.graph.types
        lost = [name for name in self.roles.params if name not in self.updated]
        if lost:
            raise OptionError(f"{lost[0]!r} is no state: no output replaces it", f"name one: --states {lost[0]}=OUTPUT")
        named = [name for name in self.updated if name in self.roles.params]
        found = [
            name
            for name, output in self.updated.items()
            if name not in self.roles.params
            and name in self.forward_values
            and output in self.tainted
            and types[name].dtype in FLOATS
        ]
        return sorted(named + found, key=lambda name: types[name].elements == 1)

    def _walk(self, facts: Facts, wanted: list[str]) -> dict[str, str]:
        types = self.index.graph.types
        gradients: dict[str, str] = {}
        facts.clean = set()
        for name in wanted:
            if types[name].elements == 1 and not facts.clean and gradients:
                facts.clean = descendants(self.index, gradients.values()) - set(gradients.values())
            given = self.roles.params.get(name, "")
            if given:
                self._check_given(facts, name, given)
            gradient = given or find_gradient(facts, self.updated[name])
            single = types[name].elements == 1 and not given
            if gradient is None or (single and (gradient in facts.clean or gradient in gradients.values())):
                continue
            gradients[name] = gradient
        return gradients

    def _check_given(self, facts: Facts, name: str, gradient: str) -> None:
        """Whether a value the user calls a gradient can be one at all."""
        types = self.index.graph.types
        maker = self.index.producer.get(gradient)
        if maker is None or gradient not in types:
            why = "no node makes it"
        elif types[gradient].shape != types[name].shape:
            why = f"it is {types[gradient]}, the parameter {types[name]}"
        elif gradient not in self.tainted or id(maker) in self.forward:
            why = "it does not come from the backward"
        elif gradient in facts.update_only or gradient in self.updated.values():
            why = "it is a part of the update"
        else:
            return
        raise OptionError(f"{gradient!r} cannot be the gradient of {name!r}: {why}")

    def _reaching_states(self, nodes: list[Node]) -> list[Node]:
        """Those of the nodes that a state's new value depends on."""
        if not nodes:
            return []
        needed = ancestors(self.index, self.updated.values())[0]
        return [node for node in nodes if id(node) in needed]

    def assemble(self, found: _Found) -> Training:
        graph = self.index.graph
        check = rawness(found.facts, set(found.gradients.values()), found.backward)
        states = [self._state(name, found, check.raw, check.reduced) for name in self.updated]
        self._own(states, found)
        hyper = [name for name in graph.inputs if name not in self.updated and name not in self.batch]
        hyper = [name for name in hyper if name not in graph.initializers]
        phases = [
            Phase.FORWARD
            if id(node) in self.forward
            else Phase.BACKWARD
            if id(node) in found.backward
            else Phase.UPDATE
            for node in graph.nodes
        ]
        paired = set(self.updated.values())
        metrics = [name for name in graph.outputs if name not in paired and name != self.loss]
        training = Training(graph, self.loss, states, found.gradients, self.batch, hyper, metrics, phases, self.random)
        self._refuse_dropped_states(training, found, check.reduced)
        training.notes = self._notes(training)
        if not found.gradients:
            raise InputError(
                "no parameter found: no state that the loss depends on is updated through a gradient",
                "name parameters with --params INPUT",
            )
        return training

    def _refuse_dropped_states(self, training: Training, found: _Found, reduced: set[str]) -> None:
        """An output that may be a state whose old value its update does not read must not pass as a metric."""
        types, batch = self.index.graph.types, set(training.batch)
        free: dict[tuple[TensorType, bool], str] = {}
        for name in self.index.graph.inputs:
            if name not in self.updated and name not in self.roles.batch and not self.index.one_element(name):
                free.setdefault((types[name], name in batch), name)
        for output in training.metrics:
            type = types.get(output)
            if type is None or self.index.one_element(output):
                continue
            maker = self.index.producer.get(output)
            inside = maker is not None and (id(maker) in self.forward or id(maker) in found.backward)
            updates = output in reduced or output not in self.tainted or not inside
            shown = output in found.gradients.values()
            rival = (free.get((type, False)) if updates or shown else None) or (
                free.get((type, True)) if updates else None
            )
            if rival is not None:
                raise UnsupportedError(
                    f"output {output!r} may be the new value of input {rival!r}: the data flow does not say",
                    f"name the pair with --states {rival}={output}, or say --batch {rival}",
                )

    def _state(self, name: str, found: _Found, raw: set[str], reduced: set[str]) -> State:
        graph = self.index.graph
        output = self.updated[name]
        producer = self.index.producer.get(output)
        is_raw = output in raw or (
            output in self.tainted
            and output not in reduced
            and (producer is None or id(producer) in self.forward or id(producer) in found.backward)
        )
        type = graph.types[name]
        if name in found.gradients:
            kind = Kind.PARAMETER
        elif is_raw:
            kind = Kind.STATISTIC
            self._check_statistic(name, output)
        elif name in self.forward_values and type.shape != ():
            kind = Kind.PARAMETER
        else:
            kind = Kind.OPTIMIZER_STATE
        return State(name, output, kind)

    def _check_statistic(self, name: str, output: str) -> None:
        """A state that follows the batch past every gradient, but that the loss trains on, is none we know."""
        type = self.index.graph.types[name]
        if name in self.forward_values and type.dtype in FLOATS and name not in self.roles.states:
            raise UnsupportedError(
                f"state {name!r} follows the batch without a gradient that could be found, and the loss depends on it",
                f"if it is a parameter, name its gradient: --params {name}=VALUE",
            )
        if type.dtype not in FLOATS:
            raise UnsupportedError(
                f"statistic {name!r} is {type.dtype} and depends on the batch: ranks cannot agree on it by a mean",
                "keep integer states free of the batch",
            )

    def _own(self, states: list[State], found: _Found) -> None:
        """Give each optimizer state its parameter: the one whose gradient its new value holds element by element."""
        graph = self.index.graph
        owner: dict[str, str] = {}
        for parameter, gradient in found.gradients.items():
            owner.setdefault(gradient, parameter)
            owner.setdefault(parameter, parameter)
        skip = self.forward | found.backward
        for node in graph.nodes:
            if id(node) in skip:
                continue
            owned = [name for name in node.inputs if name in owner]
            if not owned:
                continue
            wide = [name for name in owned if not self.index.one_element(name)]
            of = owner[(wide or owned)[0]]
            for name in node.outputs:
                if not self.index.one_element(name) or graph.types[of].elements == 1:
                    owner.setdefault(name, of)
        for state in states:
            if state.kind is not Kind.OPTIMIZER_STATE:
                continue
            state.of = owner.get(state.updated)
            if state.of is not None and _accumulates(self.index, state, found.gradients[state.of]):
                state.kind = Kind.ACCUMULATOR
            elif state.of is None and self.index.one_element(state.tensor):
                state.kind = Kind.SCALAR

    def _notes(self, training: Training) -> list[str]:
        graph, notes = self.index.graph, []
        for node in training.random:
            notes.append(f"{node.label} ({node.op_type}) draws random numbers: each rank draws its own")
        for name in graph.inputs:
            if name not in self.index.readers and name not in graph.outputs:
                notes.append(f"input {name} is read by nothing")
        for name in training.metrics:
            if not self.index.one_element(name):
                notes.append(f"output {name} replaces no input and is taken as a metric")
        return notes


def _accumulates(index: Index, state: State, gradient: str) -> bool:
    """Whether the state's new value is old + gradient, behind at most a gate (``Where``) and casts."""
    stack, seen = [state.updated], set()
    while stack:
        name = stack.pop()
        node = index.producer.get(name)
        if node is None or name in seen:
            continue
        seen.add(name)
        if node.is_a("Where"):
            stack.extend(node.inputs[1:])
        elif node.is_a("Identity"):
            stack.extend(node.inputs)
        elif node.is_a("Add") and state.tensor in node.inputs:
            other = next((x for x in node.inputs if x != state.tensor), "")
            while other != gradient and (maker := index.producer.get(other)) is not None:
                scaled = maker.is_a("Div", "Mul") and any(map(index.one_element, maker.inputs))
                if not scaled and not maker.is_a("Cast", "Identity"):
                    return False
                rest = [x for x in maker.inputs if not scaled or not index.one_element(x)]
                if len(rest) != 1:
                    return False
                other = rest[0]
            return other == gradient
    return False
