"""The Python API: what the commands do, for programs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gopt import documents
from gopt.analysis.look_through import declare_axes
from gopt.analysis.role_map import RoleMap
from gopt.analysis.roles import recover
from gopt.analysis.source_collectives import adopt_source_collectives
from gopt.analysis.training import TrainingGraph
from gopt.artifact.manifest import MANIFEST_FILE, Manifest
from gopt.artifact.path_diagnostics import model_is_folder
from gopt.artifact.report import PassRun
from gopt.artifact.report_record import REPORT_FILE, ChoiceEntry, Report, SourceEntry
from gopt.disk.files import create, digest_of, write_new
from gopt.errors import InputError, OptionError, UnsupportedError
from gopt.garbage import gc_paused
from gopt.importers.collectives import recognise
from gopt.importers.training_info import Flattened, flatten
from gopt.ir.external_data import load_state, naming
from gopt.ir.graph import Graph
from gopt.ir.load import graph_of, read_file
from gopt.ir.load import load as load_graph
from gopt.lower.invariants import Check
from gopt.lower.lowering import lower
from gopt.lower.rank_graph import RankGraph, RankState
from gopt.mesh import Mesh, axis_kinds
from gopt.notebook import HtmlTable
from gopt.opaque import schema_roles
from gopt.opaque.expand import expand
from gopt.parameter_server.options import SplitOptions
from gopt.parameter_server.split import SplitStep, split_step
from gopt.pipeline import Pipeline, build_pipeline
from gopt.preflight import check_axes, check_mesh, check_passes, check_states
from gopt.program import SpmdProgram

ROLES = "gopt.roles"
"""The metadata entry that says which values are states, parameters and the batch."""


@dataclass(slots=True)
class Source(HtmlTable):
    """A training step as loaded, with its roles."""

    training: TrainingGraph
    name: str
    sha256: str
    nbytes: int
    roles: RoleMap = field(default_factory=RoleMap)
    """The user's map of roles: roles are found again where collectives of the source are adopted."""

    def __repr__(self) -> str:
        training = self.training
        parts = (
            f"{len(training.graph.nodes)} nodes, {len(training.parameters)} parameters, {len(training.states)} states"
        )
        return f"<Source {self.name}: {parts}>"

    def html_rows(self) -> Iterable[tuple[str, object]]:
        entry = self.entry()
        return [("file", self.name), ("bytes", self.nbytes), ("loss", self.training.loss), *entry.counts.items()]

    def entry(self) -> SourceEntry:
        """What the report says of the source."""
        graph = self.training.graph
        kinds: dict[str, int] = {}
        for state in self.training.states:
            kinds[state.kind.value] = kinds.get(state.kind.value, 0) + 1
        nodes = len(graph.file_nodes or graph.nodes)
        counts = {"nodes": nodes, "inputs": len(graph.inputs), "outputs": len(graph.outputs), **kinds}
        return SourceEntry(self.name, self.sha256, self.nbytes, counts)


@gc_paused()
def load(
    path: str | os.PathLike[str],
    *,
    roles: RoleMap = RoleMap(),
    state: str | os.PathLike[str] | None = None,
    group_types: Mapping[str, str] | None = None,
    axes: Mapping[str, str] | None = None,
) -> Source:
    """Read a training step and recover its roles; ``state`` supplies values where the file has none.

    ``group_types`` says which mesh axes the integer ``group_type`` of collectives in the source means, such as
    ``{"1": "shard", "4": "tp"}``; ``axes`` what ranks along axes of other names see, ``data`` or ``replica``.
    Raises InputError, UnsupportedError (contract sections 2 and 3).

    >>> gopt.load("fixtures/mlp_adamw.onnx").training.loss
    'loss'
    """
    data = Path(path)
    if data.is_dir():
        raise model_is_folder(data)
    try:
        graph, bound = expand(load_graph(data)), None
    except UnsupportedError:
        bound = _flattened(data)
        if bound is None:
            raise
        graph = expand(graph_of(bound.model, data))
        roles = replace(roles, loss=roles.loss or bound.loss, states={**bound.states, **roles.states})
    recognise(graph, group_types or {})
    declare_axes(graph, axis_kinds(axes or {}))
    roles = with_stored_roles(graph, roles, data.name)
    training = read_roles(graph, roles)
    training.notes += bound.notes if bound is not None else ()
    roles = with_schema_roles(graph, roles)
    if state is not None:
        _supply(training, Path(state))
    return Source(training, data.name, digest_of(data).hex(), data.stat().st_size, roles)


def _flattened(path: Path) -> Flattened | None:
    """The step of a file with training_info, None for other files; raises InputError, UnsupportedError."""
    from gopt.autodiff.backward import expand_gradient

    with naming(str(path)):
        model = read_file(str(path)).model
        return flatten(model, expand_gradient) if model.training_info else None


def as_source(given: Source | str | os.PathLike[str]) -> Source:
    """A source as it is, or the file read."""
    return given if isinstance(given, Source) else load(given)


def with_stored_roles(graph: Graph, roles: RoleMap, name: str) -> RoleMap:
    """The user's map over the one that ``gopt export`` and ``gopt derive`` leave in a model's metadata.

    The graph loses that entry: passes rename what it names. Raises InputError for an entry that does not fit.
    """
    if ROLES not in graph.metadata:
        return roles
    stored = stored_roles(graph, name)
    del graph.metadata[ROLES]
    kept = [entry for entry in graph.header.metadata_props if entry.key != ROLES]
    del graph.header.metadata_props[:]
    graph.header.metadata_props.extend(kept)
    return RoleMap(
        roles.loss or stored.loss,
        {**stored.states, **roles.states},
        {**stored.params, **roles.params},
        [*roles.batch, *(name for name in stored.batch if name not in roles.batch)],
        roles.shared or stored.shared,
    )


def with_schema_roles(graph: Graph, roles: RoleMap) -> RoleMap:
    """The user's map, and what the schemas of opaque operators say; data flow settles the rest."""
    taken = {*roles.states, *roles.states.values()}
    schema = {old: new for old, new in schema_roles.pairs(graph).items() if not {old, new} & taken}
    return replace(roles, states={**schema, **roles.states})


def read_roles(graph: Graph, roles: RoleMap) -> TrainingGraph:
    """Roles of an expanded graph: the user's map, then the schemas of its opaque operators, then the data flow."""
    training = recover(graph, with_schema_roles(graph, roles))
    check_states(training)
    training.notes += schema_roles.notes(graph)
    return training


def _supply(training: TrainingGraph, path: Path) -> None:
    graph = training.graph
    known = training.state_of()
    given = load_state(path)
    for name in given:
        if name not in known:
            raise InputError(f"{path}: {name!r} is not a state of the model")
    for name, tensor in given.items():
        if tensor.type != graph.types[name]:
            raise InputError(f"{path}: {name!r} is {tensor.type}, the model says {graph.types[name]}")
        graph.initializers.setdefault(name, tensor)


@dataclass(slots=True, weakref_slot=True)
class Sharded(HtmlTable):
    """A sharded step, checked: the rank-independent graph, and each phase of each rank made from it."""

    source: Source
    program: SpmdProgram
    ranks: list[RankGraph]
    common: list[RankState]
    checks: list[Check]
    choice: ChoiceEntry | None = None
    """What ``--auto`` chose and why; None without it."""

    def __repr__(self) -> str:
        ranks = len({each.rank for each in self.ranks})
        return f"<Sharded {self.source.name} on {self.program.mesh}: {ranks} ranks, {len(self.checks)} checks passed>"

    def html_rows(self) -> Iterable[tuple[str, object]]:
        passes = ", ".join(each.record.name for each in self.ran)
        return [("source", self.source.name), ("mesh", str(self.program.mesh)), ("passes", passes)]

    @property
    def ran(self) -> list[PassRun]:
        """The passes in the order in which they ran, with what they report."""
        return self.program.passes

    def report(self) -> Report:
        """The report as it is written."""
        from gopt.artifact.report_builder import build_report

        report = build_report(self.program, self.source.entry(), self.ran, self.checks, self.common, self.ranks)
        return replace(report, choice=self.choice)

    def manifest(self) -> Manifest:
        """The manifest as it is written."""
        from gopt.artifact.manifest_builder import build_manifest

        return build_manifest(self.program, self.common, self.ranks)

    @gc_paused()
    def write(
        self, folder: str | os.PathLike[str], *, force: bool = False, jobs: int = 1, annotate: bool = False
    ) -> Report:
        """Write the output folder, whole or not at all, ``jobs`` rank files at a time; returns the report.

        ``annotate``: the kept source says in sharding specs of ONNX IR 11 which rank holds what part.
        """
        from gopt.artifact import ranks, serialize, states_file
        from gopt.artifact.output_folder import output_folder

        report = self.report()
        stored = states_file.plan_states_file(self.program)
        with output_folder(Path(folder), force=force) as staged:
            stored.write(staged / states_file.STATES_FILE)
            ranks.write_ranks(staged, self.program, stored, self.common, self.ranks, jobs)
            source = serialize.source_model(self.program, stored, roles_text(self.program.source), annotate=annotate)
            write_new(staged / serialize.SOURCE_FILE, source)
            with create(staged / REPORT_FILE) as file:
                file.writelines(piece.encode() for piece in report.pieces())
            write_new(staged / MANIFEST_FILE, self.manifest().text().encode())
        return report


@dataclass(frozen=True, slots=True)
class Split(HtmlTable):
    """A step shared out between trainers and servers, checked."""

    source: Source
    step: SplitStep

    def __repr__(self) -> str:
        return f"<Split {self.source.name}: {self.step}>"

    def html_rows(self) -> Iterable[tuple[str, object]]:
        return [("source", self.source.name), ("split", str(self.step))]

    def manifest(self) -> Manifest:
        """The manifest as it is written."""
        from gopt.parameter_server.folder import split_manifest

        return split_manifest(self.step)

    def report(self) -> Report:
        """The report as it is written."""
        from gopt.parameter_server.report import build_split_report

        return build_split_report(self.step, self.source.entry())

    @gc_paused()
    def write(self, folder: str | os.PathLike[str], *, force: bool = False, jobs: int = 1) -> Report:
        """Write the output folder, whole or not at all, ``jobs`` files at a time; returns the report."""
        from gopt.parameter_server.folder import write_split

        roles = roles_text(self.step.training)
        return write_split(self.step, folder, self.source.entry(), roles, force=force, jobs=jobs)


@gc_paused()
def split(source: Source | str | os.PathLike[str], options: SplitOptions) -> Split:
    """Split a step between trainers and servers and check the result; nothing is written.

    ``source`` may be a file. Raises OptionError and UnsupportedError for what cannot be split so.

    >>> gopt.split("fixtures/mlp_adamw.onnx", gopt.SplitOptions(trainers=2, servers=1)).source.name
    'mlp_adamw.onnx'
    """
    source = as_source(source)
    return Split(source, split_step(source.training, options))


def roles_text(training: TrainingGraph) -> str:
    """The roles as metadata of the kept source: after sharding they cannot be recovered."""
    record = {
        "loss": training.loss,
        "states": {state.tensor: state.updated for state in training.states},
        "params": training.gradients,
        "batch": training.batch,
    }
    if training.shared:
        record["shared"] = list(training.shared.values())
    return json.dumps(record, ensure_ascii=False)


def stored_roles(graph: Graph, name: str | os.PathLike[str]) -> RoleMap:
    """The roles in the metadata of a kept source; ``name`` is its file. Raises InputError."""
    text = graph.metadata.get(ROLES)
    if text is None:
        raise InputError(f"{name} has no roles in its metadata", "take the one that gopt shard wrote")
    record = documents.parse_json(text, documents.ROLES, f"{name}: gopt.roles")
    roles = RoleMap(record["loss"], record["states"], record["params"], record["batch"], record.get("shared", ()))
    try:
        roles.check(graph)
    except OptionError as error:
        raise InputError(f"{name}: gopt.roles: {error.message}") from None
    return roles


def load_stored_source(graph: Graph, roles: RoleMap, name: str | os.PathLike[str]) -> TrainingGraph:
    """The kept source ``name`` with its stored roles; raises InputError where they do not fit the graph."""
    try:
        return recover(graph, roles)
    except OptionError as error:
        raise InputError(f"{name}: gopt.roles: {error.message}", "take the one that gopt shard wrote") from None


def on_mesh(source: Source, mesh: Mesh) -> TrainingGraph:
    """The step as a mesh shards it: collectives of the source that gopt makes itself are adopted.

    Raises OptionError and UnsupportedError for a mesh that has no effect, or that gopt or the step does not support.
    """
    check_mesh(mesh)
    training = adopt_source_collectives(source.training, source.roles, mesh)
    check_axes(mesh, training)
    return training


@gc_paused()
def shard(
    source: Source | str | os.PathLike[str],
    mesh: Mesh | int | str,
    *,
    stage: int = 2,
    partition: str = "flat",
    bucket_mb: float | None = None,
    statistics: str = "mean",
    loss_reduction: str = "mean",
    accumulate: int = 1,
    pipeline: Pipeline | None = None,
    only_ranks: Sequence[int] | None = None,
) -> Sharded:
    """Shard a step for every rank of a mesh and check the result; nothing is written.

    ``source`` may be a file. ``mesh``: a Mesh, its text (``dp=2,shard=4``), or a number of ranks along ``shard``.
    ``accumulate`` micro-steps make one update.
    ``loss_reduction`` is mean, sum or weighted:VALUE. ``pipeline`` replaces the default one and its options.
    Raises InputError, OptionError and UnsupportedError.

    >>> gopt.shard("fixtures/mlp_adamw.onnx", "dp=2,shard=2", stage=1)
    <Sharded mlp_adamw.onnx on dp=2,shard=2: 4 ranks, 7 checks passed>
    """
    source, mesh = as_source(source), Mesh.of(mesh)
    training = on_mesh(source, mesh)
    if pipeline is None:
        pipeline = build_pipeline(
            defaults={
                "shard": {
                    "stage": stage,
                    "partition": partition,
                    "bucket-mb": bucket_mb,
                    "loss-reduction": loss_reduction,
                },
                "statistics": {"statistics": statistics},
                "fuse-collectives": {"cap-mb": bucket_mb},
            }
        )
    if accumulate < 1:
        raise OptionError(f"--accumulate cannot be {accumulate}", "it is the number of micro-steps of one update")
    program = SpmdProgram.start(training, mesh, accumulate)
    check_passes(program, [stage.spec.name for stage in pipeline.stages])
    pipeline.run(program)
    wanted = range(mesh.ranks) if only_ranks is None else only_ranks
    if any(not 0 <= rank < mesh.ranks for rank in wanted):
        raise OptionError(f"--only-ranks names rank {max(wanted)}, the mesh has {mesh.ranks} ranks")
    lowered = lower(program, wanted)
    return Sharded(source, program, lowered.ranks, lowered.common, lowered.checks)
