"""The processes of a job on this host. Processes find each other through the launcher, by MPICH's PMI-1 over a pair of
sockets: nothing listens, and MPI has shared memory alone."""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

ONE_HOST = {
    "UCX_TLS": "self,sm",  # MPICH's usual transports
    "FI_TCP_IFACE": "lo",  # MPICH with libfabric
    "FI_SOCKETS_IFACE": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
}
"""Variables that keep the ranks of one host off its network; those that the user has set stay."""
_MOST = 1 << 16
"""Bytes of a request."""
_FIXED = {
    "init": "response_to_init pmi_version=1 pmi_subversion=1 rc=0",
    "get_maxes": "maxes kvsname_max=256 keylen_max=256 vallen_max=4096 rc=0",
    "get_appnum": "appnum appnum=0 rc=0",
    "finalize": "finalize_ack rc=0",
}
"""Request -> its answer, where that is always the same."""


def new_name() -> str:
    """A name unused by other jobs."""
    return f"gopt_{secrets.token_hex(8)}"


def remove_shared(name: str) -> None:
    """Remove the shared memory of a job's processes, where the processes have not done so."""
    for path in Path("/dev/shm").glob(f"mpich_shm_{_fnv(name.encode()):x}_*"):
        with suppress(OSError):
            if path.lstat().st_uid == os.geteuid():
                path.unlink()


@dataclass(slots=True)
class _Peer:
    """A process that sends requests. ``line``: the beginning of a request whose end has not come."""

    rank: int
    line: bytes = b""


@dataclass(slots=True)
class RankProcesses:
    """Processes started together, each in a separate session, so that a terminal signals no process."""

    running: dict[int, subprocess.Popen[bytes]]
    _selector: selectors.BaseSelector
    codes: dict[int, int] = field(default_factory=dict)
    """Rank -> its exit code, or the negative number of the signal that killed it."""
    finalized: set[int] = field(default_factory=set)
    """Ranks that have ended MPI in order."""
    aborted: tuple[int, int] | None = None
    """The rank that has ended the job by MPI, and its code: all are killed then."""
    _values: dict[str, str] = field(default_factory=dict)
    _name: str = field(default_factory=new_name)
    """Names the files of MPICH in shared memory: no other job has it."""
    _waiting: list[socket.socket] = field(default_factory=list)
    """At the barrier."""
    _size: int = 0

    @classmethod
    def start(
        cls, count: int, command: Sequence[str], environment: Mapping[str, str], stdout: int, stderr: int,
        *, name: str = "",
    ) -> RankProcesses:  # fmt: skip
        """Start so many processes, of a job of this name. Raises OSError where the system refuses a process; the
        earlier ones are ended then."""
        processes = cls({}, selectors.DefaultSelector(), _size=count, _name=name or new_name())
        processes._values["PMI_process_mapping"] = f"(vector,(0,1,{count}))"
        try:
            for rank in range(count):
                mine, theirs = socket.socketpair()
                processes._selector.register(mine, selectors.EVENT_READ, _Peer(rank))
                variables = {"PMI_FD": str(theirs.fileno()), "PMI_RANK": str(rank), "PMI_SIZE": str(count)}
                with theirs:
                    processes.running[rank] = subprocess.Popen(
                        command, env={**ONE_HOST, **environment, **variables}, stdin=subprocess.DEVNULL, stdout=stdout,
                        stderr=stderr, pass_fds=[theirs.fileno()], start_new_session=True,
                    )  # fmt: skip
        except BaseException:
            processes.end()
            raise
        return processes

    def serve(self, seconds: float) -> list[int]:
        """Answer requests for so long, or until a process ends. Returns the ranks that have ended since."""
        for key, _ in self._selector.select(seconds):
            self._read(key.fileobj, key.data)  # type: ignore[arg-type]
        ended = [rank for rank, process in self.running.items() if process.poll() is not None]
        self.codes.update({rank: self.running.pop(rank).returncode for rank in ended})
        return ended

    def send(self, number: int) -> None:
        """Send all processes a signal."""
        for process in self.running.values():
            process.send_signal(number)

    def kill(self) -> None:
        """Kill all processes."""
        self.send(signal.SIGKILL)
        self.codes.update({rank: process.wait() for rank, process in self.running.items()})
        if self.aborted is not None:
            self.codes.update([self.aborted])
        self.running.clear()

    def end(self) -> None:
        """Kill all processes, close the sockets to them, and remove their shared memory: ranks remove it themselves
        once all have it."""
        self.kill()
        remove_shared(self._name)
        for key in list((self._selector.get_map() or {}).values()):
            self._close(key.fileobj)  # type: ignore[arg-type]
        self._selector.close()

    def _close(self, peer: socket.socket) -> None:
        self._selector.unregister(peer)
        peer.close()

    def _read(self, peer: socket.socket, came: _Peer) -> None:
        try:
            data = peer.recv(_MOST)
        except OSError:
            data = b""
        *lines, came.line = (came.line + data).split(b"\n")
        if not data or len(came.line) > _MOST:
            self._close(peer)
            return
        for line in lines:
            with suppress(ValueError):  # no request at all
                if (answer := self._answer(peer, came.rank, line.decode("ascii", "replace"))) is not None:
                    _tell(peer, answer)

    def _answer(self, peer: socket.socket, rank: int, request: str) -> str | None:
        text, _, value = request.partition(" value=")
        fields = dict(part.split("=", 1) for part in text.split() if "=" in part)
        wanted, key = fields.get("cmd", ""), fields.get("key", "")
        if wanted == "put":
            self._values[key] = value
            return "put_result rc=0 msg=success"
        if wanted == "get":
            stored = self._values.get(key)
            return f"get_result rc={-1 if stored is None else 0} msg=done value={stored or 'unknown'}"
        if wanted == "get_my_kvsname":
            return f"my_kvsname kvsname={self._name} rc=0"
        if wanted == "get_universe_size":
            return f"universe_size size={self._size} rc=0"
        if wanted == "barrier_in":
            self._waiting.append(peer)
            if len(self._waiting) == self._size:
                waiting, self._waiting = self._waiting, []
                for waiter in waiting:
                    _tell(waiter, "barrier_out rc=0")
            return None
        if wanted == "abort":
            self.aborted = self.aborted or (rank, int(fields.get("exitcode", "1")) or 1)
            self.kill()
            return None
        if wanted == "finalize":
            self.finalized.add(rank)
        return _FIXED.get(wanted, f"{wanted} rc=-1 msg=unknown")


def _fnv(text: bytes) -> int:
    """The hash by which MPICH names the files of a job: FNV-1a."""
    digest = 2166136261
    for byte in text:
        digest = (digest ^ byte) * 16777619 & 0xFFFFFFFF
    return digest


def _tell(peer: socket.socket, answer: str) -> None:
    with suppress(OSError):  # its process has ended
        peer.sendall(f"cmd={answer}\n".encode())


def catches(process: int, number: int) -> bool:
    """Return whether a process of this host has a handler for a signal."""
    with suppress(OSError, ValueError, StopIteration), open(f"/proc/{process}/status", encoding="utf-8") as file:
        line = next(line for line in file if line.startswith("SigCgt:"))
        return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
