"""Checks which scalar of the source each result of a packed call is: a norm of a parameter is not another's.

A rank's term of a reduction names the results of the source (``of`` of ``Select``). A sweep follows the terms through
joins and calls, position by position; the value with the source's name must have the same terms as in the source.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from gopt.errors import InvariantError
from gopt.ir.graph import COMM, SPMD, Node
from gopt.ir.node_kinds import record_of
from gopt.operators.kinds import COMPARISONS, EXTREMES, LOGIC, UNMOVED
from gopt.spmd.program import SpmdProgram
from gopt.spmd.stage_plan import transfers

Terms: TypeAlias = frozenset[tuple[str, int]]
"""Results of reductions of the source, with signs in a sum."""
FOLLOWED = UNMOVED | EXTREMES | COMPARISONS | LOGIC | {"Sqrt"}
"""Operators that join terms, or give what is joined its form, beside sums."""


def check_scalar_order(program: SpmdProgram) -> None:
    """Raise InvariantError for the first scalar made of wrong terms; linear in the program."""
    terms_of: dict[str, Terms] = {}
    claimed = [node for node in program.graph.nodes if node.domain == SPMD and node.op_type == "Select"]
    if not claimed:
        return
    for node in claimed:
        terms_of[node.outputs[0]] = frozenset((name, 1) for name in node.attributes.get("of", ()))
    due_terms: dict[str, Terms] = {name: frozenset([(name, 1)]) for terms in terms_of.values() for name, _ in terms}
    _follow(program.training.graph.nodes, due_terms)
    for node in program.graph.nodes:
        _pass_on(node, terms_of)
        for name in node.outputs if node.source is None else ():
            if name in due_terms and name in terms_of and terms_of[name] != due_terms[name]:
                wrong, due = map(_text, (terms_of[name], due_terms[name]))
                raise InvariantError(
                    f"{node.op_type} {node.label!r} makes {name!r} of {wrong}", f"the source makes it of {due}"
                )


def _follow(nodes: Iterable[Node], terms_of: dict[str, Terms]) -> None:
    for node in nodes:
        _pass_on(node, terms_of)


def _pass_on(node: Node, terms_of: dict[str, Terms]) -> None:
    """Add the terms of a node's results to ``terms_of``."""
    if node.domain == COMM:
        if node.op_type == "AllReduce":
            terms_of.update((new, terms_of[old]) for old, new in zip(node.inputs, node.outputs) if old in terms_of)
    elif transfers(node):
        terms_of.update((new, terms_of[old]) for old, new in zip(node.inputs, node.outputs) if old in terms_of)
    elif (node.is_in(FOLLOWED) or record_of(node).signs) and node.outputs[0] not in terms_of:
        joined = _joined(node, terms_of)
        if joined:
            terms_of[node.outputs[0]] = joined


def _joined(node: Node, terms_of: Mapping[str, Terms]) -> Terms:
    record = record_of(node)
    return frozenset(
        (term, sign * record.sign(position))
        for position, name in enumerate(node.inputs)
        for term, sign in terms_of.get(name, ())
    )


def _text(terms: Terms) -> str:
    return ", ".join(f"{'-' if sign < 0 else ''}{name!r}" for name, sign in sorted(terms))
