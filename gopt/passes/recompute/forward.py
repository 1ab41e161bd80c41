"""The forward of a step: the values to save or to compute again, and repeated blocks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property
from itertools import pairwise

from gopt.analysis.flops import flops_of
from gopt.analysis.isomorphism import signature
from gopt.analysis.training import Phase
from gopt.ir.graph import Node
from gopt.ir.graph_index import GraphIndex, descendants
from gopt.ir.node_kinds import heavy
from gopt.operators.kinds import MAY_DRAW, SUMS, VIEWS
from gopt.records.mesh import PIPELINE
from gopt.records.placements import OnMember
from gopt.spmd.program import SpmdProgram
from gopt.spmd.stage_actions import stage_actions
from gopt.spmd.stage_plan import transfers

_LONGEST = 64
"""A block has at most this many parts between two cuts."""


class ForwardValues:
    """Values of the forward. ``makers``: repeatable value -> the node, in order. A repeatable node is a node of the
    step without draws, calls, and results of the step, such as a running statistic; on pipeline stages, a node of one
    stage. ``remade``: values made anew by every action of a stage."""

    def __init__(self, program: SpmdProgram) -> None:
        self.program, self.graph = program, program.graph
        self.remade = _remade(program)
        results = program.results() | self.remade | _beside(program)
        self.makers = {
            name: node for node in self.graph.nodes
            if _repeatable(node, results) and (program.stages is None or self.on_stage(node)) for name in node.outputs
        }  # fmt: skip
        self.root: dict[str, str] = {}
        """View -> the owner of the memory."""
        for name, node in self.makers.items():
            if node.is_in(VIEWS):
                self.root[name] = self.root.get(node.inputs[0], node.inputs[0])

    @cached_property
    def batch(self) -> set[str]:
        """The values depending on the batch."""
        return descendants(GraphIndex(self.graph), self.program.training.batch)

    def nbytes(self, name: str) -> int:
        """Bytes of a saved value."""
        type = self.graph.type_of(name)
        return 0 if name in self.root or name in self.remade or not type.static else type.nbytes

    def on_stage(self, node: Node) -> bool:
        """Return whether a node of a stage can run again: later micro-batches have moved statistics by then."""
        moved = self.program.loop_carried if _scheduled(self.program) else ()
        return _placed(node) and not any(name in moved for name in node.reads)

    def member(self, name: str) -> int:
        """The member of the axis of stages with a repeatable value; 0 without stages."""
        return member_of(self.makers[name])

    def operations(self, node: Node) -> int:
        """The cost of a copy: operations of a product, elements of other results."""
        return flops_of(self.graph, node) or sum(self.nbytes(name) // 4 for name in node.outputs)

    def light(self, node: Node) -> bool:
        """Return whether results cost few operations for the bytes: not a product, except for a product of two
        activations with a larger or equal result, such as attention scores; not a residual sum."""
        if not heavy(node):
            return not self.joins(node)
        sizes = [self.graph.type_of(value).nbytes for value in node.inputs if value in self.batch]
        return len(sizes) == 2 and max(sizes) <= self.graph.type_of(node.outputs[0]).nbytes

    def joins(self, node: Node) -> bool:
        """Return whether a node adds two activations, as in a residual stream: a copy of the last sum needs copies of
        all sums before."""
        size = self.graph.type_of(node.outputs[0]).nbytes
        return node.is_in(SUMS) and sum(
            value in self.batch and self.graph.type_of(value).nbytes == size for value in node.inputs
        ) > 1  # fmt: skip

    @cached_property
    def blocks(self) -> list[tuple[str, Sequence[Node]]]:
        """The repeated blocks in order: the input, and the nodes up to the input of the next block."""
        nodes = [
            node for node in self.graph.nodes if node.phase is Phase.FORWARD
            and (self.program.stages is None or _placed(node) or transfers(node))  # others are of every stage
        ]  # fmt: skip
        cuts = self._cuts(nodes)
        parts = [nodes[start:stop] for (start, _), (stop, _) in pairwise(cuts)]
        start, length, end = _repeated([self._structure(part) for part in parts])
        read = {name for node in self.graph.nodes if node.phase is Phase.BACKWARD for name in node.inputs}
        starts = max(
            (range(at, end - length + 1, length) for at in range(start, min(start + length, end - 2 * length + 1))),
            key=lambda starts: sum(cuts[at][1] in read for at in starts), default=range(0),
        )  # fmt: skip
        return [(cuts[at][1], [node for part in parts[at : at + length] for node in part]) for at in starts]

    def _structure(self, part: Sequence[Node]) -> Hashable:
        """The common structure of isomorphic parts: operators and types of values depending on the batch, without
        views and transfers between stages."""
        return tuple(
            (signature(node), str(self.graph.type_of(node.outputs[0])))
            for node in part
            if node.outputs[0] in self.batch and node.outputs[0] not in self.root and not transfers(node)
        )

    def _cuts(self, nodes: Sequence[Node]) -> list[tuple[int, str]]:
        """Positions where one value alone is live, and the value. A value live for more than half of the forward, such
        as a mask, does not count."""
        last = {self.root.get(name, name): position for position, node in enumerate(nodes) for name in node.reads}
        ends: dict[int, set[str]] = {}
        crossing: set[str] = set()
        cuts: list[tuple[int, str]] = []
        for position, node in enumerate(nodes):
            crossing -= ends.get(position, set())
            for name in node.outputs:
                if (
                    name in self.root
                    or name not in self.batch
                    or not self.graph.type_of(name).dtype.startswith(_FLOATS)
                ):
                    continue
                if position < last.get(name, -1) <= position + len(nodes) / 2:
                    ends.setdefault(last[name], set()).add(name)
                    crossing.add(name)
            if len(crossing) == 1 and (not cuts or cuts[-1][1] not in crossing):
                if cuts and transfers(node) and cuts[-1][1] in node.inputs:
                    cuts.pop()  # the same value, on the next stage
                cuts.append((position + 1, min(crossing)))
        return cuts


_FLOATS = ("float", "bfloat")


def _placed(node: Node) -> bool:
    return isinstance(node.sharding.on(PIPELINE), OnMember)


def member_of(node: Node) -> int:
    """The member of the axis of stages with a node; 0 without stages."""
    placement = node.sharding.on(PIPELINE)
    return placement.member if isinstance(placement, OnMember) else 0


def _scheduled(program: SpmdProgram) -> bool:
    return program.stages is not None and program.stages.schedule is not None


def _remade(program: SpmdProgram) -> set[str]:
    if not _scheduled(program):
        return set()
    actions = stage_actions(program)
    return {name for node in actions.nodes if actions.remade(node) for name in node.outputs}


def _beside(program: SpmdProgram) -> set[str]:
    """The values read by another stage of the same member, and the results of such readers: the backward of another
    stage runs at another time, so neither side can rely on copies or gathers of the other."""
    stages, result = program.value_stages, set[str]()
    for node in program.graph.nodes:
        if transfers(node) or node.first_output not in stages:
            continue
        stage = stages[node.first_output]
        if others := {name for name in node.reads if name in stages and stages[name] != stage}:
            result.update(others, node.outputs)
    return result


def _repeatable(node: Node, results: set[str]) -> bool:
    return (
        node.phase is Phase.FORWARD and node.source is not None and node.domain in ("", "ai.onnx")
        and node.op_type not in MAY_DRAW and not node.captures and "" not in node.outputs
        and results.isdisjoint(node.outputs)
    )  # fmt: skip


def _repeated(parts: Sequence[Hashable]) -> tuple[int, int, int]:
    """The longest run of equal blocks: start, parts of a block, and end. Shorter blocks win ties."""
    most, run_at = 0, (0, 1, 0)
    for length in range(1, min(len(parts) // 2, _LONGEST) + 1):
        run = 0
        for position in range(len(parts) - length):
            run = run + 1 if parts[position] == parts[position + length] else 0
            covered = run + length if run >= length else 0
            if covered > most:
                most, run_at = covered, (position + 1 - run, length, position + 1 + length)
    return run_at
