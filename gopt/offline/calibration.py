"""The figures of a device from measured times: speeds that fit best, near a known device's speeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gopt.offline.device import FITTED, DeviceFigures
from gopt.offline.roofline import NOTHING, NodeWork
from gopt.operators.operator import Array
from gopt.records.topology import Link

STIFFNESS = 0.05
"""Weight of a figure's distance from the known device, beside measured times: a few segments do not settle all."""
ENOUGH = 10
"""With fewer segments the start of a segment stays nearer, with fewer calls the latency: both are as good as the other
figures."""
ROUNDS = 60


@dataclass(frozen=True, slots=True)
class MeasuredCall:
    """A call: rounds of a ring among members, bytes sent by a rank, and the measured seconds."""

    rounds: int
    members: int
    sent: float
    seconds: float


@dataclass(frozen=True, slots=True)
class MeasuredSegment:
    """The work of nodes run together, and the measured seconds. ``starts``: whether the nodes take a start
    together."""

    works: Sequence[NodeWork]
    seconds: float
    starts: bool = True


def fit_device(device: DeviceFigures, measured_segments: Iterable[MeasuredSegment]) -> DeviceFigures:
    """``device`` with the speeds for which segments of nodes take the measured seconds: least squares of logarithms,
    with the logarithm of the sum. The peaks of types keep their relation. Segments of a calibration before weigh in by
    ``settled``, a quadratic form around the speeds that they gave."""
    segments = [item for item in measured_segments if item.seconds > 0 and any(map(NOTHING.__ne__, item.works))]
    if not segments:
        return device
    numbers = np.repeat(np.arange(len(segments)), [len(item.works) for item in segments])
    works = [work for item in segments for work in item.works]
    products = np.array([work.flops / device.peak(work.dtype) for work in works])
    moves = np.array([0 if work.fused else work.nbytes / device.stream for work in works])
    fused = np.array([work.nbytes / device.fused_stream if work.fused else 0 for work in works])
    starts = np.array([work.launches * device.launch for work in works])
    together = np.array([device.segment * item.starts for item in segments])
    stiffer = np.array([1, 1, 1, 1, _stiffer(sum(item.starts for item in segments))])
    prior = (
        np.diag(STIFFNESS * stiffer) if device.settled is None else np.array([device.settled[name] for name in FITTED])
    )
    measured = np.array([item.seconds for item in segments])

    def residuals(logs: Array) -> Array:
        slower = np.exp(logs)
        times = starts * slower[2] + np.maximum(products * slower[0], moves * slower[1] + fused * slower[3])
        modelled = np.maximum(np.bincount(numbers, times, len(segments)) + together * slower[4], 1e-12)
        share = np.sqrt(measured / measured.sum())
        return np.concatenate([
            share * np.log(modelled / measured), [3 * np.log(modelled.sum() / measured.sum())],
            prior @ logs,
        ])  # fmt: skip

    logs, settled = _least_squares(residuals, 5)
    products_, moves_, starts_, fused_, segments_ = np.exp(logs)
    return replace(
        device, flops={name: float(speed / products_) for name, speed in device.flops.items()},
        bandwidth=float(device.bandwidth / moves_), launch=float(device.launch * starts_),
        fused_bandwidth=float((device.fused_bandwidth or device.bandwidth) / fused_),
        segment=float(device.segment * segments_),
        settled={name: tuple(row) for name, row in zip(FITTED, settled.round(6).tolist())},
    )  # fmt: skip


def fit_link(link: Link, calls: Sequence[MeasuredCall]) -> Link:
    """``link`` with the bandwidth and the latency for which calls take the measured seconds."""
    calls = [call for call in calls if call.seconds > 0 and call.members > 1]
    if not calls:
        return link
    starts = np.array([link.start(call.rounds, call.members) for call in calls])
    moves = np.array([call.sent / link.bandwidth for call in calls])
    stiffer = np.array([_stiffer(len(calls)), 1])
    measured = np.array([call.seconds for call in calls])

    def residuals(logs: Array) -> Array:
        modelled = starts * np.exp(logs[0]) + moves * np.exp(logs[1])
        return np.concatenate([np.log(modelled / measured) / np.sqrt(len(calls)), STIFFNESS * stiffer * logs])

    latency, moving = np.exp(_least_squares(residuals, 2)[0])
    return Link(float(link.bandwidth / moving), float(link.latency * latency))


def _stiffer(count: int) -> float:
    return max(ENOUGH / max(count, 1), 1)


def _least_squares(residuals: Callable[[Array], Array], count: int) -> tuple[Array, Array]:
    """The arguments with the least sum of squares, from zeros, and the root of the Hessian there: Gauss-Newton with a
    damping that adapts (Levenberg, 1944)."""
    at, damping = np.zeros(count), 1e-2
    now = residuals(at)
    for _ in range(ROUNDS):
        slopes = _slopes(residuals, at, now)
        move = np.linalg.solve(slopes.T @ slopes + damping * np.eye(count), -slopes.T @ now)
        tried = residuals(at + np.clip(move, -2, 2))
        if tried @ tried < now @ now:
            at, now, damping = at + np.clip(move, -2, 2), tried, damping / 4
        else:
            damping *= 8
    return at, np.linalg.qr(_slopes(residuals, at, now)).R


def _slopes(residuals: Callable[[Array], Array], at: Array, now: Array) -> Array:
    return np.stack([(residuals(at + step) - now) / 1e-6 for step in 1e-6 * np.eye(len(at))], axis=1)
