"""One process of ``test_messages_mpi.py``, under mpiexec. Arguments: the scene, and a folder; each process writes there
what it saw, in a file of its number."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from gopt.errors import GoptError
from gopt.runtime.messages import mpi
from gopt.runtime.messages.endpoint import Endpoint
from gopt.runtime.messages.failures import Awaited, LateError, LostError
from gopt.runtime.messages.message import Header, Kind
from gopt.runtime.messages.mpi import MpiHub
from gopt.runtime.messages.roster import Roster, Settings

LONG = 120.0
DTYPES = ("float32", "float16", "bool", "int64", "complex128", ml_dtypes.bfloat16)


def drawn(source: int, number: int) -> list[np.ndarray]:
    """Arrays of all types and many lengths: none, with the header, alone, in chunks; not always contiguous."""
    generator = np.random.default_rng([source, number])
    shapes = [(0, 3), (), (7,), (65, 33), (2, 0), (40_001,)]
    picked = [(shapes[place], DTYPES[place]) for place in generator.permutation(6)[: number % 5]]
    arrays = [np.asarray(generator.integers(0, 255, shape)).astype(dtype) for shape, dtype in picked]
    return [array.T for array in arrays] if number % 2 else arrays


def everything(endpoint: Endpoint) -> Any:
    """Endpoints 0 and 1 send to 2 and 3, of which two share a process; 3 has memory for what comes."""
    assert endpoint.gather(endpoint.number * 10) == [0, 10, 20, 30]
    count = 150
    if endpoint.number < 2:
        handles = []
        for number in range(count):
            for to in (2, 3):
                message = endpoint.message(Kind.PUSH, number, to, drawn(endpoint.number, number), {"n": number})
                if number % 3:
                    endpoint.send(to, message)
                else:
                    handles.append(endpoint.isend(to, message))
        for handle in handles:
            handle.wait()
        answers = [endpoint.receive() for _ in range(2)]
        endpoint.close()
        return sorted(answer.source for answer in answers)
    given: list[np.ndarray] = []

    def allocate(header: Header) -> list[np.ndarray]:
        arrays = [spec.empty() for spec in header.arrays]
        given.extend(arrays)
        return arrays

    endpoint.allocate = allocate if endpoint.number == 3 else None
    nexts = [0, 0]
    for _ in range(2 * count):
        message = endpoint.receive()
        assert (message.key, message.round, message.note) == (
            nexts[message.source],
            endpoint.number,
            {"n": message.key},
        )
        nexts[message.source] += 1
        for mine, theirs in zip(message.arrays, drawn(message.source, message.key), strict=True):
            assert (mine.dtype, mine.shape, mine.tobytes()) == (theirs.dtype, theirs.shape, theirs.tobytes())
            assert endpoint.number == 2 or any(mine is each for each in given)
    for trainer in (0, 1):
        endpoint.send(trainer, endpoint.message(Kind.VALUES))
    endpoint.close()
    return nexts


def blocked(endpoint: Endpoint) -> Any:
    """Four messages of 100 bytes for a queue of two: with those that MPI may hold, the rest waits; as do large ones."""
    if endpoint.number == 0:
        sent = [endpoint.isend(1, endpoint.message(Kind.PUSH, n, 0, [np.zeros(100_000, np.uint8)])) for n in range(4)]
        for each in sent[:2]:
            each.wait()
        try:
            sent[2].wait(0.3)
        except LateError as error:
            late = error.message
        done = [each.done for each in sent]
        endpoint.barrier()
        for each in sent:
            each.wait()
        small = [endpoint.isend(1, endpoint.message(Kind.PUSH, n)) for n in range(10 * mpi.UNTAKEN)]
        time.sleep(0.2)
        stuck = [each.done for each in small].count(False) > 8 * mpi.UNTAKEN
        endpoint.barrier()
        for each in small:
            each.wait()
        endpoint.close()
        return late, done, stuck
    endpoint.barrier()
    keys = [endpoint.receive().key for _ in range(4)]
    endpoint.barrier()
    keys += [endpoint.receive().key for _ in range(10 * mpi.UNTAKEN)]
    endpoint.close()
    return keys == [*range(4), *range(10 * mpi.UNTAKEN)]


def dies(endpoint: Endpoint) -> Any:
    """Endpoint 1 is killed while its message comes; 0 and 2 go on, and print. The server names it."""
    array = np.zeros(1 << 20, np.uint8)
    endpoint.barrier()
    if endpoint.number == 1:
        endpoint.send(2, endpoint.message(Kind.PUSH, 5, 0, [array]))
        endpoint.isend(2, endpoint.message(Kind.PUSH, 6, 0, [array]))
        os.kill(os.getpid(), signal.SIGKILL)
    if endpoint.number == 0:
        only = Awaited((2,), "send VALUES")
        found = [endpoint.receive(awaited=lambda: only).kind.name for _ in range(20)]
        print("trainer 0 prints")
        endpoint.close()
        return found.count("VALUES")
    assert endpoint.receive().key == 5
    told = ""
    try:
        while True:
            endpoint.receive()  # the second message may have come whole
    except LostError as lost:
        told = lost.message
        endpoint.drop(lost.number)
    endpoint.send(1, endpoint.message(Kind.VALUES, arrays=[array]))
    for _ in range(20):
        print("server 0 prints", flush=True)
        endpoint.send(0, endpoint.message(Kind.VALUES, arrays=[array]))
        time.sleep(0.01)
    endpoint.close()
    return told


def two_die(endpoint: Endpoint) -> Any:
    """Endpoints 1 and 2 are killed in one moment, with more messages under way than MPICH has cells for and the server
    has room for. The server names both, and goes on with 0."""
    array = np.zeros(1 << 18, np.uint8)
    if endpoint.number in (1, 2):
        endpoint.send(3, endpoint.message(Kind.PUSH, 5, 0, [array]))
    endpoint.barrier()  # the server has room for these two: it takes none before the next barrier
    if endpoint.number in (1, 2):
        for _ in range(5 * mpi.UNTAKEN):
            endpoint.isend(3, endpoint.message(Kind.PUSH, 6))
            endpoint.isend(3, endpoint.message(Kind.PUSH, 7, 0, [array]))
        endpoint.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    endpoint.barrier()
    if endpoint.number == 0:
        for turn in range(20):
            endpoint.send(3, endpoint.message(Kind.PUSH, turn, 1, [array]))
            assert endpoint.receive(awaited=lambda: Awaited((3,), "send VALUES")).key == turn
        endpoint.close()
        return 20
    lost: list[int] = []
    answered = 0
    while len(lost) < 2 or answered < 20:
        try:
            message = endpoint.receive()
        except LostError as error:
            lost.append(error.number)
            endpoint.drop(error.number)
            endpoint.send(error.number, endpoint.message(Kind.VALUES, arrays=[array]))  # reaches nobody
            continue
        if message.source == 0:
            endpoint.send(0, endpoint.message(Kind.VALUES, message.key, arrays=[array]))
            answered += 1
    endpoint.close()
    return sorted(lost)


def fails(endpoint: Endpoint) -> Any:
    """Endpoint 1 fails, the others hear of it; 2 hears it from its own process, while it waits in a send.

    Where 1 fails, the others have left the barrier: each has sent it something.
    """
    endpoint.barrier()
    try:
        if endpoint.number == 0:
            endpoint.send(1, endpoint.message(Kind.PUSH, 7))
        if endpoint.number == 1:
            while endpoint.receive().key != 7:
                pass
            while not endpoint._hub._outboxes[1]:  # until 2 waits in a send, however slow the machine is
                time.sleep(1e-3)
            raise ValueError("no data")
        if endpoint.number == 0:
            endpoint.receive(awaited=lambda: Awaited((2,), "send VALUES of key 3 in round 5"))
        while True:
            endpoint.send(1, endpoint.message(Kind.PUSH, arrays=[np.zeros(1 << 20, np.uint8)]))
    except GoptError as error:
        return error.message
    except ValueError as error:
        endpoint.fail(error)
        return "failed"


ROLES = ["trainer 0", "trainer 1", "server 0", "server 1"]
SCENES: dict[str, tuple[Any, Roster, Settings]] = {
    "everything": (everything, Roster.of(ROLES, [0, 1, 2, 1]), Settings(LONG, 3, 300_000)),
    "blocked": (blocked, Roster.of(["trainer 0", "server 0"]), Settings(LONG, 2)),
    "dies": (dies, Roster.of(ROLES[:3]), Settings(LONG, heartbeat=0.01, heartbeat_timeout=1.0)),
    "two_die": (
        two_die,
        Roster.of([*ROLES[:2], "trainer 2", "server 0"]),
        Settings(LONG, 2, heartbeat=0.01, heartbeat_timeout=3.0),
    ),
    "fails": (fails, Roster.of(ROLES[:3], [0, 1, 1]), Settings(LONG, 2)),
}


def main() -> None:
    work, roster, settings = SCENES[sys.argv[1]]
    hub = MpiHub(roster, settings, chunk=10_000)
    codes = []

    def live(number: int) -> None:
        try:
            found = work(hub.endpoint(number))
            Path(sys.argv[2], f"{number}").write_text(json.dumps(found))
        except BaseException as error:
            Path(sys.argv[2], f"{number}").write_text(json.dumps(repr(error)))
            codes.append(1)
            hub.fail(number, error)

    threads = [threading.Thread(target=live, args=(number,)) for number in hub.mailboxes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if sys.argv[1] in ("dies", "two_die", "fails") or codes:
        hub.leave(max(codes, default=0))


if __name__ == "__main__":
    main()
