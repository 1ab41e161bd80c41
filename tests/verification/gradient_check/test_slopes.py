"""Gradients that are moved together: right ones agree, and an error in one of many shows, of whatever kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest

from gopt.verification.gradient_check.forward import DOUBLE, Values
from gopt.verification.gradient_check.slopes import SlopeCheck

SCALES = (1e-3, 1.0, 30.0, 1e-2, 1.0, 5.0)
"""Of the layers: gradients differ by orders of magnitude."""
WIDTH = 12


def weights(seed: int) -> Values:
    random = np.random.default_rng(seed)
    made = {f"w{place}": random.normal(0, 0.5, (WIDTH, WIDTH)) / scale for place, scale in enumerate(SCALES)}
    made |= {f"b{place}": random.normal(0, 0.5, WIDTH) for place in range(len(SCALES))}
    return made | {"x": random.normal(0, 1, (5, WIDTH))}


def run(point: Values) -> tuple[float, Values]:
    """The loss of layers with a kink, and its gradients."""
    value, kept = point["x"], []
    for place, scale in enumerate(SCALES):
        sums = scale * value @ point[f"w{place}"] + point[f"b{place}"]
        kept.append((value, sums))
        value = np.maximum(sums, 0.1 * sums)
    loss, adjoint, gradients = float((value**2).mean()), 2 * value / value.size, {}
    for place, scale in reversed(list(enumerate(SCALES))):
        value, sums = kept[place]
        adjoint = adjoint * np.where(sums > 0, 1, 0.1)
        gradients[f"w{place}"], gradients[f"b{place}"] = scale * value.T @ adjoint, adjoint.sum(0)
        adjoint = scale * adjoint @ point[f"w{place}"].T
    return loss, gradients


def moved(point: Values, direction: Mapping[str, np.ndarray], step: float) -> Values:
    return {**point, **{name: point[name] + step * along for name, along in direction.items()}}


def found(seed: int, change: Callable[[Values], None], factor: float | None = 1.0, masked: bool = False) -> set[str]:
    """The parameters that agree, where ``change`` was made to the gradients at every point."""

    def looks():
        for place in range(4):
            point = weights(seed) | {"x": weights(seed + 100 + place)["x"]}
            loss, gradients = run(point)
            change(gradients)
            yield point, loss, gradients

    names = [name for name in weights(seed) if name != "x"]
    masks = {"w1": np.eye(WIDTH)} if masked else {}
    check = SlopeCheck(lambda point: run(point)[0], moved, DOUBLE, np.random.default_rng(seed), factor, masks)
    return {name for group, *_ in check.agreeing(looks(), names) for name in group}


ALL = {f"{kind}{place}" for kind in "wb" for place in range(len(SCALES))}


@pytest.mark.parametrize("factor", [1.0, None])
@pytest.mark.parametrize("seed", range(8))
def test_right_gradients_agree(seed, factor):
    assert found(seed, lambda gradients: None, factor) == ALL


def test_one_unknown_factor_is_the_same_for_all():
    def scale(gradients: Values) -> None:
        for name in gradients:
            gradients[name] = 64 * gradients[name]

    assert found(2, scale, None) == ALL
    assert not found(0, scale, 1.0)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("faint", [1e-18, 1e-30, 1e-39, 1e-42])
def test_a_direction_along_a_faint_gradient_is_finite(faint):
    """One over its length, or over the square of it, is more than float32 holds."""

    def change(gradients: Values) -> None:
        gradients["w5"] = np.full((WIDTH, WIDTH), faint, np.float32)

    assert found(0, change) == ALL - {"w5"}


@pytest.mark.filterwarnings("error")
def test_a_gradient_that_fades_is_moved_along_as_it_was():
    """What is faint at one point alone has the length that it had."""
    calls = iter(range(4))

    def change(gradients: Values) -> None:
        if next(calls):
            gradients["w5"] = np.full((WIDTH, WIDTH), 1e-42, np.float32)

    assert "w5" not in found(0, change)


ERRORS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "twice": lambda g: 2 * g,
    "a tenth more": lambda g: 1.1 * g,
    "zero, nearly": lambda g: 1e-6 * g,
    "the other sign": lambda g: -g,
    "transposed": lambda g: g.T if g.ndim > 1 else g[::-1],
    "a missing half": lambda g: np.where(np.arange(g.size).reshape(g.shape) % 2, g, 0),
    "a missing term": lambda g: g - g[..., :1] if g.ndim > 1 else g - g.mean(),
    "one entry": lambda g: np.where(np.abs(g) == np.abs(g).max(), 0, g),
    "its magnitude": np.abs,
}


@pytest.mark.parametrize("factor", [1.0, None])
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("name", ["w0", "w2", "w5", "b0", "b3"])
def test_an_error_in_one_of_many_shows(name, error, factor):
    def plant(gradients: Values) -> None:
        gradients[name] = ERRORS[error](gradients[name])

    if factor is None and error == "zero, nearly":
        return  # a constant times the gradient, too small to be moved with others
    for seed in range(3):
        assert name not in found(seed, plant, factor), "moved with others, each of which adds as much to the slope"


def test_entries_that_are_not_moved_are_not_compared():
    def plant(gradients: Values) -> None:
        gradients["w1"] = np.eye(WIDTH) * gradients["w1"]

    assert "w1" not in found(0, plant)
    assert "w1" in found(0, plant, masked=True)


def test_a_gradient_of_zero_agrees_with_nothing():
    def plant(gradients: Values) -> None:
        gradients["b5"] = 0 * gradients["b5"]

    assert found(0, plant) == ALL - {"b5"}, "the others are compared without it"
