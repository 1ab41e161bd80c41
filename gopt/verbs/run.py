"""``gopt.run``: train with the ranks of an output folder, as threads of this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from gopt.artifact import manifest_check
from gopt.artifact.checkpoint_index import BEST_DIR, step_dir
from gopt.errors import OptionError
from gopt.offline.folder_contents import read_folder
from gopt.options.records import changed
from gopt.options.types import checked
from gopt.runtime.session import Array
from gopt.runtime.training.batch_stream import BatchStream, array
from gopt.runtime.training.draws import seed_of
from gopt.runtime.training.evaluation import Evaluation
from gopt.runtime.training.job import Job, Progress, read_manifest
from gopt.steps.sharded import Sharded
from gopt.steps.split import Split
from gopt.text.notebook import HtmlTable
from gopt.verbs.curves import curves
from gopt.verbs.on_disk import TemporaryFolder
from gopt.verbs.run_options import RunKeywords, RunOptions, check_samples
from gopt.verbs.training import RunHooks, train_endpoints, train_ranks


@dataclass(frozen=True, slots=True)
class Run(HtmlTable):
    """The result of a run. ``steps``: a record per step; ``path``: the last checkpoint, for ``merge``, ``reshard`` and
    ``diff``. Without ``checkpoint``, the path exists as long as this object. ``draws``: the seed of random numbers
    missing in the data; None for a step without random numbers."""

    ranks: int
    steps: tuple[Progress, ...]
    folder: Path
    path: Path
    draws: int | None = None
    _home: Any = field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        last = f", loss {self.losses[-1]:.6g}" if self.steps else ""
        return f"<Run of {self.ranks} ranks: {len(self.steps)} steps{last}>"

    @property
    def evaluations(self) -> dict[int, Evaluation]:
        """Step -> the evaluation behind it (``eval``)."""
        return {step.step: step.evaluation for step in self.steps if step.evaluation is not None}

    @property
    def best(self) -> Path | None:
        """The best checkpoint by ``keep_best``, or None."""
        path = self.path.parent / BEST_DIR
        return path if path.is_dir() else None

    @property
    def losses(self) -> list[float]:
        """The loss of each step, the mean over ranks."""
        return [step.loss for step in self.steps]

    def to_json(self) -> dict[str, Any]:
        return {"ranks": self.ranks, "checkpoint": str(self.path), "draws": self.draws,
                "steps": [step.to_json() for step in self.steps]}  # fmt: skip

    @property
    def states(self) -> dict[str, Array]:
        """State of the source -> its whole value behind the last step, read from the checkpoint."""
        folder = read_folder(self.path)
        tensors = folder.graph.initializers
        return {
            state.tensor: tensors[state.tensor].numpy() for state in folder.manifest.states if state.tensor in tensors
        }

    def html_rows(self) -> Iterable[tuple[str, object]]:
        return [(f"step {step.step}", f"loss {step.loss:.6g}") for step in self.steps[-10:]]


@checked
def run(
    folder: str | os.PathLike[str] | Sharded | Split,
    data: str | os.PathLike[str] | Mapping[str, Array] | Iterable[Any],
    steps: int,
    options: RunOptions | None = None,
    *,
    on_step: Callable[[Progress], None] = lambda progress: None,
    **changes: Unpack[RunKeywords],
) -> Run:
    """Train until step ``steps``, each rank, or trainer and server, in a thread of this process.

    ``data``: samples on disk, ``module:function``, arrays by the names of the batch inputs, samples along the first
    dimension, or an iterable of batches, such as a PyTorch DataLoader. Each batch is one rank's: a mapping from input
    to array or tensor, or a tuple in the order of the inputs; data ranks take them in turn. A list or a loader starts
    anew at its end.

    Options are fields of ``RunOptions``: as keywords (``settings={"lr": 0.1}``), as one record, or as a record with
    changes. ``on_step`` is called with each step. ``gopt run`` starts ranks as processes, too. Raises InputError,
    OptionError and RunError.

    >>> batch = {"x": np.ones((16, 32), np.float32), "y": np.zeros(16, np.int64)}
    >>> len(gopt.run(gopt.shard("fixtures/mlp_sgd.onnx", 2), batch, 3, settings={"lr": 0.1}).losses)
    3
    """
    if steps < 1:
        raise OptionError(f"steps={steps}", "give at least 1")
    settings = changed(options, RunOptions, changes)
    if settings.checkpoint is not None and isinstance(folder, Sharded | Split):
        raise OptionError("a checkpoint belongs to an output folder", "write the ranks first: .write(FOLDER)")
    scratch = TemporaryFolder()
    ranks = scratch.write(folder) if isinstance(folder, Sharded | Split) else Path(folder)
    root = scratch.path / "checkpoints" if settings.checkpoint is None else Path(settings.checkpoint)
    if isinstance(settings.eval_data, Mapping):
        settings = replace(settings, eval_data=str(_data(settings.eval_data, scratch.path, "held_out")))
    job = replace(settings, checkpoint=root).job(ranks, _data(data, scratch.path), steps)
    steps_run: list[Progress] = []

    seed = seed_of(job, manifest_check.read_manifest(ranks)[0])
    with curves(settings.tensorboard) as draw:

        def tell(progress: Progress) -> None:
            steps_run.append(progress)
            draw(progress)
            on_step(progress)

        count, last = _train(job, settings, RunHooks(tell))
    return Run(count, tuple(steps_run), ranks, root / step_dir(last), seed, scratch)


def _train(job: Job, options: RunOptions, hooks: RunHooks) -> tuple[int, int]:
    """How many ranks there were, and the last step."""
    split = manifest_check.read_manifest(job.folder)[0].parameter_server is not None
    options.check(split=split)
    if split:
        server_job = options.server_job(job, _ignore, _ignore)
        return server_job.endpoints, train_endpoints(server_job, options.deadline, hooks)[0]
    _, mesh = read_manifest(job.folder)
    return mesh.ranks, train_ranks(job, mesh, options.deadline, hooks)[0]


def _ignore(_: object) -> None:
    return None


def _data(
    data: str | os.PathLike[str] | Mapping[str, Array] | Iterable[Any], home: Path, name: str = "samples"
) -> str | BatchStream:
    if isinstance(data, str | os.PathLike):
        return os.fspath(data)
    check_samples("data", data)
    if not isinstance(data, Mapping):
        return BatchStream(data)
    path = home / f"{name}.npz"
    arrays: Any = {name: array(value) for name, value in data.items()}
    np.savez(path, **arrays)
    return str(path)
