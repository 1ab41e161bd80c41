"""Compiles a trace by Inductor, scalars before the rest.

Inductor writes the computation of a scalar into each loop over tensors, and the machine repeats the computation: two
powers for each 16 elements of Adam's update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch._inductor
from torch.fx import Graph, GraphModule, Node

Program = Callable[..., Sequence[torch.Tensor]]
_OPTIONS = {"cpp.max_horizontal_fusion_size": 1}
"""One loop for each parameter of an update: a loop over several reads more rows at once than a processor prefetches."""


def compiled(module: GraphModule, operands: Sequence[torch.Tensor]) -> Program:
    """The trace compiled for operands of these shapes, without Dynamo and its guards."""
    split = split_scalars(module)
    if split is None:
        return _inductor(module, operands)
    scalar_operands = [operands[index] for index in split.indices]
    scalars = _inductor(split.scalars, scalar_operands)
    rest = _inductor(split.rest, [*operands, *scalars(*scalar_operands)])

    def run(*operands: torch.Tensor) -> Sequence[torch.Tensor]:
        return rest(*operands, *scalars(*(operands[index] for index in split.indices)))

    return run


def _inductor(module: GraphModule, operands: Sequence[torch.Tensor]) -> Program:
    return torch._inductor.compile(module, [*operands], options=_OPTIONS)


@dataclass(frozen=True, slots=True)
class HoistedScalars:
    """``scalars``: from the operands at ``indices`` to tensors of one element. ``rest``: from all operands and the
    scalars to the results."""

    scalars: GraphModule
    indices: Sequence[int]
    rest: GraphModule


def split_scalars(module: GraphModule) -> HoistedScalars | None:
    """The scalars computed from scalars alone, and the rest; None for a trace without such scalars in larger results.

    ``module``: a trace without computation behind the stores in operands."""
    operands = [node for node in module.graph.nodes if node.op == "placeholder"]
    early = _early(module)
    used = [node for node in early if any(user not in early and _computes(user) for user in node.users)]
    if not used:
        return None
    border = [node for node in early if any(user not in early for user in node.users)]
    scalars, rest = Graph(), Graph()
    in_rest = {node: rest.node_copy(node) for node in operands} | {node: rest.placeholder(node.name) for node in border}
    in_scalars: dict[Node, Node] = {}
    for node in module.graph.nodes:
        if node in early or node.op == "get_attr" or (node.op == "placeholder" and _is_single(node)):
            in_scalars[node] = scalars.node_copy(node, in_scalars.__getitem__)
        if node not in early and node.op != "placeholder":
            in_rest[node] = rest.node_copy(node, in_rest.__getitem__)
    lent = {_memory(node) for node in module.graph.nodes if node not in early and _is_tensor(node)}
    results = [in_scalars[node] for node in border]
    for index, node in enumerate(border):
        if _memory(node) in lent:
            results[index] = scalars.call_function(torch.ops.aten.clone.default, (results[index],))
    scalars.output(tuple(results))
    indices = [index for index, node in enumerate(operands) if node in in_scalars]
    return HoistedScalars(GraphModule(module, scalars), indices, GraphModule(module, rest))


def _early(module: GraphModule) -> dict[Node, None]:
    """Nodes for a run before all others, in order."""
    early: dict[Node, None] = {}
    for node in module.graph.nodes:
        if _computes(node) and _is_single(node) and all(
            read in early or read.op == "get_attr" or (read.op == "placeholder" and _is_single(read))
            for read in node.all_input_nodes
        ):  # fmt: skip
            early[node] = None
    return early


def _computes(node: Node) -> bool:
    """Return whether a node is a function of its operands, without draws and stores."""
    target = node.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and not target._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in target.tags
    )


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _is_single(node: Node) -> bool:
    return _is_tensor(node) and node.meta["val"].numel() == 1


def _memory(node: Node) -> int:
    """A number for the memory of a node's result."""
    return int(node.meta["val"].untyped_storage()._cdata)
