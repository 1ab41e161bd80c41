"""Names of sets of ranks in goldens: by role and number in the role, so that another number of trainers renames no
server."""

from __future__ import annotations

from collections.abc import Sequence

from gopt.text.amounts import rank_ranges


class RankNames:
    """Names of sets of ranks, given every rank with a role."""

    def __init__(self, roles: Sequence[tuple[int, str]]) -> None:
        self._roles = dict(roles)
        self._members: dict[str, dict[int, int]] = {}
        for rank, role in roles:
            members = self._members.setdefault(role, {})
            members[rank] = len(members)
        self._known: dict[str, str] = {}

    def of(self, ranks: Sequence[int]) -> str:
        """``all ranks``, ``ranks 0-2``; of a split ``all trainers, server 1``."""
        if len(ranks) == len(self._roles):
            return "all ranks"
        if len(self._members) == 1:
            return _numbered("rank", ranks)
        sets: dict[str, list[int]] = {}
        for rank in ranks:
            role = self._roles[rank]
            sets.setdefault(role, []).append(self._members[role][rank])
        return ", ".join(
            f"all {role}s" if 1 < len(numbers) == len(self._members[role]) else _numbered(role, numbers)
            for role, numbers in sets.items()
        )

    def of_ranges(self, text: str) -> str:
        """The name of ``0-2,5``."""
        if text not in self._known:
            spans = [part.partition("-") for part in text.split(",")]
            ranks = [rank for start, _, last in spans for rank in range(int(start), int(last or start) + 1)]
            self._known[text] = self.of(ranks)
        return self._known[text]


def _numbered(what: str, numbers: Sequence[int]) -> str:
    return f"{what}{'s' * (len(numbers) > 1)} {rank_ranges(list(numbers))}"
