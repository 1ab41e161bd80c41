"""Meshes for a number of ranks: ranks with separate samples, by ranks that compute a batch together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from gopt.analysis.training import TrainingGraph
from gopt.errors import OptionError, UnsupportedError
from gopt.offline.plan import PlanChoice, split_choices, split_program
from gopt.offline.plan_ranking import rank_choices
from gopt.offline.timed_search import MOST_MESHES, TimedSearch, shortest_first
from gopt.passes.preflight import check_planned
from gopt.records.mesh import SHARD, TENSOR, Mesh
from gopt.records.topology import Topology
from gopt.spmd.program import SpmdProgram

MOST_MEMBERS = 8
"""Ranks along ``tp`` up to which meshes are weighed: their calls stand between one product and the next, so that they
need the links inside a node."""


@dataclass(slots=True)
class MeshChoices:
    """Choices of all meshes.

    ``remarks``: by mesh, limits of the figures, or the reason for leaving the mesh out."""

    found: list[PlanChoice] = field(default_factory=list)
    meshes: list[Mesh] = field(default_factory=list)
    remarks: dict[str, str] = field(default_factory=dict)


def meshes_of(ranks: int, link: str | None = None) -> list[Mesh]:
    """``shard=N/t,tp=t`` for every t up to MOST_MEMBERS that divides N, ``shard=N`` first.

    Neighbouring ranks are along ``tp``. Axes of one rank exist only where ``link`` names axes."""
    named = {part.partition("=")[0].strip() for part in (link or "").split(",") if "=" in part}
    meshes = []
    for members in range(1, min(ranks, MOST_MEMBERS) + 1):
        if ranks % members == 0:
            axes = [(SHARD, ranks // members), (TENSOR, members)]
            relevant = [axis for axis in axes if axis[1] > 1 or (named and (axis[0] in named or members > 1))]
            meshes.append(Mesh(tuple(relevant or axes[:1])))
    return meshes


def weigh(
    on_mesh: Callable[[Mesh], TrainingGraph],
    meshes: Sequence[Mesh],
    *,
    caps: Sequence[float | None] | None = None,
    link: str | None = None,
    advance: Callable[[str], None] = lambda _: None,
) -> MeshChoices:
    """The choices of every mesh, each split once; ``on_mesh`` gives the step sharded for a mesh.

    A refused mesh behind the first is left out, with the reason. Raises the first mesh's error."""
    result = MeshChoices()
    for mesh in meshes:
        try:
            topology = None if link is None else Topology.parse(link, mesh)
            check_planned(mesh)
            split = split_program(on_mesh(mesh), mesh, topology)
            result.found += split_choices(split, caps=caps, topology=topology, advance=advance)
        except (OptionError, UnsupportedError) as error:
            if mesh is meshes[0]:
                raise
            result.remarks[str(mesh)] = f"not weighed: {error.message}"
            continue
        result.meshes.append(mesh)
        remarks = "; ".join(_remarks(split))
        if remarks:
            result.remarks[str(mesh)] = remarks
    return result


def weigh_timed(
    on_mesh: Callable[[Mesh], TrainingGraph], meshes: Sequence[Mesh], search: TimedSearch, *, fixed: bool
) -> MeshChoices:
    """The choices of the meshes that compute least in a step, as ``weigh`` does, and variants of the best choice.

    All meshes read as many batches in a step as there are ranks, unless the mesh is ``fixed``, or the number of
    micro-batches is. A mesh whose computation alone takes longer than a whole step of another is left out."""
    result = MeshChoices()
    least = shortest_first(on_mesh(meshes[0]), meshes, search) if not fixed else [(0.0, mesh) for mesh in meshes]
    batches = None if fixed else meshes[0].ranks
    for bound, mesh in least:
        best = min((choice.seconds for choice in result.found if search.fits(choice)), default=bound)
        if bound > best or len(result.meshes) == MOST_MESHES:
            break
        try:
            training = on_mesh(mesh)
            result.found += search.plain(training, mesh, batches)
        except (OptionError, UnsupportedError) as error:
            if fixed:
                raise
            result.remarks[str(mesh)] = f"not weighed: {error.message}"
            continue
        result.meshes.append(mesh)
    if left := len(meshes) - len(result.meshes) - len(result.remarks):
        result.remarks["other meshes"] = f"{left} more compute longer, or hold more, and were not weighed"
    if not result.found:
        raise OptionError("no mesh can be weighed", *result.remarks.values())
    best_choice = rank_choices(result.found, search.memory)[0].choice
    result.found += search.refined(on_mesh(best_choice.mesh), best_choice)
    return result


def _remarks(split: SpmdProgram) -> Iterator[str]:
    """Yield costs of a mesh that the row of figures leaves out."""
    record = split.passes[0].record
    if split.split and record.note:
        yield record.note
    whole = record.facts.get("computed_whole")
    if whole:
        nodes = "1 node" if len(whole) == 1 else f"{len(whole)} nodes"
        yield f"every rank along {'+'.join(split.split)} computes {nodes} whole"
    if not split.mesh.shard_axis and split.mesh.ranks > 1:
        data = split.mesh.data_ranks
        hint = f" (they share them along shard: shard={data} in place of other axes)" if data > 1 else ""
        yield f"no ranks share states{hint}: stages 1 to 3 are stage 0"
