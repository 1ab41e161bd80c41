"""The batches of a verification: drawn from its seed, or the user's own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from gopt.analysis.training import TrainingGraph
from gopt.errors import InputError
from gopt.runtime.proof import draws
from gopt.runtime.proof.compare import Values
from gopt.runtime.proof.randoms import Randoms
from gopt.runtime.training.data import Source, Turn, open_data


class Batches(Protocol):
    """Where batches come from."""

    def batch(self, number: int, part: int) -> Values:
        """What data rank ``part`` sees in a micro-step, counted over all steps from 0."""


@dataclass(slots=True)
class Drawn:
    """Batches drawn from ``seed``; ``parts``: how many data ranks there are."""

    training: TrainingGraph
    randoms: Randoms
    seed: int
    ranges: dict[str, draws.Range]

    def batch(self, number: int, part: int) -> Values:
        generator = np.random.default_rng([self.seed, 2, number, part])
        types = self.training.graph.types
        made = {
            name: draws.draw(types[name], generator, self.ranges.get(name))
            for name in self.training.batch
            if name not in self.randoms.fed
        }
        return made | self.randoms.draw(self.seed, number, part)

    def plain(self) -> Drawn:
        """The same without labels to ignore."""
        return Drawn(self.training, self.randoms, self.seed, draws.without_ignored(self.ranges))


@dataclass(slots=True)
class Given:
    """The user's own batches, as ``gopt run`` deals them out to ``parts`` data ranks; each is asked for once."""

    training: TrainingGraph
    randoms: Randoms
    seed: int
    parts: int
    text: str
    _sources: list[Source] = field(default_factory=list)
    _held: dict[tuple[int, int], Values] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises InputError, OptionError where the data cannot be read or does not fit."""
        types = {name: self.training.graph.types[name] for name in self.training.batch if name not in self.randoms.fed}
        for name, type in types.items():
            if not type.static:
                raise InputError(f"batch input {name!r} has the open shape {type}")
        self._sources = [open_data(self.text, types, None) for _ in range(self.parts)]

    def batch(self, number: int, part: int) -> Values:
        for each in range(number + 1):  # a function yields them in order
            if (each, part) not in self._held:
                self._held[each, part] = self._sources[part].batch(Turn(each, part, self.parts))
        return self._held[number, part] | self.randoms.draw(self.seed, number, part)
