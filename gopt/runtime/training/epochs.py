"""The steps of a job that reads all samples so many times."""

from __future__ import annotations

from gopt.errors import OptionError
from gopt.runtime.training.array_source import RowCounts
from gopt.runtime.training.batch_types import batch_types
from gopt.runtime.training.job import Job, read_manifest
from gopt.runtime.training.kept_order import with_kept_order
from gopt.runtime.training.sample_files import on_disk, read_samples


def steps_of_epochs(job: Job, epochs: int) -> int:
    """The steps of ``epochs`` passes over the samples of a job of ranks. Only headers of arrays are read.

    Raises InputError for data that fits no input or has too few samples, OptionError for data without an end."""
    manifest, mesh = read_manifest(job.folder)
    job = with_kept_order(job, manifest)
    types = batch_types(manifest, job)
    counts = None
    if isinstance(job.data, str) and on_disk(job.data):
        stored = read_samples(job.data, types, manifest.draws)
        dims = {name: samples.type.dims for name, samples in stored.items()}
        counts = RowCounts.of({name: types[name] for name in dims}, dims)
    if counts is None:
        raise OptionError("--epochs needs samples on disk: the length of this data is not known", "say --steps K")
    return job.order(max(manifest.schedule.values())).steps(counts, mesh.data_ranks, epochs)
