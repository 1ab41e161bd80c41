"""A folder against its source, step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rank_files import HALVES, Array, Values, dtype_of

from split_gen.reference import Reference
from split_gen.simulator import Simulation

Batches = list[list[Values]]
"""By trainer and micro-step."""


@dataclass(frozen=True)
class Allowance:
    """How far a state may be off: a share of the largest move of its tensor, and of its largest element. 0: no bit."""

    share: float = 0.0

    def fault(self, name: str, real: Array, wanted: Array, before: Array) -> str:
        if real.shape != wanted.shape or real.dtype != wanted.dtype:
            return f"{name} is {real.dtype}{list(real.shape)}, not {wanted.dtype}{list(wanted.shape)}"
        if real.tobytes() == wanted.tobytes():
            return ""
        r, w, b = (each.astype(np.float64) for each in (real, wanted, before))
        if np.array_equal(r, w, equal_nan=True):
            return ""
        with np.errstate(all="ignore"):
            off = np.abs(np.nan_to_num(r - w))
            odd = np.isnan(r) != np.isnan(w)
            odd |= (np.isinf(r) | np.isinf(w)) & (r != w)
            allowed = self.share * float(np.nan_to_num(np.abs(w - b)).max() + 2e-2 * np.nan_to_num(np.abs(w)).max())
        if odd.any() or not self.share or off.max() > allowed:
            worst = int(np.argmax(np.where(odd, np.inf, off)))
            return (
                f"{name}[{worst}] is {r.flat[worst]:.9g}, not {w.flat[worst]:.9g}; before {b.flat[worst]:.9g}; "
                f"{int((r != w).sum())} of {r.size} differ, by {off.max():.3g}, allowed {allowed:.3g}"
            )
        return ""


EXACT = Allowance()


def differences(
    simulation: Simulation,
    reference: Reference,
    draw: Callable[[int], tuple[Batches, Values]],
    steps: int,
    allow: Callable[[str], Allowance] = lambda name: EXACT,
) -> Iterator[str]:
    """Where a folder and its source differ, over some steps; one line each. The first step that differs ends it."""
    yield from _unlike(simulation, reference, reference.all_states(), lambda name: EXACT, "start")
    for step in range(steps):
        before = reference.all_states()
        batches, hyper = draw(step)
        simulation.round(batches, hyper)
        reference.step(batches, hyper, simulation.rows.touched)
        found = list(_unlike(simulation, reference, before, allow, f"step {step + 1}"))
        found += _copies(simulation, f"step {step + 1}")
        found += _losses(simulation, reference, f"step {step + 1}", allow("") if not step else None)
        found += _metrics(simulation, reference, f"step {step + 1}", allow)
        yield from found
        if found:
            return


def _unlike(
    simulation: Simulation, reference: Reference, before: Values, allow: Callable[[str], Allowance], when: str
) -> Iterator[str]:
    for trainer in range(len(simulation.trainers)):
        real, wanted = simulation.states(trainer), reference.all_states(trainer)
        for name in wanted if not trainer else reference.own:
            fault = allow(name).fault(name, real[name], wanted[name], before.get(name, wanted[name]))
            if fault:
                yield f"{when}: trainer {trainer}: {fault}"
    missing = set(reference.all_states()) ^ set(simulation.states())
    if missing:
        yield f"{when}: states {sorted(missing)} are of one side alone"


def _copies(simulation: Simulation, when: str) -> Iterator[str]:
    """V5: with pulls at the end, all trainers hold what servers hold, as it travels."""
    whole = simulation.states()
    for trainer in range(len(simulation.trainers)):
        for name, copy in simulation.copies(trainer).items():
            if copy.tobytes() != simulation.travelled(name, whole[name]).astype(copy.dtype).tobytes():
                yield f"{when}: trainer {trainer} holds another {name} than servers"


def _losses(simulation: Simulation, reference: Reference, when: str, allow: Allowance | None) -> Iterator[str]:
    for trainer, (mine, theirs) in enumerate(zip(simulation.losses, reference.losses, strict=True)):
        if len(mine) != len(theirs):
            yield f"{when}: trainer {trainer} gives {len(mine)} losses, not {len(theirs)}"
        for one, other in zip(mine, theirs):
            if allow == EXACT and one.tobytes() != other.tobytes():
                yield f"{when}: trainer {trainer}: loss {one}, not {other}"


def _metrics(
    simulation: Simulation, reference: Reference, when: str, allow: Callable[[str], Allowance]
) -> Iterator[str]:
    """Outputs that servers compute come back to every trainer."""
    for key in simulation.keys:
        if key["kind"] != "metric":
            continue
        (name,) = key["outputs"]
        for trainer, given in enumerate(simulation.outputs):
            wanted = reference.outputs[name]
            fault = allow(name).fault(name, np.asarray(given[name]), wanted, np.zeros_like(wanted))
            if fault:
                yield f"{when}: trainer {trainer}: metric {fault}"


def draw_like(
    manifest: dict[str, Any], seed: int, micro: int, size: float = 1.0
) -> Callable[[int], tuple[Batches, Values]]:
    """Random batches for the inputs of a manifest: unlike from trainer to trainer in size, so that a sum shows."""
    inputs = manifest["common"]["inputs"]
    trainers = sum(each["role"] == "trainer" for each in manifest["ranks"])

    def draw(step: int) -> tuple[Batches, Values]:
        batches: Batches = []
        for trainer in range(trainers):
            generator = np.random.default_rng((seed, step, trainer))
            batches.append([_batch(inputs, generator, size * (1.0 + trainer)) for _ in range(micro)])
        return batches, _hyper(inputs, step)

    return draw


def _batch(inputs: Sequence[dict[str, Any]], generator: np.random.Generator, size: float) -> Values:
    found = {}
    for each in inputs:
        if each["kind"] != "batch":
            continue
        shape = [dim if isinstance(dim, int) else 4 for dim in each["shape"]]
        dtype = dtype_of(each["dtype"])
        if dtype.kind == "f" or dtype in HALVES:
            found[each["name"]] = np.asarray(size * generator.standard_normal(shape)).astype(dtype)
        elif dtype.kind == "b":
            found[each["name"]] = generator.random(shape) < 0.7
        else:
            found[each["name"]] = generator.integers(0, 4, shape).astype(dtype)
    return found


def _hyper(inputs: Sequence[dict[str, Any]], step: int) -> Values:
    found = {}
    for each in inputs:
        if each["kind"] == "hyper":
            dtype = dtype_of(each["dtype"])
            value = 0.01 / (1 + step) if dtype.kind == "f" or dtype in HALVES else 1 + step
            found[each["name"]] = np.full([d for d in each["shape"] if isinstance(d, int)], value).astype(dtype)
    return found
