"""A training step as loaded: its graph and roles."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from gopt.analysis.counters import start_counters
from gopt.analysis.look_through import declare_axes
from gopt.analysis.role_map import RoleMap
from gopt.analysis.roles import recover
from gopt.analysis.sample_counters import OpenCountError
from gopt.analysis.source_collectives import adopt_source_collectives
from gopt.analysis.startup import why_unusable
from gopt.analysis.stored_roles import with_stored_roles
from gopt.analysis.training import TrainingGraph
from gopt.artifact.path_diagnostics import model_is_folder
from gopt.artifact.report_record import SourceEntry
from gopt.errors import InputError
from gopt.importers.collectives import recognise
from gopt.importers.load import NO_STARTUP, read_step
from gopt.ir.external_data import load_state
from gopt.ir.graph import Graph
from gopt.ir.opaque import schema_roles
from gopt.ir.opaque.expand import expand
from gopt.options.types import checked
from gopt.passes.preflight import check_axes, check_states
from gopt.records.mesh import Mesh, axis_kinds
from gopt.system.garbage import gc_paused
from gopt.system.progress import ProgressCallback, no_progress
from gopt.text.notebook import HtmlTable

Found = TypeVar("Found")


@dataclass(slots=True)
class Source(HtmlTable):
    """A training step as loaded, with its roles."""

    training: TrainingGraph
    name: str
    sha256: str
    nbytes: int
    roles: RoleMap = field(default_factory=RoleMap)
    """The user's map of roles: roles are found again where collectives of the source are adopted."""
    startup: Graph | None = field(default=None, repr=False)
    """A graph without inputs that computes first values, an output of the same name for each; None: the stored values
    are the first ones."""

    def __repr__(self) -> str:
        training = self.training
        parts = (
            f"{len(training.graph.nodes)} nodes, {len(training.parameters)} parameters, {len(training.states)} states"
        )
        return f"<Source {self.name}: {parts}>"

    def html_rows(self) -> Iterable[tuple[str, object]]:
        entry = self.entry()
        return [
            ("file", self.name),
            ("bytes", self.nbytes),
            ("loss", ", ".join(self.training.losses)),
            *entry.counts.items(),
        ]

    @property
    def rank_startup(self) -> Graph | None:
        """The start-up graph, where ranks can run parts of it; None: they start from the stored values."""
        usable = self.startup is not None and not why_unusable(self.startup, self.training)
        return self.startup if usable else None

    def entry(self) -> SourceEntry:
        """The report's entry of the source."""
        graph = self.training.graph
        kinds: dict[str, int] = {}
        for state in self.training.states:
            kinds[state.kind.value] = kinds.get(state.kind.value, 0) + 1
        nodes = len(graph.file_nodes or graph.nodes)
        counts = {"nodes": nodes, "inputs": len(graph.inputs), "outputs": len(graph.outputs), **kinds}
        return SourceEntry(self.name, self.sha256, self.nbytes, counts)


@gc_paused()
@checked
def load(
    path: str | os.PathLike[str],
    *,
    roles: RoleMap = RoleMap(),
    state: str | os.PathLike[str] | None = None,
    group_types: Mapping[str, str] | None = None,
    axes: Mapping[str, str] | None = None,
    advance: ProgressCallback = no_progress,
) -> Source:
    """Read a training step and recover its roles; ``state`` supplies values where the file has none.

    ``group_types`` says which mesh axes the integer ``group_type`` of collectives in the source means, such as
    ``{"1": "shard", "4": "tp"}``; ``axes`` what ranks along axes of other names see, ``data`` or ``replica``.
    Raises InputError, UnsupportedError (contract sections 2 and 3).

    >>> gopt.load("fixtures/mlp_adamw.onnx").training.loss
    'loss'
    """
    data = Path(path)
    advance("reading the model")
    file = read_step(data)
    if file is None:
        raise model_is_folder(data)
    advance("finding roles")
    training, roles = find_roles(file.graph, data.name, roles, group_types, axes)
    training.notes += file.notes
    if file.startup is not None:
        _note_startup(file.startup, training)
    if state is not None:
        _supply(training, Path(state))
    start_counters(training)
    return Source(training, data.name, file.digest().hex(), file.nbytes, roles, file.startup)


def _note_startup(startup: Graph, training: TrainingGraph) -> None:
    """Note whether ranks run a start-up graph."""
    why = why_unusable(startup, training)
    used = f"training_info computes first values of {len(startup.outputs)} states: start-up graphs"
    training.notes.append(f"{NO_STARTUP}: {why}" if why else used)


def as_source(given: Source | str | os.PathLike[str]) -> Source:
    """A source as it is, or the file read."""
    return given if isinstance(given, Source) else load(given)


def alone(find: Callable[[RoleMap], Found]) -> Found:
    """Call ``find`` for a step that no ranks share: it is the same there whether states count samples or steps."""
    answers: dict[str, str] = {}
    while True:
        try:
            return find(RoleMap(statistics=answers))
        except OpenCountError as error:
            if error.state in answers:
                raise
            answers[error.state] = "mean"


def find_roles(
    graph: Graph,
    name: str,
    roles: RoleMap = RoleMap(),
    group_types: Mapping[str, str] | None = None,
    axes: Mapping[str, str] | None = None,
) -> tuple[TrainingGraph, RoleMap]:
    """The step of a loaded graph, which is changed, and the map of roles in effect; ``name``: the file.

    The rest is as in ``load``.
    """
    graph = expand(graph)
    recognise(graph, group_types or {})
    declare_axes(graph, axis_kinds(axes or {}))
    roles = with_schema_roles(graph, with_stored_roles(graph, roles, name))
    return _recovered(graph, roles), roles


def with_schema_roles(graph: Graph, roles: RoleMap) -> RoleMap:
    """The user's map, and the schemas of opaque operators; data flow settles the rest."""
    states = {*roles.states, *roles.states.values()}
    schema = {old: new for old, new in schema_roles.pairs(graph).items() if not {old, new} & states}
    return replace(roles, states={**schema, **roles.states})


def read_roles(graph: Graph, roles: RoleMap) -> TrainingGraph:
    """Roles of an expanded graph: the user's map, then the schemas of opaque operators, then the data flow."""
    return _recovered(graph, with_schema_roles(graph, roles))


def _recovered(graph: Graph, roles: RoleMap) -> TrainingGraph:
    training = recover(graph, roles)
    check_states(training)
    training.notes += schema_roles.notes(graph)
    return training


def _supply(training: TrainingGraph, path: Path) -> None:
    graph = training.graph
    states = training.state_of()
    state = load_state(path)
    for name in state:
        if name not in states:
            raise InputError(
                f"{path}: {name!r} is not a state of the model",
                "gopt inspect lists the states; leave other tensors out of the file",
            )
    for name, tensor in state.items():
        if tensor.type != graph.types[name]:
            raise InputError(
                f"{path}: {name!r} is {tensor.type}, the model says {graph.types[name]}",
                "give the state the type and shape that the model declares",
            )
        graph.initializers.setdefault(name, tensor)


def with_statistics(source: Source, named: Mapping[str, str]) -> Source:
    """The source with more states named as statistics, and how ranks combine them: its roles are found again."""
    if all(source.roles.statistics.get(name) == rule for name, rule in named.items()):
        return source
    roles = replace(source.roles, statistics={**source.roles.statistics, **named})
    training = recover(source.training.graph, roles)
    training.notes = source.training.notes
    return replace(source, training=training, roles=roles)


def on_mesh(source: Source, mesh: Mesh) -> TrainingGraph:
    """The step as a mesh shards it: collectives of the source that gopt makes itself are adopted.

    Raises OptionError and UnsupportedError for a mesh that has no effect, or that gopt or the step does not support.
    """
    training = adopt_source_collectives(source.training, source.roles, mesh)
    check_axes(mesh, training)
    return training
