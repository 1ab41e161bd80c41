"""The questions of a search about a mesh: an outline to compare meshes by, all choices, variants of the best."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from gopt.analysis.coupling import refuse_unlike
from gopt.analysis.loss_reduction import LossReduction
from gopt.analysis.role_map import RoleMap
from gopt.analysis.training import TrainingGraph
from gopt.errors import GoptError, InvariantError, OptionError, UnsupportedError
from gopt.offline.plan import PlanChoice
from gopt.offline.plan_ranking import held_first
from gopt.offline.plan_settings import ShardSettings
from gopt.records.mesh import TENSOR, Mesh


class MeshSearch(Protocol):
    """The choices of meshes. ``memory``: bytes of a rank; ``refused``: the choices refused by ``gopt shard``."""

    @property
    def memory(self) -> int | None: ...

    @property
    def refused(self) -> Refusals: ...

    def bounds(self, training: TrainingGraph, meshes: Iterable[Mesh]) -> list[tuple[float, Mesh]]:
        """The meshes by a lower bound of the seconds of a step for each batch."""

    def outline(self, training: TrainingGraph, mesh: Mesh, batches: int | None) -> Iterator[PlanChoice]:
        """The choices by which meshes are compared. ``batches``: of the source in a step; None: any."""

    def whole(self, training: TrainingGraph, mesh: Mesh, batches: int | None) -> Iterator[PlanChoice]:
        """The choices of a mesh."""

    def refined(self, training: TrainingGraph, best: PlanChoice) -> Iterator[PlanChoice]:
        """Variants of the best choice so far."""

    def remarks(self, training: TrainingGraph, mesh: Mesh) -> Iterator[str]:
        """Costs left out of the figures of a mesh."""


@dataclass(slots=True)
class Refusals:
    """Refused choices, by mesh and settings, each with the first error. ``roles``: as the user gave them."""

    roles: RoleMap = field(default_factory=RoleMap)
    errors: dict[str, GoptError] = field(default_factory=dict)

    def admitted(self, what: str, choices: Iterable[PlanChoice]) -> list[PlanChoice]:
        """The choices, made here; [] for a refusal, which is kept under ``what``."""
        try:
            return list(choices)
        except (OptionError, UnsupportedError, InvariantError) as error:  # shard stops at each of them
            self.errors.setdefault(what, error)
            return []

    def check(self, training: TrainingGraph, mesh: Mesh, micro_batches: int) -> None:
        """Raise UnsupportedError where the samples of a batch cannot be divided among ranks or micro-batches."""
        if mesh.data_group is not None or micro_batches > 1:
            refuse_unlike(training, self.roles, LossReduction())

    def texts(self) -> dict[str, str]:
        """For each refused choice, the reason."""
        return {what: f"not weighed: {error.message}" for what, error in self.errors.items()}

    def cause(self) -> GoptError:
        """The first refusal."""
        return next(iter(self.errors.values()))


def leading(found: Iterable[PlanChoice], memory: int | None) -> PlanChoice | None:
    """The best choice, or where nothing fits in ``memory`` bytes the one that holds least."""
    return min(found, key=lambda choice: held_first(choice, memory), default=None)


def attempted(choices: Iterable[PlanChoice]) -> list[PlanChoice]:
    """The choices, computed here; [] where the step does not admit them: no tokens to divide, too few layers for two
    stages on each member, no value to compute again. ``Refusals.admitted`` names the reason for the user."""
    try:
        return list(choices)
    except (OptionError, UnsupportedError):
        return []


def sequence_variants(choice: PlanChoice, sequences: Sequence[bool]) -> list[ShardSettings]:
    """The settings of a choice with the ``sequences`` behind the first, where ranks along ``tp`` compute together."""
    values = sequences[1:] if choice.mesh.along(TENSOR) > 1 else ()
    return [replace(choice.settings, sequence=value) for value in values]
