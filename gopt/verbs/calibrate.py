"""``gopt.calibrate``: the figures of a device from the trace of a run."""

from __future__ import annotations

import os
from pathlib import Path

from gopt.offline.device import DeviceFigures, device_of
from gopt.options.types import checked
from gopt.runtime.calibration import device_of_trace


@checked
def calibrate(
    folder: str | os.PathLike[str],
    trace: str | os.PathLike[str],
    *,
    rank: int = 0,
    name: str = "calibrated",
    device: DeviceFigures | str | os.PathLike[str] = "cpu",
) -> DeviceFigures:
    """Fit the figures of a device to the trace of ``gopt run --trace``, of a folder of ranks run on CPUs.

    ``rank``: the rank with the events; ``name``: of the device; ``device``: a known device or a file, with the figures
    that the trace does not settle, such as the link of a folder whose ranks make no calls. Times are the lower quartile
    over the steps behind the first few: other load of the machine only adds. Raises InputError for a trace of another
    folder.

    >>> gopt.calibrate("out", "trace.json")  # doctest: +SKIP
    """
    return device_of_trace(Path(folder), Path(trace), rank, name, device_of(device))
