"""The runs of a rank's files in a step, in order."""

from __future__ import annotations

from pathlib import Path

from gopt.artifact.manifest import Manifest
from gopt.records.mesh import PIPELINE, Mesh
from gopt.schedules.schedule_file import member_runs, read_schedule
from gopt.schedules.simulation import simulate


def step_runs(folder: Path, manifest: Manifest, mesh: Mesh, rank: int) -> list[tuple[str, int]]:
    """The phases of a step, each with the number of its micro-batch; raises as ``check_schedule``."""
    if rank == 0:  # one rank finds faults for all
        check_schedule(folder, manifest, mesh)
    return _runs(folder, manifest, mesh, mesh.coordinates(rank).get(PIPELINE, 0))


def check_schedule(folder: Path, manifest: Manifest, mesh: Mesh) -> None:
    """Raise InputError for a schedule of another pipeline, OptionError for one that cannot run."""
    if manifest.pipeline is not None and manifest.pipeline.schedule is not None:
        for member in range(mesh.size(PIPELINE)):
            _runs(folder, manifest, mesh, member)
        simulate(read_schedule(_path(folder, manifest.pipeline.schedule)))


def _path(folder: Path, name: str) -> Path:
    return folder / Path(name).name


def _runs(folder: Path, manifest: Manifest, mesh: Mesh, member: int) -> list[tuple[str, int]]:
    """The runs of a member of the pipeline."""
    phases, pipeline = manifest.schedule, manifest.pipeline
    if pipeline is None or pipeline.schedule is None:
        return [(phase, turn) for phase, times in phases.items() for turn in range(times)]
    path, sizes = _path(folder, pipeline.schedule), (mesh.size(PIPELINE), pipeline.stages, max(phases.values()))
    return member_runs(read_schedule(path), member, sizes, phases, path)
