"""Run the source and all ranks, on a different batch per rank, and compare every state, loss and metric.

The reference is the source cut at its gradients: each rank's batch gives local gradients, and their mean goes through
the source's own update. The cut itself is confirmed by value: a gradient must be proportional to a finite difference of
the loss."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Unpack

import numpy as np

from gopt.analysis.look_through import declare_axes
from gopt.analysis.loss_reduction import LossReduction
from gopt.analysis.roles import recover
from gopt.analysis.source_collectives import adopt_source_collectives
from gopt.analysis.startup import why_unusable
from gopt.analysis.statistic_points import StatisticReduction
from gopt.analysis.training import TrainingGraph
from gopt.artifact.graph_check import check_source
from gopt.artifact.integrity import check_files
from gopt.artifact.manifest import Manifest
from gopt.artifact.manifest_check import check_all_ranks, read_manifest
from gopt.artifact.manifest_entries import RankEntry
from gopt.artifact.path_diagnostics import check_folder
from gopt.artifact.report_check import stored_proof
from gopt.collectives.messages import ROUND_INPUT
from gopt.errors import RunError
from gopt.importers.collectives import DECLARED, parse_groups, recognise
from gopt.importers.load import load_file
from gopt.ir.graph import COMM, Graph
from gopt.ir.load import load
from gopt.ir.opaque.expand import expand
from gopt.ir.types import LOW_PRECISION
from gopt.options.records import changed
from gopt.records.mesh import Mesh
from gopt.runtime.capacity import check_fits
from gopt.runtime.engines.threads import check_threads, run_ranks
from gopt.runtime.session import shrink_arena
from gopt.runtime.step_runs import check_schedule
from gopt.runtime.training.hyper_parameters import refuse_unknown
from gopt.system.garbage import gc_paused
from gopt.system.progress import ProgressCallback, no_progress
from gopt.text.sanitize import listed
from gopt.verification import sampling
from gopt.verification.all_ranks import AllRanks, Tamper, Transport, data_ranks, gradient_boxes
from gopt.verification.batches import Batches, SampledBatches, UserBatches
from gopt.verification.compare import Values, finite, tolerance_of
from gopt.verification.conditions import find_conditions
from gopt.verification.engines import NodeEngine
from gopt.verification.folder_check import check_roles, check_starts, other_start_values
from gopt.verification.gradient_check import PHASE, check_gradients
from gopt.verification.gradient_sample import sample_gradients
from gopt.verification.inexact_reductions import inexact_reductions
from gopt.verification.lazy_tables import lazy_tables
from gopt.verification.message_rounds import MessageRounds
from gopt.verification.options import VerifyKeywords, VerifyOptions
from gopt.verification.pulled_types import pulled_types
from gopt.verification.random_inputs import feed_training, find_random
from gopt.verification.rank_programs import Held, RankPrograms, read_rank
from gopt.verification.reference_graphs import PROBE
from gopt.verification.reference_step import ReferenceProgram
from gopt.verification.result import Verification
from gopt.verification.second_engine import check_step
from gopt.verification.sensitivity import UNITS
from gopt.verification.source_duals import check_source_duals
from gopt.verification.stage_terms import terms_of_stages
from gopt.verification.startup_check import check_startup
from gopt.verification.variants import (
    PLAIN,
    Variant,
)
from gopt.verification.verification_run import VerificationRun

READERS = 2
"""Ranks that are read at a time."""


class Verifier:
    """The source and the ranks of one output folder, ready to run."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: str | os.PathLike[str] | None = None,
        deadline: float | None = None,
        advance: ProgressCallback = no_progress,
        engine: NodeEngine = NodeEngine.ONNXRUNTIME,
    ) -> None:
        """``deadline``: the longest run of a graph's piece, in seconds; None: no limit."""
        advance("reading the source")
        self.transport: Transport = run_ranks
        """Runs one phase of all ranks: on threads, unless the caller sets another engine."""
        self.folder = Path(folder)
        check_folder(self.folder)
        self.manifest, self.mesh = read_manifest(self.folder)
        wanted = self.manifest.total_ranks
        check_threads(wanted, "ranks", "verify the same step on fewer ranks: gopt shard --ranks N")
        check_files(self.folder, self.manifest.files)
        self.phases = self.manifest.schedule
        source, self.startup = source_training(self.folder, model, self.manifest, self.mesh)
        check_roles(self.manifest, source, self.folder)
        self.random_inputs = find_random(source.graph)
        self.training = feed_training(source, self.random_inputs)
        # The reference holds one, and all ranks together another at least.
        check_fits(source.graph, (state.tensor for state in source.states), copies=2)
        plan = self.manifest.parameter_server
        check_all_ranks(self.manifest, self.folder)
        check_schedule(self.folder, self.manifest, self.mesh)
        self.cache, self.second = engine.sessions(deadline), engine.second()
        self.conditions = find_conditions(self.training)
        reduction = LossReduction.parse(self.manifest.loss_reduction)
        shared = self.manifest.synchronised
        self.reference = ReferenceProgram(
            self.training, self.mesh, self.cache, self.conditions, reduction, shared, self.manifest.statistics,
            self.manifest.reductions, lazy_tables(self.training, plan),
        )  # fmt: skip
        self.reference.refuse_inputs(self.random_inputs.fed)
        self.ranks = self._read_ranks(source, advance)
        self.which = data_ranks(self.mesh)
        if plan is not None:
            self.transport = MessageRounds(self.manifest, deadline)
            self.which += [0] * plan.servers  # servers see no batch
        trainer = [program.graph for program in self.ranks[0].programs.values()]
        self.reference.pulled = {name: wire for name, (_, wire) in pulled_types(plan, trainer).items()}
        self.boxes = gradient_boxes(self.manifest, self.training.gradients)
        self.stored = self.all_ranks.joined("input", [rank.values for rank in self.ranks])
        check_starts(self.ranks, self.stored, self.folder)
        self.notes = other_start_values(self.stored, source)
        self.kinds = {state.tensor: state.kind.value for state in self.training.states}

    def _read_ranks(self, source: TrainingGraph, advance: ProgressCallback) -> list[RankPrograms]:
        """All ranks, two at a time: the runtime compiles one while Python reads the next."""

        arrays: Held = {}
        terms = terms_of_stages(self.folder, self.manifest, source, self.reference.terms)

        def read(record: RankEntry) -> RankPrograms:
            return read_rank(
                self.folder, record, self.manifest, self.phases, self.reference.gradients,
                terms, self.cache, self.random_inputs, source.graph.types, arrays,
            )  # fmt: skip

        with gc_paused(), ThreadPoolExecutor(READERS) as pool:
            ranks: list[RankPrograms] = []
            for rank in pool.map(read, self.manifest.ranks):
                ranks.append(rank)
                advance("reading ranks", len(ranks), len(self.manifest.ranks))
            return ranks

    @property
    def all_ranks(self) -> AllRanks:
        return AllRanks(
            self.ranks, self.mesh, self.phases, self.which, self.transport, self.training.graph.types, self.boxes
        )  # fmt: skip

    @property
    def reductions(self) -> list[StatisticReduction]:
        """How ranks combine each statistic."""
        if self.manifest.reductions or self.manifest.statistics != "root":
            return list(self.manifest.reductions)
        return [StatisticReduction(state.tensor, "root") for state in self.reference.statistics]

    @property
    def parts(self) -> int:
        """Number of ranks with different data."""
        return max(self.which) + 1

    def run(
        self,
        options: VerifyOptions | None = None,
        *,
        variants: Sequence[Variant] | None = None,
        tamper: Tamper | None = None,
        advance: ProgressCallback = no_progress,
        **changes: Unpack[VerifyKeywords],
    ) -> Verification:
        """Run the steps of every variant and compare; ``changes``: fields of ``VerifyOptions``.

        ``variants``: only these. ``tamper`` may change a rank's feeds: both are for tests."""
        selected = changed(options, VerifyOptions, changes)
        steps, seed, data, hyper = selected.steps, selected.seed, selected.data, selected.settings
        result = Verification(self._tolerance(), steps, len(self.ranks))
        result.proof = stored_proof(self.folder, self.manifest)
        for note in self.notes:
            result.say(note)
        if self._drawn():
            result.say("states with no stored value were drawn from the seed")
        if self.reference.lazy:
            tables = listed([table.parameter for table in self.reference.lazy])
            result.say(
                f"{tables}: updates run on rows that were pushed. These "
                "are compared with the source's update; other rows, which the source moves, with what they were"
            )
        if self.random_inputs.fed:
            count = len(self.random_inputs.fed)
            who = f"{count} random nodes were fed what they" if count > 1 else "1 random node was fed what it"
            result.say(f"{who} would have drawn")
        start, settings = self._start(seed), self._hyper(hyper)
        check_startup(result, self.folder, self.manifest, self.ranks, start, self.startup, self.cache.deadline)
        self.forget()
        batches = self._batches(seed, data, start, settings)
        session = VerificationRun(self, result, steps, seed, start, settings, batches, tamper, advance, hyper)
        if variants is None:
            session.all_variants()
            advance("evaluating one step by a second engine")
            point = {**session.start, **session.settings, **session.given(1)[0][0]}
            result.hold_engines(
                check_step(
                    self.training, point, self.cache, self.reference.call, self.reference.known(point), self.second
                )
            )
        else:
            for variant in variants:
                session.one(variant)
        if self.manifest.parameter_server is None:
            for note in inexact_reductions(
                self.reference, session.start, session.settings, session.given(1), result.large_batch
            ):
                result.say(note)
        start, settings = session.start, session.settings
        del session
        self.forget()
        if selected.confirm:
            shrink_arena()
            for note in check_source_duals(self.training, self.mesh, seed):
                result.say(note)
            sample = None if selected.every else sample_gradients(self.training, seed)
            names = None if sample is None else sample.parameters
            advance(PHASE, 0, len(names or self.training.gradients))
            feeds = [{**start, **settings, **batch} for batch in self._several(batches)]
            result.gradients = check_gradients(self.training, feeds, seed, self.reference.call, advance, names)
            result.say_stops()
            if sample is not None:
                result.sample = replace(sample, widened=len(result.gradients) > len(sample.parameters))
        return result

    def forget(self) -> None:
        """Hold no results of steps that are run no more."""
        self.reference.forget()
        for rank in self.ranks:
            rank.first_runs.clear()

    def groups(self) -> list[str]:
        """Every group with a call on some rank."""
        graphs = [program.graph for rank in self.ranks for program in rank.programs.values()]
        nodes = [node for graph in graphs for node in graph.nodes if node.domain == COMM and node.op_type != PROBE]
        return sorted({str(node.attributes["group"]) for node in nodes})

    def _tolerance(self) -> float:
        """By the narrowest participating type, in the source or on the wire."""
        return max(map(tolerance_of, (self.training.graph, *self._graphs())))

    def _graphs(self) -> list[Graph]:
        return [program.graph for rank in (self.ranks[0], self.ranks[-1]) for program in rank.programs.values()]

    @cached_property
    def wire(self) -> str:
        """The halves in the ranks' files alone, to which gradients are rounded on the wire; "" for none."""
        source = {type.dtype for type in self.training.graph.types.values()}
        kinds = {type.dtype for graph in self._graphs() for type in graph.types.values()} - source
        return max(kinds & LOW_PRECISION, key=UNITS.__getitem__, default="")

    def _drawn(self) -> bool:
        return any(state.tensor not in self.stored for state in self.training.states)

    def _start(self, seed: int) -> Values:
        generator = np.random.default_rng(seed + 1)
        values = {}
        for state in self.training.states:
            value = self.stored.get(state.tensor)
            values[state.tensor] = sampling.initial_state(self.training, state, generator) if value is None else value
        return values

    def _hyper(self, values: Mapping[str, float]) -> Values:
        types = self.training.graph.types
        refuse_unknown(values, self.training.hyper)
        fed = {
            name: sampling.filled(types[name], values[name]) if name in values else sampling.hyper(self.training, name)
            for name in self.training.hyper
        }
        return fed if self.manifest.parameter_server is None else fed | {ROUND_INPUT: np.zeros((), np.int64)}

    def _batches(self, seed: int, data: str | None, start: Values, settings: Values) -> Batches:
        if data is not None:
            return UserBatches(self.training, self.random_inputs, seed, self.parts, data)
        drawn = SampledBatches(self.training, self.random_inputs, seed, sampling.integer_ranges(self.training))
        if drawn.ignores:
            # What looks like a label to ignore may be none: then the source says so, or gives no loss.
            turns = range(max(self.phases.values()))
            drawn_batches = [[drawn.batch(turn, part) for part in range(self.parts)] for turn in turns]
            self.reference.apart = self.all_ranks.apart(self.all_ranks.held(start))
            try:
                local = self.reference.kept(PLAIN, start, settings, drawn_batches)
            except RunError:
                return drawn.plain()
            if not all(finite(shown[name]) for shown in local.outputs[0] for name in self.training.losses):
                self.forget()
                return drawn.plain()
        return drawn

    def _several(self, batches: Batches) -> list[Values]:
        """Different batches, of ranks and of micro-steps: two of the user's, more if free."""
        sides, count = min(self.parts, 2), 2
        if isinstance(batches, SampledBatches):
            # An id to ignore may be padding, whose row's gradient is masked: no derivative.
            batches, count = batches.plain(), 8
        return [batches.batch(number // sides, number % sides) for number in range(count)]


def source_training(
    folder: Path, model: str | os.PathLike[str] | None, manifest: Manifest, mesh: Mesh
) -> tuple[TrainingGraph, Graph | None]:
    """The source with the roles settled at sharding, and the start-up graph of the user's model, if given and usable by
    ranks."""
    from gopt.api import load_stored_source, stored_roles

    stored = load(folder / "source.onnx", own=True)
    roles = stored_roles(stored, folder / "source.onnx")
    check_source(manifest, stored, folder)
    if model is None:
        return load_stored_source(expand(stored), roles, folder / "source.onnx"), None
    original = load_file(model)
    graph = expand(original.graph)
    check_source(manifest, graph, folder, os.fspath(model))
    recognise(graph, parse_groups(stored.metadata.get(DECLARED, "")))
    declare_axes(graph, dict(mesh.kinds))
    training = adopt_source_collectives(recover(graph, roles), roles, mesh)
    usable = original.startup is not None and not why_unusable(original.startup, training)
    return training, original.startup if usable else None
