"""Hyper-parameters of a run: numbers or schedules that the user gives, fed to the graph in every step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gopt.artifact.manifest import InputKind, Manifest
from gopt.errors import OptionError
from gopt.ir.types import numpy_dtype
from gopt.runtime.session import Array
from gopt.runtime.training.data import parse_schedule


@dataclass(slots=True)
class HyperParameter:
    """A hyper-parameter, and the array in which it is fed in every step."""

    name: str
    schedule: Callable[[int], float]
    array: Array
    value: float = math.nan

    def at(self, step: int) -> Array:
        """Its value at a step, counted from 0; the same array every time."""
        value = self.schedule(step)
        if value != self.value:
            np.copyto(self.array, value, casting="unsafe")
            self.value = value
        return self.array


def refuse_unknown(settings: Iterable[str], names: Sequence[str]) -> None:
    """Raise OptionError where a setting is none of the hyper-parameters ``names`` of a step."""
    unknown = sorted(set(settings) - set(names))
    if unknown:
        raise OptionError(
            f"--set: {unknown[0]!r} is not a hyper-parameter of the step",
            f"the step has {', '.join(names)}" if names else "the step has none",
            "an input of the model that has a stored value is a constant: store none for what is to be set",
        )


def hyper_parameters(manifest: Manifest, settings: Mapping[str, str]) -> list[HyperParameter]:
    """The hyper-parameters of a step with the user's values; raises OptionError for a missing, unknown or unusable
    one."""
    entries = manifest.inputs_of(InputKind.HYPER)
    names = [each.name for each in entries]
    refuse_unknown(settings, names)
    missing = [name for name in names if name not in settings]
    if missing:
        raise OptionError(f"the step needs a value for {missing[0]!r}", f"give --set {missing[0]}=1e-3")
    return [
        HyperParameter(
            each.name, parse_schedule(settings[each.name]), np.empty(each.type.dims, numpy_dtype(each.dtype))
        )
        for each in entries
    ]
