"""Bandwidth of the message layer against MPI's own Send and Recv, in the same processes and the same run.

``python benchmarks/messages.py [--mib 1,4,16] [--seconds 2]`` starts 2 and 4 processes with mpiexec: one trainer and
one server, then two and two. In a round a trainer pushes ``KEYS`` arrays, then it pulls as many of the same size, as
in a step; with two servers in turn. MPI moves the same bytes the same ways with blocking calls. A line of JSON for
each size of an array: MB per second of all trainers, and how they compare.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from gopt.runtime.engines.mpi import launched, load_mpi
from gopt.runtime.messages.endpoint import Endpoint, Sent
from gopt.runtime.messages.message import Kind
from gopt.runtime.messages.mpi import MpiHub
from gopt.runtime.messages.roster import Roster

KEYS = 8
REPEATS = 31
"""Ways are measured in turn, so that other work on the machine meets both; ``ratio`` is the median of all turns."""


@dataclass(frozen=True)
class Traffic:
    """``pairs`` trainers and as many servers; ``size`` in bytes."""

    pairs: int
    rounds: int
    size: int

    def server(self, trainer: int, key: int) -> int:
        return self.pairs + (trainer + key) % self.pairs

    def memory(self) -> list[np.ndarray]:
        return [np.ones(self.size, np.uint8) for _ in range(KEYS)]


def plain(traffic: Traffic, sent: list[np.ndarray], received: list[np.ndarray]) -> None:
    """What MPI does in one thread with blocking calls."""
    mpi = load_mpi()
    comm = mpi.COMM_WORLD
    if comm.rank < traffic.pairs:
        ends = [(traffic.server(comm.rank, key), key) for key in range(KEYS)]
        ways = comm.Send, comm.Recv
        memory = sent, received
    else:
        trainers = range(traffic.pairs)
        ends = [(t, key) for key in range(KEYS) for t in trainers if traffic.server(t, key) == comm.rank]
        ways = comm.Recv, comm.Send
        memory = received, sent
    for _ in range(traffic.rounds):
        for way, arrays in zip(ways, memory, strict=True):
            for other, key in ends:
                way([arrays[key], mpi.BYTE], other)


def messages(endpoint: Endpoint, traffic: Traffic, sent: list[np.ndarray]) -> None:
    """The same through the message layer: pushes, and pulls with their answers."""
    if endpoint.number < traffic.pairs:
        for turn in range(traffic.rounds):
            ends = [(traffic.server(endpoint.number, key), key) for key in range(KEYS)]
            handles = [endpoint.isend(to, endpoint.message(Kind.PUSH, key, turn, [sent[key]])) for to, key in ends]
            handles += [endpoint.isend(to, endpoint.message(Kind.PULL, key, turn)) for to, key in ends]
            for _ in range(KEYS):
                endpoint.receive()
            for handle in handles:
                handle.wait()
        for server in range(traffic.pairs, endpoint.roster.size):
            endpoint.send(server, endpoint.message(Kind.BYE))
        return
    left = traffic.pairs
    answers: list[Sent] = []
    while left:
        message = endpoint.receive()
        left -= message.kind is Kind.BYE
        if message.kind is Kind.PULL:
            values = endpoint.message(Kind.VALUES, message.key, message.round, [sent[message.key]])
            answers = [answer for answer in answers if not answer.done]
            answers.append(endpoint.isend(message.source, values))
    for answer in answers:
        answer.wait()


@dataclass(frozen=True)
class Taken:
    """Seconds of the slowest process, and CPU seconds of all."""

    wall: float
    cpu: float


def measured(endpoint: Endpoint, work: Callable[[], None]) -> Taken:
    endpoint.barrier()
    begin, used = time.perf_counter(), time.process_time()
    work()
    mine = time.perf_counter() - begin, time.process_time() - used
    walls, cpus = zip(*endpoint.gather(mine), strict=True)
    return Taken(max(walls), sum(cpus))


def measure(pairs: int, sizes: list[float], budget: float) -> None:
    names = [f"trainer {n}" for n in range(pairs)] + [f"server {n}" for n in range(pairs)]
    hub = MpiHub(Roster.of(names))
    endpoint = hub.endpoint(hub.process)
    for mib in sizes:
        size = int(mib * (1 << 20))
        found = compare(endpoint, Traffic(pairs, max(1, int(budget / REPEATS * 1e9 / (2 * KEYS * size))), size))
        if endpoint.number == 0:
            print(json.dumps({"trainers": pairs, "servers": pairs, "mib": mib, **found}), flush=True)
    endpoint.close()


def compare(endpoint: Endpoint, traffic: Traffic) -> dict[str, Any]:
    """MB per second of all trainers, both ways."""
    memory = traffic.memory(), traffic.memory()
    endpoint.allocate = lambda header: [memory[1][header.key]]  # before the barrier behind which others may send
    ways: dict[str, Callable[[], None]] = {
        "mpi": lambda: plain(traffic, *memory),
        "messages": lambda: messages(endpoint, traffic, memory[0]),
    }
    taken = [{name: measured(endpoint, work) for name, work in ways.items()} for _ in range(REPEATS)]
    whole = traffic.pairs * traffic.rounds * 2 * KEYS * traffic.size / 1e6
    rates = {name: round(whole / median(each[name].wall for each in taken)) for name in ways}
    cpu = {name: round(1e3 * median(each[name].cpu for each in taken) / whole, 3) for name in ways}
    ratio = median(each["mpi"].wall / each["messages"].wall for each in taken)
    return {"rounds": traffic.rounds, "mb_per_s": rates, "cpu_ms_per_mb": cpu, "ratio": round(ratio, 2)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", default="1,4,16")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--trainers", type=int, default=0)
    given = parser.parse_args()
    sizes = [float(text) for text in given.mib.split(",")]
    if launched():
        measure(given.trainers, sizes, given.seconds)
        return
    for trainers in (1, 2):
        more = ["--trainers", str(trainers), "--mib", given.mib, "--seconds", str(given.seconds)]
        environment = (
            {**os.environ, "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"} if 2 * trainers > (os.cpu_count() or 1) else None
        )
        subprocess.run(
            [str(Path(sys.prefix, "bin", "mpiexec")), "-n", str(2 * trainers), sys.executable, __file__, *more],
            check=True,
            env=environment,
        )


if __name__ == "__main__":
    main()
