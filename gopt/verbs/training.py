"""A run in threads of this process, with its calls: the same for ``gopt.run`` and the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gopt.artifact.checkpoint_index import complete_steps
from gopt.records.mesh import Mesh
from gopt.runtime.engines.base import Engine, run_threads
from gopt.runtime.parameter_server.job import ServerJob
from gopt.runtime.parameter_server.run import Hooks, run_in_threads
from gopt.runtime.parameter_server.sync_point import SyncReport
from gopt.runtime.training.job import Job, Progress
from gopt.runtime.training.train import Trainer


@dataclass(frozen=True, slots=True)
class RunHooks:
    """Callbacks of a run. ``on_step``: with each step; ``on_start``: with the first step and a note on the data, once
    all checks have passed; ``stop_signal`` returns the signal asking for the end, or 0; ``on_end``: of a split without
    rounds, with the ends of all roles."""

    on_step: Callable[[Progress], None]
    on_start: Callable[[int, str], None] = lambda step, note: None
    stop_signal: Callable[[], int] = lambda: 0
    on_end: Callable[[SyncReport], None] = lambda report: None

    def of_servers(self, job: Job, position: Callable[[int, int], None] = lambda *_: None) -> Hooks:
        """The hooks of a run of trainers and servers; ``position``: called with step and message."""
        return Hooks(lambda: self.on_start(_first_step(job), ""), position, self.stop_signal, self.on_end)


def _first_step(job: Job) -> int:
    """The step a run starts at."""
    if not job.resume or job.checkpoint is None:
        return 0
    return max(complete_steps(job.checkpoint), default=0)


def train_ranks(job: Job, mesh: Mesh, deadline: float, hooks: RunHooks) -> tuple[int, int]:
    """Train with a thread for each rank; returns the last step, and the ending signal, or 0."""

    def live(engine: Engine) -> tuple[int, int]:
        trainer = Trainer(job, engine, lambda step, call: None, stop_signal=hooks.stop_signal)
        trainer.run(hooks.on_step, lambda: hooks.on_start(trainer.step, trainer.note))
        return trainer.step, trainer.stopped

    endpoints: tuple[int, int] = run_threads(mesh, deadline, live)[0]
    return endpoints


def train_endpoints(server_job: ServerJob, deadline: float, hooks: RunHooks) -> tuple[int, int]:
    """As ``train_ranks``, with a thread for each trainer and server."""
    return run_in_threads(server_job, hooks.on_step, hooks.of_servers(server_job.job), deadline=deadline)
