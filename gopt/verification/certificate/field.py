"""A prime field in NumPy, drawn by a seed, and functions without laws as hashes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from fractions import Fraction
from functools import reduce
from typing import Any

import numpy as np

Array = np.ndarray
_HALF, _LOW = np.uint64(32), np.uint64((1 << 32) - 1)
_STEPS = tuple((np.uint64(shift), np.uint64(factor)) for shift, factor in (
    (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 0x9E3779B97F4A7C15)))  # fmt: skip


def seed_of(*key: Any) -> int:
    """A number of 64 bits by the text of a key."""
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "big")


def _prime(number: int) -> bool:
    """Return whether an odd number below 2^64 is prime, by Miller and Rabin."""
    twos = ((number - 1) & (1 - number)).bit_length() - 1
    powers = ([pow(base, (number - 1) >> at, number) for at in range(twos, 0, -1)]
              for base in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37))  # fmt: skip
    return all(row[0] == 1 or number - 1 in row for row in powers)


class PrimeField:
    """The numbers below a prime of 52 bits."""

    def __init__(self, seed: str) -> None:
        self.seed, prime = seed, seed_of(seed, "prime") % (1 << 51) + (1 << 51) | 1
        while not _prime(prime):
            prime += 2
        self.prime, self._size = prime, np.uint64(prime)

    def element(self, value: Fraction | int) -> np.uint64:
        """A fraction in the field."""
        value = Fraction(value)
        return np.uint64(value.numerator * pow(value.denominator, -1, self.prime) % self.prime)

    def times(self, one: Any, two: Any) -> Array:
        """The product of arrays. Both roundings of the quotient are below 1 together, since it has 52 bits."""
        with np.errstate(over="ignore"):
            quotient = (np.multiply(one, two, dtype=np.float64) / self.prime).astype(np.uint64)
            return np.asarray((one * two - quotient * self._size + self._size) % self._size)

    def plus(self, one: Any, two: Any) -> Array:
        """The sum of arrays."""
        return np.asarray((one + two) % self._size)

    def total(self, array: Array, axis: Any, *, keep: bool = False) -> Array:
        """The sum along dimensions of at most 2^32 elements."""
        high, low = (half.sum(axis, keepdims=keep, dtype=np.uint64) % self._size
                     for half in (array >> _HALF, array & _LOW))  # fmt: skip
        return self.plus(self.times(high, self.element(1 << 32)), low)

    def power(self, array: Array, exponent: int) -> Array:
        """A power; the power -1 of zero is zero."""
        result, exponent = np.full_like(array, self.element(1)), exponent % (self.prime - 1)
        while exponent:
            result = self.times(result, array) if exponent & 1 else result
            array, exponent = self.times(array, array), exponent >> 1
        return result

    def drawn(self, shape: Sequence[int], *key: Any) -> Array:
        """Random elements by a key."""
        generator = np.random.Generator(np.random.PCG64(seed_of(self.seed, *key)))
        return generator.integers(0, self.prime, tuple(shape), np.uint64)

    def hashed(self, key: Any, *arrays: Array) -> Array:
        """A function without laws, element by element."""

        def mixed(state: Any, array: Any) -> Any:
            state = (state ^ array) + np.uint64(0x9E3779B97F4A7C15)
            for shift, factor in _STEPS:
                state = (state ^ (state >> shift)) * factor
            return state ^ (state >> _HALF)

        with np.errstate(over="ignore"):
            state = mixed(np.uint64(seed_of(self.seed, key)), np.uint64(len(arrays)))
            return np.asarray(reduce(mixed, arrays, state) % self._size)
