"""Runs of steps with tables: batches, splits, and what they leave."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from helpers import ROOT

from gopt import api
from gopt.artifact.checkpoint_index import step_dir
from gopt.offline.folder_contents import read_folder
from gopt.parameter_server.options import SplitOptions
from gopt.runtime.parameter_server.job import ServerJob
from gopt.runtime.parameter_server.run import run_in_threads
from gopt.runtime.training.job import Job, Progress


def batches(path: Path, wrong: bool = False, apart: bool = False) -> str:
    """Batches for steps of ``dlrm``. ``wrong``: an id that no table has; ``apart``: a batch has no id twice in its
    bags, so that no sum has an order."""
    random = np.random.default_rng(5)
    bag = random.integers(0, 24, (24, 5))
    bag[:, 3:] = 0  # padding, and repeated
    ids = random.integers(0, 40, (24, 2))
    if apart:
        chosen = [random.permutation(24).reshape(6, 4) for _ in range(4)]
        bag = np.concatenate([np.concatenate(chosen), np.zeros((24, 1), int)], axis=1)
    if wrong:
        bag[0, 0] = 24
    np.savez(
        path, numbers=random.normal(size=(24, 4)).astype("f4"), ids=ids, bag=bag,
        clicked=random.integers(0, 2, 24).astype("f4"),
    )  # fmt: skip
    return str(path)


def folder(tmp_path: Path, layout: str, name: str = "dlrm_adagrad", **given: object) -> Path:
    tables = {"tables": {"*": layout}} if layout != "dense" else {"tables_off": True}
    options = SplitOptions(**{"trainers": 2, "servers": 2, "minimum": 16, **tables, **given})  # type: ignore[arg-type]
    target = tmp_path / f"{layout}{len(list(tmp_path.iterdir()))}"
    api.split(api.load(ROOT / f"fixtures/sparse/{name}.onnx"), options).write(target)
    return target


def run(path: Path, data: str, steps: int = 3, **given: object) -> list[tuple[float, ...]]:
    job = Job(folder=path, data=data, steps=steps, settings={"lr": "0.5"}, **given)  # type: ignore[arg-type]
    told: list[Progress] = []
    run_in_threads(ServerJob.read(job), told.append, deadline=30)
    return [each.losses for each in told]


def values(checkpoint: Path, step: int) -> dict[str, np.ndarray]:
    graph = read_folder(checkpoint / step_dir(step)).graph
    return {name: tensor.numpy() for name, tensor in graph.initializers.items() if name in graph.inputs}
