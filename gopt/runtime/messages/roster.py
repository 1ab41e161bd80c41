"""The participants of a job: endpoints with names and processes, memory limits and timeouts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gopt.errors import OptionError
from gopt.text.sanitize import listed


@dataclass(frozen=True, slots=True)
class Roster:
    """All endpoints of a job. An endpoint is a role, not a process: a process may have several.

    ``names``: names for messages, such as ``server 0``. ``processes``: the number of each endpoint's process.
    """

    names: tuple[str, ...]
    processes: tuple[int, ...]

    @classmethod
    def of(cls, names: Sequence[str], processes: Sequence[int] | None = None) -> Roster:
        """``processes``: the process of each endpoint; by default one process each. Raises OptionError where a process
        from 0 to the last has no endpoint."""
        numbers = tuple(range(len(names)) if processes is None else processes)
        if not names or len(numbers) != len(names):
            raise OptionError(f"{len(names)} roles stand on {len(numbers)} processes")
        idle = set(range(max(numbers) + 1)) - set(numbers)
        if idle or min(numbers) < 0:
            raise OptionError(f"process {min(idle, default=min(numbers))} has no role")
        return cls(tuple(names), numbers)

    @property
    def size(self) -> int:
        return len(self.names)

    def local(self, process: int) -> list[int]:
        """The endpoints of a process."""
        return [number for number, home in enumerate(self.processes) if home == process]

    def describe(self, number: int) -> str:
        """The name of an endpoint in messages, such as ``server 0 (endpoint 2, process 1)``."""
        if not 0 <= number < self.size:
            return f"endpoint {number}"
        return f"{self.names[number]} (endpoint {number}, process {self.processes[number]})"

    def describe_all(self, numbers: Iterable[int]) -> str:
        """Names of endpoints; long lists are shortened."""
        distinct = sorted(set(numbers))
        return listed([self.describe(number) for number in distinct], 8)


@dataclass(frozen=True, slots=True)
class Settings:
    """Limits of a job.

    ``deadline``: the longest wait in seconds. ``messages``, ``bytes``: an endpoint accepts another message while it
    holds fewer messages and bytes than these. ``heartbeat``: seconds between signs of life, 0 for none.
    ``heartbeat_timeout``: seconds of silence after which an endpoint of another process counts as lost."""

    deadline: float = 60.0
    messages: int = 64
    bytes: int = 256 << 20
    heartbeat: float = 0.0
    heartbeat_timeout: float = 10.0

    def __post_init__(self) -> None:
        limited = self.deadline > 0 and self.messages >= 1 and self.bytes >= 1
        if not limited or not 0 <= self.heartbeat < self.heartbeat_timeout:
            raise OptionError(f"bad limits: {self}", "limits are at least 1, and heartbeat_timeout exceeds heartbeat")
