"""``gopt.run``: train with the ranks of an output folder, as threads of this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gopt.api import Sharded, Split
from gopt.artifact import manifest_check
from gopt.artifact.checkpoint_index import step_dir
from gopt.errors import OptionError
from gopt.notebook import HtmlTable
from gopt.offline.folder_contents import read_folder
from gopt.runtime.engines.base import Engine, run_threads
from gopt.runtime.parameter_server.job import ServerJob
from gopt.runtime.parameter_server.run import run_in_threads
from gopt.runtime.session import Array
from gopt.runtime.training.job import Job, Progress, read_manifest
from gopt.runtime.training.train import Trainer
from gopt.verbs.on_disk import TemporaryFolder


@dataclass(frozen=True, slots=True)
class Run(HtmlTable):
    """The result of a run. ``steps``: one record a step; ``path``: the checkpoint of the last one, which ``merge``,
    ``reshard`` and ``diff`` take. Of a run without ``checkpoint`` it is there as long as this object is."""

    ranks: int
    steps: tuple[Progress, ...]
    folder: Path
    path: Path
    _home: Any = field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        last = f", loss {self.losses[-1]:.6g}" if self.steps else ""
        return f"<Run of {self.ranks} ranks: {len(self.steps)} steps{last}>"

    @property
    def losses(self) -> list[float]:
        """The loss of each step, the mean over ranks."""
        return [each.loss for each in self.steps]

    def to_json(self) -> dict[str, Any]:
        return {"ranks": self.ranks, "checkpoint": str(self.path), "steps": [each.to_json() for each in self.steps]}

    @property
    def states(self) -> dict[str, Array]:
        """State of the source -> its whole value behind the last step, read from the checkpoint."""
        held = read_folder(self.path)
        tensors = held.graph.initializers
        return {each.tensor: tensors[each.tensor].numpy() for each in held.manifest.states if each.tensor in tensors}

    def html_rows(self) -> Iterable[tuple[str, object]]:
        return [(f"step {each.step}", f"loss {each.loss:.6g}") for each in self.steps[-10:]]


def run(
    folder: str | os.PathLike[str] | Sharded | Split,
    data: str | os.PathLike[str] | Mapping[str, Array],
    steps: int,
    *,
    settings: Mapping[str, float | str] | None = None,
    state: str | os.PathLike[str] | None = None,
    shuffle: int | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    every: int = 0,
    keep: int = 2,
    resume: bool = False,
    stop_on_nan: bool = False,
    on_step: Callable[[Progress], None] = lambda progress: None,
    deadline: float = 60.0,
) -> Run:
    """Train until step ``steps``, each rank, or trainer and server, in a thread of this process.

    ``data``: a file of samples, ``module:function``, or arrays by the names of the batch inputs, samples along the
    first dimension. ``settings``: hyper-parameter -> a number or a schedule (``cosine:1e-3:0:1000``). ``checkpoint``
    needs a folder on disk; ``every`` steps one is written, ``keep`` of them stay, and ``resume`` continues from the
    newest. ``deadline``: seconds that a rank waits for the others at a call. ``gopt run`` starts ranks as processes.
    Raises InputError, OptionError and RunError.

    >>> batch = {"x": np.ones((16, 32), np.float32), "y": np.zeros(16, np.int64)}
    >>> len(gopt.run(gopt.shard("fixtures/mlp_sgd.onnx", 2), batch, 3, settings={"lr": 0.1}).losses)
    3
    """
    if steps < 1:
        raise OptionError(f"steps={steps}", "give at least 1")
    if checkpoint is not None and isinstance(folder, Sharded | Split):
        raise OptionError("a checkpoint belongs to an output folder", "write the ranks first: .write(FOLDER)")
    if checkpoint is None and (every or resume):
        raise OptionError("every and resume need a checkpoint", "give checkpoint=FOLDER")
    scratch = TemporaryFolder()
    ranks = scratch.write(folder) if isinstance(folder, Sharded | Split) else Path(folder)
    root = scratch.path / "checkpoints" if checkpoint is None else Path(checkpoint)
    job = Job(
        folder=ranks, data=_data(data, scratch.path), steps=steps,
        settings={name: str(value) for name, value in (settings or {}).items()},
        state=None if state is None else os.fspath(state), shuffle=shuffle, checkpoint=root, every=every, keep=keep,
        resume=resume, stop_on_nan=stop_on_nan,
    )  # fmt: skip
    told: list[Progress] = []

    def tell(progress: Progress) -> None:
        told.append(progress)
        on_step(progress)

    count, last = _train(job, tell, deadline)
    return Run(count, tuple(told), ranks, root / step_dir(last), scratch)


def _train(job: Job, tell: Callable[[Progress], None], deadline: float) -> tuple[int, int]:
    """How many ranks there were, and the last step."""
    if manifest_check.read_manifest(job.folder)[0].parameter_server is not None:
        server_job = ServerJob.read(job)
        return server_job.endpoints, run_in_threads(server_job, tell, deadline=deadline)[0]
    _, mesh = read_manifest(job.folder)

    def live(engine: Engine) -> int:
        trainer = Trainer(job, engine, lambda step, call: None)
        trainer.run(tell)
        return trainer.step

    return mesh.ranks, run_threads(mesh, deadline, live)[0]


def _data(data: str | os.PathLike[str] | Mapping[str, Array], home: Path) -> str:
    if not isinstance(data, Mapping):
        return os.fspath(data)
    path = home / "samples.npz"
    arrays: Any = dict(data)
    np.savez(path, **arrays)
    return str(path)
