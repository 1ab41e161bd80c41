"""One step, one way to split it, and what became of it."""

from __future__ import annotations

import itertools
import json
import random
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from draws import Verdict
from onnx import ModelProto, numpy_helper
from rank_files import Values, dtype_of

from gopt import api
from gopt.analysis.loss_reduction import LossReduction
from gopt.artifact.server_entries import PullAt
from gopt.errors import GoptError
from gopt.parameter_server.options import SplitOptions
from gopt.parameter_server.placement import Placement
from gopt.parameter_server.slicing import Slicing
from split_gen.compare import EXACT, Allowance, Batches, differences, draw_like
from split_gen.merging import Fault
from split_gen.reference import Reference, Unknown, Unseen
from split_gen.simulator import Simulation

GOOD = ("equal", "refused", "unseen")
REDUCED = Allowance(2e-5)
"""Where a reduction is summed in another order."""


@dataclass(frozen=True)
class Setting:
    """How a step is split. Defaults cut much of small steps. ``tables``: the layout of all tables, '' for none;
    ``rows``: which rows of them an update runs on."""

    trainers: int = 2
    servers: int = 3
    slicing: str = "balanced"
    minimum: int = 16
    placement: str = "bytes"
    pull: str = ""
    reduce: str = "mean"
    accumulate: int = 1
    wire: str = ""
    cap: int = 4 << 20
    tables: str = ""
    rows: str = "dense"

    @classmethod
    def draw(cls, seed: int) -> Setting:
        r = random.Random(seed * 13 + 5)
        accumulate = r.choice([1, 1, 1, 1, 3])
        return cls(
            trainers=r.choice([1, 2, 2, 3]),
            servers=r.choice([1, 2, 3, 5]),
            slicing=r.choice(["off", "classic", "balanced"]),
            minimum=r.choice([1, 2, 5, 16]),
            placement=r.choice(["round-robin", "hash", "bytes"]),
            pull=r.choice(["", "start", "end"]) if accumulate == 1 else "",
            reduce=r.choice(["mean", "mean", "mean", "sum"]),
            accumulate=accumulate,
            wire=r.choice(["", "", "", "", "float16", "bfloat16"]),
            cap=r.choice([4 << 20, 4 << 20, 64, 1]),
        )

    def options(self) -> SplitOptions:
        return SplitOptions(
            trainers=self.trainers, servers=self.servers, slicing=Slicing(self.slicing), minimum=self.minimum,
            placement=Placement(self.placement), pull=PullAt(self.pull) if self.pull else None,
            loss_reduction=LossReduction.parse(self.reduce), accumulate=self.accumulate, wire=self.wire, cap=self.cap,
            tables_off=not self.tables, tables={"*": self.tables} if self.tables else {},
            rows={"*": self.rows} if self.tables else {},
        )  # fmt: skip

    def told(self) -> str:
        plain = Setting()
        said = [
            f"{each.name}={getattr(self, each.name)}" for each in fields(self)
            if getattr(self, each.name) != getattr(plain, each.name)
        ]  # fmt: skip
        return " ".join(said) or "plain"


def start_values(model: ModelProto, manifest: Mapping[str, Any]) -> Values:
    """The source's own start values; small positive numbers for states that have none."""
    found = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
    for place, state in enumerate(manifest["states"]):
        if state["tensor"] not in found:
            made = np.random.default_rng(place).uniform(1e-2, 0.3, state["shape"])
            found[state["tensor"]] = np.asarray(made).astype(dtype_of(state["dtype"]))
    return found


Draw = Callable[[int], tuple[Batches, Values]]


def written(path: Path, setting: Setting, folder: Path, edit: Callable[[Path], None] | None = None, **roles: Any) -> (
    tuple[Simulation, Reference]
):  # fmt: skip
    """Split a step; the folder as it runs, and what it must compute. ``edit``: what is done to the folder first."""
    out = folder / "out"
    api.split(api.load(path, **roles), setting.options()).write(out)
    if edit is not None:
        edit(out)
    return opened(path, setting, out)


def opened(path: Path, setting: Setting, out: Path) -> tuple[Simulation, Reference]:
    start = start_values(onnx.load(str(path)), json.loads((out / "manifest.json").read_text()))
    wire = dtype_of(setting.wire) if setting.wire else None
    return Simulation(out, start), Reference.of(out, start, setting.trainers, wire=wire)


def judge(
    path: Path, setting: Setting, folder: Path, *, steps: int = 3, draw: Draw | None = None,
    allow: Callable[[str], Allowance] = lambda name: EXACT, seed: int = 0, edit: Callable[[Path], None] | None = None,
    **roles: Any,
) -> Verdict:  # fmt: skip
    """Split a step, run trainers and servers, and compare all states with the source's after every step."""
    try:
        simulation, reference = written(path, setting, folder, edit, **roles)
    except GoptError as error:
        if error.exit_code in (2, 3, 4):
            return Verdict("refused", error.message)
        return Verdict("crash", f"exit {error.exit_code}: {error.message}")
    except Unseen as error:
        return Verdict("unseen", str(error))
    except Fault as error:
        return Verdict("WRONG", str(error))
    except Exception as error:
        return Verdict("crash", f"{error!r}\n{traceback.format_exc()}")
    draw = draw or draw_like(simulation.manifest, seed, reference.micro)
    try:
        found = list(itertools.islice(differences(simulation, reference, draw, steps, allow), 5))
    except Unknown as error:
        return Verdict("WRONG", f"written, although {error}")
    except Fault as error:
        return Verdict("WRONG", str(error))
    return Verdict("WRONG", "; ".join(found)) if found else Verdict("equal")
