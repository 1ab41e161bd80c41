"""The targets of speed, decided from the rows of ``benchmarks/train.py``. Ratios are of medians, and of best steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from cases import LARGE, SMALL

Rows = Mapping[str, Mapping[str, Any]]
"""Contestant -> its row."""
STAGES = ("gopt2.2", "gopt2.3")
NAMES = {
    "session": "onnxruntime, one session", "gopt1": "gopt, 1 rank", "gopt1x2": "gopt, 1 rank, twice at once",
    "gopt2.2": "gopt, 2 ranks, stage 2", "gopt2.3": "gopt, 2 ranks, stage 3", "single": "torch, one process",
    "ddp": "torch DDP", "zero1": "torch ZeRO-1", "fsdp2": "torch FSDP2", "pass1": "memory pass, 1 process",
    "pass2": "memory pass, 2 at once",
    "single+compile": "torch.compile, one process", "ddp+compile": "torch.compile, DDP",
    "fsdp2+compile": "torch.compile, FSDP2", "torch1.2": "engine torch, 1 rank", "torch2.2": "engine torch, stage 2",
    "torch2.3": "engine torch, stage 3", "torch1.2c": "engine torch --compile, 1 rank",
    "torch2.2c": "engine torch --compile, stage 2", "torch2.3c": "engine torch --compile, stage 3",
    "torch2.3k": "engine torch, stage 3, kept", "torch2.3kc": "engine torch --compile, stage 3, kept",
}  # fmt: skip
ENGINE_TORCH = (
    ("torch1.2", ("single", "single+compile"), 1.05),
    ("torch2.2", ("ddp", "zero1", "fsdp2", "ddp+compile", "fsdp2+compile"), 1.0),
    ("torch2.3", ("ddp", "zero1", "fsdp2", "ddp+compile", "fsdp2+compile"), 1.0),
)
"""A way of engine torch, its peers, and the most that it may take of the fastest's time."""
UPDATE, COST, TRAFFIC, OVERHEAD = 2.0, 1.1, 1.02, 0.05
"""The targets. Traffic leaves room for the frames around the bytes: TCP adds almost 1 % on loopback."""


@dataclass(frozen=True)
class Verdict:
    """One target. ``best``: the same ratio of the best steps, which noise hardly touches; None where there is none."""

    what: str
    value: float
    best: float | None
    limit: float
    note: str = ""

    @property
    def met(self) -> bool:
        return self.value <= self.limit

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"met": self.met}


def decide(name: str, rows: Rows) -> Iterator[Verdict]:
    """The targets that one model's rows can decide."""
    if name in SMALL:
        for way in (way for way in ("gopt1", *STAGES) if way in rows):
            shares = rows[way]["shares"]
            note = f"{shares['overhead']:.2f} ms of {shares['wall']:.2f}, of it {shares['loop']:.2f} between segments"
            what = f"{name}, {NAMES[way]}: executor overhead / 10 ms"
            yield Verdict(what, shares["overhead"] / 10, None, OVERHEAD, note)
    if name not in LARGE:
        return
    for way, memory in (("gopt1", "pass1"), *((stage, "pass2") for stage in STAGES)):
        if rows.keys() >= {way, memory}:
            yield _update(name, way, rows[way]["shares"], rows[memory])
    peers = ("ddp", "zero1", "fsdp2") if name == "mlp" else ("fsdp2",)
    limits = {"gopt1": COST, "gopt1x2": COST} | dict.fromkeys(peers, 1.0)
    for way, (peer, limit) in product(STAGES, limits.items()):
        if rows.keys() >= {way, peer}:
            yield _against(name, rows, way, peer, limit)
    for one, peers, limit in ENGINE_TORCH:
        theirs = [peer for peer in peers if peer in rows]
        mine = [way for way in (one, f"{one}c") if way in rows]
        if theirs and mine:
            best, fastest = (min(ways, key=lambda way: rows[way]["ms"]) for ways in (mine, theirs))
            yield _against(name, rows, best, fastest, limit)
    for way in ("torch2.3c", "torch2.3kc"):
        if rows.keys() >= {way, "torch2.2c"}:
            yield _against(name, rows, way, "torch2.2c", COST)
    for way in (way for way in STAGES if way in rows):
        each = rows[way]
        note = f"{'measured' if each['measured'] else 'counted'}; the report says {each['planned_ratio']:.3f}"
        yield Verdict(f"{name}, {NAMES[way]}: bytes sent / bound", each["of_bound"], None, TRAFFIC, note)


def _against(name: str, rows: Rows, way: str, other: str, limit: float) -> Verdict:
    mine, theirs = rows[way], rows[other]
    ratios = (mine[key] / theirs[key] for key in ("ms", "min_ms"))
    return Verdict(f"{name}: {NAMES[way]} / {NAMES[other]}", *ratios, limit)


def _update(name: str, way: str, shares: Mapping[str, float], memory: Mapping[str, float]) -> Verdict:
    if not shares["update_bytes"]:
        raise SystemExit(f"{name}, {NAMES[way]}: the trace shows no update in tiles; spans.py knows it by its title")
    note = f"{shares['update']:.1f} ms for {shares['update_bytes'] / 1e6:.0f} MB"
    ratios = shares["update_ns"] / memory["ns"], shares["update_min_ns"] / memory["min_ns"]
    return Verdict(f"{name}, {NAMES[way]}: update / memory pass", *ratios, UPDATE, note)
