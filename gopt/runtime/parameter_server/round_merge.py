"""Merges a round of each bucket and table: waits for the pushes of trainers, merges them, and finds NaN and
infinity."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gopt.artifact.server_entries import KeyEntry
from gopt.collectives.layout import parse_shapes
from gopt.errors import RunError
from gopt.ir.graph import Node
from gopt.runtime.merge import Contribution, merge
from gopt.runtime.messages.message import Kind
from gopt.runtime.parameter_server.contributions import Contributions
from gopt.runtime.parameter_server.faults import not_finite, overflow
from gopt.runtime.parameter_server.membership import Trainers
from gopt.runtime.parameter_server.server_rows import StoredRows, merged_rows
from gopt.runtime.parameter_server.waits import Waits
from gopt.runtime.session import Array


@dataclass(slots=True)
class RoundMerge:
    """The merge of the current round of ``contributions``. ``receive``: receives one message from some endpoints, with
    a description of the awaited message."""

    buckets: Mapping[int, Sequence[KeyEntry]]
    tables: Mapping[int, StoredRows]
    contributions: Contributions
    trainers: Trainers
    waits: Waits
    receive: Callable[[Sequence[int], str], None]
    contributors: tuple[int, ...] | None = None
    """The trainers whose contributions the round uses, where servers decide that together."""
    _merged: dict[str, list[Array]] = field(default_factory=dict)
    """First output of an Aggregate -> its results, where they were merged ahead."""

    def wait(self, missing: Sequence[int], what: str) -> None:
        """Receive one message, and record the waiting time."""
        begun = self.waits.clock()
        self.receive(missing, what)
        self.waits.add(missing, len(self.trainers.live), begun)

    def ahead(self, nodes: Sequence[Node]) -> str:
        """Merge everything in the round; returns a message on a NaN or infinite value, or ''. ``nodes``: Aggregate and
        AggregateRows."""
        wrong = ""
        for node in nodes:
            self._merged[node.outputs[0]] = self._merge(node)
            wrong = wrong or self.fault(node, self._merged[node.outputs[0]])
        return wrong

    def take(self, node: Node) -> list[Array]:
        """The results of an Aggregate or AggregateRows."""
        return self._merged.pop(node.outputs[0], None) or self._merge(node)

    def next_round(self) -> None:
        """Remove the results of this round."""
        self._merged.clear()
        self.contributions.next_round()

    def fault(self, node: Node, merged: Sequence[Array]) -> str:
        """A message on a NaN or infinite value in the pushes for a bucket or table, or in the merged result; or ''."""
        kind, key, what = self._slot(node)
        counted = {trainer: it for trainer, it in self.contributions.of(key, kind).items() if self._counts(trainer)}
        keys, number = self.buckets[key] if kind is Kind.PUSH else (), self.contributions.round
        return not_finite(counted, keys, number, what) or overflow(merged, keys, number, what)

    def _merge(self, node: Node) -> list[Array]:
        """Wait for the pushes for a bucket or a table, and merge them."""
        kind, key, what = self._slot(node)
        contributions = self._contributions(key, kind, what)
        if kind is Kind.PUSH_ROWS:
            return merged_rows(self.tables[key], node, contributions)
        shapes = parse_shapes(node.attributes["shapes"])
        return merge(contributions, node.attributes["reduce"], node.attributes["dtype"], shapes)

    def _slot(self, node: Node) -> tuple[Kind, int, str]:
        """The message of trainers for an Aggregate or AggregateRows: the kind, the number of the bucket or table, and a
        description."""
        attributes, number = node.attributes, self.contributions.round
        if node.op_type == "AggregateRows":
            what = f"push rows of table {attributes['parameter']} of round {number}"
            return Kind.PUSH_ROWS, int(attributes["table"]), what
        what = f"push bucket {attributes['bucket']} ({', '.join(attributes['keys'])}) of round {number}"
        return Kind.PUSH, int(attributes["bucket"]), what

    def _counts(self, trainer: int) -> bool:
        return self.contributors is None or trainer in self.contributors

    def _contributions(self, key: int, kind: Kind, what: str) -> dict[int, Contribution]:
        """Wait until all trainers of the round have pushed; raises RunError for a trainer that will not."""
        contributions = self.contributions
        while missing := [trainer for trainer in self._expected() if trainer not in contributions.of(key, kind)]:
            silent = next(
                (trainer for trainer in missing if self.trainers.ended.get(trainer, 0) > contributions.round), None
            )
            if silent is not None:
                raise RunError(f"trainer {silent} ended round {contributions.round} and did not {what}")
            self.wait(missing, what)
        counted = {trainer: push for trainer, push in contributions.of(key, kind).items() if self._counts(trainer)}
        if not counted:
            raise RunError(f"no trainer is left to {what}")
        return counted

    def _expected(self) -> Sequence[int]:
        """The trainers that contribute to the round."""
        return sorted(self.trainers.live) if self.contributors is None else self.contributors
