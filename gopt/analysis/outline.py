"""What is settled of a step before its gradients are: states, loss, forward, batch."""

from __future__ import annotations

from collections.abc import Mapping

from gopt.analysis.operators import random
from gopt.analysis.rolemap import RoleMap
from gopt.analysis.sweeps import Index, ancestors, descendants


class Outline:
    """One reading of a step, with the loss and the pairs settled.

    ``updated``: state -> its new value, in the order of the inputs; ``forward``: nodes by id, and ``forward_values``
    all that they read; ``batch``: inputs, and ``tainted`` what depends on them, or on a random node.
    """

    def __init__(self, index: Index, pairs: Mapping[str, str], loss: str, roles: RoleMap) -> None:
        self.index, self.loss, self.roles = index, loss, roles
        graph = index.graph
        order = {name: place for place, name in enumerate([*graph.inputs, *graph.initializers])}
        self.updated = dict(sorted(((name, output) for output, name in pairs.items()), key=lambda p: order[p[0]]))
        self.forward, self.forward_values = ancestors(index, [loss])
        self.random = [node for node in graph.nodes if random(node)]
        self.batch = [name for name in graph.inputs if self._is_batch(name)]
        sources = [*self.batch, *(name for node in self.random for name in node.outputs)]
        self.tainted = descendants(index, sources)

    def _is_batch(self, name: str) -> bool:
        if name in self.updated:
            return False
        if name in self.roles.batch:
            return True
        graph = self.index.graph
        return name in self.forward_values and name not in graph.initializers and graph.inputs[name].shape != ()
