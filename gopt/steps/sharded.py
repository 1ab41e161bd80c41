"""A sharded step: made for a mesh, checked, and written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from gopt.analysis.coupling import refuse_unlike
from gopt.analysis.stored_roles import roles_text
from gopt.analysis.training import TrainingGraph
from gopt.artifact.kinds import KIND_FILES, Kinds
from gopt.artifact.manifest import MANIFEST_FILE, Manifest
from gopt.artifact.report_record import ChoiceEntry, ProofEntry, Report
from gopt.errors import OptionError
from gopt.ir.graph import Graph
from gopt.lower.lowering import lower
from gopt.lower.rank_graph import RankGraph, RankState
from gopt.options.records import changed
from gopt.options.types import checked
from gopt.passes.preflight import check_passes, check_stage
from gopt.records.checks import Check
from gopt.records.mesh import Mesh
from gopt.spmd.pass_records import PassRun
from gopt.spmd.program import SpmdProgram
from gopt.spmd.stage_plan import SCHEDULE_FILE
from gopt.steps.shard_options import ShardKeywords, ShardOptions
from gopt.steps.source import Source, as_source, on_mesh, with_statistics
from gopt.system import background
from gopt.system.background import Task
from gopt.system.files import write_new
from gopt.system.garbage import gc_paused
from gopt.system.progress import ProgressCallback, no_progress
from gopt.text.notebook import HtmlTable

if TYPE_CHECKING:
    from gopt.artifact.report_builder import RemovedItems
    from gopt.artifact.startup_graphs import StartupFile
    from gopt.artifact.states_file import StatesFile


@dataclass(slots=True, weakref_slot=True)
class Sharded(HtmlTable):
    """A sharded step, checked: the rank-independent graph, and each phase of each rank made from it."""

    source: Source
    program: SpmdProgram
    ranks: list[RankGraph]
    common: list[RankState]
    checks: list[Check]
    removed: Task[RemovedItems] = field(repr=False)
    """The removed operators and variables, as the report lists them."""
    kinds: Callable[[int], list[RankGraph]] = field(repr=False)
    """The graphs of any rank of the mesh, with the peers of another rank."""
    prover: Callable[[Path, Manifest, TrainingGraph, Kinds | None], ProofEntry] | None = field(default=None, repr=False)
    """Proves the files of ranks, which must not be wrong, before the folder is there; None without a proof."""
    choice: ChoiceEntry | None = None
    """The choice of ``--auto`` and its reason; None without it."""

    def __repr__(self) -> str:
        ranks = len({rank.rank for rank in self.ranks})
        return f"<Sharded {self.source.name} on {self.program.mesh}: {ranks} ranks, {len(self.checks)} checks passed>"

    def html_rows(self) -> Iterable[tuple[str, object]]:
        passes = ", ".join(item.record.name for item in self.ran)
        return [("source", self.source.name), ("mesh", str(self.program.mesh)), ("passes", passes)]

    @property
    def ran(self) -> list[PassRun]:
        """The passes in the order of their runs, with their reports."""
        return self.program.passes

    def report(self) -> Report:
        """The report as it is written."""
        from gopt.artifact.report_builder import build_report

        report = build_report(self.program, self.source.entry(), self.removed, self.checks, self.common, self.ranks)
        return replace(report, choice=self.choice)

    def manifest(self) -> Manifest:
        """The manifest as it is written."""
        from gopt.artifact import startup_graphs
        from gopt.artifact.manifest_builder import build_manifest

        manifest = build_manifest(self.program, self.common, self.ranks)
        startup = self.source.rank_startup
        if startup is None:
            return manifest
        return startup_graphs.with_startup(manifest, self._startup_files(startup))

    def _startup_files(self, startup: Graph) -> list[StartupFile]:
        from gopt.artifact.startup_graphs import files_of_ranks

        return files_of_ranks(startup, self.program.mesh, self.common, self.ranks)

    def explain(self, value: str) -> list[str]:
        """Where the placement of a value came from, a line for each step; raises OptionError for an unknown value."""
        lines = [line for explanation in self.program.explanations for line in explanation.lines(value)]
        return lines or ["no axis of the mesh splits the computation: every value is whole"]

    @gc_paused()
    @checked
    def write(
        self,
        folder: str | os.PathLike[str],
        *,
        force: bool = False,
        jobs: int | None = None,
        annotate: bool = False,
        advance: ProgressCallback = no_progress,
    ) -> Report:
        """Write the output folder, whole or not at all; returns the report.

        ``jobs``: as in ``Split.write``. Here this process does all that is left: ``gopt shard --jobs`` shares out the
        work before it.
        ``annotate``: the kept source says in sharding specs of ONNX IR 11 which rank holds what part.
        """
        with background.processes(jobs) if jobs is not None else nullcontext():
            return self._write(Path(folder), advance, force=force, annotate=annotate)

    def _write(self, folder: Path, advance: ProgressCallback, *, force: bool, annotate: bool) -> Report:
        from gopt.artifact import annotations, ranks, serialize, startup_graphs, states_file
        from gopt.artifact.integrity import Inventory, sealed
        from gopt.artifact.output_folder import output_folder
        from gopt.artifact.report_check import digest_of_ranks

        stored = states_file.plan_states_file(self.program)
        roles = roles_text(self.program.source)
        with output_folder(folder, force=force) as staged:
            advance("writing values")
            files = Inventory(staged)
            stored.write(files)
            ranks.write_ranks(files, self.program, stored, self.common, self.ranks, advance=advance)
            if self.program.stages is not None and (text := self.program.stages.schedule_text):
                with files.create(SCHEDULE_FILE) as file:
                    file.write(text.encode())
            startup = self.source.rank_startup
            if startup is not None:
                types, start_files = self.program.source.graph.types, self._startup_files(startup)
                startup_graphs.write_startup(files, startup, types, stored, start_files)
            source = serialize.source_model(self.program, stored, roles, annotate=annotate)
            with files.create(serialize.SOURCE_FILE) as file:
                file.writelines(source)
            advance("building the report")  # last: parts of it are found beside the rest
            note = annotations.untold(self.program) if annotate else ""
            manifest = replace(self.manifest(), files=dict(files.files))
            proof = self._proof(staged, manifest, stored)
            report = self.report()
            report = replace(report, notes=(*report.notes, note)) if note else report
            text = manifest.bare.text()
            if proof is not None:
                advance("proving the ranks")
                report = replace(report, proof=replace(proof.result(), files=digest_of_ranks(manifest, text)))
            for path in staged.glob(KIND_FILES):
                path.unlink()
            report.write(files)
            write_new(staged / MANIFEST_FILE, sealed(text, files.files).encode())
        return report

    def _proof(self, folder: Path, manifest: Manifest, values: StatesFile) -> Task[ProofEntry] | None:
        """The proof of the ranks' files in a folder, and of all other ranks by their kinds, beside other work."""
        prover, training = self.prover, self.program.source
        if prover is None:
            return None
        kinds = self._kinds(folder, manifest, values) if len(manifest.ranks) < self.program.mesh.ranks else None
        return background.begin(lambda: prover(folder, manifest, training, kinds), len(training.graph.nodes))

    def _kinds(self, folder: Path, manifest: Manifest, values: StatesFile) -> Kinds:
        """The files of all kinds of ranks in a folder, and the entries of all ranks."""
        from gopt.artifact import ranks
        from gopt.artifact.integrity import Inventory
        from gopt.artifact.manifest_builder import rank_entries

        graphs = {rank: self.kinds(rank) for rank in range(self.program.mesh.ranks)}
        files = ranks.write_kinds(Inventory(folder), self.program, values, self.common, graphs)
        written = {entry.rank: entry for entry in manifest.ranks}
        entries = tuple(written.get(of.rank, of) for of in rank_entries(self.program, graphs, files))
        unwritten = ((rank, parts) for rank, parts in graphs.items() if rank not in written)
        return Kinds(entries, {rank: {part.phase.name: part.rank for part in parts} for rank, parts in unwritten})


@gc_paused()
@checked
def shard(
    source: Source | str | os.PathLike[str],
    mesh: Mesh | int | str,
    options: ShardOptions | None = None,
    *,
    advance: ProgressCallback = no_progress,
    **changes: Unpack[ShardKeywords],
) -> Sharded:
    """Shard a step for every rank of a mesh and check the result; nothing is written.

    ``source`` may be a file. ``mesh``: a Mesh, its text (``dp=2,shard=4``), or a number of ranks along ``shard``.
    ``changes``: fields of ``ShardOptions``, such as ``stage=3``, beside or instead of ``options``. ``advance`` is
    called with each phase. Raises InputError, OptionError and UnsupportedError.

    >>> gopt.shard("fixtures/mlp_adamw.onnx", "dp=2,shard=2", stage=1)
    <Sharded mlp_adamw.onnx on dp=2,shard=2: 4 ranks, 7 checks passed>
    """
    from gopt.artifact.report_builder import begin_source_figures, find_removed

    settings = changed(options, ShardOptions, changes)
    mesh = Mesh.of(mesh)
    check_stage(mesh, settings.asked_stage)
    source = with_statistics(as_source(source), settings.named_statistics)
    training = on_mesh(source, mesh)
    pipeline = settings.passes_to_run()
    program = SpmdProgram.start(training, mesh, settings.accumulate)
    check_passes(program, [stage.spec.name for stage in pipeline.stages])
    wanted = range(mesh.ranks) if settings.only_ranks is None else sorted({*settings.only_ranks})
    for rank in wanted:
        if not 0 <= rank < mesh.ranks:
            raise OptionError(
                f"--only-ranks names rank {rank}, the mesh has {mesh.ranks} ranks",
                f"ranks count from 0 to {mesh.ranks - 1}",
            )
    begin_source_figures(program.source)
    pipeline.run(program, advance)
    if mesh.data_group is not None or settings.accumulate > 1:
        refuse_unlike(program.source, source.roles, program.loss_reduction)
    lowered = lower(program, wanted, advance, lambda: find_removed(program, wanted))
    return Sharded(source, program, lowered.ranks, lowered.common, lowered.checks, lowered.beside, lowered.kinds)
