"""A trainer's batches, and their end."""

from __future__ import annotations

from gopt.analysis.open_shapes import fix_sizes
from gopt.artifact.manifest_entries import InputKind
from gopt.errors import InputError
from gopt.ir.graph import Graph
from gopt.ir.types import TensorType
from gopt.runtime.parameter_server.job import ServerJob
from gopt.runtime.training.array_source import ArraySource, Batch, DataEndedError, MicroStep
from gopt.runtime.training.batch_types import samples_in
from gopt.runtime.training.data import open_data
from gopt.runtime.training.draws import DrawnInputs


class TrainerData:
    """The batches of one trainer. ``idle``: no data for the current step or later steps. ``ahead``: as of
    ``MicroStep``.

    Raises InputError for arrays that fit no input, and OptionError for a missing function."""

    def __init__(self, server_job: ServerJob, number: int, ahead: int) -> None:
        self._number, self._parts, self._ahead_by = number, server_job.trainers, ahead
        self._job = server_job.job
        self._manifest = server_job.manifest
        self._times = max(server_job.manifest.schedule.values())
        """Micro-steps of a step."""
        inputs = server_job.manifest.inputs_of(InputKind.BATCH)
        self._types: dict[str, TensorType] = {entry.name: entry.type for entry in inputs}
        for name, type in self._types.items():
            if not type.static:
                raise InputError(f"batch input {name!r} has the open shape {type}", fix_sizes(self._types))
        order = self._job.order(self._times, self._manifest.samples_axis, once=server_job.faults.stop is not None)
        drawn = DrawnInputs.of(server_job.manifest, server_job.seed)
        self._source = open_data(self._job.data, self._types, order, drawn)
        self._ahead: list[Batch] = []
        self._taken: int | None = None
        """The step whose batches were taken ahead."""
        self.idle = False

    @property
    def samples(self) -> int:
        """Samples of a batch."""
        return samples_in(self._manifest, {name: type.dims for name, type in self._types.items()})

    def feeds(self, graph: Graph) -> bool:
        """Return whether a graph reads a batch."""
        return not self._types.keys().isdisjoint(graph.inputs)

    def batch(self, step: int, turn: int) -> Batch:
        """The batch of a micro-step. Raises InputError where the data has ended."""
        if self._ahead:
            return self._ahead[turn]
        try:
            return self._source.batch(self._place(step, turn))
        except DataEndedError as error:
            raise InputError(
                f"trainer {self._number}: {error.message}", "yield more, take fewer --steps, or add --stop first or all"
            ) from error

    def take_ahead(self, step: int) -> bool:
        """Read all batches of a step in advance; False where no whole step is left."""
        if step == self._taken or self.idle:
            return not self.idle
        self._ahead, self._taken = [], step
        try:
            self._ahead = [self._source.batch(self._place(step, turn)) for turn in range(self._times)]
        except DataEndedError:
            self.idle = True
        return not self.idle

    def _place(self, step: int, turn: int) -> MicroStep:
        return MicroStep(step * self._times + turn, self._number, self._parts, self._ahead_by)

    def epoch(self, step: int) -> dict[str, float]:
        """How often the samples of a file were used after a step, as ``{"epoch": 1.5}``; empty for other data."""
        whole = self._source.batches if isinstance(self._source, ArraySource) else None
        return {} if not whole else {"epoch": round((step * self._times * self._parts + self._ahead_by) / whole, 4)}
