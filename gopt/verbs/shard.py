"""``gopt.shard``: a sharded step, and facts known only from a run of the source."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack

from gopt.analysis.region_mappings import find_region_mappings, without_dual
from gopt.analysis.training import TrainingGraph
from gopt.artifact.kinds import Kinds
from gopt.artifact.manifest import Manifest
from gopt.artifact.report_record import ChoiceEntry, ProofEntry
from gopt.errors import OptionError
from gopt.offline.device import device_of, link_of
from gopt.options.records import changed, check_types
from gopt.options.types import checked
from gopt.records.mesh import Mesh
from gopt.records.topology import parse_bytes
from gopt.steps.shard_options import ShardKeywords, ShardOptions
from gopt.steps.sharded import Sharded
from gopt.steps.sharded import shard as shard_step
from gopt.steps.source import Source, as_source, on_mesh
from gopt.system.garbage import gc_paused
from gopt.system.progress import ProgressCallback, no_progress

CHOSEN = ("stage", "partition", "bucket_mb", "pipeline")
"""Fields of ``ShardOptions`` that ``auto`` finds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Auto:
    """Take the best choice of ``gopt plan``. ``memory``: the limit of a rank, such as ``80GB``; ``link``: the links
    between ranks, such as ``200GB/s:5us``; ``device``: ``h100``, ``a100``, ``cpu`` or a file, for times of steps."""

    memory: str | None = None
    link: str | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        check_types(self)


@gc_paused()
@checked
def shard(
    source: Source | str | os.PathLike[str],
    mesh: Mesh | int | str,
    options: ShardOptions | None = None,
    *,
    auto: Auto | None = None,
    prove: bool = True,
    advance: ProgressCallback = no_progress,
    **changes: Unpack[ShardKeywords],
) -> Sharded:
    """Shard a step for every rank of a mesh and check the result; nothing is written.

    ``source`` may be a file. ``mesh``: a Mesh, its text (``dp=2,shard=4``), or a number of ranks along ``shard``.
    Options are fields of ``ShardOptions``: as keywords (``stage=3``), as one record, or as a record with changes.
    ``auto`` chooses stage, partition and bucket size, and the report says why. ``prove``: the ranks are proven equal to
    the source before they are written, beside other work. ``advance`` is called with each phase.
    Raises InputError, OptionError and UnsupportedError.

    >>> gopt.shard("fixtures/mlp_adamw.onnx", "dp=2,shard=2", stage=1)
    <Sharded mlp_adamw.onnx on dp=2,shard=2: 4 ranks, 7 checks passed>
    """
    settings, mesh, choice = changed(options, ShardOptions, changes), Mesh.of(mesh), None
    source = as_source(source)
    if auto is not None:
        settings, choice = _chosen(source, mesh, settings, auto, advance)
    unsure = confirm_duals(source, mesh)
    sharded = shard_step(source, mesh, settings, advance=advance)
    sharded.program.warnings += unsure
    sharded.choice = choice
    if prove:
        sharded.prover = prove_files
    return sharded


def prove_files(folder: Path, manifest: Manifest, training: TrainingGraph, kinds: Kinds | None = None) -> ProofEntry:
    """The proof of written ranks, for the report; ``kinds``: of all ranks, where some are written alone. Raises
    InvariantError for a value unlike the source's."""
    from gopt.verification.proof.written_ranks import proof_entry

    with gc_paused():
        return proof_entry(folder, manifest, training, kinds)


def confirm_duals(source: Source, mesh: Mesh) -> list[str]:
    """Notes on mappings of the source without a known dual; nothing is loaded or run if all are known."""
    if not without_dual(find_region_mappings(source.training)):
        return []
    from gopt.verification.source_duals import check_source_duals

    return check_source_duals(on_mesh(source, mesh), mesh)


def _chosen(
    source: Source, mesh: Mesh, settings: ShardOptions, auto: Auto, advance: ProgressCallback
) -> tuple[ShardOptions, ChoiceEntry]:
    """The options with the best choice filled in, and the choice's entry in the report."""
    from gopt.offline.call_search import CallSearch
    from gopt.offline.mesh_search import MeshSearch, Refusals
    from gopt.offline.meshes import weigh
    from gopt.offline.plan_ranking import best
    from gopt.offline.plan_settings import ShardSettings
    from gopt.offline.timed_search import TimedSearch

    for name in CHOSEN:
        if getattr(settings, name) is not None:
            raise OptionError(f"auto chooses {name}", f"leave out {name}, or auto")
    limit = None if auto.memory is None else parse_bytes(auto.memory)
    device = None if auto.device is None else device_of(auto.device)
    link = link_of(auto.link, device)
    refused = Refusals(source.roles)
    sequences = ShardSettings.sequences(settings)
    search: MeshSearch = CallSearch(link, limit, None, advance, refused, sequences)
    if device is not None:
        fixed = ShardSettings(
            accumulate=settings.accumulate, schedule=settings.schedule, recompute=settings.recompute,
            offload=settings.offload,
        )  # fmt: skip
        search = TimedSearch(device, link or "", limit, None, fixed, advance, refused, sequences)
    weighed = weigh(lambda mesh: on_mesh(source, mesh), mesh, search)
    choice = best(weighed.choices, limit)
    entry = choice.entry(len(weighed.choices), limit, link, None if device is None else device.name)
    if mesh.splits_computation and settings.link is None:
        settings = replace(settings, link=link)  # by which the choice was split
    return choice.choice.settings.applied(settings), entry
