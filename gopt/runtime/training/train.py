"""Trains one rank of a job: checks with the other ranks, compiles, runs step after step, writes checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from gopt.analysis.flops import flops
from gopt.artifact.checkpoint_index import BestEntry
from gopt.errors import GoptError, OptionError, RunError
from gopt.ir.types import TensorType, numpy_dtype
from gopt.runtime.device import Device, Host
from gopt.runtime.engines.base import AsyncCollectives, CollectiveRunner, Engine
from gopt.runtime.executor import no_timing
from gopt.runtime.memory import peak_memory
from gopt.runtime.session import Array
from gopt.runtime.training.array_source import ArraySource, MicroStep
from gopt.runtime.training.audit import Audit
from gopt.runtime.training.batch_stream import StreamSource
from gopt.runtime.training.batch_types import batch_types, samples_in
from gopt.runtime.training.checkpoint import Checkpoints
from gopt.runtime.training.data import BatchSource, open_data
from gopt.runtime.training.draws import DrawnInputs, seed_of
from gopt.runtime.training.evaluation import Evaluation, EvaluationPlan
from gopt.runtime.training.evaluator import Evaluator
from gopt.runtime.training.first_nan import first_nan
from gopt.runtime.training.hyper_parameters import hyper_parameters
from gopt.runtime.training.job import Job, JobUsage, Progress, mean, not_finite, not_finite_error
from gopt.runtime.training.kept_order import kept_order, with_kept_order
from gopt.runtime.training.loaded_rank import LoadedRank
from gopt.runtime.training.start_values import sync_axes
from gopt.runtime.training.trace import Trace, check_writable
from gopt.runtime.tuning.tuning import tuning_of


class Trainer:
    """One rank of a job.

    ``position`` is called with step and call whenever they change; ``stop_signal`` returns the signal received by this
    rank, or 0. ``device``: host memory by default. Raises InputError, OptionError and RunError for unusable files and
    options."""

    def __init__(
        self, job: Job, engine: Engine, position: Callable[[int, int], None], device: Device | None = None,
        calls: type[CollectiveRunner] = AsyncCollectives, *, stop_signal: Callable[[], int] = lambda: 0,
    ) -> None:  # fmt: skip
        self.engine, self._calls = engine, calls
        self.device: Device = Host(tuning_of(job.tuning)) if device is None else device
        self.rank = rank = LoadedRank(job.folder, engine, self.device)
        self.manifest, self.mesh = rank.manifest, rank.mesh
        self.job = job = with_kept_order(job, self.manifest)
        self._sync = sync_axes(job.sync_init, self.mesh)
        self.step = 0
        self.stopped = 0
        """The signal for which the run ends early, the same on all ranks."""
        self.ended = False
        """Whether the run ends because evaluations no longer improve."""
        self._stop_signal = stop_signal
        self.call = -1
        self._position = position
        self._hyper = hyper_parameters(self.manifest, job)
        self.types = batch_types(self.manifest, job)
        seed = seed_of(job, self.manifest)
        self.checkpoints: Checkpoints | None = None
        if job.checkpoint:
            self.checkpoints = Checkpoints(
                job.checkpoint, job.folder, self.manifest, job.keep, draws=seed, order=kept_order(job)
            )
            self.checkpoints.check(job.resume)
        rank.held = self._start()
        order = job.order(rank.micro_steps, self.manifest.samples_axis)
        self.data: BatchSource = open_data(job.data, self.types, order, DrawnInputs.of(self.manifest, seed))
        reading = {name for name, graph in rank.graphs.items() if not graph.inputs.keys().isdisjoint(self.types)}
        self._reads = {turn: at for at, (phase, turn) in enumerate(rank.actions) if phase in reading}
        """Micro-step -> the last action that reads its batch."""
        self._reading = reading
        if reading and isinstance(self.data, StreamSource):
            self.data.stream.note_reader()
        self._samples = samples_in(self.manifest, {name: type.dims for name, type in self.types.items() if type.static})
        """Of a batch of one rank; where their number is open, of its newest one."""
        self._evaluator = None if job.evaluation is None else self._evaluation(job.evaluation)
        self._usage = JobUsage()
        self._tokens = max((_tokens(type, self.manifest.samples_axis) for type in self.types.values()), default=0)
        """Of a sample; 0 where no input is of tokens."""

    @property
    def note(self) -> str:
        """A note on the samples, and on what is not moved to the host, or ''."""
        counts = self.data.held if isinstance(self.data, ArraySource) else None
        rest = 0 if self._evaluator is None else self._evaluator.left_out
        evaluated = f"the evaluation leaves out the last {rest} samples, which make no whole batch" if rest else ""
        sampled = self.job.order(self.rank.micro_steps).note(counts, self.rank.parts)
        return "; ".join(filter(None, (sampled, evaluated, self._unmoved)))

    @property
    def _unmoved(self) -> str:
        """A note on values that the folder places on the host, where the device has no memory of its own; else ''."""
        host = self.manifest.host
        if self.device.has_host or not (host.states or host.activations):
            return ""
        count = f"{len(host.states)} states and {len(host.activations)} values between forward and backward"
        return f"--offload places {count} on the host, which this engine does not: on CPUs all are, on GPUs take torch"

    def _evaluation(self, plan: EvaluationPlan) -> Evaluator:
        evaluator = Evaluator.of(plan, self.rank, self._samples)
        if evaluator.choice is not None and self.checkpoints is not None and self.job.resume:
            best = self.checkpoints.best()
            since = 0 if best is None or not plan.every else (self.step - best.step) // plan.every
            evaluator.choice.resume(*((None, 0) if best is None else (best.best, best.step)), since)
        return evaluator

    def _start(self) -> dict[str, Any]:
        """The states at the first step: of the checkpoint, else of the start-up graph, the folder and ``--state``."""
        if self.job.resume:
            if self.checkpoints is None:
                raise OptionError("--resume needs --checkpoint DIR", "name the folder of the checkpoints")
            if complete := self.checkpoints.steps():
                self.step = complete[-1]
                return self.rank.zeros | self.checkpoints.load(self.engine.rank, self.step)
        return self.rank.start_values(self.job.state, startup=self.job.startup)

    # --- before the first step ---

    def _prepare(self) -> None:
        """Check with all ranks, then allocate memory, then compile; raises RunError, UnsupportedError."""
        self.rank.prepare(self._sync)
        if self.job.peak_flops is not None:
            operations = sum(times * flops(self.rank.graphs[phase]) for phase, times in self.rank.phases)
            self._usage = JobUsage(
                flops=sum(self.engine.gather(operations)), peak=self.job.peak_flops * self.mesh.ranks
            )
        self._audit = Audit(self.rank.replicas, self.engine.rank, self.job.folder)

    # --- the loop ---

    def run(self, on_step: Callable[[Progress], None], on_start: Callable[[], None] = lambda: None) -> None:
        """Run all steps of the job, or the steps until a signal arrives.

        On the first rank ``on_step`` is called after each step, and ``on_start`` when all checks before the first step
        have passed.
        """
        try:
            self._prepare()
            with nullcontext() if self.checkpoints is None else self.checkpoints.open(self.engine, self.step):
                if self.engine.rank == 0:
                    on_start()
                self._train(on_step)
        except GoptError as error:
            raise self._with_position(error) from error
        except (Exception, SystemExit) as error:  # what the user's functions raise, sys.exit among it
            raise self._with_position(
                RunError(f"{type(error).__name__}: {error}", "--debug shows where it was raised")
            ) from error

    def _train(self, on_step: Callable[[Progress], None]) -> None:
        trace = Trace(self.engine.rank) if self.job.trace is not None else None
        if self.job.trace is not None and self.engine.rank == 0:
            check_writable(self.job.trace)
        collectives = self._calls(self.engine, self._set_position, trace.call if trace is not None else no_timing)
        self.rank.hold()
        for program in self.rank.programs.values():
            program.mark = trace.segment if trace is not None else no_timing
        try:
            while self.step < self.job.steps and not (self.stopped or self.ended):
                self._step(collectives, on_step)
        finally:
            collectives.close()
        if trace is not None and self.job.trace is not None:
            trace.write(self.engine, self.job.trace)

    def _with_position(self, error: GoptError) -> GoptError:
        if getattr(error, "named", False):
            return error
        where = f"rank {self.engine.rank}, step {self.step + 1}"
        where += f", call {self.call}" if self.call >= 0 else ""
        named = type(error)(f"{where}: {error.message}", *error.hints)
        named.named = True  # type: ignore[attr-defined]
        return named

    def _set_position(self, call: int) -> None:
        self.call = call
        self._position(self.step, call)

    def _step(self, collectives: CollectiveRunner, on_step: Callable[[Progress], None]) -> None:
        begin = time.perf_counter()
        self._set_position(-1)
        hyper = {parameter.name: parameter.at(self.step) for parameter in self._hyper}
        micro_losses: dict[str, list[float]] = {name: [] for name in self.manifest.losses}
        weights: list[float] = []
        times, batches, fetched = self.rank.micro_steps, dict[int, Mapping[str, Array]](), 0
        for at, (phase, turn) in enumerate(self.rank.actions):
            feeds: Mapping[str, Any] = hyper
            if phase in self._reading:
                while fetched <= turn:  # a schedule may begin with any micro-batch, the data is read in order
                    micro_step = MicroStep(self.step * times + fetched, self.rank.part, self.rank.parts)
                    batches[fetched] = batch = self.data.batch(micro_step)
                    open_sized = {name: batch[name].shape for name, type in self.types.items() if not type.static}
                    self._samples = samples_in(self.manifest, open_sized) if open_sized else self._samples
                    fetched += 1
                feeds = hyper | self.rank.record.feeds(batches[turn])
                if self.step and at == self._reads[turn]:
                    del batches[turn]
            shown = self.rank.run_phase(phase, turn, feeds, collectives)
            if self.manifest.loss in shown and self.rank.weight in feeds:
                weights.append(float(np.reshape(feeds[self.rank.weight], ())))
            elif self.rank.weight in shown:
                weights.append(float(self.device.to_host(shown[self.rank.weight]).reshape(())))
            for name in micro_losses.keys() & shown.keys():
                micro_losses[name].append(float(self.device.to_host(shown[name]).reshape(())))
        mine = {name: mean(losses, weights) for name, losses in micro_losses.items()}
        broken = not_finite(mine) if any(weights) or not weights else ""
        cause = (
            first_nan(self.job, [*batches.values()], hyper, self.rank.states, self._start) if batches and broken else ""
        )
        if self.job.stop_on_nan and broken:
            self.call = -1  # it came of no call
            raise not_finite_error(mine, self.step, cause)
        self.step += 1
        digests = self._digests() if self._audit_due(self._due()) else None
        reports = self.engine.gather((mine, self._stop_signal(), digests, cause, peak_memory(), sum(weights)))
        losses, signals, everything, causes, memory, totals = zip(*reports, strict=True)
        self.stopped = next(filter(None, signals), 0)
        seconds = time.perf_counter() - begin
        evaluation = self._evaluated()
        if self.engine.rank == 0:
            samples = self._samples * self.rank.parts * times
            fed = {name: float(value) for name, value in hyper.items()}
            where = next((f"rank {rank}: {text}" for rank, text in enumerate(causes) if text), "")
            usage = replace(self._usage, tokens=samples * self._tokens, memory=max(memory))
            on_step(Progress.of(
                self.step, losses, seconds, samples, hyper=fed, evaluation=evaluation, cause=where, usage=usage,
                weights=totals,
            ))  # fmt: skip
        best = self._best(evaluation)
        due = self._due()
        if self._audit_due(due or best is not None):
            if digests is None:  # of a signal, or an evaluation
                everything = tuple(self.engine.gather(self._digests()))
            self._audit.check(self.engine, everything, self.rank.held, self.rank.to_host, self.step)
        if self.checkpoints is not None and best is not None:  # first: a step that is kept is not made again
            self.checkpoints.save(self.engine, self.step, self.rank.held, self.rank.to_host, best=best)
        if self.checkpoints is not None and due:
            self.checkpoints.save(self.engine, self.step, self.rank.held, self.rank.to_host)

    def _evaluated(self) -> Evaluation | None:
        """Evaluate the states where an evaluation is due."""
        evaluator = self._evaluator
        if self.stopped or evaluator is None or not evaluator.due(self.step, self.step == self.job.steps):
            return None
        evaluation = evaluator.evaluate(self.step)
        self.ended = evaluation.ends
        return evaluation

    def _best(self, evaluation: Evaluation | None) -> BestEntry | None:
        """The entry of the best checkpoint, if one is due."""
        choice = None if self._evaluator is None else self._evaluator.choice
        return choice.kept if choice is not None and evaluation is not None and evaluation.best else None

    def _audit_due(self, saved: bool) -> bool:
        """Return whether states in common are compared now; ``saved``: whether a checkpoint follows."""
        if self.job.audit is None:
            return saved
        return self.job.audit > 0 and (saved or self.step % self.job.audit == 0)

    def _digests(self) -> list[str]:
        return self._audit.digests(self.rank.held, self.rank.to_host)

    def _due(self) -> bool:
        """Return whether a checkpoint follows."""
        return self.checkpoints is not None and (
            self.step == self.job.steps
            or bool(self.stopped)
            or self.ended
            or bool(self.job.every and self.step % self.job.every == 0)
        )


def _tokens(type: TensorType, axis: int) -> int:
    """The numbers of a sample in an input of whole numbers in rows, as token ids are; 0 for other inputs. ``axis``: the
    dimension of the samples."""
    shape = type.shape or ()
    size = shape[1 - axis] if len(shape) == 2 and numpy_dtype(type.dtype).kind in "iu" else 0
    return size if isinstance(size, int) and size > 1 else 0
