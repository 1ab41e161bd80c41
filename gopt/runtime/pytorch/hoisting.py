"""Compiles a trace by Inductor, its scalars before the rest.

Inductor writes the computation of a scalar into each loop that reads it, and the machine then repeats it: two powers
for each 16 elements of Adam's update."""

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
    given = [operands[place] for place in split.places]
    scalars = _inductor(split.scalars, given)
    rest = _inductor(split.rest, [*operands, *scalars(*given)])

    def run(*operands: torch.Tensor) -> Sequence[torch.Tensor]:
        return rest(*operands, *scalars(*(operands[place] for place in split.places)))

    return run


def _inductor(module: GraphModule, operands: Sequence[torch.Tensor]) -> Program:
    return torch._inductor.compile(module, [*operands], options=_OPTIONS)


@dataclass(frozen=True, slots=True)
class Split:
    """``scalars``: from the operands at ``places`` to tensors of one element. ``rest``: from all operands and these
    tensors to the results."""

    scalars: GraphModule
    places: Sequence[int]
    rest: GraphModule


def split_scalars(module: GraphModule) -> Split | None:
    """The nodes of one element that read no larger operand, and the rest; None where the rest reads none of them.

    ``module``: a trace in which nothing is computed behind the stores in operands."""
    operands = [node for node in module.graph.nodes if node.op == "placeholder"]
    early = _early(module)
    used = [node for node in early if any(user not in early and _computes(user) for user in node.users)]
    if not used:
        return None
    border = [node for node in early if any(user not in early for user in node.users)]
    first, rest = Graph(), Graph()
    in_rest = {node: rest.node_copy(node) for node in operands} | {node: rest.placeholder(node.name) for node in border}
    in_first: dict[Node, Node] = {}
    for node in module.graph.nodes:
        if node in early or node.op == "get_attr" or (node.op == "placeholder" and _is_single(node)):
            in_first[node] = first.node_copy(node, in_first.__getitem__)
        if node not in early and node.op != "placeholder":
            in_rest[node] = rest.node_copy(node, in_rest.__getitem__)
    lent = {_memory(node) for node in module.graph.nodes if node not in early and _is_tensor(node)}
    results = [in_first[node] for node in border]
    for place, node in enumerate(border):
        if _memory(node) in lent:
            results[place] = first.call_function(torch.ops.aten.clone.default, (results[place],))
    first.output(tuple(results))
    places = [place for place, node in enumerate(operands) if node in in_first]
    return Split(GraphModule(module, first), places, GraphModule(module, rest))


def _early(module: GraphModule) -> dict[Node, None]:
    """The nodes that can run before all others, in order."""
    found: dict[Node, None] = {}
    for node in module.graph.nodes:
        if _computes(node) and _is_single(node) and all(
            read in found or read.op == "get_attr" or (read.op == "placeholder" and _is_single(read))
            for read in node.all_input_nodes
        ):  # fmt: skip
            found[node] = None
    return found


def _computes(node: Node) -> bool:
    """Whether a node is a function of its operands, without draws and stores."""
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
