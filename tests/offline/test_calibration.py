"""Figures of a device from measured times."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gopt.offline.calibration import MeasuredCall, MeasuredSegment, fit_calls, fit_device
from gopt.offline.device import DEVICES, OF_CALLS, OF_SEGMENTS, DeviceFigures
from gopt.offline.roofline import NodeWork
from gopt.records.topology import Link

CPU = DEVICES["cpu"]
TRUE = replace(CPU, flops={name: 3 * speed for name, speed in CPU.flops.items()}, bandwidth=CPU.bandwidth / 2,
               launch=2 * CPU.launch, segment=2 * CPU.segment)  # fmt: skip
SEGMENTS = [
    [NodeWork(flops=10**8, nbytes=10**5, launches=1)] * 3, [NodeWork(nbytes=10**7, launches=1)] * 4,
    [NodeWork(nbytes=10**2, launches=1)] * 200,
    [NodeWork(nbytes=10**6, launches=1), NodeWork(flops=10**7, launches=1)],
]  # fmt: skip


def measured(device=TRUE, segments=SEGMENTS):
    seconds = [device.segment + sum(work.seconds(device) for work in works) for works in segments]
    return [MeasuredSegment(*item) for item in zip(segments, seconds)]


def test_the_figures_behind_the_times_are_found():
    fitted = fit_device(CPU, measured())
    for name, found, due in [
        ("float32", fitted.flops["float32"], TRUE.flops["float32"]), ("bandwidth", fitted.bandwidth, TRUE.bandwidth),
        ("launch", fitted.launch, TRUE.launch),
    ]:  # fmt: skip
        assert found == pytest.approx(due, rel=0.1), name
    assert fitted.flops["float64"] / fitted.flops["float32"] == pytest.approx(0.5), "peaks keep their relation"
    told = sum(item.seconds for item in measured(fitted))
    assert told == pytest.approx(sum(item.seconds for item in measured()), rel=0.02)


def test_many_short_segments_settle_what_starts_each():
    short = [[NodeWork(nbytes=10**2, launches=1)] * count for count in (1, 3, 10, 40) for _ in range(5)]
    fitted = fit_device(CPU, measured(segments=short))
    assert fitted.segment == pytest.approx(TRUE.segment, rel=0.15)
    assert fitted.launch == pytest.approx(TRUE.launch, rel=0.15)
    tiled = [replace(item, seconds=item.seconds - TRUE.segment, starts=False) for item in measured(segments=short)]
    assert fit_device(CPU, tiled).segment == pytest.approx(CPU.segment), "none of them starts so"


def test_a_second_trace_adds_to_the_first():
    """Products and long moves stand in one trace, short segments in the other: each alone leaves figures open."""
    pure = [SEGMENTS[0], SEGMENTS[1], [NodeWork(nbytes=10**7, launches=1, fused=True)] * 4]
    true = replace(TRUE, fused_bandwidth=5e10)
    first = fit_device(CPU, measured(true, pure))
    fitted = fit_device(first, measured(true, [[NodeWork(flops=10**6, launches=1)] * n for n in (1, 5, 20)]))
    assert fitted.flops["float32"] == pytest.approx(true.flops["float32"], rel=0.1)
    assert fitted.fused_bandwidth == pytest.approx(true.fused_bandwidth, rel=0.1)
    assert sum(item.seconds for item in measured(fitted, pure)) == pytest.approx(
        sum(item.seconds for item in measured(true, pure)), rel=0.05
    )
    # Segments of another machine: what the first trace settled firmly moves half as far as without.
    other = measured(replace(true, flops=CPU.flops, bandwidth=CPU.bandwidth), SEGMENTS[3:])
    held, free = fit_device(first, other), fit_device(replace(first, settled=None), other)
    assert abs(held.bandwidth - first.bandwidth) < 0.5 * abs(free.bandwidth - first.bandwidth)


def test_what_no_segment_settles_stays_near_the_known_device():
    fitted = fit_device(CPU, measured(replace(TRUE, segment=CPU.segment))[2:3])
    assert fitted.launch == pytest.approx(TRUE.launch, rel=0.05)
    assert fitted.flops == pytest.approx(CPU.flops, rel=0.05)
    assert fit_device(CPU, []) == CPU and fit_device(CPU, [MeasuredSegment([NodeWork()], 1.0)]) == CPU


# --- calls ----------------------------------------------------------------------------------------------------------

SUMS = replace(CPU, link="5GB/s:200us", adding=5e8)
"""A host whose ranks move values in shared memory, and add slowly."""


def called(device: DeviceFigures, kinds: str, sizes=4 * (1e3, 1e6, 1e7), members: int = 2) -> list[MeasuredCall]:
    """Calls of kinds (A: AllReduce, R: ReduceScatter, G: AllGather) on values of some bytes, as ``device`` times
    them."""
    link, calls = Link.parse(device.link), []
    for kind in kinds:
        rounds = 2 if kind == "A" else 1
        for size in sizes:
            share = (members - 1) / members * size
            added = 0.0 if kind == "G" else share
            seconds = link.seconds(rounds, members, rounds * share) + (added / device.adding if device.adding else 0)
            calls.append(MeasuredCall(rounds, members, rounds * share, added, seconds))
    return calls


def figures(device: DeviceFigures) -> tuple[float, float, float]:
    link = Link.parse(device.link)
    return link.bandwidth, link.latency, device.adding


@pytest.mark.parametrize("members", [2, 4])
@pytest.mark.parametrize("kinds", ["ARG", "RG"])
def test_the_link_and_the_adding_behind_calls_are_found(kinds, members):
    assert figures(fit_calls(CPU, called(SUMS, kinds, members=members))) == pytest.approx(figures(SUMS), rel=0.1)


def test_calls_of_two_traces_settle_together_what_neither_settles_alone():
    """AllReduces do not tell moving from adding, and AllGathers know nothing of adding."""
    gathers = fit_calls(CPU, called(SUMS, "G"))
    assert gathers.adding is None, "no call combines values"
    assert figures(fit_calls(gathers, called(SUMS, "A"))) == pytest.approx(figures(SUMS), rel=0.1)
    alone = fit_calls(CPU, called(SUMS, "A"))
    assert figures(alone) != pytest.approx(figures(SUMS), rel=0.2)
    for one, due in zip(called(alone, "A"), called(SUMS, "A")):
        assert one.seconds == pytest.approx(due.seconds, rel=0.1), "AllReduces themselves are told by either"


def test_a_second_trace_does_not_undo_the_first():
    first, other = fit_calls(CPU, called(SUMS, "RG")), called(replace(SUMS, link="1GB/s:200us"), "RG")
    free, held = (figures(fit_calls(device, other))[0] for device in (replace(first, settled=None), first))
    assert free == pytest.approx(1e9, rel=0.1) and held == pytest.approx((5e9 * 1e9) ** 0.5, rel=0.2)


def test_segments_and_calls_are_settled_apart():
    both = fit_calls(fit_device(CPU, measured()), called(SUMS, "ARG"))
    assert both.settled.keys() == {*OF_SEGMENTS, *OF_CALLS}
    assert both.flops == fit_device(CPU, measured()).flops
    again = fit_device(fit_calls(CPU, called(SUMS, "ARG")), measured())
    assert (again.link, again.adding, again.flops) == (both.link, both.adding, both.flops)


def test_a_call_of_one_rank_settles_nothing():
    assert fit_calls(CPU, [MeasuredCall(1, 1, 0, 0, 1.0)]) == CPU and fit_calls(CPU, []) == CPU
