"""Checkpoints of a split: every endpoint writes its own states, at the same step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from gopt.errors import OptionError
from gopt.runtime.parameter_server.job import EndpointEngine, ServerJob
from gopt.runtime.session import Array
from gopt.runtime.training.checkpoint import NOTHING, Checkpoints
from gopt.runtime.training.kept_order import kept_order


class SplitCheckpoints:
    """When an endpoint writes a checkpoint, and the checkpoint from which it starts. ``step``: the rounds before the
    start. ``ahead``: of the data, as of ``MicroStep``."""

    def __init__(self, server_job: ServerJob, endpoint: int) -> None:
        self._job, self._number = server_job.job, endpoint
        job = server_job.job
        self.checkpoints: Checkpoints | None = None
        if job.checkpoint is not None:
            written, trainers = server_job.written or server_job.manifest, server_job.trainers
            self.checkpoints = Checkpoints(
                job.checkpoint, job.folder, written, job.keep, trainers, server_job.seed, kept_order(job)
            )
            self.checkpoints.check(job.resume)
        elif job.resume:
            raise OptionError("--resume needs --checkpoint DIR", "name the folder of the checkpoints")
        steps = self.checkpoints.steps() if self.checkpoints is not None and job.resume else []
        self.step = steps[-1] if steps else 0
        self.ahead = self.checkpoints.start_from(self.step) if self.checkpoints is not None and steps else 0
        self._saved = self.step

    def load(self) -> dict[str, Array] | None:
        """The states of the newest checkpoint, or None."""
        if self.checkpoints is None or not self.step:
            return None
        return self.checkpoints.load(self._number, self.step)

    @contextmanager
    def open(self, engine: EndpointEngine) -> Iterator[None]:
        """Lock the folder while the block runs."""
        if self.checkpoints is None:
            yield
            return
        with self.checkpoints.open(engine, self.step):
            yield

    def due(self, step: int) -> bool:
        """Return whether all endpoints write a checkpoint after a step before the last."""
        every = self._job.every
        return self.checkpoints is not None and bool(every) and step % every == 0 and step != self._job.steps

    def load_extra(self, name: str) -> Array | None:
        """The value saved by this endpoint beside the states in the newest checkpoint, or None."""
        if self.checkpoints is None or not self.step:
            return None
        return self.checkpoints.load_extra(self.step, name)

    def save(
        self, engine: EndpointEngine, step: int, states: Mapping[str, Any], to_host: Callable[[Any], Array],
        extra: Mapping[str, Array] = NOTHING,
    ) -> None:  # fmt: skip
        """Write a checkpoint; all endpoints call this method."""
        if self.checkpoints is not None:
            self.checkpoints.save(engine, step, states, to_host, extra)
            self._saved = step

    def finish(self, engine: EndpointEngine, step: int, save: Callable[[], None]) -> None:
        """Write the last checkpoint, unless this step has a checkpoint."""
        if self.checkpoints is not None and any(step not in (None, self._saved) for step in engine.gather(step)):
            save()
