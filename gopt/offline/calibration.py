"""The figures of a device from measured times: speeds that fit best, near a known device's speeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gopt.offline.device import OF_CALLS, OF_SEGMENTS, DeviceFigures
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
    """A call: rounds of a ring among members, bytes sent and bytes combined by a rank, and the measured seconds."""

    rounds: int
    members: int
    sent: float
    added: float
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
    segment_of = np.repeat(np.arange(len(segments)), [len(item.works) for item in segments])
    works = [work for item in segments for work in item.works]
    # Seconds on ``device``: of each work, and of the start of each segment.
    products = np.array([work.flops / device.peak(work.dtype) for work in works])
    fused = np.array([work.fused for work in works])
    passes = np.array([work.nbytes / (device.fused_stream if work.fused else device.stream) for work in works])
    launches = np.array([work.launches * device.launch for work in works])
    starts = np.array([device.segment * item.starts for item in segments])
    measured = np.array([item.seconds for item in segments])
    shares = np.sqrt(measured / measured.sum())

    def residuals(logs: Array) -> Array:
        flops, bandwidth, launch, fused_bandwidth, segment = np.exp(logs)
        memory = passes * np.where(fused, fused_bandwidth, bandwidth)
        seconds = launches * launch + np.maximum(products * flops, memory)
        modelled = np.maximum(np.bincount(segment_of, seconds, len(segments)) + starts * segment, 1e-12)
        return np.append(shares * np.log(modelled / measured), np.log(modelled.sum() / measured.sum()))

    stiffness = (1, 1, 1, 1, _stiffer(sum(item.starts for item in segments)))
    slower, settled = _slower(residuals, device, dict(zip(OF_SEGMENTS, stiffness)))
    return replace(
        device, flops={name: speed / slower["flops"] for name, speed in device.flops.items()},
        bandwidth=device.bandwidth / slower["bandwidth"], launch=device.launch * slower["launch"],
        fused_bandwidth=(device.fused_bandwidth or device.bandwidth) / slower["fused_bandwidth"],
        segment=device.segment * slower["segment"], settled=settled,
    )  # fmt: skip


def fit_calls(device: DeviceFigures, measured_calls: Iterable[MeasuredCall]) -> DeviceFigures:
    """``device`` with the bandwidth and the latency of the only link, and the speed of adding, for which calls take the
    measured seconds: least squares of logarithms. Calls of a calibration before weigh in by ``settled``. Without a
    speed of adding the bandwidth is the first guess. Raises OptionError for several links."""
    calls = [call for call in measured_calls if call.seconds > 0 and call.members > 1]
    if not calls:
        return device
    link = Link.parse(device.link or "")
    adding = device.adding or link.bandwidth
    moves = np.array([call.sent / link.bandwidth for call in calls])
    starts = np.array([link.start(call.rounds, call.members) for call in calls])
    sums = np.array([call.added / adding for call in calls])
    measured = np.array([call.seconds for call in calls])

    parts = np.stack([moves, starts, sums], axis=1)  # in the order of OF_CALLS

    def residuals(logs: Array) -> Array:
        modelled = np.maximum(parts @ np.exp(logs), 1e-12)
        return np.asarray(np.log(modelled / measured) / np.sqrt(len(calls)))

    slower, settled = _slower(residuals, device, dict(zip(OF_CALLS, (1, _stiffer(len(calls)), 1))))
    bandwidth, latency = link.bandwidth / slower["link.bandwidth"], link.latency * slower["link.latency"]
    return replace(
        device, link=f"{bandwidth / 1e9:.6f}GB/s:{latency * 1e9:.0f}ns", settled=settled,
        adding=adding / slower["adding"] if sums.any() else device.adding,
    )  # fmt: skip


def _slower(
    residuals: Callable[[Array], Array], device: DeviceFigures, stiffness: Mapping[str, float]
) -> tuple[dict[str, float], dict[str, tuple[float, ...]]]:
    """How many times as long each figure of ``stiffness`` takes as on ``device``, and ``settled`` with these rows.
    ``residuals``: of measured times, by the logarithms. Where ``settled`` has no rows, figures are held near ``device``
    by ``stiffness`` times STIFFNESS."""
    settled = dict(device.settled or {})
    prior = STIFFNESS * np.diag([*stiffness.values()])
    if stiffness.keys() <= settled.keys():
        prior = np.array([settled[name] for name in stiffness])
    logs, root = _least_squares(lambda logs: np.concatenate([residuals(logs), prior @ logs]), len(stiffness))
    settled.update(zip(stiffness, map(tuple, root.round(6).tolist())))
    return dict(zip(stiffness, np.exp(logs).tolist())), settled


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
