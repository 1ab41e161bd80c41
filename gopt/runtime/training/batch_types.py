"""The types of the inputs that have samples, as a run feeds them."""

from __future__ import annotations

from gopt.artifact.manifest import InputKind, Manifest
from gopt.errors import InputError, OptionError
from gopt.ir.types import TensorType
from gopt.runtime.training.fitted_arrays import closed
from gopt.runtime.training.job import Job
from gopt.runtime.training.sample_files import on_disk


def batch_types(manifest: Manifest, job: Job) -> dict[str, TensorType]:
    """The batch's inputs, whose open number of samples is the job's ``batch_size``.

    Raises InputError where samples on disk do not say how many of them are a batch, OptionError for a size that the
    step or the data contradicts.
    """
    types = {each.name: each.type for each in manifest.inputs_of(InputKind.BATCH)}
    stored = isinstance(job.data, str) and on_disk(job.data)
    if job.batch_size is not None:
        if not stored:
            raise OptionError(
                "--batch-size needs samples on disk: batches that --data yields have a size of their own",
                "yield batches of that size, or name a file or a folder",
            )
        types = of_size(types, job.batch_size)
    for name, type in types.items():
        if stored and not type.static:
            said = "--batch-size leaves open" if job.batch_size else "samples on disk do not say how many are a batch"
            raise InputError(
                f"batch input {name!r} has the open shape {type}: {said}",
                "give --batch-size N" if job.batch_size is None else "export the step at fixed sizes",
                "--data module:function yields batches of any shape",
            )
    return types


def of_size(types: dict[str, TensorType], size: int) -> dict[str, TensorType]:
    """Types with so many samples: what the first dimension of an input is called has this size everywhere."""
    first = {name: type.shape[0] for name, type in types.items() if type.shape}
    symbols = {held: size for held in first.values() if isinstance(held, str)}
    if not symbols and size not in first.values():
        name = next(iter(first), "")
        raise OptionError(
            f"--batch-size {size}: the step takes batches of {first.get(name, 'no')} samples ({name!r})",
            "leave it out, or export the step with --dynamic batch",
        )
    return {name: closed(type, symbols) for name, type in types.items()}
