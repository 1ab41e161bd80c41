"""Bandwidth of the message layer against MPI's own Send and Recv, in the same processes and the same run.

``python benchmarks/messages.py [--mib 1,4,16] [--seconds 1]`` starts 2 and 4 processes with mpiexec: one trainer and
one server, then two and two. Each trainer pushes an array to a server and pulls one of the same size back, again and
again; with two servers in turn. MPI moves the same bytes both ways between the same processes. A line of JSON for
each size: MB per second of all trainers, and how they compare.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from gopt.runtime.engines.launch import mpiexec
from gopt.runtime.engines.mpi import launched, load_mpi
from gopt.runtime.messages.endpoint import Endpoint
from gopt.runtime.messages.message import Kind
from gopt.runtime.messages.mpi import MpiHub
from gopt.runtime.messages.roster import Roster

REPEATS = 5
"""Ways are measured in turn; the best of each counts: other work on the machine only slows them down."""


def plain(trainers: int, servers: int, rounds: int, array: np.ndarray, into: np.ndarray) -> None:
    """What MPI does in one thread with blocking calls."""
    mpi = load_mpi()
    comm = mpi.COMM_WORLD
    for turn in range(rounds):
        if comm.rank < trainers:
            server = trainers + (comm.rank + turn) % servers
            comm.Send([array, mpi.BYTE], server)
            comm.Recv([into, mpi.BYTE], server)
        else:
            for trainer in (t for t in range(trainers) if trainers + (t + turn) % servers == comm.rank):
                comm.Recv([into, mpi.BYTE], trainer)
                comm.Send([array, mpi.BYTE], trainer)


def messages(endpoint: Endpoint, trainers: int, rounds: int, array: np.ndarray, into: np.ndarray) -> None:
    """The same through the message layer: a push, and a pull with its answer."""
    endpoint.allocate = lambda header: [into]
    servers = endpoint.roster.size - trainers
    if endpoint.number < trainers:
        for turn in range(rounds):
            server = trainers + (endpoint.number + turn) % servers
            push = endpoint.isend(server, endpoint.message(Kind.PUSH, 0, turn, [array]))
            pull = endpoint.isend(server, endpoint.message(Kind.PULL, 0, turn))
            endpoint.receive()
            push.wait()
            pull.wait()
        for server in range(trainers, endpoint.roster.size):
            endpoint.send(server, endpoint.message(Kind.BYE))
        return
    left, answers = trainers, []
    while left:
        message = endpoint.receive()
        left -= message.kind is Kind.BYE
        if message.kind is Kind.PULL:
            answers.append(endpoint.isend(message.source, endpoint.message(Kind.VALUES, 0, message.round, [array])))
            answers = [answer for answer in answers if not answer.done]
    for answer in answers:
        answer.wait()


def seconds(endpoint: Endpoint, work: Callable[[], None]) -> float:
    endpoint.barrier()
    begin = time.perf_counter()
    work()
    endpoint.barrier()
    return time.perf_counter() - begin


def measure(trainers: int, sizes: list[float], budget: float) -> None:
    names = [f"trainer {n}" for n in range(trainers)] + [f"server {n}" for n in range(trainers)]
    hub = MpiHub(Roster.of(names))
    endpoint = hub.endpoint(hub.process)
    for mib in sizes:
        found = compare(endpoint, trainers, int(mib * (1 << 20)), budget)
        if endpoint.number == 0:
            print(json.dumps({"trainers": trainers, "servers": trainers, "mib": mib, **found}), flush=True)
    endpoint.close()


def compare(endpoint: Endpoint, trainers: int, size: int, budget: float) -> dict[str, Any]:
    """MB per second of all trainers, both ways."""
    array, into = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    rounds = max(4, int(budget / REPEATS * 1.5e9 / (2 * size)))
    rounds -= rounds % trainers
    ways: dict[str, Callable[[], None]] = {
        "mpi": lambda: plain(trainers, trainers, rounds, array, into),
        "messages": lambda: messages(endpoint, trainers, rounds, array, into),
    }
    taken = [{name: seconds(endpoint, work) for name, work in ways.items()} for _ in range(REPEATS)]
    rates = {name: round(trainers * rounds * 2 * size / min(each[name] for each in taken) / 1e6) for name in ways}
    return {"rounds": rounds, "mb_per_s": rates, "ratio": round(rates["messages"] / rates["mpi"], 2)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", default="1,4,16")
    parser.add_argument("--seconds", type=float, default=1.0)
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
            [mpiexec(), "-n", str(2 * trainers), sys.executable, __file__, *more], check=True, env=environment
        )


if __name__ == "__main__":
    main()
