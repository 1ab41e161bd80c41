"""``gopt.plan``: the costs of each choice of mesh, stage, partition and bucket size."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gopt import api
from gopt.analysis.training import TrainingGraph
from gopt.errors import OptionError
from gopt.offline.call_search import CallSearch
from gopt.offline.device import DeviceFigures, device_of, link_of
from gopt.offline.mesh_search import MeshSearch, Refusals
from gopt.offline.meshes import weigh, weigh_meshes
from gopt.offline.plan_ranking import RankedChoice, rank_choices
from gopt.offline.plan_settings import ShardSettings
from gopt.offline.timed_search import TimedSearch
from gopt.options.types import checked
from gopt.records.mesh import Mesh
from gopt.records.topology import Topology, parse_bytes
from gopt.system.garbage import gc_paused
from gopt.text.notebook import HtmlTable


@dataclass(frozen=True, slots=True)
class Plan(HtmlTable):
    """All choices, best first. ``mesh``: the requested mesh, None if meshes of ``ranks`` were weighed; ``memory``:
    bytes of a rank; ``remarks``: by mesh, beyond the figures."""

    ranks: int
    mesh: Mesh | None
    memory: int | None
    link: str | None
    device: DeviceFigures | None
    choices: tuple[RankedChoice, ...]
    remarks: Mapping[str, str]

    def __repr__(self) -> str:
        over = f"{self.ranks} ranks" if self.mesh is None else str(self.mesh)
        return f"<Plan for {over}: {len(self.choices)} choices>"

    def html_rows(self) -> Iterable[tuple[str, object]]:
        return [(f"{choice.choice.mesh}, {choice.choice.settings}", choice.why) for choice in self.choices]

    def to_json(self) -> dict[str, Any]:
        """The record printed by ``gopt plan --json``."""
        rows = [{"mesh": str(row.choice.mesh), "batches": row.choice.batches, **row.to_json()} for row in self.choices]
        head: dict[str, Any] = {"ranks": self.ranks} if self.mesh is None else {"mesh": str(self.mesh)}
        more = {
            "memory": self.memory,
            "link": self.link,
            "device": self.device and self.device.to_json(),
            "remarks": dict(self.remarks),
            "choices": rows,
        }
        return {"format": "gopt-plan/1", **head, **more}


@checked
def plan(
    source: api.Source | str | os.PathLike[str] | Callable[[], api.Source],
    mesh: Mesh | int | str,
    *,
    memory: int | str | None = None,
    link: str | None = None,
    device: DeviceFigures | str | os.PathLike[str] | None = None,
    bucket_mb: float | None = None,
    micro_batches: int | None = None,
    advance: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Compare every stage, partition and bucket size by memory, traffic, calls, balance and overlap. Writes nothing.

    An int for ``mesh`` weighs several meshes of that many ranks. ``memory``: bytes of a rank or such as ``80GB``;
    ``link``: such as ``200GB/s:5us``; ``device``: ``h100``, ``a100``, ``cpu`` or a file, for times of whole steps, with
    own links; ``bucket_mb``: only this cap, in MiB; ``micro_batches``: only this number of them. ``source`` may be a
    function loading the step, called after reading the other options. Raises InputError, OptionError and
    UnsupportedError.

    >>> gopt.plan("fixtures/mlp_sgd.onnx", "shard=2", bucket_mb=1).choices[0].choice.mesh.ranks
    2
    """
    fixed = not isinstance(mesh, int)
    if isinstance(mesh, int) and mesh < 1:
        raise OptionError(f"the number of ranks cannot be {mesh}", "give at least 1")
    grid = Mesh.of(mesh)
    limit = parse_bytes(memory) if isinstance(memory, str) else memory
    if limit is not None and limit < 0:
        raise OptionError(f"memory cannot be {limit} bytes", "give what a rank may hold, such as 80GB")
    if micro_batches is not None and (device is None or micro_batches < 1):
        raise OptionError(
            f"micro_batches cannot be {micro_batches}" + (" without device" if device is None else ""),
            "give device and at least 1",
        )
    timed = device_of(device) if device is not None else None
    link = link_of(link, timed)
    if link is not None and fixed:
        Topology.parse(link, grid)
    with gc_paused():
        advance("reading")
        step = source() if callable(source) else api.as_source(source)
        caps, refused = None if bucket_mb is None else [bucket_mb], Refusals(step.roles)
        search: MeshSearch = CallSearch(link, limit, caps, advance, refused)
        if timed is not None:
            asked = ShardSettings(accumulate=micro_batches or 1)
            search = TimedSearch(timed, link or "", limit, caps, asked, advance, refused)

        def on_mesh(mesh: Mesh) -> TrainingGraph:
            return api.on_mesh(step, mesh)

        if fixed:
            weighed = weigh(on_mesh, grid, search)
        else:
            weighed = weigh_meshes(on_mesh, grid.ranks, search, link=link, stages=timed is not None)
    ranked = tuple(rank_choices(weighed.choices, limit))
    return Plan(grid.ranks, grid if fixed else None, limit, link, timed, ranked, weighed.remarks)
