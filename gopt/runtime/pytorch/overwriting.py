"""How results of a segment overwrite operands."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Overwrites:
    """Indices among the results, and among the operands, of a segment.

    ``in_program``: pairs of a result in memory of its own and the operand in which the program stores it.
    ``after_program``: pairs stored once the program has ended, since a result lies in the operand's memory.
    ``cloned``: results in memory changed by a store or a later step, cloned before ``after_program``."""

    in_program: Sequence[tuple[int, int]] = ()
    after_program: Sequence[tuple[int, int]] = ()
    cloned: Sequence[int] = ()


def plan_overwrites(
    results: Sequence[torch.Tensor], operands: Sequence[torch.Tensor], *, targets: Mapping[int, int],
    surviving: Collection[int], fixed: Collection[int],
) -> Overwrites:  # fmt: skip
    """The stores of a segment. ``targets``: result -> the operand to overwrite. ``surviving``: results that outlive the
    step. ``fixed``: results known before the first step, in memory of constants."""
    of_operands, of_results = [*map(_memory, operands)], [*map(_memory, results)]
    lent, shown = set(of_operands), set(of_results)
    borrowed = {index for index, memory in enumerate(of_results) if index in fixed or memory in lent}
    in_program: list[tuple[int, int]] = []
    after_program: list[tuple[int, int]] = []
    for index, operand in targets.items():
        is_shown = index in borrowed or of_operands[operand] in shown
        (after_program if is_shown else in_program).append((index, operand))
    overwritten = {of_operands[operand] for operand in targets.values()}
    stored, cloned, earlier = {index for index, _ in in_program}, [], set[int]()
    for index, memory in enumerate(of_results):
        outlives = index in surviving and (index in borrowed or memory in earlier)
        if (memory in overwritten or outlives) and index not in stored:
            cloned.append(index)
        earlier.add(memory)
    return Overwrites(in_program, after_program, cloned)


class StateViews:
    """The names of results in the memory of operands."""

    def __init__(self) -> None:
        self._views: dict[str, set[str]] = {}
        self._viewed: dict[str, str] = {}
        """A view -> the value with the memory."""

    def add(self, operands: Mapping[str, torch.Tensor], results: Mapping[str, torch.Tensor]) -> None:
        """Record the results of a segment in the memory of operands."""
        names = {_memory(operand): self._viewed.get(name, name) for name, operand in operands.items()}
        for name, result in results.items():
            viewed = names.get(_memory(result))
            if viewed is not None:
                self._viewed[name] = viewed
                self._views.setdefault(viewed, set()).add(name)

    def of(self, names: Iterable[str]) -> set[str]:
        """The views of values."""
        return set[str]().union(*(self._views[name] for name in names if name in self._views))


def _memory(tensor: torch.Tensor) -> int:
    """A number for the memory of a tensor, or of a stand-in in a trace."""
    return int(tensor.untyped_storage()._cdata)
