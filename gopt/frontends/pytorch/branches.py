"""Branches of optimizers on computed values: each path is traced, and conditions choose between the results.

A condition is identified by its expression: parameters that share a condition take the same side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._functorch._aot_autograd.functional_utils import from_fun
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from gopt.errors import UnsupportedError
from gopt.frontends.pytorch.node_keys import NodeKeys

PATHS = 32
_HINT = "write it with torch.where"


@dataclass(slots=True)
class Branch:
    """A condition: a Boolean of no dimension, and the line of code with the branch."""

    value: torch.Tensor
    line: str


@dataclass(slots=True)
class Branches:
    """The conditions of a trace by key; ``paths``: most paths through the code of an optimizer, and most conditions on
    a path; ``conditions``: all so far, ``decided``: the present path's."""

    paths: int = PATHS
    conditions: dict[int, Branch] = field(default_factory=dict)
    decided: dict[int, bool] = field(default_factory=dict)
    _keys: NodeKeys | None = None

    def decide(self, value: Any, line: str) -> bool:
        """The side of the present path; a new condition holds."""
        if value.numel() != 1:
            raise UnsupportedError(f"a branch on a tensor of several elements, {line}", _HINT)
        key = self.key(value)
        if key not in self.conditions:
            self.conditions[key] = Branch((value.detach().reshape(()) != 0), line)
        if len(self.decided) == self.paths and key not in self.decided:
            raise UnsupportedError(f"a path with more than {self.paths} branches on values of the graph, {line}", _HINT)
        return self.decided.setdefault(key, True)

    def key(self, value: Any) -> int:
        """The key of a traced tensor."""
        mode = get_proxy_mode()
        assert mode is not None
        if self._keys is None:
            self._keys = NodeKeys(mode.tracer)
        return self._keys.of(get_proxy_slot(from_fun(value), mode.tracer).proxy.node)

    def explored(self, reader: str, run: Callable[[], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """The values of ``run``, called anew for each path, chosen by conditions."""
        paths = 0

        def path(before: Mapping[int, bool]) -> dict[str, torch.Tensor]:
            nonlocal paths
            paths += 1
            if paths > self.paths:
                lines = "; ".join(dict.fromkeys(self.conditions[key].line for key in before))
                among = f"paths by branches on {len(before)} values of the graph, {lines}"
                raise UnsupportedError(f"{reader} has more than {self.paths} {among}", _HINT)
            self.decided = dict(before)
            values = run()
            new = [key for key in self.decided if key not in before]
            for position in reversed(range(len(new))):
                alternative = path({**before, **dict.fromkeys(new[:position], True), new[position]: False})
                condition = self.conditions[new[position]].value
                values = {name: self._chosen(condition, value, alternative[name]) for name, value in values.items()}
            return values

        try:
            return path({})
        finally:
            self.decided = {}

    def _chosen(self, condition: torch.Tensor, then: torch.Tensor, orelse: torch.Tensor) -> torch.Tensor:
        if then.shape != orelse.shape:
            raise UnsupportedError(
                f"the sides of a branch make values of shapes {list(then.shape)} and {list(orelse.shape)}",
                "a state of a graph has one shape in all steps",
            )
        return then if self.key(then) == self.key(orelse) else torch.where(condition, then, orelse)
