"""The order of samples of a run that is continued."""

from __future__ import annotations

from dataclasses import replace

from gopt.artifact.manifest import Manifest
from gopt.errors import OptionError
from gopt.runtime.training.array_source import Last, SampleOrder
from gopt.runtime.training.checkpoint_folder import newest_index
from gopt.runtime.training.job import Job
from gopt.runtime.training.sample_files import on_disk


def with_kept_order(job: Job, manifest: Manifest) -> Job:
    """The job with the order of samples of the run that it continues. Raises OptionError where it asks for another one:
    some samples would be seen twice in a pass, and others never."""
    if not job.resume or job.checkpoint is None or not isinstance(job.data, str) or not on_disk(job.data):
        return job
    kept = newest_index(job.checkpoint, manifest)
    if kept is None or kept.last is None:  # of an older gopt
        return job
    for option, asked, held in (
        ("shuffle", job.shuffle, kept.shuffle), ("last", job.last, kept.last),
        ("batch-size", job.batch_size, kept.batch_size),
    ):  # fmt: skip
        if asked is not None and asked != held:
            raise OptionError(
                f"--{option} {asked}: the run that is continued has "
                f"{f'--{option} {held}' if held is not None else f'no --{option}'}",
                f"leave out --{option}: a resumed run goes on with its samples",
            )
    return replace(job, shuffle=kept.shuffle, last=Last(kept.last), batch_size=kept.batch_size)


def kept_order(job: Job) -> SampleOrder | None:
    """The order of samples that a checkpoint keeps; None where a function has it."""
    return job.order(1) if isinstance(job.data, str) and on_disk(job.data) else None
