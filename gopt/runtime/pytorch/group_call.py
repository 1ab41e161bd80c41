"""A rank's side of a collective on a process group of PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

Tensors: TypeAlias = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class GroupCall:
    """``members``: the ranks of the group, in group order; ``device``: of new
    tensors."""

    attributes: Any
    inputs: Tensors
    group: Any
    members: tuple[int, ...]
    rank: int
    device: torch.device
    number: int = 0
    """Among the calls of the file."""
    sent: list[tuple[Any, torch.Tensor]] = field(default_factory=list)
    """Sends on the way, with the memory to read."""

    @property
    def index(self) -> int:
        """The place of this rank in the group."""
        return self.members.index(self.rank)
