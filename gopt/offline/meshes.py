"""Meshes for a number of ranks: ranks that see samples of their own, by ranks that compute a batch together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from gopt.analysis.training import TrainingGraph
from gopt.errors import OptionError, UnsupportedError
from gopt.offline.plan import PlanChoice, split_choices, split_program
from gopt.passes.preflight import check_mesh
from gopt.records.mesh import SHARD, Mesh
from gopt.records.topology import Topology
from gopt.spmd.program import SpmdProgram
from gopt.tensor_parallel.mesh_axes import TENSOR

MOST_MEMBERS = 8
"""Ranks along ``tp`` up to which meshes are weighed: their calls stand between one product and the next, so that they
need the links inside a node."""


@dataclass(slots=True)
class MeshChoices:
    """Choices of all meshes.

    ``remarks``: by mesh, limits of its figures, or the reason why it was not weighed.
    """

    found: list[PlanChoice] = field(default_factory=list)
    meshes: list[Mesh] = field(default_factory=list)
    remarks: dict[str, str] = field(default_factory=dict)


def meshes_of(ranks: int, link: str | None = None) -> list[Mesh]:
    """``shard=N/t,tp=t`` for every t up to MOST_MEMBERS that divides N, ``shard=N`` first.

    Neighbouring ranks are along ``tp``. Axes of one rank are there only where the ``link`` names axes.
    """
    named = {part.partition("=")[0].strip() for part in (link or "").split(",") if "=" in part}
    found = []
    for members in range(1, min(ranks, MOST_MEMBERS) + 1):
        if ranks % members == 0:
            axes = [(SHARD, ranks // members), (TENSOR, members)]
            kept = [each for each in axes if each[1] > 1 or (named and (each[0] in named or members > 1))]
            found.append(Mesh(tuple(kept or axes[:1])))
    return found


def weigh(
    on_mesh: Callable[[Mesh], TrainingGraph],
    meshes: Sequence[Mesh],
    *,
    caps: Sequence[float | None] | None = None,
    link: str | None = None,
    advance: Callable[[str], None] = lambda _: None,
) -> MeshChoices:
    """The choices of every mesh, each split once; ``on_mesh`` gives the step as a mesh shards it.

    A mesh behind the first that is refused is left out, with the reason. Raises what the first one raises.
    """
    result = MeshChoices()
    for mesh in meshes:
        try:
            topology = None if link is None else Topology.parse(link, mesh)
            check_mesh(mesh)
            split = split_program(on_mesh(mesh), mesh, topology)
            result.found += split_choices(split, caps=caps, topology=topology, advance=advance)
        except (OptionError, UnsupportedError) as error:
            if mesh is meshes[0]:
                raise
            result.remarks[str(mesh)] = f"not weighed: {error.message}"
            continue
        result.meshes.append(mesh)
        said = "; ".join(_remarks(split))
        if said:
            result.remarks[str(mesh)] = said
    return result


def _remarks(split: SpmdProgram) -> Iterator[str]:
    """Yield costs of a mesh that its row of figures leaves out."""
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
