"""Values in the memory of the host, beside a device: a record of the program and of its manifest."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostValues:
    """The values with placement ``host``; all others are on the device. Ranks without such a value ignore the name."""

    states: tuple[str, ...] = ()
    """The inputs of ranks in this list are states that stay in the memory of the host from step to step. Each item is
    the name of an input."""
    activations: tuple[str, ...] = ()
    """The values of the forward in this list are moved to the host behind a reader, and back for the next reader. Each
    item is the name of a value."""
