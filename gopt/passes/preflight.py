"""Refuses incomplete requests before any work: unsupported axes, and missing passes without which ranks are wrong."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

from gopt.analysis.training import Phase, TrainingGraph
from gopt.errors import InputError, OptionError, RunError, UnsupportedError
from gopt.ir.external_data import show
from gopt.ir.node_kinds import draws
from gopt.ir.types import known
from gopt.passes import PASSES
from gopt.records.mesh import PIPELINE, SHARD, Mesh, format_axes
from gopt.spmd.program import SpmdProgram


def check_planned(mesh: Mesh) -> None:
    """Raise UnsupportedError for a mesh with pipeline stages, if no device is given for their times."""
    if mesh.along(PIPELINE) > 1:
        raise UnsupportedError(
            f"without a device the time of pipeline stages along mesh axis {PIPELINE!r} is not known",
            "add --device h100, a100, cpu or a file",
        )


def check_stage(mesh: Mesh, stage: object) -> None:
    """Raise OptionError for a stage on a mesh whose ranks share out no states."""
    data_axes = [name for name in mesh.data_axes if name != SHARD]
    if stage is None or stage in (0, "0") or mesh.data_ranks == 1 or len(data_axes) < len(mesh.data_axes):
        return
    named = [(SHARD if name == data_axes[-1] else name, size) for name, size in mesh.axes]
    raise OptionError(
        f"--stage {stage} shards nothing on the mesh {mesh}: ranks share out states along an axis {SHARD!r} alone",
        f"write --mesh {format_axes(named)}, or --stage 0 to keep all states on every rank",
    )


def check_axes(mesh: Mesh, training: TrainingGraph) -> None:
    """Raise UnsupportedError where ranks must compute the same and cannot. An axis that splits nothing is refused by
    the pass for this axis."""
    shared = [name for name, size in mesh.axes if size > 1 and name not in (*mesh.data_axes, PIPELINE)]
    node = next(filter(draws, training.graph.nodes), None) if shared else None
    if node is not None:
        raise UnsupportedError(
            f"{node.op_type} {node.label!r} draws different values on each rank, but ranks along {shared[0]!r} must "
            "compute the same",
            "give it a seed, or what it draws as an input",
        )


def check_states(training: TrainingGraph) -> None:
    """Raise InputError for a state with a new value of another type: the next step could not read the value."""
    graph = training.graph
    for state in training.states:
        old, new = graph.type_of(state.tensor), graph.type_of(state.updated)
        unequal = old.static and new.static and old.shape != new.shape
        if known(new.dtype) and (unequal or old.dtype != new.dtype):
            raise InputError(
                f"state {show(state.tensor)} is {old}, and its new value {show(state.updated)} is {new}",
                "a state keeps its type from step to step: check --states",
            )


def check_disk_space(training: TrainingGraph, ranks: int, target: Path, split: bool = False) -> None:
    """Raise RunError where the disk under ``target``, a whole path, has less room than the least size of so many ranks,
    in bytes: every rank's part of the forward and backward, and all values once. ``split``: of trainers and servers,
    ``ranks`` is the number of trainers' files."""
    graph = training.graph
    item = sum(len(node.encoded or node.to_bytes()) for node in graph.nodes if node.phase is not Phase.UPDATE)
    values = sum(tensor.nbytes for tensor in graph.initializers.values())
    home = next(folder for folder in (target, *target.parents) if folder.is_dir())
    free, needed = shutil.disk_usage(home).free, ranks * item + values
    if needed > free:
        if split:
            what = f"{home}: trainers and servers take at least {needed} bytes, and {free} are free"
            raise RunError(what, "choose another folder with -o")
        raise RunError(
            f"{home}: {ranks} ranks take at least {needed} bytes ({item} a rank, {values} of values), {free} are free",
            "take fewer ranks, write some of them with --only-ranks, or choose another folder with -o",
        )


def check_passes(program: SpmdProgram, names: Collection[str]) -> None:
    """Raise OptionError for a pass missing from ``names`` without which the ranks of a step would be wrong."""
    for name, spec in PASSES.items():
        why = spec.needed(program) if name not in names else ""
        if why:
            raise OptionError(f"the pipeline has no pass {name}: {why}", f"add {name} to it; see gopt passes")
