"""All ranks of an output folder, run together: one step of every phase, and what came out of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gopt.ir.types import TensorType
from gopt.mesh import Mesh
from gopt.sharding.boxes import Box, put
from gopt.verification.compare import Values
from gopt.verification.rank_programs import RankPrograms, joined
from gopt.verification.reference_step import Batches, ReferenceProgram
from gopt.verification.variants import Variant, VariantProgram

Transport = Callable[[Sequence[Any], Sequence[Values], Mesh], list[Values]]
Tamper = Callable[[int, Values], None]


@dataclass(frozen=True, slots=True)
class RankResults:
    """What a step of all ranks made. ``outputs``: by rank; ``losses``: micro-step, rank, value; ``gradients``: the
    local ones by micro-step and data rank, as the ranks sent them, where they could be seen."""

    outputs: list[Values]
    losses: list[tuple[int, int, np.ndarray]]
    gradients: list[list[Values]]


@dataclass(slots=True)
class AllRanks:
    """The ranks; ``which`` says of each which batch it sees, ``phases`` how often each file runs in a step."""

    ranks: list[RankPrograms]
    mesh: Mesh
    phases: dict[str, int]
    which: list[int]
    transport: Transport
    types: Mapping[str, TensorType]
    boxes: Sequence[Mapping[str, Box]] = field(default=())
    """Of each rank: gradient -> what the rank has of it, where that is a part."""

    def held(self, states: Values) -> list[Values]:
        """What every rank holds of these states."""
        return [each.feeds(states) for each in self.ranks]

    def joined(self, key: str, values: Sequence[Values]) -> Values:
        """Whole tensors of what the ranks hold, in their shapes."""
        return joined(self.ranks, key, values, self.types)

    def step(
        self, reference: ReferenceProgram, variant: Variant, held: Sequence[Values], settings: Values, batches: Batches,
        tamper: Tamper | None,
    ) -> RankResults:  # fmt: skip
        """One step: every phase as often as it is due. ``held`` follows."""
        made = RankResults([Values() for _ in self.ranks], [], [[Values() for _ in turn] for turn in batches])
        last = max(self.which)
        for phase, times in self.phases.items():
            programs = [rank.programs[phase] for rank in self.ranks]
            for turn in range(times):
                given = [{**held[r], **settings, **batches[turn][self.which[r]]} for r in range(len(self.ranks))]
                feeds = [
                    {name: value for name, value in values.items() if name in program.graph.inputs}
                    for program, values in zip(programs, given)
                ]
                if tamper is not None:
                    for number, feed in enumerate(feeds):
                        tamper(number, feed)
                data = self.mesh.data_axes
                varied = [
                    VariantProgram(
                        program, variant, reference.gradients, reference.marked if self.which[r] == last else "", data
                    )
                    for r, program in enumerate(programs)
                ]
                for r, output in enumerate(self.transport(varied, feeds, self.mesh)):
                    self.ranks[r].carry(held[r], output)
                    made.outputs[r].update(output)
                    if reference.training.loss in output:
                        made.losses.append((turn, r, np.asarray(output[reference.training.loss], np.float64)))
                    seen = made.gradients[turn][self.which[r]]
                    for name, value in reference.varied(variant, output, self.which[r] == last).items():
                        self._see(seen, name, value, r)
        return made

    def _see(self, seen: Values, name: str, value: np.ndarray, rank: int) -> None:
        """Note a local gradient of a rank; parts are put together."""
        box = self.boxes[rank].get(name) if self.boxes else None
        if box is None:
            seen.setdefault(name, value)
            return
        if name not in seen:
            seen[name] = np.zeros(self.types[name].dims, value.dtype)
        put(seen[name], box, value.reshape(-1), 0)


def gradient_boxes(ranks: Sequence[RankPrograms], mesh: Mesh, gradients: Mapping[str, str]) -> list[dict[str, Box]]:
    """What each rank has of gradients, by name: as of its parameters, which other ranks of its place may hold for it.

    ``gradients``: parameter -> gradient.
    """
    places = [
        tuple(at for axis, at in mesh.coordinates(rank).items() if axis not in mesh.data_axes)
        for rank in range(mesh.ranks)
    ]
    found: dict[tuple[int, ...], dict[str, Box]] = {}
    for place, rank in zip(places, ranks):
        pieces = [piece for state in rank.states for piece in state.pieces]
        known = {gradients[each.tensor]: each.box for each in pieces if each.box and each.tensor in gradients}
        found.setdefault(place, {}).update({name: box for name, box in known.items() if box is not None})
    return [found[place] for place in places]


def data_ranks(mesh: Mesh) -> list[int]:
    """For every rank, which batch it sees: ranks that differ along data axes alone see different ones."""
    seen: dict[tuple[int, ...], int] = {}
    data = mesh.data_axes
    return [
        seen.setdefault(tuple(v for k, v in mesh.coordinates(rank).items() if k in data), len(seen))
        for rank in range(mesh.ranks)
    ]
