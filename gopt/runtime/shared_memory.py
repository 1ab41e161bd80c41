"""Agreement before memory is allocated: buffers of calls in memory shared by the ranks of a host.

A rank's plan lists requests. The engine grants the requests that all members of a group can have; the program is
compiled with the granted buffers, and keeps all others private."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from gopt.ir.graph import Node
from gopt.runtime.session import Array

Key: TypeAlias = tuple[str, int]
"""A group, and the number of a call among the calls of that group."""


@dataclass(frozen=True, slots=True)
class SendRequest:
    """A reduction with inputs that could lie in one flat buffer of ``count`` elements, for the reduction to
    overwrite."""

    call: Node
    count: int
    dtype: np.dtype[Any]


@dataclass(frozen=True, slots=True)
class GatherRequest:
    """A gather with a result of ``count`` elements that could be one buffer for all members of the group.

    All numbers index the calls of the group. ``calls``: the gathers of a step with this result. ``reads``: this rank's
    first call after the last read of the previous result. ``writes``: the last call entered by all members when this
    rank writes its shard of the next result. The buffer is safe where no member's ``writes`` is smaller than any
    member's ``reads``."""

    call: Node
    count: int
    dtype: np.dtype[Any]
    calls: tuple[int, ...]
    reads: int
    writes: int


@dataclass(frozen=True, slots=True, eq=False)
class SharedSend:
    """A granted buffer of a reduction: this rank's ``memory``, and ``parts``, the buffers of all members in order."""

    memory: Array
    parts: Sequence[Array]


@dataclass(frozen=True, slots=True, eq=False)
class SharedGather:
    """A granted buffer of a gather: the same flat ``memory`` on all members, split at ``cuts``.

    ``filled``: an earlier gather of the step has filled the memory already."""

    memory: Array
    cuts: Sequence[int]
    member: int
    calls: int = 1
    filled: bool = False

    @property
    def local_shard(self) -> Array:
        """The elements written by this rank."""
        return self.memory[self.cuts[self.member] : self.cuts[self.member + 1]]


CallBuffer: TypeAlias = Array | SharedSend | SharedGather
"""Flat memory that a call may write: the rank's own, or shared."""


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Granted buffers, by ``Key``, or by the index of the call in a file."""

    sends: Mapping[Any, SharedSend] = field(default_factory=dict)
    gathers: Mapping[Any, SharedGather] = field(default_factory=dict)


NOT_SHARED = SharedMemory()
