"""Edits of a folder, and what ``gopt prove`` says of each beside the numbers of ranks with and without it."""

from __future__ import annotations

import json
import random
import shutil
import traceback
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from draws import Verdict
from rank_files import has_halves
from rank_simulator import World
from split_gen.simulator import Simulation

import gopt
from edit_gen.edits import drawn, in_turn
from edit_gen.folders import Write
from gopt.artifact.manifest_check import read_manifest
from gopt.errors import GoptError
from gopt.verification.certificate.check import check
from gopt.verification.certificate.lines import sealed
from gopt.verification.proof.certificate import CertificateWriter
from gopt.verification.proof.expected import MICRO
from gopt.verification.proof.folder import folder_relation
from gopt.verification.proof.prove import Prover
from gopt.verification.proof.result import ProofVerdict, RankProof
from gopt.verification.proof.samples import SampledLeaves

Numbers = dict[str, np.ndarray]
SEEDS = (1, 2, 5)
"""Of states and batches: of 2, states are large; the batches of 5 are."""
LARGE = {5: 6.0}
STEPS = 2
NEAR, NEAR_OF_HALVES = 2e-4, 3e-2
"""Of the largest element of a value, or of how far it moves."""
OF_MANIFEST = ("pieces", "exchanged pieces", "files", "boxes", "starts", "phases", "schedule")


def numbers_of(folder: Path, leaves: SampledLeaves, states: Numbers, accumulate: int, whole: bool) -> Numbers:
    """All that is claimed of a folder, after some steps. ``whole``: of states, by the pieces of the manifest."""
    served = leaves_served(folder)
    coordinates = [leaves.mesh.coordinates(rank) for rank in range(leaves.mesh.ranks)]
    batches = [[_batch(leaves, {**where, MICRO: turn}) for turn in range(accumulate)] for where in coordinates]
    found: Numbers = {}
    if served:
        simulation = Simulation(folder, states, stored=False)
        for _ in range(STEPS):
            simulation.round(batches, leaves.settings)
        rows = [*enumerate(simulation.server), *enumerate(simulation.trainer, 1000)]
        found |= {f"{rank}.{name}": value for rank, held in rows for name, value in held.items()}
        shown = {each["name"] for each in simulation.manifest["common"]["outputs"]}
        rows = [*enumerate(simulation.outputs)]
        found |= {f"{rank}!{name}": each for rank, held in rows for name, each in held.items() if name in shown}
        return found
    world = World(folder)
    held = [world.feeds(rank, states) for rank in world.ranks]
    shown = {each["name"] for each in world.manifest["common"]["outputs"]}
    for step in range(STEPS):
        world.step(held, [[batch | leaves.settings for batch in turn] for turn in zip(*batches)])
        found |= {
            f"{step}!{rank}!{name}": value for rank, last in enumerate(world.last) for name, value in last.items()
            if name in shown
        }  # fmt: skip
    if whole:
        return found | world.whole(held)
    return found | {f"{rank}.{name}": value for rank, mine in enumerate(held) for name, value in mine.items()}


def leaves_served(folder: Path) -> bool:
    return "parameter_server" in json.loads((folder / "manifest.json").read_text())


def _batch(leaves: SampledLeaves, where: Mapping[str, int]) -> Numbers:
    larger = LARGE.get(leaves.seed, 1.0)
    return {
        name: np.asarray(value * larger, value.dtype) if value.dtype.kind == "f" and value.size > 1 else value
        for name, value in leaves.batch(where).items()
    }


@dataclass
class Folder:
    """A right folder, and the numbers of its ranks."""

    home: Path
    path: Path
    certificate: str = ""
    numbers: dict[int, tuple[SampledLeaves, Numbers, Numbers, Numbers]] = field(default_factory=dict)
    """By seed: leaves, states, and the numbers, of the whole states too."""

    @classmethod
    def of(cls, write: Write, home: Path) -> Folder | Verdict:
        path = home / "ranks"
        try:
            write(path)
        except GoptError as error:
            return Verdict("refused", error.message)
        folder = cls(home, path)
        try:
            proof = gopt.prove(path, certificate=home / "certificate")
            folder.certificate = (home / "certificate").read_text() if proof.proven else ""
        except GoptError:
            try:
                proof = gopt.prove(path)
            except GoptError as error:
                return Verdict("refused", error.message)
        if not proof.proven:
            return Verdict("unproven", str([claim.name for claim in proof.open()][:3]))
        prover = Prover(folder_relation(path))
        folder.accumulate = prover.relation.accumulate
        for seed in SEEDS:
            leaves = SampledLeaves(prover.training, prover.mesh, prover.constants, seed)
            try:
                states = {state.tensor: leaves.state(state.tensor) for state in prover.training.states}
                parts = [numbers_of(path, leaves, states, folder.accumulate, whole) for whole in (False, False, True)]
            except Exception as error:  # the runtime's have no common base
                return Verdict("unrun", f"{error!r}"[:300])
            steady = [_kept(parts[0], parts[1]), parts[2]]
            folder.numbers[seed] = leaves, states, *steady
        folder.axes = [(name, size) for name, size in folder.manifest["mesh"]["axes"]]
        return folder

    accumulate: int = 1
    axes: list[tuple[str, int]] = field(default_factory=list)

    @cached_property
    def manifest(self) -> dict[str, Any]:
        return json.loads((self.path / "manifest.json").read_text())

    @cached_property
    def near(self) -> float:
        return NEAR_OF_HALVES if has_halves(self.path) else NEAR

    @cached_property
    def files(self) -> list[list[Path]]:
        """The files of each phase or role."""
        groups: dict[str, list[Path]] = {}
        for record in self.manifest["ranks"]:
            for phase, file in record["files"].items():
                group = groups.setdefault(f"{record['role']} {phase}", [])
                if Path(file) not in group:
                    group.append(Path(file))
        return list(groups.values())

    # --- an edit ----------------------------------------------------------------------------------------------------

    def edited(self, draw: random.Random, copy: Path, only: str = "") -> str:
        """Edit a copy of the folder; what was done, '' for nothing."""
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.path, copy)
        if only in OF_MANIFEST or (not only and draw.random() < 0.12):
            return self._of_manifest(draw, copy, only)
        files = [copy / path for path in draw.choice(self.files)]
        chosen = draw.choice(list(in_turn(draw, files)))
        done = list[str]()
        for _ in range(draw.choice([1, 1, 1, 2])):
            edit = drawn(chosen[0], draw, only)
            if edit is not None:
                told = [path.name for path in chosen if edit.of(path, self.axes)]
                done += [f"{edit.kind} at {edit.place} ({edit.seed}) in {', '.join(told)}"] if told else []
        if done:
            gopt.seal(copy)
        return "; ".join(done)

    def _of_manifest(self, draw: random.Random, copy: Path, only: str) -> str:
        kind = only or draw.choice(OF_MANIFEST)
        record = json.loads((copy / "manifest.json").read_text())
        ranks = record["ranks"]
        held = [state for each in ranks for state in each.get("state", ())] + record["common"].get("state", [])
        done = ""
        if kind == "pieces" and held:
            state = draw.choice(held)
            piece = draw.choice(state["pieces"])
            shift = draw.choice([1, -1, 2])
            if "box" in piece and draw.random() < 0.6:
                ends = draw.choice(piece["box"])
                ends[:] = [end + shift for end in ends]
            elif draw.random() < 0.3 and len(state["pieces"]) > 1:
                draw.shuffle(state["pieces"])
            elif draw.random() < 0.3:
                piece["tensor"] = draw.choice(record["states"])["tensor"]
            else:
                piece["start"], piece["stop"] = piece["start"] + shift, piece["stop"] + shift
            done = f"{state['input']}: {state['pieces']}"
        elif kind == "exchanged pieces" and len(held) > 1:
            one, two = draw.sample(held, 2)
            key = draw.choice(["pieces", "output", "input"])
            one[key], two[key] = two[key], one[key]
            done = f"{key} of {one['input']} and {two['input']}"
        elif kind == "boxes":
            fed = [each for rank in ranks for each in rank.get("fed", ())]
            if fed:
                entry = draw.choice(fed)
                ends = draw.choice(entry["box"])
                shift = draw.choice([1, -1])
                ends[:] = [end + shift for end in ends]
                done = f"{entry}"
        elif kind == "files" and len(ranks) > 1:
            one, two = draw.sample(ranks, 2)
            phase = draw.choice(list(one["files"]))
            if phase in two["files"]:
                if draw.random() < 0.5:
                    paths = [copy / each["files"][phase] for each in (one, two)]
                    texts = [path.read_bytes() for path in paths]
                    for path, text in zip(paths, reversed(texts)):
                        path.write_bytes(text)
                else:
                    one["files"][phase], two["files"][phase] = two["files"][phase], one["files"][phase]
                done = f"{phase} of {one['rank']} and {two['rank']}"
        elif kind == "phases" and "phases" in record:
            phases = record["phases"]
            if draw.random() < 0.3:
                draw.shuffle(phases)
            else:
                draw.choice(phases)["times"] += draw.choice([1, -1, -1, 1 - self.accumulate, self.accumulate - 1])
            done = f"{phases}"
        elif kind == "schedule" and (copy / "schedule.txt").is_file():
            done = _other_actions(draw, copy / "schedule.txt")
        elif kind == "starts":
            return self._starts(draw, copy)
        if done:
            (copy / "manifest.json").write_text(json.dumps(record))
            gopt.seal(copy)
        return f"manifest, {kind}: {done}" if done else ""

    def _starts(self, draw: random.Random, copy: Path) -> str:
        """Other start values in the file of all states."""
        path = copy / "states.bin"
        if not path.is_file():
            return ""
        data = bytearray(path.read_bytes())
        at = draw.randrange(len(data) // 4) * 4
        value = np.frombuffer(bytes(data[at : at + 4]), np.float32)[0]
        data[at : at + 4] = np.float32(value + 1).tobytes()
        path.write_bytes(bytes(data))
        gopt.seal(copy)
        return f"starts {at}"

    # --- what is said -----------------------------------------------------------------------------------------------

    def judge(self, copy: Path, told: str, draw: random.Random) -> Verdict:
        whole = told.startswith("manifest")
        try:
            proof = gopt.prove(copy)
        except GoptError as error:
            return Verdict("refused", error.message)
        except Exception:
            return Verdict("CRASH", traceback.format_exc(limit=-4))
        verdicts = [proof]
        if draw.random() < 0.5:
            verdicts.append(Prover(folder_relation(copy)).run())
        if told.startswith("starts"):
            return Verdict("starts")
        if all(each.verdict is ProofVerdict.UNPROVEN for each in verdicts):
            forged = self._forged(copy, draw)
            apart = self.apart(copy, whole) if forged else ""
            return Verdict("WRONG", f"certificate: {apart}") if forged and apart else Verdict("unproven")
        apart = self.apart(copy, whole)
        if any(each.proven for each in verdicts):
            if apart.startswith("does not run"):
                return Verdict("UNRUN", apart)
            return Verdict("WRONG", f"proven, but {apart}") if apart else self._certified(copy, draw)
        if not apart:
            return Verdict(*_alike(proof, max(0.01, 2 * self.near)))
        if self._forged(copy, draw):
            return Verdict("WRONG", f"certificate: {apart}")
        return Verdict("different")

    def _certified(self, copy: Path, draw: random.Random) -> Verdict:
        """A proven edit has a certificate that follows."""
        if not self.certificate or draw.random() < 0.7:
            return Verdict("equal")
        try:
            if not gopt.prove(copy, certificate=self.home / "second").proven:
                return Verdict("equal")
        except GoptError:
            return Verdict("equal")
        checked = check(copy, (self.home / "second").read_text())
        return Verdict("WRONG", f"the certificate's check: {checked.fault}") if checked.fault else Verdict("equal")

    def _forged(self, copy: Path, draw: random.Random) -> bool:
        """Whether a certificate is checked for the edited folder, with digests made anew: the right folder's, the one
        that the prover writes if it is not asked whether all is proven, or one of these with other lines."""
        if not self.certificate or draw.random() < 0.5:
            return False
        text = self.certificate
        if draw.random() < 0.5:
            try:
                prover = Prover(folder_relation(copy))
                prover.run()
                text = CertificateWriter(copy, prover).text()
            except Exception:  # there is none of such a folder
                text = self.certificate
        head, *lines = map(json.loads, text.splitlines())
        del head["digest"]
        manifest, _ = read_manifest(copy)
        for _ in range(draw.choice([0, 0, 1, 3])):
            other_lines(draw, lines)
        checked = check(copy, sealed([{**head, "files": manifest.read_digests}, *lines]))
        return checked.exit_code == 0

    def apart(self, copy: Path, whole: bool) -> str:
        """How the numbers of an edited folder differ; '' where they do not."""
        for seed, (leaves, states, parts, wholes) in self.numbers.items():
            due = wholes if whole else parts
            try:
                with warnings.catch_warnings(action="ignore"):
                    actual = numbers_of(copy, leaves, states, self.accumulate, whole)
            except Exception as error:  # the runtime's have no common base
                return f"does not run: {error!r}"[:300]
            for name, value in due.items():
                if name not in actual:
                    return f"{name} is missing"
                if fault := self._apart(actual[name], value):
                    return f"seed {seed}, {name}: {fault}"
        return ""

    def _apart(self, actual: np.ndarray, due: np.ndarray) -> str:
        if actual.shape != due.shape:
            return f"shape {actual.shape}, not {due.shape}"
        if due.dtype.kind in "iub":
            return "" if np.array_equal(actual, due) else "whole numbers"
        one, two = actual.astype(np.float64), due.astype(np.float64)
        fine = np.isfinite(two)
        if not (np.isfinite(one) == fine).all():
            return "no numbers"
        off = np.abs(one[fine] - two[fine]).max(initial=0)
        largest = np.abs(two[fine]).max(initial=1e-6)
        return f"off by {off:.3g} of {largest:.3g}" if off > self.near * largest else ""


def other_lines(draw: random.Random, lines: list[dict[str, Any]]) -> None:
    """Two lines exchanged, another line's rule, or another line's expression."""
    one, two = draw.sample(range(len(lines)), 2)
    key = draw.choice(["", "rule", "number"])
    if key:
        rows = [line for line in lines if key in line]
        if len(rows) > 1:
            line, other = draw.sample(rows, 2)
            line[key] = other[key]
    else:
        lines[one], lines[two] = lines[two], lines[one]


def _other_actions(draw: random.Random, path: Path) -> str:
    """Two actions of a schedule exchanged, one left out, said twice, or of another micro-batch."""
    lines = path.read_text().split("\n")
    rows = [at for at, line in enumerate(lines) if line.split()[:1] and line.split()[0].isdigit()]
    one, two = draw.sample(rows, 2)
    near = [at for at in rows if at > one and lines[at].split()[0] == lines[one].split()[0]]
    kind = draw.choice(["near", "near", "far", "without", "again", "other"])
    done = f"{kind} {lines[one].split()} {lines[two].split()}"
    if kind in ("near", "far"):
        two = near[0] if kind == "near" and near else two
        lines[one], lines[two] = lines[two], lines[one]
    elif kind == "other":
        lines[one] = " ".join([*lines[one].split()[:3], lines[two].split()[3]])
    else:
        lines[one : one + 1] = [lines[one]] * (2 * (kind == "again"))
    path.write_text("\n".join(lines))
    return done


def _kept(one: Numbers, two: Numbers) -> Numbers:
    """The numbers that are the same in two runs."""
    return {
        name: value
        for name, value in one.items()
        if np.array_equal(value, two[name], equal_nan=value.dtype.kind == "f")
    }


def _alike(proof: RankProof, near: float) -> tuple[str, str]:
    """What is called different without a difference in numbers: ``near``, where the example's numbers are."""
    for claim in proof.claims:
        mismatch = claim.mismatch
        if claim.verdict is ProofVerdict.DIFFERENT and mismatch is not None:
            example = mismatch.example
            if example is not None and abs(example.actual - example.expected) < near * abs(example.expected):
                return "near", ""
            if claim.kind == "call":  # members call unlike each other
                return "call", ""
            return "ALIKE", f"different, but equal: {claim.name} ({claim.kind}) {mismatch}"[:700]
    return "near", ""


def judged(folder: Folder, seed: int, number: int, only: str = "") -> Iterator[tuple[str, Verdict]]:
    """One edit of a folder: what was done, and what is said; nothing where nothing was done."""
    draw = random.Random(f"edit {seed} {number}")
    copy = folder.home / "copy"
    try:
        told = folder.edited(draw, copy, only)
    except GoptError as error:
        yield "", Verdict("refused", error.message)
        return
    if told:
        try:
            yield told, folder.judge(copy, told, draw)
        except Exception:
            yield told, Verdict("CRASH", traceback.format_exc(limit=-6))
