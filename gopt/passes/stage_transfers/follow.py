"""Nodes behind a message that run on the stage of the reader, where the reader's stage has all operands."""

from __future__ import annotations

from dataclasses import dataclass, field

from gopt.analysis.training import Phase
from gopt.ir.graph import Node
from gopt.ir.node_kinds import draws
from gopt.operators.kinds import MAY_DRAW
from gopt.passes.stage_transfers.place import StagePlacement
from gopt.spmd.stage_plan import transfers


def follow(placement: StagePlacement) -> None:
    """Run the nodes behind a message of a micro-batch on the stage with the readers, and leave the message out, where
    this stage has all operands and no other stage needs a result.

    The gradient of a bias is such a result: the sum of a gradient that the stage receives for its weight as well."""
    while _followed(placement):  # a value may have lost all further readers
        placement.drop_unread()


def _followed(placement: StagePlacement) -> bool:
    """Move what follows a message; return whether anything did. A node moves once: its operands are others then."""
    search = _Search(placement)
    for node in placement.begin():
        if not transfers(node) or transfers(node, to_all=True) or node.phase is Phase.UPDATE:
            continue
        behind: list[Node] = []
        stage = int(node.attributes["stages"][1])
        if search.movable(node.inputs[0], node, stage, behind):
            for maker in behind:
                search.moved.add(id(maker))
                maker.inputs = [search.origins.get(name, name) for name in maker.inputs]
                placement.move(maker, stage)
            search.users[node.inputs[0]] = placement.leave_out(node, search.users.get(node.first_output, []))
    placement.rewriter.finish()
    return bool(search.moved)


@dataclass(slots=True)
class _Search:
    """``origins``: the name of a value on a stage -> the value."""

    placement: StagePlacement
    users: dict[str, list[Node]] = field(init=False)
    producers: dict[str, Node] = field(init=False)
    results: set[str] = field(init=False)
    origins: dict[str, str] = field(init=False)
    moved: set[int] = field(default_factory=set)
    """The ids of nodes."""

    def __post_init__(self) -> None:
        graph, names = self.placement.graph, self.placement.names
        self.users, self.producers = graph.users(), graph.producers()
        self.results = self.placement.program.results()
        self.origins = {name: value for value, by_stage in names.items() for name in by_stage.values()}

    def movable(self, value: str, reader: Node, stage: int, behind: list[Node]) -> bool:
        """Return whether a stage can make a value for its single reader; the nodes are added to ``behind``, in
        order."""
        maker = self.producers.get(value)
        if maker is None or id(maker) in self.moved or transfers(maker) or maker.captures:
            return False
        if maker.op_type in MAY_DRAW and draws(maker):
            return False
        for name in filter(None, maker.outputs):
            if name in self.results or any(node is not reader for node in self.users.get(name, ())):
                return False
        for name in dict.fromkeys(maker.reads):
            origin = self.origins.get(name, name)
            there = origin not in self.placement.names or self.placement.has(origin, stage)
            if not there and not self.movable(name, maker, stage, behind):
                return False
        if not any(node is maker for node in behind):
            behind.append(maker)
        return True
