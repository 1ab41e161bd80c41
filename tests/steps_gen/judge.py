"""One step through gopt, and what became of it."""

from __future__ import annotations

import io
import re
import traceback
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from gopt.cli.main import main
from helpers import stage_on
from rank_files import Stuck, Values
from rank_simulator import World

import gopt
from gopt.errors import GoptError
from gopt.records.mesh import Mesh
from steps_gen.make import Made
from steps_gen.oracle import Nudge, Oracle
from steps_gen.plan import Plan

STEPS = 3
TOLERANCE = {"single": 1e-4, "cast": 2e-2, "half": 2e-2, "master": 2e-2}
NUDGE = {"single": 2.0**-23, "cast": 2.0**-11, "half": 2.0**-11, "master": 2.0**-11}
NUDGES = ((1, 0), (2, 0), (0, 1), (0, -1))
"""Seeds of disturbances at random, and which way gradients are pushed: signs of mere rounding turn in one of two."""
NOISE = 30.0
"""How many times what a disturbed reference shows is still taken for rounding."""


@dataclass(frozen=True)
class Setting:
    """How a step is sharded."""

    mesh: str = "shard=2"
    stage: int = 2
    partition: str = "flat"
    micro: int = 1
    """Micro-steps of one update."""


GOOD = ("proven", "refused")


@dataclass(frozen=True)
class Verdict:
    """What became of a step.

    ``proven``: right, and ``gopt verify`` says so. ``refused``: as ``excuse`` allows. ``unjust``: refused, though
    nothing is open. ``WRONG``: written, and another step than its source. ``alarm``: right, and verify says unequal.
    ``unconfirmed``: right, and verify cannot tell. ``crash``: anything else.
    """

    outcome: str
    why: str = ""
    verify: int | None = None
    """Exit code of ``gopt verify``."""

    @property
    def kind(self) -> str:
        """The reason without names and numbers: what is alike counts as one."""
        why = re.sub(r"'[^']*'", "'…'", self.why.split("\n")[0])
        why = re.sub(r"\b(q[0-9a-f]{8,}|v\d+_\d+|p\d+\S*)", "…", why)
        return f"{self.outcome}: {re.sub(r'[0-9][0-9.e+-]*', '#', why)[:150]}"


def excuse(plan: Plan, setting: Setting, why: str) -> str:
    """Why a step may be refused so; empty where it may not."""
    layers = 1 if plan.network == "flat-buffer" else len(plan.widths) - 1
    if "too few parameters for" in why and layers < Mesh.parse(setting.mesh).along("pp"):
        return "fewer layers than stages"
    pairs = "may be the new value of" in why or "may replace any of" in why
    if setting.micro > 1 and (plan.gate == "accumulate" or {"dual", "kept"} & set(plan.rules)):
        return "a step with sums of gradients of its own takes no micro-steps"
    if plan.joint:
        return "states of one row cannot be paired through joins"
    if plan.trap != "none":
        return "its update reads the batch past its gradients"
    if pairs and {"kept", "rprop"} & set(plan.rules):
        return "a state's new value does not read its old one, or a flag alone does"
    if pairs and plan.network == "twins" and plan.precision == "master":
        return "two parameters of one gradient: which master is whose is not to be seen"
    if pairs and plan.form in ("exp", "relative", "factor") and (plan.decay != "none" or plan.mask != "none"):
        return "a parameter that is a factor of its own new value, beside a mask or in its own optimizer state"
    if plan.batch == 1 and "may be the gradient of" in why:
        return "the gradient of one sample is the forward's own difference: a clip of it may be a loss's derivative"
    return ""


def judge(made: Made, setting: Setting = Setting(), verify: bool = True) -> Verdict:
    """Shard the step, run its ranks against the oracle, and ask ``gopt verify``."""
    with TemporaryDirectory() as place:
        folder = Path(place)
        path, out = folder / "step.onnx", folder / "out"
        path.write_bytes(made.model.SerializeToString(deterministic=True))
        try:
            mesh = Mesh.parse(setting.mesh)
            options = {"partition": setting.partition} if setting.stage else {}
            source = gopt.load(path)
            stage = stage_on(setting.mesh, setting.stage)
            gopt.shard(source, mesh, stage=stage, accumulate=setting.micro, **options).write(out)
        except GoptError as error:
            if error.exit_code in (2, 3, 4):
                fair = excuse(made.plan, setting, error.message)
                return Verdict("refused" if fair else "unjust", error.message)
            return Verdict("crash", f"shard: {error.message}")
        except Exception as error:
            return Verdict("crash", f"shard: {error!r}\n{traceback.format_exc()}")
        if made.plan.trap != "none":
            return Verdict("WRONG", "written, although its update reads a rank's own batch", verified(out, made)[0])
        try:
            fault = next(differences(made, out), None)
        except Stuck as error:
            fault = f"the ranks are stuck: {error}"
        code, text = verified(out, made) if verify else (0, "")
        if fault is not None:
            return Verdict("WRONG", fault, code)
        if code == 1:
            return Verdict("alarm", text, code)
        if code == 4:
            # Units of a few ReLUs may be shut on the batches that verify draws.
            still = dead(made) or (made.plan.activation == "Relu" and min(made.plan.widths) <= 2)
            return Verdict("refused" if "zero against zero" in text and still else "unconfirmed", text, code)
        return Verdict("proven", "", code) if code == 0 else Verdict("crash", f"verify: {text}", code)


def verified(folder: Path, made: Made) -> tuple[int, str]:
    """Exit code and what was said, on one line: of errors the message, else the findings."""
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        rate = made.names.get("lr", "lr")
        code = main(["verify", str(folder), "--set", f"{rate}={float(made.hyper['lr'][0])}"])
    lines = [line.strip() for line in said.getvalue().splitlines()]
    errors = [line for line in lines if "error:" in line or "NOT" in line or "not" in line]
    return code, " | ".join(errors) or " | ".join(lines)


def differences(made: Made, folder: Path) -> Iterator[str]:
    """Where the ranks and the oracle differ, over some steps; one line each."""
    oracle, world = Oracle(made), World(folder)
    new = made.names
    known = {new.get(name, name) for name in made.states}
    held_for = {piece["tensor"] for held in world.held for state in held for piece in state["pieces"]}
    if held_for - known:
        yield f"{sorted(held_for - known)[0]!r} is held as a state, and is none"
        return
    start = {name: made.known[name] for name in made.states}
    fixed = {name: made.known[name] for name in _fixed(made)}
    wanted, nearby = dict(start), [dict(start) for _ in NUDGES]
    held = [world.feeds(rank, {new.get(k, k): v for k, v in {**start, **fixed}.items()}) for rank in world.ranks]
    tolerance, nudge = TOLERANCE[made.plan.precision], NUDGE[made.plan.precision]
    turns = max(times for _, times in world.phases)
    for step in range(STEPS):
        batches = [draw_batches(made, max(world.sees) + 1, step, turn) for turn in range(turns)]
        hyper = {name: values[step % len(values)] for name, values in made.hyper.items()}
        before = wanted
        wanted = oracle.step({**wanted, **fixed}, hyper, batches)
        nearby = [
            oracle.step({**each, **fixed}, hyper, batches, Nudge(nudge, seed, way))
            for each, (seed, way) in zip(nearby, NUDGES, strict=True)
        ]
        given = [
            [{new.get(k, k): v for k, v in {**fixed, **hyper, **turn[part]}.items()} for part in world.sees]
            for turn in batches
        ]
        world.step(held, given)
        for rank in world.ranks:
            for state in world.held[rank]:
                fault = _fault(made, state, held[rank][state["input"]], wanted, nearby, before, tolerance)
                if fault:
                    yield f"step {step + 1} rank {rank}: {fault}"


def dead(made: Made) -> list[str]:
    """Parameters whose gradient is zero on every batch that this test draws: nothing can confirm it."""
    oracle = Oracle(made)
    feeds = {name: made.known[name] for name in (each.name for each in oracle.first.graph.input)}
    batches = [batch for step in range(STEPS) for batch in draw_batches(made, 2, step)]
    local = [oracle.local({**feeds, **batch}) for batch in batches]
    top = max(float(np.nanmax(np.abs(each[name]), initial=0)) for each in local for name in oracle.cuts)

    def zero(name: str) -> bool:
        return all(float(np.nanmax(np.abs(each[name]), initial=0)) <= 1e-6 * top for each in local)

    return [parameter for parameter, gradient in made.gradients.items() if zero(gradient)]


def _fixed(made: Made) -> list[str]:
    """Parameters that nothing updates: inputs all the same."""
    names = {each.name for each in made.plain.graph.input}
    return sorted(names - set(made.states) - set(made.hyper) - set(made.batch))


def _fault(
    made: Made, state: dict[str, object], value: np.ndarray, wanted: Values, nearby: list[Values], before: Values,
    tolerance: float,
) -> str:  # fmt: skip
    old = {made.names.get(name, name): name for name in wanted}
    value, place = value.reshape(-1), 0
    pieces: list[dict[str, object]] = state["pieces"]
    for piece in pieces:
        name, low, high = old[str(piece["tensor"])], int(piece["start"]), int(piece["stop"])
        part, place = value[place : place + high - low], place + high - low
        whole = wanted[name].reshape(-1)
        if part.dtype.kind not in "f" or state.get("copy"):
            if not state.get("copy") and not np.array_equal(part, whole[low:high]):
                return f"{name} [{low}:{high}] is {part[:4]}, not {whole[low:high][:4]}"
            continue
        with np.errstate(all="ignore"):
            real = whole.astype(np.float64)
            spread = np.max([np.abs(each[name].reshape(-1) - real) for each in nearby], axis=0)[low:high]
            off = np.abs(part.astype(np.float64) - real[low:high]) - NOISE * np.nan_to_num(spread, posinf=0)
            moved = real - before[name].reshape(-1)
        odd = ~np.isfinite(real[low:high]) | ~np.isfinite(part)
        alike = (np.isnan(part) & np.isnan(real[low:high])) | (part == real[low:high])
        if (odd & ~alike).any():
            return f"{name} [{low}:{high}] is {part[odd][:3]}, not {real[low:high][odd][:3]}"
        off = np.linalg.norm(np.where(odd, 0, np.maximum(off, 0)))
        share = np.linalg.norm(np.nan_to_num(moved)) + 1e-3 * np.linalg.norm(np.nan_to_num(real))
        if off > tolerance * share + 1e-7:
            return f"{name} [{low}:{high}] is off by {off:.3g}, {off / (tolerance * share + 1e-7):.3g} allowances"
    return ""


def draw_batches(made: Made, ranks: int, step: int, turn: int = 0) -> list[Values]:
    """Every rank's own batch: unlike in size, so that a sum or a local clip shows."""
    found = []
    for rank in range(ranks):
        generator = np.random.default_rng((made.plan.seed, rank, step, turn))
        size = (0.5, 1.0, 3.0)[step % 3] * (1 + rank)
        batch = {}
        for name, (shape, dtype, bound) in made.batch.items():
            if dtype == "float32":
                batch[name] = (size * generator.standard_normal(shape)).astype(np.float32)
            else:
                batch[name] = generator.integers(0, bound, shape).astype(dtype)
        found.append(batch)
    if (
        made.plan.gate == "finite"
        and made.plan.gate_form in ("where", "not-where")
        and step == 1
        and ranks > 1
        and not turn
    ):
        name = next((name for name, (_, dtype, _) in made.batch.items() if dtype == "float32"), None)
        if name is not None:
            found[1][name].flat[0] = np.inf
    return found
