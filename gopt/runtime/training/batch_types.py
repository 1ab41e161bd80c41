"""The types of a step's batch inputs, at the sizes of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gopt.artifact.manifest import Manifest
from gopt.artifact.manifest_entries import InputKind
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
        types = of_size(types, job.batch_size, manifest.samples_axis)
    for name, type in types.items():
        if stored and not type.static:
            reason = "--batch-size leaves open" if job.batch_size else "samples on disk do not say how many are a batch"
            raise InputError(
                f"batch input {name!r} has the open shape {type}: {reason}",
                "give --batch-size N" if job.batch_size is None else "export the step at fixed sizes",
                "--data module:function yields batches of any shape",
            )
    return types


def samples_in(manifest: Manifest, shapes: Mapping[str, Sequence[int]]) -> int:
    """The samples of a batch with inputs of these shapes."""
    axis, drawn = manifest.samples_axis, manifest.draws
    counted = (shape[axis] for name, shape in shapes.items() if len(shape) > axis and not (axis and name in drawn))
    return max(counted, default=1)


def of_size(types: Mapping[str, TensorType], size: int, axis: int = 0) -> dict[str, TensorType]:
    """Types with so many samples: the symbol of an input's dimension ``axis`` has this size everywhere."""
    shapes = {name: type.shape or () for name, type in types.items()}
    counts = {name: shape[axis] for name, shape in shapes.items() if len(shape) > axis}
    symbols = {symbol: size for symbol in counts.values() if isinstance(symbol, str)}
    if not symbols and size not in counts.values():
        name = next(iter(counts), "")
        raise OptionError(
            f"--batch-size {size}: the step takes batches of {counts.get(name, 'no')} samples ({name!r})",
            "leave it out, or export the step with --dynamic batch",
        )
    return {name: closed(type, symbols) for name, type in types.items()}
