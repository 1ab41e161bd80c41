"""The nodes of a rank with copies between device and host, and bytes of values on the device alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gopt.ir.graph import Node
from gopt.ir.host_copies import TO_DEVICE, TO_HOST, CopiedStep, FileNodes, with_copies
from gopt.spmd.liveness import ByteCounts
from gopt.spmd.local_sizes import LocalSizes
from gopt.spmd.program import SpmdProgram


@dataclass(frozen=True, slots=True)
class DeviceSizes:
    """The sizes of values on the device; 0 for values on the host."""

    sizes: ByteCounts
    copied: CopiedStep

    def nbytes(self, name: str) -> int:
        """Bytes of a value on the device; 0 if the shape is unknown."""
        original = self.copied.original.get(name, name)
        return 0 if name in self.copied.on_host else self.sizes.nbytes(original)


def copied(
    program: SpmdProgram, nodes: Sequence[Node], sizes: LocalSizes, carried: Collection[str] = (),
    results: Collection[str] = (),
) -> CopiedStep:  # fmt: skip
    """The nodes of a rank with the copies of the program. ``carried``: activations of earlier files of the micro-batch;
    ``results``: activations for later files. Ranks with the same nodes share the answer, which stays unchanged."""
    names = tuple(node.outputs[0] if node.outputs else node.inputs[0] for node in nodes)
    question = "copies", program.host, names, frozenset(carried), frozenset(results)
    return program.once(question, lambda: _copied(program, nodes, sizes, carried, results))


def _copied(
    program: SpmdProgram, nodes: Sequence[Node], sizes: LocalSizes, carried: Collection[str], results: Collection[str]
) -> CopiedStep:
    states = {state.input: state.output for state in program.states if state.input in set(program.host.states)}
    graph, results_here = program.graph, {name for node in nodes for name in node.outputs}
    outputs = {*program.results().intersection(results_here), *results}
    step = FileNodes(nodes, {*graph.inputs, *carried}, outputs)
    return with_copies(step, states, program.host.activations, sizes.nbytes)


def on_device(
    program: SpmdProgram, nodes: Iterable[Node], sizes: LocalSizes, carried: Collection[str] = (),
    results: Collection[str] = (),
) -> tuple[Sequence[Node], ByteCounts]:  # fmt: skip
    """The same nodes, and the sizes of values on the device; without values on the host, the given sizes."""
    nodes = list(nodes)
    if not program.host.states and not program.host.activations:
        return nodes, sizes
    step = copied(program, nodes, sizes, carried, results)
    return step.nodes, DeviceSizes(sizes, step)


def copied_bytes(step: CopiedStep, sizes: ByteCounts) -> Mapping[str, int]:
    """Bytes copied by each kind of copy: ``TO_HOST`` and ``TO_DEVICE``."""
    result = {TO_HOST: 0, TO_DEVICE: 0}
    for node in step.nodes:
        if node.op_type in result:
            name = node.outputs[0]
            result[node.op_type] += sizes.nbytes(step.original.get(name, name))
    return result
