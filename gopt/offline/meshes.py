"""Meshes for a number of ranks: ranks with separate samples, by ranks that compute a batch together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

from gopt.analysis.training import TrainingGraph
from gopt.offline.mesh_search import MeshSearch, leading
from gopt.offline.plan import PlanChoice
from gopt.offline.plan_ranking import fits, held_first
from gopt.records.mesh import EXPERT, PIPELINE, SHARD, SPACE, TENSOR, TOKENS, Mesh

MOST_MEMBERS = 8
"""Ranks up to which a batch is computed together: calls of these ranks stand between products, and need the links
inside a node."""
MOST_STAGES = 8
"""Members along ``pp`` up to which meshes are weighed."""
MOST_MESHES = 12
"""So many meshes are outlined at most."""
WHOLE = 2
"""So many meshes, the best by their outlines, are weighed with all settings."""
COMPUTING = (*SPACE, *TOKENS, EXPERT, TENSOR)
"""Axes of ranks computing a batch together, neighbouring ranks last."""
_ORDER = (PIPELINE, SHARD, *COMPUTING)


@dataclass(slots=True)
class MeshChoices:
    """Choices of all meshes, each once.

    ``remarks``: by mesh, or by mesh and settings: limits of the figures, or the reason for leaving something out."""

    choices: list[PlanChoice] = field(default_factory=list)
    meshes: list[Mesh] = field(default_factory=list)
    remarks: dict[str, str] = field(default_factory=dict)

    def take(self, choices: list[PlanChoice]) -> None:
        """Add choices with new settings."""
        earlier = {(choice.mesh, choice.settings) for choice in self.choices}
        self.choices += [choice for choice in choices if (choice.mesh, choice.settings) not in earlier]

    def tell(self, on_mesh: Callable[[Mesh], TrainingGraph], search: MeshSearch) -> None:
        """Set the remarks on meshes and refused choices."""
        texts = {str(mesh): "; ".join(search.remarks(on_mesh(mesh), mesh)) for mesh in self.meshes}
        self.remarks |= {mesh: text for mesh, text in texts.items() if text} | search.refused.texts()


def mesh_of(sizes: dict[str, int], link: str | None = None) -> Mesh:
    """The mesh of some sizes of axes. Axes of a single rank exist only where ``link`` names axes."""
    named = {part.partition("=")[0].strip() for part in (link or "").split(",") if "=" in part}
    axes = tuple((axis, sizes.get(axis, 1)) for axis in _ORDER if sizes.get(axis, 1) > 1 or axis in named)
    return Mesh(axes or ((SHARD, 1),))


def neighbours(mesh: Mesh, link: str | None = None, *, stages: bool) -> Iterator[Mesh]:
    """Meshes of the same ranks in which a factor of ``shard`` has gone to another axis: any factor to ``tp``, a prime
    to ``cp``, ``sp``, ``ep``, ``h`` and ``w``, and with ``stages`` to ``pp``."""
    sizes = {axis: mesh.along(axis) for axis in _ORDER}
    together = prod(sizes[axis] for axis in COMPUTING)
    for axis in (TENSOR, EXPERT, *TOKENS, *SPACE, *((PIPELINE,) if stages else ())):
        most = MOST_STAGES // sizes[PIPELINE] if axis == PIPELINE else MOST_MEMBERS // together
        factors = [factor for factor in range(2, most + 1) if sizes[SHARD] % factor == 0]
        if axis != TENSOR:
            factors = [factor for factor in factors if all(factor % smaller for smaller in range(2, factor))]
        for factor in factors:
            moved = {axis: sizes[axis] * factor, SHARD: sizes[SHARD] // factor}
            yield mesh_of(sizes | moved, link)


def weigh(on_mesh: Callable[[Mesh], TrainingGraph], mesh: Mesh, search: MeshSearch) -> MeshChoices:
    """The choices of a mesh, and variants of the best. A refused choice is left out, with the reason.

    Raises the first refusal where no choice is left."""
    training, result = on_mesh(mesh), MeshChoices(meshes=[mesh])
    result.take(list(search.whole(training, mesh, None)))
    best = leading(result.choices, search.memory)
    if best is None:
        raise search.refused.cause()
    result.take(list(search.refined(training, best)))
    result.tell(on_mesh, search)
    return result


def weigh_meshes(
    on_mesh: Callable[[Mesh], TrainingGraph],
    ranks: int,
    search: MeshSearch,
    *,
    link: str | None = None,
    stages: bool = False,
) -> MeshChoices:
    """The choices of meshes of so many ranks: from ``shard=N`` on, the neighbours of the best mesh so far, until no
    neighbour is better. Then all choices of the best meshes, and variants of the best choice.

    All meshes read as many batches in a step as there are ranks. ``on_mesh`` gives the step sharded for a mesh;
    ``stages``: pipeline stages are tried too. A mesh whose lower bound is above a whole step of another is left out, a
    refused mesh too, with the reason. Raises the first refusal where no mesh is left."""
    climb = _Climb(on_mesh, mesh_of({SHARD: ranks}, link), search)
    at, ring = None, [climb.start]
    while ring:
        climb.outline(ring)
        best = leading(climb.outlined.values(), search.memory)
        top = climb.start if best is None else best.mesh
        ring = climb.new(neighbours(top, link, stages=stages)) if top != at else []
        at = top
    return climb.finish()


class _Climb:
    """The meshes so far. ``outlined``: mesh -> the best choice of its outline; ``stopped``: axes not admitted
    by the step; ``dropped``: meshes without an outline."""

    def __init__(self, on_mesh: Callable[[Mesh], TrainingGraph], start: Mesh, search: MeshSearch) -> None:
        self.on_mesh, self.start, self.search = on_mesh, start, search
        self.result = MeshChoices()
        self.outlined: dict[Mesh, PlanChoice] = {}
        self.visited, self.stopped = {start}, set[str]()
        self.dropped = 0

    def new(self, meshes: Iterable[Mesh]) -> list[Mesh]:
        """The meshes not visited before, and along admitted axes alone."""
        new = [mesh for mesh in meshes if mesh not in self.visited and self.stopped.isdisjoint(_split(mesh))]
        self.visited.update(new)
        return new

    def outline(self, ring: Sequence[Mesh]) -> None:
        """Outline the meshes with a chance, shortest bound first."""
        search, done = self.search, 0
        for bound, mesh in search.bounds(self.on_mesh(self.start), ring):
            best = leading(self.outlined.values(), search.memory)
            slow = best is not None and fits(best, search.memory) and bound > best.seconds
            if slow or len(self.outlined) == MOST_MESHES:
                break
            done += 1
            choices = search.refused.admitted(str(mesh), self._choices(search.outline, mesh))
            if choices:
                self.outlined[mesh] = leading(choices, search.memory) or choices[0]
                self.result.take(choices)
            else:
                admitted = {axis for outlined in self.outlined for axis in _split(outlined)}
                self.stopped.update({*_split(mesh)} - admitted - {TENSOR})
        self.dropped += len(ring) - done

    def finish(self) -> MeshChoices:
        """All choices of the best meshes, and variants of the best choice."""
        result, search = self.result, self.search
        memory, admitted = search.memory, search.refused.admitted
        order = sorted(self.outlined, key=lambda mesh: held_first(self.outlined[mesh], memory))
        for mesh in order[:WHOLE]:
            result.take(admitted(str(mesh), self._choices(search.whole, mesh)))
        best = leading(result.choices, memory)
        if best is None:
            raise search.refused.cause()
        result.take(list(search.refined(self.on_mesh(best.mesh), best)))
        result.meshes = list(self.outlined)
        result.tell(self.on_mesh, search)
        if self.dropped:
            result.remarks["other meshes"] = f"{self.dropped} more compute longer, or hold more, and were not weighed"
        return result

    def _choices(
        self, weighed: Callable[[TrainingGraph, Mesh, int | None], Iterator[PlanChoice]], mesh: Mesh
    ) -> Iterator[PlanChoice]:
        """Yield choices of a mesh; a refusal of the mesh itself is raised with the first."""
        yield from weighed(self.on_mesh(mesh), mesh, self.start.ranks)


def _split(mesh: Mesh) -> list[str]:
    """The axes of several ranks computing a batch together."""
    return [axis for axis in COMPUTING if mesh.along(axis) > 1]
