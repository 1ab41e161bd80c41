"""The links between ranks, and the time of a call on a link."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gopt.errors import OptionError
from gopt.records.mesh import Mesh
from gopt.text.sanitize import show

_NUMBER = r"([0-9]{1,15}(?:\.[0-9]{1,15})?)"
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_A_SECOND = {"ns": 1e9, "us": 1e6, "ms": 1e3}
_HINT = "write --link 200GB/s:5us, --link shard=200GB/s:5us,dp=25GB/s:10us or --link 8x200GB/s:5us,25GB/s:10us"


def parse_bytes(text: str) -> int:
    """``80GB`` or ``80GiB`` -> bytes, powers of 1024; raises OptionError."""
    match = re.fullmatch(rf"{_NUMBER}\s*(?:([KMGTkmgt])(?:i?B)?|B)", text.strip())
    if match is None:
        bare = re.fullmatch(_NUMBER, text.strip())
        hint = f"say of what: {text.strip()}GB, or {text.strip()}B for bytes" if bare else "write --memory 80GB"
        raise OptionError(f"cannot read {show(text)} as a size" + (": it has no unit" if bare else ""), hint)
    return int(float(match[1]) * _UNITS[(match[2] or "").upper()])


@dataclass(frozen=True, slots=True)
class Link:
    """A link: ``bandwidth`` in bytes a second and direction, ``latency`` in seconds a message."""

    bandwidth: float
    latency: float

    @classmethod
    def parse(cls, text: str) -> Link:
        """Read ``200GB/s:5us``, or ``1600Gb/s:5us`` in bits; powers of 1000. Raises OptionError on anything else."""
        match = re.fullmatch(rf"{_NUMBER}\s*([KMGTk]?)(B|b|bit)/s(?::{_NUMBER}(us|ms|ns))?", text.strip())
        if match is None:
            raise OptionError(f"cannot read {show(text)} as a link", "B/s are bytes, b/s or bit/s bits", _HINT)
        rate = float(match[1]) * 1000.0 ** " KMGT".index(match[2].upper() or " ") / (1 if match[3] == "B" else 8)
        if not rate:
            raise OptionError(f"the rate of the link {show(text)} is 0", _HINT)
        return cls(rate, float(match[4] or 0) / _A_SECOND[match[5] or "us"])

    def start(self, rounds: int, members: int) -> float:
        """Seconds without transfer: (n-1)·latency a round of a ring."""
        return rounds * (members - 1) * self.latency

    def seconds(self, rounds: int, members: int, sent: float) -> float:
        """The time of a call in which a member sends so many bytes."""
        return self.start(rounds, members) + sent / self.bandwidth

    def slower(self, link: Link) -> Link:
        """The link of a message across both."""
        return Link(min(self.bandwidth, link.bandwidth), max(self.latency, link.latency))


@dataclass(frozen=True, slots=True)
class Topology:
    """The link of each group of a mesh.

    ``by_axis``: a group over several axes goes at the slowest. ``tiers``: ranks of a node or a pod, ascending, the last
    without bound (0); a group goes at the first tier that holds the whole group."""

    mesh: Mesh
    by_axis: tuple[tuple[str, Link], ...] = ()
    tiers: tuple[tuple[int, Link], ...] = ()
    text: str = ""
    """As the user wrote it."""

    @classmethod
    def parse(cls, text: str, mesh: Mesh) -> Topology:
        """Read one link, ``AXIS=LINK,...`` or ``RANKSxLINK,...,LINK``; raises OptionError on anything else."""
        parts = [part.strip() for part in text.split(",")]
        if any("=" in part for part in parts):
            return cls(mesh, by_axis=_axes(parts, mesh), text=text)
        return cls(mesh, tiers=_tiers(parts), text=text)

    def of(self, group: str) -> Link:
        """The link of the group's calls."""
        axes = self.mesh.split(group)
        if self.by_axis:
            links = dict(self.by_axis)
            result = links[axes[0]]
            for axis in axes[1:]:
                result = result.slower(links[axis])
            return result
        return next(link for ranks, link in self.tiers if not ranks or self._inside(axes, ranks))

    def _inside(self, axes: Sequence[str], ranks: int) -> bool:
        """Return whether every group over the axes stays inside a block of ``ranks`` neighbouring ranks."""
        strides, stride = {}, 1
        for name, size in reversed(self.mesh.axes):
            strides[name] = (size, stride)
            stride *= size
        reach = sum((strides[name][0] - 1) * strides[name][1] for name in axes)
        bases = [range(0, size * step, step) for name, (size, step) in strides.items() if name not in axes]
        return all(sum(base) % ranks + reach < ranks for base in itertools.product(*bases))


def _axes(parts: Iterable[str], mesh: Mesh) -> tuple[tuple[str, Link], ...]:
    result: dict[str, Link] = {}
    for part in parts:
        name, equals, link = part.partition("=")
        if not equals or name in result:
            raise OptionError(f"cannot read {show(part)} as the link of an axis", _HINT)
        if name not in dict(mesh.axes):
            raise OptionError(f"--link names axis {name!r}, which the mesh {mesh} does not have", "name axes of --mesh")
        result[name] = Link.parse(link)
    lost = [name for name, _ in mesh.axes if name not in result]
    if lost:
        raise OptionError(
            f"--link gives no rate for axis {lost[0]!r} of the mesh {mesh}", f"add {lost[0]}=RATE[:LATENCY]"
        )
    return tuple(result.items())


def _tiers(parts: Sequence[str]) -> tuple[tuple[int, Link], ...]:
    result: list[tuple[int, Link]] = []
    for part in parts[:-1]:
        ranks, times, link = part.partition("x")
        if not times or not re.fullmatch("[0-9]{1,9}", ranks) or int(ranks) <= (result[-1][0] if result else 0):
            raise OptionError(f"cannot read {show(part)} as the link inside a node", _HINT)
        result.append((int(ranks), Link.parse(link)))
    return (*result, (0, Link.parse(parts[-1])))
