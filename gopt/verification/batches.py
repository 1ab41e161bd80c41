"""The batches of a verification: drawn from the seed, or of the user."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from gopt.analysis.coupling.samples_axis import samples_axis
from gopt.analysis.training import TrainingGraph
from gopt.errors import InputError
from gopt.runtime.training.array_source import MicroStep, SampleOrder
from gopt.runtime.training.data import BatchSource, open_data
from gopt.runtime.training.draws import DrawnInputs
from gopt.verification import sampling
from gopt.verification.compare import Values
from gopt.verification.random_inputs import RandomInputs


class Batches(Protocol):
    """Source of batches."""

    def batch(self, number: int, part: int) -> Values:
        """Return the batch of data rank ``part`` in micro-step ``number``, counted over all steps from 0."""


@dataclass(slots=True)
class SampledBatches:
    """Batches drawn from ``seed``; ``parts``: how many data ranks there are."""

    training: TrainingGraph
    random_inputs: RandomInputs
    seed: int
    ranges: dict[str, sampling.Range]

    def batch(self, number: int, part: int) -> Values:
        generator = np.random.default_rng([self.seed, 2, number, part])
        names = [name for name in self.training.batch if name not in self.random_inputs.fed]
        inputs = sampling.draw_inputs(self.training, names, generator, self.ranges)
        return inputs | self.random_inputs.draw(self.seed, number, part)

    @property
    def ignores(self) -> bool:
        """Whether some drawn labels are labels to ignore."""
        return any(interval.ignored is not None for interval in self.ranges.values())

    def plain(self) -> SampledBatches:
        """The same without labels to ignore."""
        return SampledBatches(self.training, self.random_inputs, self.seed, sampling.without_ignored(self.ranges))


@dataclass(slots=True)
class UserBatches:
    """The user's batches, as dealt out by ``gopt run`` to ``parts`` data ranks; each is requested once."""

    training: TrainingGraph
    random_inputs: RandomInputs
    seed: int
    parts: int
    text: str
    _sources: list[BatchSource] = field(default_factory=list)
    _drawn: dict[tuple[int, int], Values] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises InputError, OptionError where the data cannot be read or does not fit."""
        types = {
            name: self.training.graph.types[name] for name in self.training.batch if name not in self.random_inputs.fed
        }
        for name, type in types.items():
            if not type.static:
                raise InputError(
                    f"batch input {name!r} has the open shape {type}",
                    "give batches with --data, or fix the dimension in the step",
                )
        drawn = DrawnInputs(types, self.training.draws, self.seed)
        order = SampleOrder(axis=samples_axis(self.training))
        self._sources = [open_data(self.text, types, order, drawn) for _ in range(self.parts)]

    def batch(self, number: int, part: int) -> Values:
        for index in range(number + 1):  # a function yields them in order
            if (index, part) not in self._drawn:
                self._drawn[index, part] = self._sources[part].batch(MicroStep(index, part, self.parts))
        return self._drawn[number, part] | self.random_inputs.draw(self.seed, number, part)
