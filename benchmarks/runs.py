"""One run of each contestant, every one in processes of its own; ``benchmarks/train.py`` makes them take turns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import spans
from cases import Case
from counters import WARMUP

HERE = Path(__file__).parent
OVER_TCP = {"MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "tcp,self", "GOPT_BENCH_WIRE": "1"}
"""Keeps MPICH's ranks of one host off shared memory, so that loopback's counters see what they send."""
LONGEST = 600
"""Seconds of a run."""

Run = dict[str, Any]
"""``seconds`` of the steps that count, ``losses`` of all, ``peak`` bytes of each process; what else it tells."""


def together(commands: Sequence[Sequence[str]], environments: Sequence[dict[str, str]]) -> list[str]:
    """What commands print that run at the same time; ends the benchmark when one fails."""
    common = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    started = [
        subprocess.Popen(command, env=common | more, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)
        for command, more in zip(commands, environments, strict=True)
    ]
    try:
        printed = [process.communicate(timeout=LONGEST) for process in started]
    except subprocess.TimeoutExpired as error:
        for process in started:
            process.kill()
        raise SystemExit(f"{' '.join(error.cmd)} takes longer than {LONGEST} s") from None
    for process, (_, errors) in zip(started, printed):
        if process.returncode:
            raise SystemExit(f"{' '.join(process.args)} failed:\n{errors}")  # type: ignore[arg-type]
    return [out for out, _ in printed]


def told(out: str) -> Run:
    """The last line of JSON among what was printed."""
    found: Run = json.loads([line for line in out.splitlines() if line.startswith("{")][-1])
    return found


def session(case: Case, steps: int, device: str = "cpu") -> Run:
    files = [str(path) for path in (case.model, case.state, case.batch)]
    command = [sys.executable, str(HERE / "session.py"), *files, str(steps), device]
    return told(together([command], [{}])[0])


def torch(python: str, case: Case, mode: str, steps: int) -> Run:
    return told(together([[python, str(HERE / "peers.py"), case.name, mode, str(steps)]], [{}])[0])


def has_gopt(python: str) -> bool:
    """Whether an interpreter has gopt too."""
    return not subprocess.run([python, "-c", "import gopt"], capture_output=True).returncode


def memory(elements: int, copies: int, seconds: float = 1.0) -> Run:
    """Passes over the memory of an update of ``elements``, by as many processes at once."""
    command = [sys.executable, str(HERE / "counters.py"), str(elements), str(seconds)]
    found = together([command] * copies, [{}] * copies)
    return {"seconds": [each for out in found for each in told(out)["seconds"]]}


def imports() -> int:
    command = [sys.executable, str(HERE / "counters.py"), "imports"]
    return int(told(together([command], [{}])[0])["imports"])


def gopt(case: Case, ranks: int, stage: int, steps: int, *, copies: int = 1, threads: bool = False,
         wire: bool = False) -> Run:  # fmt: skip
    """``gopt run``, traced, under MPI or with ``threads``; ``copies`` of it at once; ``wire``: over TCP, bytes counted.

    ``shares``: where the time goes, every step of every rank; ``handed``: bytes a step that its calls send on a ring.
    """
    with tempfile.TemporaryDirectory(prefix="gopt-run-") as text:
        folders = [Path(text, str(copy)) for copy in range(copies)]
        for folder in folders:
            folder.mkdir()
        how = ["--engine", "threads"] if threads else ["--launch", str(ranks)]
        commands = [_command(case.ranks(ranks, stage), steps, folder, how) for folder in folders]
        common = _environment(case) | (OVER_TCP if wire else {})
        together(commands, [common | {"GOPT_BENCH_NOTES": str(folder)} for folder in folders])
        found = [_read(folder, ranks) for folder in folders]
    first: Run = found[0]
    for more in found[1:]:
        for key in ("seconds", "shares", "peak"):
            first[key] += more[key]
    return first


def gopt_torch(python: str, case: Case, ranks: int, stage: str, steps: int, *, compiled: bool) -> Run:
    """``gopt run --engine torch`` by an interpreter that has gopt and PyTorch. The loss is read after every step."""
    with tempfile.TemporaryDirectory(prefix="gopt-run-") as text:
        command = [
            python, "-P", "-m", "gopt.cli", "run", str(case.ranks(ranks, stage)), "--data", str(case.batch), "--steps",
            str(WARMUP + steps), "--set", "lr=0.0001", "--log", str(Path(text, "log.jsonl")), "--engine", "torch",
            "--launch", str(ranks), "--compile" if compiled else "--no-compile",
        ]  # fmt: skip
        together([command], [{}])
        lines = [json.loads(line) for line in Path(text, "log.jsonl").read_text().splitlines()]
    return {"seconds": [line["seconds"] for line in lines][WARMUP:], "losses": [line["loss"] for line in lines]}


def gopt_on_gpu(case: Case, steps: int) -> Run:
    """``gopt run`` with one rank on a GPU. The loss is read after every step."""
    with tempfile.TemporaryDirectory(prefix="gopt-run-") as text:
        command = _command(case.ranks(1, 2), steps, Path(text), ["--engine", "nccl", "--launch", "1"])
        together([command], [_environment(case) | {"GOPT_BENCH_NOTES": text}])
        lines = Path(text, "log.jsonl").read_text().splitlines()
        return {"seconds": [json.loads(line)["seconds"] for line in lines][WARMUP:]}


def _environment(case: Case) -> dict[str, str]:
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, "GOPT_BENCH_BATCH": str(case.batch)}


def _command(target: Path, steps: int, folder: Path, how: Sequence[str]) -> list[str]:
    return [
        sys.executable, "-P", "-m", "gopt.cli", "run", str(target), "--data", "probe:batches",
        "--steps", str(WARMUP + steps),
        "--set", "lr=0.0001", "--log", str(folder / "log.jsonl"), "--trace", str(folder / "trace.json"), *how,
    ]  # fmt: skip


def _read(folder: Path, ranks: int) -> Run:
    notes = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    parts = [spans.shares(events, each, rank, WARMUP) for rank, each in enumerate(notes)]
    calls, sent = spans.counted(notes[0], WARMUP)
    run: Run = {
        "seconds": [line["seconds"] for line in lines][WARMUP:], "losses": [line["loss"] for line in lines],
        "peak": [each["peak"] for each in notes],
        "calls": calls, "handed": sent, "shares": [each for part in parts for each in part],
    }  # fmt: skip
    if seen := notes[0]["wire"]:
        run["sent"] = (seen[-1] - seen[WARMUP]) / (len(seen) - 1 - WARMUP) / ranks
    return run
