"""Describes a model or an output folder as records: roles, the rule behind each update, controls, casts, bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from gopt.analysis.coupling import Coupling, find_couplings
from gopt.analysis.coupling import notes as coupling_notes
from gopt.analysis.region_mappings import RegionMapping, find_region_mappings
from gopt.analysis.training import Phase, StateKind, TrainingGraph
from gopt.analysis.update_subgraphs import find_updates
from gopt.analysis.updates import UpdateSubgraph
from gopt.documents.default_values import DefaultValue
from gopt.documents.draws import Draw
from gopt.documents.records import to_document
from gopt.errors import UnsupportedError
from gopt.ir.device_specs import read_configurations
from gopt.ir.types import LOW_PRECISION, TensorType
from gopt.offline.optimizer.controls import Controls, find_controls
from gopt.offline.optimizer.evidence import Rule
from gopt.offline.optimizer.formulas import Hyper
from gopt.offline.optimizer.recogniser import Recogniser
from gopt.offline.text import opsets
from gopt.operators.kinds import CASTS
from gopt.system.progress import ProgressCallback, no_progress
from gopt.text.notebook import HtmlTable

if TYPE_CHECKING:
    from gopt.api import Source


@dataclass(frozen=True, slots=True)
class NamedValue:
    """A value of the graph: an input, or a state without a parameter."""

    name: str
    dtype: str
    shape: tuple[int | str | None, ...] | None
    bytes: int


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """An optimizer state of a parameter; ``role`` is its role in the rule ('' if unknown)."""

    name: str
    kind: str
    role: str
    dtype: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter; a frozen parameter has no gradient and no update."""

    name: str
    dtype: str
    shape: tuple[int | str | None, ...] | None
    bytes: int
    gradient: str | None
    gradient_dtype: str | None
    states: tuple[OptimizerState, ...]
    mode: str
    why: str
    optimizer: str


@dataclass(frozen=True, slots=True)
class OptimizerEntry:
    """A rule, the constants (None: not found in the graph), and the updated parameters."""

    name: str
    recognised: bool
    hyper: Mapping[str, Hyper]
    states: tuple[str, ...]
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PhaseCount:
    """The nodes of one phase, and how many of each operator, most frequent first."""

    phase: str
    nodes: int
    operators: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Casts:
    """Low precision: casts of parameters down, and of gradients up; ``gradients``: how many gradients are narrow."""

    parameters: int
    gradients: int
    dtypes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DeviceConfiguration:
    """A device configuration of the file; ``specs``: sharding specs of nodes, ``stages``: pipeline stages."""

    name: str
    devices: int
    specs: int
    stages: int


@dataclass(frozen=True, slots=True)
class Inspection(HtmlTable):
    """Description of a training step."""

    file: str
    sha256: str
    file_bytes: int
    opsets: Mapping[str, int]
    loss: str
    phases: tuple[PhaseCount, ...]
    parameters: tuple[Parameter, ...]
    optimizers: tuple[OptimizerEntry, ...]
    controls: Controls
    casts: Casts
    batch: tuple[NamedValue, ...]
    hyper: tuple[NamedValue, ...]
    statistics: tuple[NamedValue, ...]
    scalars: tuple[NamedValue, ...]
    metrics: tuple[NamedValue, ...]
    bytes: Mapping[str, int]
    couplings: tuple[Coupling, ...]
    """Places at which the step of several ranks differs from one large batch's."""
    mappings: tuple[RegionMapping, ...]
    """Calls along axes whose ranks see the same samples, with their duals."""
    notes: tuple[str, ...]
    configurations: tuple[DeviceConfiguration, ...] = ()
    more_losses: tuple[str, ...] = ()
    draws: Mapping[str, Draw] = field(default_factory=dict)
    """Input of random numbers -> what a run draws it from."""
    defaults: Mapping[str, DefaultValue] = field(default_factory=dict)
    """Hyper-parameter -> its value where a run sets none."""

    def __repr__(self) -> str:
        names = ", ".join(dict.fromkeys(optimizer.name for optimizer in self.optimizers))
        return f"<Inspection {self.file}: {len(self.parameters)} parameters, {names or 'no optimizer'}>"

    def to_json(self) -> dict[str, Any]:
        record: dict[str, Any] = {"format": "gopt-inspection/1", "what": "model"}
        couplings = [coupling.to_json() for coupling in self.couplings]
        document = asdict(self)
        if not self.more_losses:
            del document["more_losses"]
        for key, table in (("draws", self.draws), ("defaults", self.defaults)):
            if table:
                document[key] = {name: to_document(entry) for name, entry in table.items()}
            else:
                del document[key]
        return record | document | {"couplings": couplings, "mappings": [e.to_json() for e in self.mappings]}


def inspect_model(source: Source, advance: ProgressCallback = no_progress) -> Inspection:
    """Describe the step of a source, left unchanged."""
    advance("finding updates")
    training = source.training
    graph, notes = training.graph, list(training.notes)
    recogniser = Recogniser(training)
    subgraphs: dict[str, UpdateSubgraph] = {}
    try:
        subgraphs = find_updates(training, whole_accumulators=False).subgraphs
    except UnsupportedError as error:
        notes.append(f"it cannot be sharded: {error.message}")
    by_name = {}
    for number, (name, subgraph) in enumerate(subgraphs.items(), 1):
        by_name[name] = recogniser.rule(subgraph)
        advance("recognising optimizers", number, len(subgraphs))
    rules = _directed(by_name)
    advance("looking for couplings of samples")
    for name, tensor in graph.initializers.items():
        if tensor.external:
            notes.append(f"values in external data, {name} first")
            break
    couplings = find_couplings(training)
    notes += coupling_notes(couplings)
    return Inspection(
        file=source.name,
        sha256=source.sha256,
        file_bytes=source.nbytes,
        opsets=opsets(graph),
        loss=training.loss,
        more_losses=training.losses[1:],
        phases=_phases(training),
        parameters=_parameters(training, subgraphs, rules),
        optimizers=_optimizers(rules),
        controls=find_controls(recogniser, rules.values()),
        casts=_casts(training),
        batch=_named(training, training.batch),
        draws=dict(training.draws),
        defaults=dict(training.defaults),
        hyper=_named(training, training.hyper),
        statistics=_named(training, [s.tensor for s in training.states if s.kind is StateKind.STATISTIC]),
        scalars=_named(training, [s.tensor for s in training.states if s.kind is StateKind.SCALAR]),
        metrics=_named(training, training.metrics),
        bytes=_bytes(training),
        couplings=couplings,
        mappings=find_region_mappings(training),
        notes=tuple(notes),
        configurations=tuple(
            DeviceConfiguration(
                configuration.name, configuration.devices, len(configuration.specs), configuration.stages
            )
            for configuration in read_configurations(graph)
        ),
    )


def _typed(type: TensorType) -> tuple[str, tuple[int | str | None, ...] | None, int]:
    return type.dtype, type.shape, type.nbytes


def _named(training: TrainingGraph, names: Sequence[str]) -> tuple[NamedValue, ...]:
    return tuple(NamedValue(name, *_typed(training.graph.type_of(name))) for name in names)


def _phases(training: TrainingGraph) -> tuple[PhaseCount, ...]:
    counts: dict[Phase, dict[str, int]] = {phase: {} for phase in Phase}
    for node in training.graph.nodes:
        assert node.phase is not None
        operators = counts[node.phase]
        operators[node.op_type] = operators.get(node.op_type, 0) + 1
    return tuple(
        PhaseCount(phase.value, sum(ops.values()), dict(sorted(ops.items(), key=lambda item: (-item[1], item[0]))))
        for phase, ops in counts.items()
    )


def _parameters(
    training: TrainingGraph, subgraphs: Mapping[str, UpdateSubgraph], rules: Mapping[str, Rule]
) -> tuple[Parameter, ...]:
    types = training.graph.types
    owned: dict[str, list[tuple[str, StateKind]]] = {}
    for state in training.states:
        if state.of is not None and state.kind is not StateKind.PARAMETER:
            owned.setdefault(state.of, []).append((state.tensor, state.kind))
    result = []
    for state in training.parameters:
        name = state.tensor
        gradient, subgraph, rule = training.gradients.get(name), subgraphs.get(name), rules.get(name)
        roles = iter(rule.roles if rule else ())
        states_of = tuple(
            OptimizerState(
                state, kind.value, next(roles, "") if kind is StateKind.OPTIMIZER_STATE else "summed gradient",
                types[state].dtype, types[state].nbytes,
            )
            for state, kind in owned.get(name, ())
        )  # fmt: skip
        mode, why = ("", "frozen: no gradient") if gradient is None else ("", "")
        if subgraph is not None:
            mode, why = subgraph.mode.value, subgraph.why
        result.append(
            Parameter(
                name, *_typed(types[name]), gradient, training.graph.type_of(gradient).dtype if gradient else None,
                states_of, mode, why, rule.name if rule else "",
            )
        )  # fmt: skip
    return tuple(result)


def _directed(rules: Mapping[str, Rule]) -> dict[str, Rule]:
    """Return the rules, with ``maximize`` set for rules that ascend the gradient.

    For a single parameter, or a few among others, the sign may belong to the backward: ``maximize`` is then None."""
    recognised = [rule for rule in rules.values() if rule.recognised]
    sure = True if len(recognised) > 1 and all(rule.flipped for rule in recognised) else None
    return {
        name: replace(rule, hyper=rule.hyper | {"maximize": sure}) if rule.flipped and rule.recognised else rule
        for name, rule in rules.items()
    }


def _optimizers(rules: Mapping[str, Rule]) -> tuple[OptimizerEntry, ...]:
    groups: dict[str, list[str]] = {}
    distinct: dict[str, Rule] = {}
    for name, rule in rules.items():
        key = repr((rule.name, dict(rule.hyper), rule.roles))
        groups.setdefault(key, []).append(name)
        distinct.setdefault(key, rule)
    return tuple(
        OptimizerEntry(rule.name, rule.recognised, dict(rule.hyper), rule.roles, tuple(groups[key]))
        for key, rule in distinct.items()
    )


def _casts(training: TrainingGraph) -> Casts:
    graph = training.graph
    parameters = {state.tensor for state in training.parameters}
    gradients = set(training.gradients.values())
    down: dict[str, str] = {}
    up: dict[str, str] = {}
    for node in graph.nodes:
        if not node.is_in(CASTS):
            continue
        source, target = node.inputs[0], graph.type_of(node.outputs[0]).dtype
        if source in parameters and target in LOW_PRECISION:
            down[source] = target
        elif source in gradients and graph.type_of(source).dtype in LOW_PRECISION:
            up[source] = graph.type_of(source).dtype
    return Casts(len(down), len(up), tuple(sorted({*down.values(), *up.values()})))


def _bytes(training: TrainingGraph) -> dict[str, int]:
    graph = training.graph
    total = {kind.value: 0 for kind in StateKind}
    for state in training.states:
        total[state.kind.value] += graph.types[state.tensor].nbytes
    states = {state.tensor for state in training.states}
    total["gradient"] = sum(graph.type_of(name).nbytes for name in set(training.gradients.values()))
    total["batch"] = sum(graph.type_of(name).nbytes for name in training.batch)
    total["constant"] = sum(t.nbytes for name, t in graph.initializers.items() if name not in states)
    return total
