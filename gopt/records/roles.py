"""Maps the launcher's ranks to trainers and servers. A rank may be both.

Written as ``trainer:0-3;server:4,5``: the n-th rank listed for a kind gets its number n. ``;`` or ``,`` stands between
kinds, ``,`` between ranks, ``-`` in a range. ``trainer:0,1;server:0,1`` puts a trainer and a server on each rank;
``server:0,1;trainer:2-5`` puts servers first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise

from gopt import limits
from gopt.documents.records import OPTIONAL, Count, Positive
from gopt.errors import OptionError
from gopt.text.amounts import rank_ranges
from gopt.text.sanitize import show
from gopt.text.suggestions import did_you_mean


class RoleKind(str, Enum):
    """Kind of a role."""

    TRAINER = "trainer"
    SERVER = "server"


_KINDS = tuple(RoleKind)
_HINT = "write --roles 'trainer:0-3;server:4,5', or --roles 'trainer:0,1;server:0,1' for both on each rank"


@dataclass(frozen=True, slots=True)
class Role:
    """One trainer or one server, by its number."""

    kind: RoleKind
    number: int

    def __str__(self) -> str:
        return f"{self.kind.value} {self.number}"


@dataclass(frozen=True, slots=True)
class Roles:
    """The roles of every rank. Every role has exactly one rank; every rank has one or two roles of different kinds.

    ``of``: the roles of each rank, a trainer before a server. While the number of trainers is open, ``trainers`` is 0,
    ``of`` is empty, and only ``servers``, ``is_open`` and ``with_trainers`` may be used. Raises OptionError.
    """

    trainers: int
    servers: int
    of: tuple[tuple[Role, ...], ...]
    _ranks: dict[Role, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_size(self.trainers, self.servers, least=0)
        ordered = tuple(tuple(sorted(roles, key=lambda role: _KINDS.index(role.kind))) for roles in self.of)
        object.__setattr__(self, "of", ordered)
        object.__setattr__(self, "_ranks", _rank_by_role(ordered))
        if self.of and self.is_open:
            raise OptionError("ranks have roles, but there is no trainer among them", _HINT)
        self._check_counts()

    def _check_counts(self) -> None:
        """Check that every role has a rank, and no unknown role has a rank; nothing is checked while trainers are
        open."""
        if self.is_open:
            return
        for kind, count in zip(_KINDS, (self.trainers, self.servers), strict=True):
            missing = next((number for number in range(count) if Role(kind, number) not in self._ranks), None)
            if missing is not None:
                raise OptionError(f"no rank is {Role(kind, missing)} of {count}", _HINT)
        extra = [role for role in self._ranks if role.number not in range(self._count(role.kind))]
        if extra:
            count = self._count(extra[0].kind)
            raise OptionError(f"rank {self._ranks[extra[0]]} is {extra[0]}, but {_there(count, extra[0].kind)}", _HINT)

    def _count(self, kind: RoleKind) -> int:
        return self.trainers if kind is RoleKind.TRAINER else self.servers

    @classmethod
    def default(cls, trainers: int, servers: int) -> Roles:
        """Return roles with trainers on ranks 0 to T-1, followed by the servers; raises OptionError."""
        _check_size(trainers, servers, least=1)
        return cls.on_ranks(range(trainers), range(trainers, trainers + servers))

    @classmethod
    def open(cls, servers: int) -> Roles:
        """Return roles with a number of trainers set at the start (``with_trainers``); raises OptionError."""
        return cls(0, servers, ())

    @classmethod
    def on_ranks(cls, trainers: Sequence[int], servers: Sequence[int]) -> Roles:
        """Return roles with given ranks of trainer 0, 1, ... and of server 0, 1, ...; raises OptionError."""
        ranks = [*trainers, *servers]
        beyond = next((rank for rank in ranks if not 0 <= rank < limits.RANKS), None)
        if beyond is not None:
            raise OptionError(
                f"a role is on rank {show(beyond)}; ranks are 0 to {limits.RANKS - 1} (RANKS)", "number ranks from 0"
            )
        if not trainers:
            raise OptionError("the roles name no trainer", _HINT)
        of: list[list[Role]] = [[] for _ in range(max(ranks) + 1)]
        for kind, members in zip(_KINDS, (trainers, servers), strict=True):
            for number, rank in enumerate(members):
                of[rank].append(Role(kind, number))
        return cls(len(trainers), len(servers), tuple(map(tuple, of)))

    @classmethod
    def parse(cls, text: str) -> Roles:
        """Read ``trainer:0-3;server:4,5``; raises OptionError on anything else."""
        ranks: dict[RoleKind, list[int]] = {kind: [] for kind in _KINDS}
        for kind, rank in _named_ranks(text):
            ranks[kind].append(rank)
        return cls.on_ranks(ranks[RoleKind.TRAINER], ranks[RoleKind.SERVER])

    @property
    def is_open(self) -> bool:
        """Whether a start has yet to say how many trainers there are."""
        return not self.trainers

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self._fixed().of)

    @property
    def trainer_ranks(self) -> tuple[int, ...]:
        """The rank of each trainer."""
        return self._ranks_of(RoleKind.TRAINER, self.trainers)

    @property
    def server_ranks(self) -> tuple[int, ...]:
        """The rank of each server."""
        return self._ranks_of(RoleKind.SERVER, self.servers)

    def _ranks_of(self, kind: RoleKind, count: int) -> tuple[int, ...]:
        fixed = self._fixed()._ranks
        return tuple(fixed[Role(kind, number)] for number in range(count))

    def roles_of(self, rank: int) -> tuple[Role, ...]:
        """Return the roles of a rank, a trainer before a server; raises OptionError where there is no such rank."""
        if not 0 <= rank < self.ranks:
            raise OptionError(
                f"there is no rank {show(rank)}: ranks are 0 to {self.ranks - 1}", "name a rank that the roles have"
            )
        return self.of[rank]

    def with_trainers(self, trainers: int) -> Roles:
        """Return these roles for a number of trainers, in the default order for an open number.

        Raises OptionError for another number than a fixed one."""
        if self.is_open:
            return Roles.default(trainers, self.servers)
        if trainers != self.trainers:
            raise OptionError(
                f"the roles are for {_counted(self.trainers, RoleKind.TRAINER)}, not for {show(trainers)}",
                "split again for another number, or leave it open until the start",
            )
        return self

    def check_counts(self, trainers: int, servers: int) -> None:
        """Raise OptionError where a split is for other numbers of trainers or servers."""
        for kind, wanted in zip(_KINDS, (trainers, servers), strict=True):
            if self._fixed()._count(kind) != wanted:
                has = _counted(self._count(kind), kind)
                raise OptionError(f"the roles name {has}, the split is for {wanted}", f"name {wanted} in --roles")

    def check_processes(self, processes: int) -> None:
        """Raise OptionError where the launcher started another number of processes than there are ranks."""
        if processes != self.ranks:
            counts = f"{_counted(self.trainers, RoleKind.TRAINER)} and {_counted(self.servers, RoleKind.SERVER)}"
            raise OptionError(
                f"the launcher started {_many(processes, 'process', 'processes')}; {counts} ({self}) need {self.ranks}",
                f"start {self.ranks} (mpiexec -n {self.ranks}), or name ranks 0 to {max(processes, 1) - 1} in --roles",
            )

    def _fixed(self) -> Roles:
        if self.is_open:
            raise OptionError("the number of trainers is not fixed", "give --trainers T")
        return self

    def __str__(self) -> str:
        """Return the text for ``parse``; a description while the number of trainers is open."""
        if self.is_open:
            return f"any number of trainers and {_counted(self.servers, RoleKind.SERVER)}"
        parts = [f"trainer:{rank_ranges(self.trainer_ranks)}"]
        return ";".join([*parts, *([f"server:{rank_ranges(self.server_ranks)}"] if self.servers else [])])


@dataclass(frozen=True, slots=True)
class RolesEntry:
    """Roles as the manifest has them: counts, and the rank of each trainer and server, absent while those are open."""

    trainers: Count
    """The number of trainers, zero where it is open until a start."""
    servers: Positive
    """The number of servers."""
    trainer_ranks: tuple[Count, ...] = field(default=(), metadata=OPTIONAL)
    """The list has the rank of trainer 0, 1 and so on; the key is absent where the number of trainers is open."""
    server_ranks: tuple[Count, ...] = field(default=(), metadata=OPTIONAL)
    """The list has the rank of server 0, 1 and so on; the key is absent where the number of trainers is open."""

    @classmethod
    def of(cls, roles: Roles) -> RolesEntry:
        if roles.is_open:
            return cls(0, roles.servers)
        return cls(roles.trainers, roles.servers, roles.trainer_ranks, roles.server_ranks)

    def roles(self) -> Roles:
        """Return the roles of this entry; raises OptionError where the entry is not valid."""
        if not self.trainers and not self.trainer_ranks and not self.server_ranks:
            return Roles.open(self.servers)
        if (len(self.trainer_ranks), len(self.server_ranks)) != (self.trainers, self.servers):
            raise OptionError(
                f"there are ranks for {len(self.trainer_ranks)} trainers and {len(self.server_ranks)} servers, and "
                f"counts of {self.trainers} and {self.servers}",
                "give each trainer and each server one rank",
            )
        return Roles.on_ranks(self.trainer_ranks, self.server_ranks)


def _check_size(trainers: int, servers: int, least: int) -> None:
    """Refuse counts below 1, before any allocation of this size."""
    if trainers < least or servers < 0 or trainers + servers > limits.RANKS:
        raise OptionError(
            f"there cannot be {show(trainers)} trainers and {show(servers)} servers",
            f"there is at least one trainer, and together they are at most {limits.RANKS} (RANKS)",
            *([limits.hint("RANKS", trainers + servers)] if trainers + servers > limits.RANKS else []),
        )


def _rank_by_role(of: Sequence[Sequence[Role]]) -> dict[Role, int]:
    result: dict[Role, int] = {}
    for rank, roles in enumerate(of):
        if not roles:
            raise OptionError(f"rank {rank} has no role", "each is a trainer, a server or both")
        for role, following in pairwise(roles):
            if role.kind is following.kind:
                raise OptionError(
                    f"rank {rank} is {role} and {following}: it can be one {role.kind.value} alone", _HINT
                )
        for role in roles:
            if result.setdefault(role, rank) != rank:
                raise OptionError(f"{role} is on rank {result[role]} and on rank {rank}", _HINT)
    return result


def _named_ranks(text: str) -> Iterator[tuple[RoleKind, int]]:
    """Yield each rank of a text, with the rank's kind, in the text's order."""
    named = 0
    for clause in text.split(";"):
        kind: RoleKind | None = None
        for part in clause.split(","):
            word, colon, ranks = part.rpartition(":")
            kind = _kind(word.strip()) if colon else kind
            match = re.fullmatch(r"([0-9]{1,9})(?:\s*-\s*([0-9]{1,9}))?", ranks.strip())
            if kind is None or match is None:
                raise OptionError(f"cannot read {show(part.strip())} in the roles {show(text)}", _HINT)
            start, last = int(match[1]), int(match[2] or match[1])
            named += last - start + 1
            if last < start:
                raise OptionError(f"the roles name ranks {start} to {last}, in descending order", _HINT)
            if named > 2 * limits.RANKS:
                raise OptionError(
                    f"the roles {show(text)} name too many ranks: at most {limits.RANKS} (RANKS)", "name fewer ranks"
                )
            for rank in range(start, last + 1):
                yield kind, rank


def _kind(word: str) -> RoleKind:
    try:
        return RoleKind(word)
    except ValueError:
        hint = did_you_mean(word.lower(), [kind.value for kind in _KINDS]) or "a rank is a trainer or a server"
        raise OptionError(f"{show(word)} is not a role", hint, _HINT) from None


def _counted(count: int, kind: RoleKind) -> str:
    return _many(count, kind.value, f"{kind.value}s")


def _there(count: int, kind: RoleKind) -> str:
    return f"there {'is' if count == 1 else 'are'} {_counted(count, kind)}"


def _many(count: int, one: str, more: str) -> str:
    return f"{count} {one if count == 1 else more}"
