"""Hyper-parameters of a run: numbers or schedules of the user or the step, fed to the graph in every step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gopt.artifact.manifest import Manifest
from gopt.artifact.manifest_entries import InputEntry, InputKind
from gopt.errors import OptionError
from gopt.ir.types import numpy_dtype
from gopt.runtime.session import Array
from gopt.runtime.training.job import Job
from gopt.runtime.training.schedules import USABLE, RateSchedule, default_schedule, parse_schedule, usable


@dataclass(slots=True)
class HyperParameter:
    """A hyper-parameter, and the array that feeds each step."""

    name: str
    schedule: RateSchedule
    array: Array
    value: float = math.nan

    def at(self, step: int) -> Array:
        """The value at a step, counted from 0; the same array every time. Raises OptionError for a value that is no
        number."""
        if self.schedule.steps is not None and step >= self.schedule.steps:
            raise _ended(self.name, self.schedule.steps, step + 1)
        value = self.schedule.at(step)
        if value != self.value:
            if not usable(value):
                raise OptionError(f"{self.name} is {value:g} in step {step + 1}", USABLE)
            np.copyto(self.array, value, casting="unsafe")
            self.value = value
        return self.array


def refuse_unknown(settings: Iterable[str], names: Sequence[str]) -> None:
    """Raise OptionError for a setting outside the hyper-parameters ``names`` of a step."""
    unknown = sorted(set(settings) - set(names))
    if unknown:
        raise OptionError(
            f"{unknown[0]!r} is not a hyper-parameter of the step",
            f"the step has {', '.join(names)}" if names else "the step has none",
            "an input of the model that has a stored value is a constant: store none for what is to be set",
        )


def hyper_parameters(manifest: Manifest, job: Job) -> list[HyperParameter]:
    """The hyper-parameters of a step with the user's values, or the step's own.

    Raises OptionError for a missing, unknown or unusable value, InputError for an unusable value of the step."""
    entries = manifest.inputs_of(InputKind.HYPER)
    names = [entry.name for entry in entries]
    refuse_unknown(job.settings, names)
    missing = [entry.name for entry in entries if entry.name not in job.settings and entry.default is None]
    if missing:
        raise OptionError(f"the step needs a value for {missing[0]!r}", f"give --set {missing[0]}=1e-3")
    parameters = [_hyper_parameter(entry, job.settings) for entry in entries]
    for parameter in parameters:
        if parameter.schedule.steps is not None and parameter.schedule.steps < job.steps:
            raise _ended(parameter.name, parameter.schedule.steps, job.steps)
    return parameters


def _hyper_parameter(entry: InputEntry, settings: Mapping[str, str]) -> HyperParameter:
    array = np.empty(entry.type.dims, numpy_dtype(entry.dtype))
    text = settings.get(entry.name)
    if text is None and entry.default is not None:
        return HyperParameter(entry.name, default_schedule(entry.name, entry.default), array)
    return HyperParameter(entry.name, parse_schedule(settings[entry.name]), array)


def _ended(name: str, length: int, steps: int) -> OptionError:
    return OptionError(
        f"{name} has values for {length} steps, and --steps is {steps}",
        f"set another with --set {name}=VALUE, or export with --schedule-steps {steps}",
    )
