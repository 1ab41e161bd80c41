"""The interface between the executor and CPU tuning, with two implementations: everything on, everything off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from gopt.ir.graph import Graph
from gopt.ir.types import TensorType
from gopt.runtime.partition import OverwritingSegment, Segment
from gopt.runtime.planner.assignment import BufferAssignment, MemberIndex
from gopt.runtime.planner.buffer_assignment import assign_buffers
from gopt.runtime.planner.memory_planner import BufferViews
from gopt.runtime.session import SessionCache
from gopt.runtime.tuning.tiling import CompiledRun, ElementwiseRun, compile_run, split_elementwise


class Tuning(Protocol):
    """Optimizations of a rank's step. All implementations give the same bits."""

    plans_memory: bool
    """Whether results keep the same memory in every step. Else every step makes new arrays, and writes only over the
    operands of an overwriting segment."""

    def assign_buffers(self, graph: Graph, replaces: Mapping[str, str], member: MemberIndex | None) -> BufferAssignment:
        """Assign buffers to data sent and gathered by calls, private or shared with ``member``'s group; ``replaces``:
        output -> state."""

    def split(self, segment: Segment, types: Mapping[str, TensorType]) -> Sequence[Segment | OverwritingSegment]:
        """The parts of a segment in run order."""

    def compile_run(
        self, run: Any, aliases: Mapping[str, str], graph: Graph, types: dict[str, TensorType],
        cache: SessionCache, views: BufferViews,
    ) -> Any:  # fmt: skip
        """Compile an overwriting segment of ``split``; ``aliases``: result -> the overwritten operand."""


class CpuTuning:
    """Buffers and memory planned before the first step, elementwise runs in tiles, kernels by LLVM or NumPy."""

    plans_memory = True

    def assign_buffers(self, graph: Graph, replaces: Mapping[str, str], member: MemberIndex | None) -> BufferAssignment:
        return assign_buffers(graph, replaces, member)

    def split(self, segment: Segment, types: Mapping[str, TensorType]) -> Sequence[Segment | ElementwiseRun]:
        return split_elementwise(segment, types)

    def compile_run(
        self, run: ElementwiseRun, aliases: Mapping[str, str], graph: Graph, types: dict[str, TensorType],
        cache: SessionCache, views: BufferViews,
    ) -> CompiledRun:  # fmt: skip
        return compile_run(run, aliases, graph, types, cache, views)


class NoTuning:
    """One session of ONNX Runtime per segment, results in new memory, and calls that copy sent and gathered data."""

    plans_memory = False

    def assign_buffers(self, graph: Graph, replaces: Mapping[str, str], member: MemberIndex | None) -> BufferAssignment:
        return BufferAssignment(graph)

    def split(self, segment: Segment, types: Mapping[str, TensorType]) -> Sequence[Segment | OverwritingSegment]:
        return [segment]

    def compile_run(
        self, run: Any, aliases: Mapping[str, str], graph: Graph, types: dict[str, TensorType],
        cache: SessionCache, views: BufferViews,
    ) -> Any:  # fmt: skip
        raise AssertionError("without tuning no run is taken out of a segment")


CPU_TUNING = CpuTuning()
NO_TUNING = NoTuning()


def tuning_of(enabled: bool) -> Tuning:
    """Return the tuning selected by ``--no-tuning``."""
    return CPU_TUNING if enabled else NO_TUNING
