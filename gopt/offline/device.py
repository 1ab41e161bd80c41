"""How fast a device computes: a record, three known devices, and files of others."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from gopt import documents
from gopt.documents.records import OPTIONAL, Amount, Bounds, Count, Name, from_document, one_of, to_document
from gopt.errors import InputError, OptionError
from gopt.text.sanitize import show
from gopt.text.suggestions import did_you_mean

FORMAT = "gopt-device/1"
FLOATS = ("float64", "float32", "bfloat16", "float16")
"""Types whose peaks a device names; values of other types go by ``float32``."""
OF_SEGMENTS = ("flops", "bandwidth", "launch", "fused_bandwidth", "segment")
"""Figures that segments of a trace settle together."""
OF_CALLS = ("link.bandwidth", "link.latency", "adding")
"""Figures that calls of a trace settle together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFigures:
    """A device is a JSON or TOML file with the speed of a rank, for gopt plan --device FILE. gopt plan --calibrate
    writes such a file."""

    format: Annotated[str, one_of(FORMAT)] = FORMAT
    """The format is the name and version of this format."""
    name: Name
    """The device is called so in tables and reports."""
    flops: Mapping[str, Amount]
    """The table gives the most floating-point operations in a second of products of values of a type: float32, and
    float64, bfloat16 and float16 where they differ from it."""
    bandwidth: Amount
    """The memory reads or writes this many bytes in a second."""
    launch: Amount
    """The start of one operator takes this many seconds."""
    efficiency: Annotated[float, Bounds(minimum=0, maximum=1)] = field(default=1.0, metadata=OPTIONAL)
    """Operators reach this share of flops and bandwidth, 0 to 1."""
    call: Amount = field(default=0.0, metadata=OPTIONAL)
    """Each call between ranks keeps the device from computing for this many seconds, beside the time on the link."""
    message: Amount | None = field(default=None, metadata=OPTIONAL)
    """Each message between pipeline stages keeps sender and receiver from computing for this many seconds; absent means
    as many as call says."""
    segment: Amount = field(default=0.0, metadata=OPTIONAL)
    """The operators between two calls or messages take this many seconds to start together."""
    run: Amount = field(default=0.0, metadata=OPTIONAL)
    """Each run of a file of the rank takes this many seconds beside its operators and calls."""
    step: Amount = field(default=0.0, metadata=OPTIONAL)
    """Each step takes this many seconds beside the runs: the batch, and losses that ranks tell one another."""
    overlaps: bool = field(default=True, metadata=OPTIONAL)
    """The value is false where the device computes nothing during a call."""
    fuse_from: Count | None = field(default=None, metadata=OPTIONAL)
    """Elementwise operators on values of at least so many elements pass over memory once, together with neighbours of
    the same size; absent means that each operator passes over memory."""
    fused_bandwidth: Amount | None = field(default=None, metadata=OPTIONAL)
    """Such elementwise operators read or write this many bytes of memory in a second, more than bandwidth says where
    results take the memory of operands; absent means as many as bandwidth says."""
    host_link: Amount | None = field(default=None, metadata=OPTIONAL)
    """Values of --offload pass between the memory of the device and of the host at this many bytes in a second, in each
    direction; absent means that the host is the device, and nothing is moved."""
    host_bandwidth: Amount | None = field(default=None, metadata=OPTIONAL)
    """The host reads or writes this many bytes of memory in a second for a rank, in updates of states there; absent
    means as many as the device."""
    settled: Mapping[str, tuple[float, ...]] | None = field(default=None, metadata=OPTIONAL)
    """A calibration writes here how firmly it settled flops, bandwidth, launch, fused_bandwidth and segment, and
    link.bandwidth, link.latency and adding, for the next one: for each of the five or three, in this order, a row of
    the root of the Hessian of the squared residuals, by the logarithms of the figures."""
    link: str | None = field(default=None, metadata=OPTIONAL)
    """The links between ranks, as gopt plan --link takes them; absent means that they are unknown. The option goes
    first."""
    adding: Amount | None = field(default=None, metadata=OPTIONAL)
    """Calls that combine values, such as AllReduce and ReduceScatter, combine this many bytes in a second, beside the
    time on the link; absent means no time."""

    def to_json(self) -> dict[str, Any]:
        """The document of the device."""
        return to_document(self)

    def peak(self, dtype: str) -> float:
        """Operations in a second of products of a type."""
        return self.efficiency * self.flops.get(dtype, self.flops["float32"])

    @property
    def host_stream(self) -> float:
        """Bytes read or written in a second by the host."""
        return self.stream if self.host_bandwidth is None else self.efficiency * self.host_bandwidth

    @property
    def fused_stream(self) -> float:
        """Bytes read or written in a second by elementwise operators that pass over memory together."""
        return self.stream if self.fused_bandwidth is None else self.efficiency * self.fused_bandwidth

    @property
    def stream(self) -> float:
        """Bytes read or written in a second."""
        return self.efficiency * self.bandwidth


DEVICES = {
    device.name: device
    for device in (
        DeviceFigures(
            name="h100", flops={"float64": 33.5e12, "float32": 66.9e12, "bfloat16": 989.4e12, "float16": 989.4e12},
            bandwidth=3.35e12, launch=7e-6, efficiency=0.7, host_link=64e9, host_bandwidth=77e9,
            link="8x450GB/s:5us,50GB/s:10us",
        ),
        DeviceFigures(
            name="a100", flops={"float64": 9.7e12, "float32": 19.5e12, "bfloat16": 312e12, "float16": 312e12},
            bandwidth=2.039e12, launch=7e-6, efficiency=0.7, host_link=32e9, host_bandwidth=51e9,
            link="8x300GB/s:5us,25GB/s:10us",
        ),
        DeviceFigures(
            name="cpu", flops={"float64": 30e9, "float32": 60e9}, bandwidth=8e9, launch=1.4e-6, call=15e-6,
            message=25e-6, segment=20e-6, run=60e-6, step=150e-6, overlaps=False, fuse_from=1 << 13,
            fused_bandwidth=24e9, link="2GB/s:12us",
        ),
    )
}  # fmt: skip
"""Peaks of the makers' data sheets (H100 SXM, A100 SXM 80 GB; dense products, without TF32). Share and launch come from
AutoParallel's cost model; links are NVLink among 8 neighbours, and 400 or 200 Gb/s between nodes. The host's link is
PCIe 5.0 or 4.0 with 16 lanes, its bandwidth an eighth of 16 channels of DDR5-4800 or DDR4-3200: 8 ranks share a host.
``cpu``: one core, rounded from traced runs; a calibration fits the core at hand."""


def link_of(link: str | None, device: DeviceFigures | None) -> str | None:
    """The links between ranks: as given, or the device's own. Raises OptionError for a device without."""
    if device is None or link is not None:
        return link
    if device.link is None:
        raise OptionError(
            f"device {show(device.name)} does not say how ranks are linked",
            "add --link 200GB/s:5us, or link to its file",
        )
    return device.link


def device_of(text: DeviceFigures | str | os.PathLike[str]) -> DeviceFigures:
    """A known device by name, or the device of a JSON or TOML file. Raises OptionError for an unknown name,
    InputError for a wrong file."""
    if isinstance(text, DeviceFigures):
        return text
    if isinstance(text, str) and text in DEVICES:
        return DEVICES[text]
    path = os.fspath(text)
    if not path.endswith((".json", ".toml")):
        hint = did_you_mean(path, DEVICES) or f"there are {', '.join(DEVICES)}, and files called .toml or .json"
        raise OptionError(f"no device is called {show(path)}", hint)
    read = documents.read_json if path.endswith(".json") else documents.read_toml
    device = from_document(DeviceFigures, read(path, documents.DEVICE))
    _check(device, path)
    return device


def _check(device: DeviceFigures, path: str) -> None:
    """Raise InputError for a missing or zero speed, and for an unknown type."""
    if "float32" not in device.flops:
        raise InputError(f"{path}: flops lacks float32", "products of other types go by it")
    for name in device.flops:
        if name not in FLOATS:
            raise InputError(f"{path}: flops has {show(name)}", did_you_mean(name, FLOATS) or f"types: {FLOATS}")
    rows = {name: len(row) for name, row in (device.settled or {}).items()}
    settled = [figures for figures in (OF_SEGMENTS, OF_CALLS) if not rows.keys().isdisjoint(figures)]
    if rows != {name: len(figures) for figures in settled for name in figures}:
        raise InputError(
            f"{path}: settled has not the rows and columns that gopt plan --calibrate writes",
            "leave it out, or calibrate again",
        )
    speeds = {f"flops.{name}": speed for name, speed in device.flops.items()}
    for name in ("bandwidth", "efficiency", "fused_bandwidth", "host_link", "host_bandwidth", "adding"):
        speeds[name] = getattr(device, name) or (1.0 if getattr(device, name) is None else 0.0)
    for name, speed in speeds.items():
        if not (speed > 0 and math.isfinite(1 / speed)):
            raise InputError(f"{path}: {name} is {speed}, and nothing would ever end", "give a number above 0")
