"""The types of a step's batch inputs, at the sizes of a run."""

from __future__ import annotations

from gopt.artifact.manifest import InputKind, Manifest
from gopt.errors import InputError, OptionError
from gopt.ir.types import TensorType
from gopt.runtime.training.fitted_arrays import closed
from gopt.runtime.training.job import Job
from gopt.runtime.training.sample_files import on_disk


def batch_types(manifest: Manifest, job: Job) -> dict[str, TensorType]:
    """The batch inputs, with the job's ``batch_size`` for an open number of samples.

    Raises InputError where samples on disk leave the batch size open, OptionError for a size that the step or the data
    contradicts."""
    types = {entry.name: entry.type for entry in manifest.inputs_of(InputKind.BATCH)}
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
            reason = "--batch-size leaves open" if job.batch_size else "samples on disk do not say how many are a batch"
            raise InputError(
                f"batch input {name!r} has the open shape {type}: {reason}",
                "give --batch-size N" if job.batch_size is None else "export the step at fixed sizes",
                "--data module:function yields batches of any shape",
            )
    return types


def of_size(types: dict[str, TensorType], size: int) -> dict[str, TensorType]:
    """Types with so many samples: the symbol of an input's first dimension has this size everywhere."""
    counts = {name: type.shape[0] for name, type in types.items() if type.shape}
    symbols = {symbol: size for symbol in counts.values() if isinstance(symbol, str)}
    if not symbols and size not in counts.values():
        name = next(iter(counts), "")
        raise OptionError(
            f"--batch-size {size}: the step takes batches of {counts.get(name, 'no')} samples ({name!r})",
            "leave it out, or export the step with --dynamic batch",
        )
    return {name: closed(type, symbols) for name, type in types.items()}
