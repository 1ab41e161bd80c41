"""The sample order of a continued run."""

from __future__ import annotations

from dataclasses import replace

from gopt.artifact.manifest import Manifest
from gopt.errors import OptionError
from gopt.runtime.training.array_source import Last, SampleOrder
from gopt.runtime.training.checkpoint_folder import newest_index
from gopt.runtime.training.job import Job
from gopt.runtime.training.sample_files import on_disk


def with_kept_order(job: Job, manifest: Manifest) -> Job:
    """The job with the sample order of the continued run. Raises OptionError where the job names another order: some
    samples would come twice in a pass, and others never."""
    if not job.resume or job.checkpoint is None or not isinstance(job.data, str) or not on_disk(job.data):
        return job
    index = newest_index(job.checkpoint, manifest)
    if index is None or index.last is None:  # of an older gopt
        return job
    for option, wanted, saved in (
        ("shuffle", job.shuffle, index.shuffle), ("last", job.last, index.last),
        ("batch-size", job.batch_size, index.batch_size),
    ):  # fmt: skip
        if wanted is not None and wanted != saved:
            raise OptionError(
                f"--{option} {wanted}: the run that is continued has "
                f"{f'--{option} {saved}' if saved is not None else f'no --{option}'}",
                f"leave out --{option}: a resumed run goes on with its samples",
            )
    return replace(job, shuffle=index.shuffle, last=Last(index.last), batch_size=index.batch_size)


def kept_order(job: Job) -> SampleOrder | None:
    """The sample order in a checkpoint; None where a function has the order."""
    return job.order(1) if isinstance(job.data, str) and on_disk(job.data) else None
