"""The runs of a rank's files in a step, in order."""

from __future__ import annotations

from pathlib import Path

from gopt.artifact.manifest import Manifest
from gopt.records.mesh import PIPELINE, Mesh
from gopt.schedules.schedule_file import member_runs, read_schedule
from gopt.schedules.simulation import simulate


def step_runs(folder: Path, manifest: Manifest, mesh: Mesh, rank: int) -> list[tuple[str, int]]:
    """The phases of a step, each with the number of its micro-batch; raises InputError for a schedule of another
    pipeline."""
    phases, pipeline = manifest.schedule, manifest.pipeline
    if pipeline is None or pipeline.schedule is None:
        return [(phase, turn) for phase, times in phases.items() for turn in range(times)]
    path, member = folder / Path(pipeline.schedule).name, mesh.coordinates(rank)[PIPELINE]
    schedule = read_schedule(path)
    sizes = mesh.size(PIPELINE), pipeline.stages, max(phases.values())
    runs = member_runs(schedule, member, sizes, phases, path)
    if rank == 0:  # one rank finds faults for all
        simulate(schedule)
    return runs
