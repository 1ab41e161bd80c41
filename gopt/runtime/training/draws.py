"""Random numbers of a run, made by a counter: the same for a seed, a micro-step, a part of the data and an input,
whatever was drawn before.

Ranks with the same batch are one part of the data, and have the same numbers. A run that is resumed goes on with the
numbers of its steps."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gopt.artifact.manifest import Manifest
from gopt.documents.draws import Distribution, Draw
from gopt.errors import OptionError
from gopt.ir.types import TensorType, numpy_dtype
from gopt.runtime.session import Array
from gopt.runtime.training.checkpoint_folder import newest_index
from gopt.runtime.training.fitted_arrays import fitted, sized

if TYPE_CHECKING:
    from gopt.runtime.training.job import Job

DEFAULT_SEED = 0
"""Of ``gopt run`` without ``--draws``."""


@dataclass(frozen=True, slots=True)
class DrawnInputs:
    """A step's inputs of random numbers, by name, and the seed."""

    types: Mapping[str, TensorType] = field(default_factory=dict)
    draws: Mapping[str, Draw] = field(default_factory=dict)
    seed: int = DEFAULT_SEED

    @classmethod
    def of(cls, manifest: Manifest, seed: int | None) -> DrawnInputs:
        """The inputs of an output folder; ``seed``: as ``seed_of`` returns it."""
        types = {entry.name: entry.type for entry in manifest.common.inputs}
        return cls(types, manifest.draws, DEFAULT_SEED if seed is None else seed)

    def batch(self, number: int, part: int, present: Container[str] = ()) -> dict[str, Array]:
        """The numbers of a data rank in a micro-step, counted over all steps, except inputs that are ``present``."""
        return {
            name: drawn(draw, self.types[name], counter(self.seed, name, number, part))
            for name, draw in self.draws.items()
            if name not in present
        }

    def completed(
        self, values: Mapping[str, Any], types: Mapping[str, TensorType], number: int, part: int
    ) -> dict[str, Array]:
        """The batch of a micro-step: the given values, in the inputs' types, and random numbers for the other inputs.
        Raises InputError for a value that does not fit, or is missing."""
        closed = sized({**self.types, **types}, values)
        arrays = {
            name: fitted(name, closed[name], values.get(name)) for name in types
            if name in values or name not in self.draws
        }  # fmt: skip
        return arrays | replace(self, types=closed).batch(number, part, arrays)

    def without(self, present: Container[str]) -> DrawnInputs:
        """The same inputs, except those that are ``present``."""
        return replace(self, draws={name: draw for name, draw in self.draws.items() if name not in present})


NO_DRAWS = DrawnInputs()


def seed_of(job: Job, manifest: Manifest) -> int | None:
    """The seed of a job's random numbers: of the continued run, else of ``--draws``, else the default.

    None for a step without random inputs. Raises OptionError where ``--draws`` cannot be met."""
    if not manifest.draws:
        if job.draws is not None:
            raise OptionError(
                f"--draws {job.draws}: no input of the step is of random numbers",
                "leave --draws out; gopt inspect MODEL lists the draws that a step has",
            )
        return None
    newest = newest_index(job.checkpoint, manifest) if job.resume and job.checkpoint is not None else None
    if newest is None:
        return DEFAULT_SEED if job.draws is None else job.draws
    seed = newest.draws or 0
    if job.draws not in (None, seed):
        raise OptionError(
            f"--draws {job.draws}: the run that is continued draws from the seed {seed}",
            f"leave --draws out, or write --draws {seed}: a resumed run goes on with its random numbers",
        )
    return seed


def counter(seed: int, name: str, number: int, part: int) -> np.random.Generator:
    """The generator of an input in a micro-step of a data rank: the key is the seed with a digest of the name, the
    counter begins with the part and the micro-step."""
    digest = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    start = np.array([0, 0, number, part], np.uint64)
    return np.random.Generator(np.random.Philox(key=np.array([seed, digest], np.uint64), counter=start))


def drawn(draw: Draw, type: TensorType, generator: np.random.Generator) -> Array:
    """Numbers of a type; an open dimension has two elements."""
    dims = tuple(size if isinstance(size, int) else 2 for size in type.shape or ())
    dtype, kind = numpy_dtype(type.dtype), draw.distribution
    if kind is Distribution.PERMUTATION:
        return generator.permuted(np.broadcast_to(np.arange(dims[-1]), dims), axis=-1).astype(dtype)
    if kind is Distribution.INTEGERS:
        return generator.integers(int(draw.low), int(draw.high), dims).astype(dtype)
    if kind is Distribution.BERNOULLI:
        return np.asarray(generator.random(dims, np.float32) < draw.p).astype(dtype)
    wide = np.float64 if dtype == np.float64 else np.float32
    if kind is Distribution.NORMAL:
        return (generator.standard_normal(dims, wide) * wide(draw.std) + wide(draw.mean)).astype(dtype)
    return _below(generator.random(dims, wide) * wide(draw.high - draw.low) + wide(draw.low), draw, dtype)


def _below(values: Array, draw: Draw, dtype: np.dtype) -> Array:
    """Uniform numbers in their type; a number rounded up to the bound becomes the next below."""
    rounded = np.asarray(values).astype(dtype)
    high = np.asarray(draw.high).astype(dtype)
    least = np.nextafter(high, np.asarray(draw.low).astype(dtype))
    return np.where(rounded >= high, least, rounded).astype(dtype)
