"""Checks that the ranks of a user's loop are fed alike: a difference would part their copies of the states."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import torch

from gopt.errors import InputError, OptionError
from gopt.runtime.engines.base import Engine
from gopt.runtime.pytorch.tensors import flat_bytes

_EVERY = 256
_LOSS = "a schedule that follows a loss takes its mean over ranks: torch.distributed.all_reduce"


def due(step: int) -> bool:
    """Return whether ranks compare before the step of this number, from 1 on: at powers of two, and at every 256th."""
    return step & (step - 1) == 0 or step % _EVERY == 0


@dataclass(slots=True)
class InputComparison:
    """A digest of the inputs of a rank since the last comparison: of numbers on the host alone, for a value on a GPU
    would have to be waited for."""

    engine: Engine
    batches: Sequence[Hashable]
    """For each rank a key: ranks with equal keys are fed equal batches."""
    _numbers: dict[str, Any] = field(default_factory=dict)
    _digest: int = 0
    _noted: bool = False

    def note(self, hyper: Mapping[str, Any]) -> None:
        """Take the hyper-parameters of a step into account."""
        tensors = {name: torch.as_tensor(value).detach() for name, value in sorted(hyper.items())}
        self._numbers = {name: tensor.tolist() for name, tensor in tensors.items() if tensor.device.type == "cpu"}
        self._digest = crc32(repr(self._numbers).encode(), self._digest)

    def check(self, batches: Iterable[torch.Tensor] | None = None) -> None:
        """Compare with all ranks, which call this function together; ``batches``: of the step, None where the rank
        reads none. Raises OptionError for unequal hyper-parameters, InputError for unequal batches of ranks that
        compute one together."""
        digest = None if batches is None else _digest(batches)
        everyone = self.engine.gather([self._digest, self._numbers, digest])
        self._digest = 0
        self._compare_numbers([digest for digest, _, _ in everyone], [numbers for _, numbers, _ in everyone])
        self._compare_batches([digest for _, _, digest in everyone])

    def _compare_numbers(self, digests: Sequence[int], numbers: Sequence[Mapping[str, Any]]) -> None:
        rank = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
        if rank is None:
            return
        expected, actual = numbers[0], numbers[rank]
        name = next((name for name in {**expected, **actual} if expected.get(name) != actual.get(name)), None)
        if name is None:
            raise OptionError(f"ranks 0 and {rank} had unequal hyper-parameters in a step before this one", _LOSS)
        raise OptionError(f"{name!r} is {expected.get(name)} on rank 0 and {actual.get(name)} on rank {rank}", _LOSS)

    def _compare_batches(self, digests: Sequence[int | None]) -> None:
        readers: dict[Hashable, int] = {}
        for rank, digest in enumerate(digests):
            if digest is None:
                continue
            earlier = readers.setdefault(self.batches[rank], rank)
            if digests[earlier] != digest:
                raise InputError(
                    f"ranks {earlier} and {rank} compute a batch together, and were given unequal batches",
                    "deal the samples by rank.sampler(dataset)",
                )
        if len(readers) > 1 and len(set(digests)) == 1 and self.engine.rank == 0 and not self._noted:
            text = "gopt: note: all ranks were given the same batch; rank.sampler(dataset) deals each its own samples"
            print(text, file=sys.stderr)
            self._noted = True


def _digest(batches: Iterable[torch.Tensor]) -> int:
    digest = 0
    for tensor in batches:
        digest = crc32(flat_bytes(tensor), digest)
    return digest
