"""The stages of a pipeline: the members of an axis that compute and hold parts of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gopt.ir.graph import SPMD, TRANSFER, Node
from gopt.records.mesh import PIPELINE, Mesh
from gopt.records.placements import OnMember, Sharding
from gopt.schedules.actions import ActionKind, Schedule, chunk_numbers, phase_name
from gopt.schedules.schedule_file import FILE, to_text
from gopt.schedules.simulation import simulate

SCHEDULE_FILE = FILE


@dataclass(frozen=True, slots=True)
class StagePlan:
    """The stage of each state of a step; a state without an entry is equal on all stages.

    ``placement``: stage -> member of the axis. Stages are numbered in the order of the forward; ``schedule``: the order
    of micro-batches, None of a step without micro-batches.
    """

    mesh: Mesh
    placement: tuple[int, ...]
    states: Mapping[str, int]
    schedule: Schedule | None = None

    @property
    def schedule_text(self) -> str:
        """The text of ``SCHEDULE_FILE``, or '' without a schedule."""
        return "" if self.schedule is None else to_text(self.schedule)

    @property
    def peak_live(self) -> tuple[int, ...]:
        """The most forwards of each member whose backwards are still to end; () without a schedule."""
        return () if self.schedule is None else simulate(self.schedule).peak_live

    @property
    def stages(self) -> int:
        return len(self.placement)

    @property
    def chunks(self) -> int:
        """The count of numbers of stages in the names of files."""
        return chunk_numbers(self.placement)[-1] + 1

    def chunk(self, stage: int) -> int:
        """The number of a stage in the names of files."""
        return chunk_numbers(self.placement)[stage]

    def phase(self, kind: ActionKind, chunk: int) -> str:
        """The name of the files that run an action of a stage."""
        return phase_name(kind, chunk, self.chunks)

    def on(self, stage: int, sharding: Sharding) -> Sharding:
        """``sharding``, on the member of a stage alone."""
        placements = dict(sharding.by_axis) | {PIPELINE: OnMember(self.placement[stage])}
        return Sharding(tuple((axis, placements[axis]) for axis, _ in self.mesh.axes if axis in placements))


def transfers(node: Node, *, to_all: bool = False) -> bool:
    """Return whether a node sends values from a stage to another, or to all; ``to_all``: to all alone."""
    return node.op_type == TRANSFER and node.domain == SPMD and (not to_all or node.attributes["target"] < 0)
