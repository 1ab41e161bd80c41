"""How ranks are compared with their source, as one record."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypedDict

from gopt.errors import OptionError
from gopt.options.records import check_deadline, check_least, check_types, spelled
from gopt.runtime.training.schedules import USABLE, usable
from gopt.verification.engines import NodeEngine


@spelled
@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """How ranks are compared with their source.

    ``steps`` of training from states and batches that ``seed`` draws; ``data``: batches of the user instead, a file or
    ``module:function``. ``settings``: hyper-parameter -> its value; the step's own where none is given, and at least
    0.01. ``confirm``: compare gradients with finite differences as well; ``every``: all of them, not a sample where
    they are many. ``engine``: what computes nodes, ``onnxruntime``, ``torch``, or ``both``, which compares them on one
    step. ``deadline``: seconds that one piece of a graph may run; None: without an end. ``replay``: the record
    of a run without rounds (``gopt run --record``), which is run again as it says; of the other options only ``data``,
    where its samples are now, and ``deadline`` count then.
    """

    steps: int = 3
    seed: int = 0
    data: str | None = None
    settings: Mapping[str, float] = field(default_factory=dict)
    confirm: bool = True
    every: bool = False
    engine: NodeEngine = NodeEngine.ONNXRUNTIME
    deadline: float | None = None
    replay: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        check_types(self)
        check_least(self, seed=0, steps=1)
        check_deadline(self.deadline)
        for name, value in self.settings.items():
            if not usable(value):
                raise OptionError(f"{name} cannot be {value:g}", USABLE)


class VerifyKeywords(TypedDict, total=False):
    """The fields of ``VerifyOptions`` as keywords of a verb."""

    steps: int
    seed: int
    data: str | None
    settings: Mapping[str, float]
    confirm: bool
    every: bool
    engine: NodeEngine
    deadline: float | None
    replay: str | os.PathLike[str] | None
