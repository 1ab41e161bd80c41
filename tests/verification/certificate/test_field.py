"""The prime field against whole numbers of Python."""

from __future__ import annotations

import random
from fractions import Fraction

import numpy as np
import pytest

from gopt.verification.certificate.field import PrimeField

SEEDS = ["a", "b", "c", "d"]


def plain(array: np.ndarray) -> list[int]:
    return [int(value) for value in np.asarray(array).reshape(-1)]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_modulus_is_a_prime_of_52_bits(seed):
    prime, draw = PrimeField(seed).prime, random.Random(seed)
    assert prime.bit_length() == 52
    assert all(pow(base := draw.randrange(2, prime), prime - 1, prime) == 1 and base for _ in range(50))
    assert all(prime % small for small in range(2, 10_000))
    assert len({PrimeField(other).prime for other in SEEDS}) == len(SEEDS)


@pytest.mark.parametrize("seed", SEEDS)
def test_sums_products_and_powers(seed):
    field, draw = PrimeField(seed), random.Random(seed)
    edges = [0, 1, 2, field.prime - 1, field.prime - 2, (1 << 32) - 1, 1 << 32, 1 << 51]
    pairs = [(a, b) for a in edges for b in edges]
    pairs += [(draw.randrange(field.prime), draw.randrange(field.prime)) for _ in range(500)]
    near = [(draw.randrange(1, field.prime), draw.choice(edges)) for _ in range(500)]
    pairs += [(a, b * pow(a, -1, field.prime) % field.prime) for a, b in near]  # quotients beside a whole number
    one, two = (np.array([field.element(pair[at]) for pair in pairs]) for at in (0, 1))
    assert plain(field.times(one, two)) == [a * b % field.prime for a, b in pairs]
    assert plain(field.plus(one, two)) == [(a + b) % field.prime for a, b in pairs]
    assert plain(field.power(one, 5)) == [pow(a, 5, field.prime) for a, _ in pairs]
    assert plain(field.power(one, -2)) == [pow(a, field.prime - 3, field.prime) for a, _ in pairs]
    assert plain(field.total(one, 0)) == [sum(a for a, _ in pairs) % field.prime]


def test_fractions_are_quotients():
    field = PrimeField("x")
    third = field.element(Fraction(1, 3))
    assert plain(field.times(third, field.element(3))) == [1]
    assert plain(field.plus(field.element(Fraction(-2, 3)), third)) == plain(field.element(Fraction(-1, 3)))


def test_no_factor_of_two_is_one():
    field = PrimeField("x")
    assert len({int(field.element(1 << power)) for power in range(2000)}) == 2000


def test_hashes_tell_keys_elements_and_order_apart():
    field = PrimeField("x")
    one, two = field.drawn((1000,), "one"), field.drawn((1000,), "two")
    rows = [field.hashed("f", one), field.hashed("g", one), field.hashed("f", one, two), field.hashed("f", two, one)]
    assert len(np.unique(np.concatenate([one, two, *rows]))) == 6000
    assert (field.hashed("f", one[:10]) == rows[0][:10]).all()
    assert (PrimeField("y").hashed("f", one) != rows[0]).all()
