"""Plans which server updates which piece, and the messages that carry gradients. The graph is not changed.

A bucket is the units of one server whose gradients travel in one message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from gopt.analysis.training import TrainingGraph
from gopt.analysis.update_subgraphs import find_updates
from gopt.analysis.updates import UpdateMode, Updates, UpdateSubgraph
from gopt.errors import UnsupportedError
from gopt.ir.types import TensorType
from gopt.parameter_server.components import components
from gopt.parameter_server.options import SplitOptions
from gopt.parameter_server.placement import PieceSize, place
from gopt.parameter_server.slicing import pieces, static_shape
from gopt.parameter_server.table_choice import TableChoice, choose_tables
from gopt.parameter_server.units import PlacedPiece, ServerUnit, make_units
from gopt.text.sanitize import show


@dataclass(frozen=True, slots=True)
class KeyBucket:
    """A message of gradients to a server, or to every server."""

    number: int
    server: int | None
    units: tuple[ServerUnit, ...]

    @property
    def ready(self) -> int:
        return max(unit.ready for unit in self.units)


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """All buckets, in the order in which their gradients are complete; ``owners``: parameter -> its pieces in order.

    ``tables``: parameters that are in no bucket, because trainers pull and push their rows.
    """

    updates: Updates
    buckets: tuple[KeyBucket, ...]
    owners: Mapping[str, tuple[PlacedPiece, ...]]
    tables: TableChoice = field(default_factory=TableChoice)
    narrow: Mapping[str, str] = field(default_factory=dict)
    """Parameter -> the type to which it is cast before it is sent: trainers read it in half precision alone."""

    @property
    def units(self) -> list[ServerUnit]:
        return [unit for bucket in self.buckets for unit in bucket.units]

    def read_name(self, parameter: str) -> str:
        """Return the name under which trainers read a parameter."""
        return f"gopt.ps.narrow.{parameter}" if parameter in self.narrow else parameter

    def read_type(self, parameter: str, type: TensorType) -> TensorType:
        """Return the type in which trainers read a parameter of a type."""
        return replace(type, dtype=self.narrow.get(parameter, type.dtype))

    def __repr__(self) -> str:
        return (
            f"<ServerPlan of {len(self.owners)} parameters in {len(self.units)} units and {len(self.buckets)} buckets>"
        )


def make_plan(
    training: TrainingGraph, options: SplitOptions, uncut: frozenset[str] = frozenset(), narrow: Mapping[str, str] = {}
) -> ServerPlan:  # fmt: skip
    """Place every parameter with a gradient.

    ``uncut``: parameters that stay in one piece, with all their states; ``narrow``: as in ``ServerPlan``. Raises
    UnsupportedError for a parameter of open shape, and in asynchronous modes for updates belonging together.
    """
    apart = not options.mode.rounds
    updates = find_updates(training, whole_accumulators=False)
    if not updates.subgraphs:
        raise UnsupportedError(
            "no parameter has a gradient: there is nothing to update on servers",
            "gopt inspect shows the roles; --params INPUT=GRADIENT names a gradient",
        )
    if apart:
        _refuse_common(updates)
    types = training.graph.types
    tables = choose_tables(training, updates, options)
    cut = {
        name: pieces(static_shape(name, types[name].shape), options.slicing, options.servers, options.minimum)
        for name, update in updates.subgraphs.items()
        if _may_cut(update, apart) and name not in tables.parameters and name not in uncut
    }  # fmt: skip
    # What stays in one piece completes a reduction of its own, such as a trust ratio: no call among servers is needed.
    # A tensor without elements would vanish from a run.
    names = [
        name for name, update in updates.subgraphs.items() if len(cut.get(name, ())) < 2 and _private(update, updates)
    ]
    names += [name for name in updates.subgraphs if not types[name].elements or name in uncut]
    whole = frozenset(name for name in names if updates.subgraphs[name].mode is UpdateMode.SPLIT) - tables.parameters
    if whole:
        updates = find_updates(training, whole_accumulators=False, uncut=whole)
    tables = replace(
        tables, served=tuple(replace(row, subgraph=updates.subgraphs[row.table.parameter]) for row in tables.served)
    )
    dense_updates = {name: update for name, update in updates.subgraphs.items() if name not in tables.parameters}
    dense = replace(updates, subgraphs=dense_updates)
    owners = _place(training, dense, {name: ranges for name, ranges in cut.items() if name not in whole}, options)
    units = make_units(training, dense, owners, options, narrow)
    return ServerPlan(updates, tuple(make_buckets(units, options)), owners, tables, narrow)


def _may_cut(subgraph: UpdateSubgraph, apart: bool) -> bool:
    """Return whether a tensor may be cut among servers: updated alone, without shared reductions."""
    return subgraph.mode is UpdateMode.SPLIT and not (apart and subgraph.reductions)


def _private(subgraph: UpdateSubgraph, updates: Updates) -> bool:
    """Return whether a tensor has reductions, all over itself alone."""
    roots = [updates.scalar_reductions.get(updates.reduction_of.get(n.outputs[0], "")) for n in subgraph.reductions]
    return bool(roots) and all(root is not None and len(root.leaves) == 1 and not root.epilogue for root in roots)


def _refuse_common(updates: Updates) -> None:
    """Refuse reductions over several parameters in modes with updates on arrival."""
    for reduction in updates.scalar_reductions.values():
        if len(reduction.leaves) > 1 or reduction.epilogue:
            raise UnsupportedError(
                f"{show(reduction.root)} is computed from the gradients of several parameters: without rounds they are "
                "never there together",
                "take --mode sync, or clip each gradient by itself",
            )


def _place(
    training: TrainingGraph, updates: Updates, cut: Mapping[str, Sequence[tuple[int, int]]], options: SplitOptions
) -> dict[str, tuple[PlacedPiece, ...]]:
    """Return the pieces of every parameter with servers. Jointly updated tensors are placed as one."""
    types = training.graph.types
    together = components(updates)
    sizes, of = [], []
    for name in updates.subgraphs:
        members = together.get(name, (name,))
        if members[0] != name:
            continue
        ranges = cut.get(name, ((0, types[name].elements),))
        nbytes_all = sum(types[state.tensor].nbytes for member in members for state in updates.subgraphs[member].states)
        for index, (start, stop) in enumerate(ranges):
            part = nbytes_all * (stop - start) // max(types[name].elements, 1) if len(ranges) > 1 else nbytes_all
            sizes.append(PieceSize(name, index, part))
            of.append((name, index, start, stop))
    servers = place(sizes, options.servers, options.placement, options.given)
    placed: dict[str, list[PlacedPiece]] = {}
    for (name, index, start, stop), server in zip(of, servers):
        whole = name not in cut or len(cut[name]) == 1
        placed.setdefault(name, []).append(PlacedPiece(name, index, start, stop, server, whole))
    for name, (leader, *_) in together.items():
        if name != leader:
            placed[name] = [PlacedPiece(name, 0, 0, types[name].elements, placed[leader][0].server, True)]
    return {name: tuple(placed[name]) for name in updates.subgraphs}


def make_buckets(units: Sequence[ServerUnit], options: SplitOptions) -> list[KeyBucket]:
    """Group neighbouring units of one server and of the same types, up to the cap."""

    def kind(unit: ServerUnit) -> tuple[int, tuple[str, ...]]:
        return -1 if unit.server is None else unit.server, unit.dtypes

    groups: list[tuple[ServerUnit, ...]] = []
    for _, group in groupby(sorted(units, key=kind), key=kind):
        group_units: list[ServerUnit] = []
        nbytes = 0
        for unit in group:
            if group_units and nbytes + unit.nbytes > options.cap:
                groups.append(tuple(group_units))
                group_units, nbytes = [], 0
            group_units.append(unit)
            nbytes += unit.nbytes
        groups.append(tuple(group_units))
    groups.sort(key=lambda units: (max(unit.ready for unit in units), units[0].number))
    return [KeyBucket(number, units[0].server, units) for number, units in enumerate(groups)]
