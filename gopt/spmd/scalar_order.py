"""Checks which scalar of the source each result of a packed call is: a norm of one parameter is not another's.

A rank's term of a reduction says of which results of the source it is a part (``of`` of ``Select``). One sweep follows
these through joins and calls, position by position; the value that takes the source's name must have the same terms as
in the source.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from gopt.errors import InvariantError
from gopt.ir.graph import COMM, SPMD, Node
from gopt.operators.kinds import CASTS, COMPARISONS, EXTREMES, LOGIC, SUMS, VIEWS
from gopt.spmd.program import SpmdProgram

Terms: TypeAlias = frozenset[str]
"""Results of reductions of the source."""
NONE: Terms = frozenset()
FOLLOWED = VIEWS | CASTS | SUMS | EXTREMES | COMPARISONS | LOGIC | {"Sqrt"}
"""Operators that join terms, or give what is joined its form."""


def check_scalar_order(program: SpmdProgram) -> None:
    """Raise InvariantError for the first scalar that is made of another one's terms; linear in the program."""
    known: dict[str, Terms] = {}
    claimed = [node for node in program.graph.nodes if node.domain == SPMD and node.op_type == "Select"]
    if not claimed:
        return
    for node in claimed:
        known[node.outputs[0]] = frozenset(node.attributes.get("of", ()))
    own = {name: frozenset([name]) for terms in known.values() for name in terms}
    _follow(program.training.graph.nodes, own)
    for node in program.graph.nodes:
        _pass_on(node, known)
        for name in node.outputs if node.source is None else ():
            if name in own and name in known and known[name] != own[name]:
                wrong, due = (", ".join(map(repr, sorted(each))) for each in (known[name], own[name]))
                raise InvariantError(
                    f"{node.op_type} {node.label!r} makes {name!r} of {wrong}", f"the source makes it of {due}"
                )


def _follow(nodes: Iterable[Node], known: dict[str, Terms]) -> None:
    for node in nodes:
        _pass_on(node, known)


def _pass_on(node: Node, known: dict[str, Terms]) -> None:
    """Add the terms of a node's results to ``known``."""
    if node.domain == COMM:
        if node.op_type == "AllReduce":
            known.update((new, known[old]) for old, new in zip(node.inputs, node.outputs) if old in known)
    elif node.is_in(FOLLOWED) and node.outputs[0] not in known:
        joined = _joined(node, known)
        if joined:
            known[node.outputs[0]] = joined


def _joined(node: Node, known: Mapping[str, Terms]) -> Terms:
    return NONE.union(*(known[name] for name in node.inputs if name in known))
