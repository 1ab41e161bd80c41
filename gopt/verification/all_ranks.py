"""All ranks of an output folder, run together: one step of every phase, and the results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from gopt.artifact.manifest import Manifest
from gopt.errors import InputError
from gopt.ir.types import TensorType
from gopt.records.boxes import Box, box_elements, put
from gopt.records.mesh import Mesh
from gopt.runtime.engines.threads import run_ranks
from gopt.text.sanitize import show
from gopt.verification.compare import Values
from gopt.verification.rank_programs import RankPrograms, joined
from gopt.verification.reference_step import Batches, ReferenceProgram, as_shown
from gopt.verification.variants import FirstRun, Variant, VariantProgram

Transport = Callable[[Sequence[Any], Sequence[Values], Mesh], list[Values]]
Tamper = Callable[[int, Values], None]


@dataclass(frozen=True, slots=True)
class RankResults:
    """Results of a step of all ranks.

    ``outputs``: by rank. ``shown``: losses and metrics of the forward: micro-step, rank, name, value. ``gradients``:
    the local gradients by micro-step and data rank, as sent by the ranks, where visible."""

    outputs: list[Values]
    shown: list[tuple[int, int, str, np.ndarray]]
    gradients: list[list[Values]]


@dataclass(slots=True)
class AllRanks:
    """The ranks of a verification.

    ``which``: the batch of each rank; ``phases``: how often each file runs in a step.
    """

    ranks: list[RankPrograms]
    mesh: Mesh
    phases: dict[str, int]
    which: list[int]
    transport: Transport
    types: Mapping[str, TensorType]
    boxes: Mapping[str, Sequence[Box | None]]
    """Gradient -> what each rank has of it, where dimensions are sharded."""

    def held(self, states: Values, apart: Sequence[Values] = ()) -> list[Values]:
        """Return each rank's part of these states; ``apart``: local states by data rank (``apart``)."""
        local = [apart[which] if apart else Values() for which in self.which]
        return [rank.feeds(states | values) for rank, values in zip(self.ranks, local)]

    def joined(self, key: str, values: Sequence[Values]) -> Values:
        """Whole tensors of the ranks' parts, in shape."""
        return joined(self.ranks, key, values, self.types)

    def apart(self, states: Sequence[Values]) -> list[Values]:
        """For each batch, the local states of its ranks: each data rank has a separate value."""
        separate = [Values() for _ in range(max(self.which) + 1)]
        for which, rank, values in zip(self.which, self.ranks, states):
            for state in rank.states:
                if state.local and state.input in values:
                    name = state.pieces[0].tensor
                    separate[which][name] = np.asarray(values[state.input]).reshape(self.types[name].dims)
        return separate

    def step(
        self, reference: ReferenceProgram, variant: Variant, states: Sequence[Values], settings: Values,
        batches: Batches, tamper: Tamper | None,
    ) -> RankResults:  # fmt: skip
        """One step: every phase as often as due. ``states`` gets the new values."""
        results = RankResults([Values() for _ in self.ranks], [], [[Values() for _ in turn] for turn in batches])
        last = max(self.which)
        remembers = tamper is None and reference.keeps(sum(self.phases.values()), len(self.ranks))
        marked = {r for r in range(len(self.ranks)) if self.which[r] == last and self._has_first(r, reference.marked)}
        saved: dict[tuple[int, int], Values] = {}
        """Rank and micro-step -> what its forward left for its backward."""
        transport = partial(run_ranks, mail={}) if self.transport is run_ranks else self.transport
        for phase, times in self.phases.items():
            members = [r for r, rank in enumerate(self.ranks) if phase in rank.programs]
            programs = [self.ranks[r].programs[phase] for r in members]
            for turn in range(times):
                rank_feeds = [
                    {
                        **states[r],
                        **settings,
                        **self.ranks[r].record.feeds(batches[turn][self.which[r]]),
                        **saved.get((r, turn), {}),
                    }
                    for r in members
                ]
                feeds = [
                    {name: value for name, value in values.items() if name in program.graph.inputs}
                    for program, values in zip(programs, rank_feeds)
                ]
                if tamper is not None:
                    for r, feed in zip(members, feeds):
                        tamper(r, feed)
                data = self.mesh.data_axes
                varied = [
                    VariantProgram(
                        program, variant, reference.gradients, {reference.marked} if r in marked else (), data,
                        reference.training.gradients,
                        self.ranks[r].first_runs.setdefault((phase, turn), FirstRun()) if remembers else None,
                    )
                    for r, program in zip(members, programs)
                ]  # fmt: skip
                for r, output in zip(members, transport(varied, feeds, self.mesh)):
                    self.ranks[r].carry(states[r], output)
                    names = {value.name for value in self.ranks[r].record.saved} & output.keys()
                    saved.setdefault((r, turn), {}).update((name, np.array(output[name])) for name in names)
                    results.outputs[r].update(output)
                    for name in reference.outputs:
                        if name in output:
                            results.shown.append((turn, r, name, as_shown(output[name])))
                    gradients = results.gradients[turn][self.which[r]]
                    for name, value in reference.varied(variant, output, r in marked).items():
                        self._note(gradients, name, value, r)
        return results

    def _box(self, name: str, rank: int) -> Box | None:
        return self.boxes[name][rank] if name in self.boxes else None

    def _has_first(self, rank: int, gradient: str) -> bool:
        """Return whether a rank has the first element of a gradient."""
        return all(dimension[0] == 0 for dimension in self._box(gradient, rank) or ())

    def _note(self, values: Values, name: str, value: np.ndarray, rank: int) -> None:
        """Take a gradient of a rank, or the rank's part."""
        box = self._box(name, rank)
        if box is None:
            values.setdefault(name, value)
            return
        if name not in values:
            values[name] = np.zeros(self.types[name].dims, value.dtype)
        if value.size != (due := box_elements(box)):
            raise InputError(
                f"rank {rank} makes {value.size} elements of the gradient {show(name)}, and has {due} of its parameter",
                "the manifest was edited: shard the step again",
            )
        put(values[name], box, value.reshape(-1), 0)


def gradient_boxes(manifest: Manifest, gradients: Mapping[str, str]) -> dict[str, list[Box | None]]:
    """Return gradient -> each rank's box, for parameters with sharded dimensions.

    A gradient of parameters with different shardings is whole on every rank.
    """
    mesh = manifest.mesh.mesh()
    owners = {state.tensor: state.of or state.tensor for state in manifest.states}
    shapes = {state.tensor: state.shape for state in manifest.states}
    model = [axis for axis, _ in mesh.axes if axis not in mesh.data_axes]
    boxes: dict[str, dict[tuple[int, ...], Box]] = {}

    def place(rank: int) -> tuple[int, ...]:
        return tuple(mesh.coordinates(rank)[axis] for axis in model)

    for entry in manifest.ranks:
        for state in entry.state:
            for piece in state.pieces:
                of = owners[piece.tensor]
                if piece.box is not None and shapes[of] == shapes[piece.tensor]:
                    boxes.setdefault(of, {})[place(entry.rank)] = piece.box
    weights: dict[str, list[str]] = {}
    for name, gradient in gradients.items():
        weights.setdefault(gradient, []).append(name)
    boxes_of: dict[str, list[Box | None]] = {}
    for gradient, names in weights.items():
        alike = [boxes.get(name, {}) for name in names]
        if alike[0] and all(box == alike[0] for box in alike):
            boxes_of[gradient] = [alike[0].get(place(entry.rank)) for entry in manifest.ranks]
    return boxes_of


def data_ranks(mesh: Mesh) -> list[int]:
    """For every rank, the index of its batch: ranks that differ along data axes alone have different batches."""
    batches: dict[tuple[int, ...], int] = {}
    data = mesh.data_axes
    return [
        batches.setdefault(tuple(v for k, v in mesh.coordinates(rank).items() if k in data), len(batches))
        for rank in range(mesh.ranks)
    ]
