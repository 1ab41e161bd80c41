"""Endpoints in MPI processes. A header is sent first; large arrays follow, each received into final memory.

A header is sent in synchronous mode: the send ends when the receiver takes the header, and a receiver with a full queue
takes none. This is the flow control. All calls of MPI are made under one lock. A waiting thread advances all transfers
of the process; without waiting threads, a background thread does."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

from gopt.errors import OptionError
from gopt.runtime.engines.launcher_folder import how_it_died
from gopt.runtime.engines.mpi import load_mpi
from gopt.runtime.memory import bits
from gopt.runtime.messages.endpoint import Endpoint
from gopt.runtime.messages.failures import PeerFailure
from gopt.runtime.messages.heartbeat import Heartbeat
from gopt.runtime.messages.hub import Hub, Ready
from gopt.runtime.messages.message import decode, encode
from gopt.runtime.messages.order import Order
from gopt.runtime.messages.outgoing import Sending
from gopt.runtime.messages.pauses import BUSY_SLEEP, LAST_SLEEP, Pauses
from gopt.runtime.messages.roster import Roster, Settings
from gopt.runtime.messages.transfers import Transfer, Transfers
from gopt.runtime.session import Array

CHUNK = 1 << 30
"""Bytes of one transfer: counts of MPI are 32 bits in many functions."""
INLINE = 8 << 10
"""Bytes of arrays that travel with the header: two copies cost less than two transfers."""
UNTAKEN = 8
"""How many headers may be on their way to one endpoint before it takes them; further ones wait here.

MPICH gives each process of a host 64 cells for everything that it has sent and that was not received. Messages to a
process that is dead or stopped occupy them for good, and a process without free cells can send nothing to any other.
So few headers are sent ahead.
"""
_CONTROL, _BEAT, _FIRST = 1, 2, 4
"""Tags: values beside all messages, signs of life, then headers to each endpoint, and arrays."""
_NUMBERS = 256
"""Messages between two endpoints whose arrays have tags of their own."""
_LOOKS = 20
"""At transfers, before a wait gives the processor away; fewer where processes outnumber processors."""
_CONTROL_EVERY = 32
"""Rounds in which something has moved, between two looks at what comes beside messages."""
FAREWELL = 1.0
"""Seconds that an endpoint which fails has to tell the others."""


class MpiHub(Hub):
    """The endpoints of this process in a job of MPI processes. All processes create the hub together.

    Raises OptionError where the launcher started another number of processes than the roster has.
    """

    def __init__(
        self, roster: Roster, settings: Settings | None = None, order: Order | None = None, chunk: int = CHUNK
    ) -> None:
        self._mpi: Any = load_mpi()
        world = self._mpi.COMM_WORLD
        wanted = max(roster.processes) + 1
        if world.size != wanted:
            raise OptionError(
                f"the launcher started {world.size} processes, the roles need {wanted}",
                f"start it with mpiexec -n {wanted}",
            )
        self.process: int = world.rank
        super().__init__(roster, settings or Settings(), roster.local(self.process), order)
        self._comm: Any = world.Dup()
        self._chunk = chunk
        self._transfers = Transfers(looks=_LOOKS if wanted <= (os.cpu_count() or 1) else 2)
        self._untaken = [0] * roster.size
        """Of each endpoint: headers to it that it has not taken."""
        self._sent: Counter[tuple[int, int]] = Counter()
        """Of two endpoints: messages whose arrays travel by themselves."""
        self._status: Any = self._mpi.Status()
        self._moves = 0
        self._waiting = 0
        """Threads that wait, and so move transfers on."""
        self._pauses = Pauses(self.changed)
        self._heartbeat = Heartbeat(self._mpi, self._comm, wanted, self.process, _BEAT, self.settings)
        self._ended = threading.Event()
        self._open = set(self.mailboxes)
        self._stop = weakref.finalize(self, self._ended.set)
        threading.Thread(target=_move_on, args=(weakref.ref(self), self._ended), name="messages", daemon=True).start()

    def endpoint(self, number: int) -> Endpoint:
        """An endpoint of this process."""
        if number not in self.mailboxes:
            raise OptionError(f"{self.roster.describe(number)} is not in process {self.process}")
        return Endpoint(self, number)

    # --- out ---

    def _dispatch(self, to: int) -> None:
        box, process = self._outboxes[to], self.roster.processes[to]
        if process == self.process:
            self._hand_over(to)
            return
        while box and self._untaken[to] < UNTAKEN:
            sending = box.popleft()
            source, arrays = sending.header.source, sending.message.arrays
            small = sending.header.nbytes <= INLINE
            parts = [] if small else self._parts(arrays)
            tag = self._array_tag(source, to, self._sent[source, to])
            data = encode(sending.header, arrays if small else None, self._sent[source, to])
            self._sent[source, to] += not small
            request = self._comm.Issend([data, self._mpi.BYTE], process, self._header_tag(to))
            self._untaken[to] += 1
            header = Transfer(request, source, to, data)
            self._transfers.add(header)
            if small:
                self._finish(sending)
            elif len(parts) == 1:
                self._send_arrays(sending, parts, tag)
            else:  # when the receiver has taken the header: these may be many
                header.waiting = sending, parts, tag

    def _send_arrays(self, sending: Sending, parts: Sequence[Array], tag: int) -> None:
        source, to = sending.header.source, sending.to
        for part in parts:
            request = self._comm.Isend([part, self._mpi.BYTE], self.roster.processes[to], tag)
            self._transfers.add(Transfer(request, source, to, part, sending))

    def _header_tag(self, to: int) -> int:
        return _FIRST + to

    def _array_tag(self, source: int, to: int, number: int) -> int:
        pair = self.roster.size * (1 + to) + source
        return _FIRST + pair * _NUMBERS + number % _NUMBERS

    def _parts(self, arrays: Sequence[Array]) -> list[Array]:
        """The bytes of arrays as sent: without empty arrays, and with long arrays in chunks."""
        flat = [bits(array) for array in arrays if array.size]
        return [array[start : start + self._chunk] for array in flat for start in range(0, array.size, self._chunk)]

    def _room(self, number: int) -> None:
        self._hand_over(number)

    def _tell(self, to: int, item: dict[str, Any]) -> None:
        if self.roster.processes[to] == self.process:
            self._given(to, json.loads(json.dumps(item)))
        else:
            self._send_control(item["from"], to, {"to": to, **item})

    def _send_control(self, source: int, to: int, item: dict[str, Any]) -> None:
        data = json.dumps(item).encode()
        request = self._comm.Isend([data, self._mpi.BYTE], self.roster.processes[to], _CONTROL)
        self._transfers.add(Transfer(request, source, to, data, control=True))

    # --- moving on ---

    def _advance(self) -> bool:
        moved = self._end_transfers()
        for number, mailbox in self.mailboxes.items():
            while mailbox.admits() and self._take_in(number):
                moved = True
        self._moves += 1
        if not moved or self._moves % _CONTROL_EVERY == 0:
            moved = self._listen() or moved
        return moved

    def _end_transfers(self) -> bool:
        ended, failed = self._transfers.ended(self._mpi)
        for transfer, why in failed:
            peer = transfer.to if transfer.source in self.mailboxes else transfer.source
            process = self.roster.processes[peer]
            died = how_it_died(process)
            for number in self.roster.local(process):
                self._lose(number, f"its process {died}" if died else f"MPI has given up a transfer: {why}")
        for transfer in ended:
            if isinstance(transfer.message, Sending):
                if not transfer.message.left:
                    self._finish(transfer.message)
            elif transfer.message is None and not transfer.control:
                self._untaken[transfer.to] -= 1
                if transfer.waiting is not None:
                    self._send_arrays(*transfer.waiting)
                self._dispatch(transfer.to)
        return bool(ended or failed)

    def _take_in(self, number: int) -> bool:
        """Receive the next header for an endpoint, and begin to receive the arrays."""
        message = self._comm.Improbe(self._mpi.ANY_SOURCE, self._header_tag(number), self._status)
        if message is None:
            return False
        process = self._status.Get_source()
        header, arrays, turn = decode(self._received(message))
        self._heartbeat.heard(process)
        slot = self._place(number, header, arrays)
        if slot is not None and arrays is None:
            tag = self._array_tag(header.source, number, turn)
            for part in self._parts(slot.arrays):  # the order in which MPI pairs them
                request = self._comm.Irecv([part, self._mpi.BYTE], process, tag)
                self._transfers.add(Transfer(request, header.source, number, part, slot))
        return True

    def _received(self, message: Any) -> bytearray:
        data = bytearray(self._status.Get_count(self._mpi.BYTE))
        message.Recv([data, self._mpi.BYTE])
        return data

    def _listen(self) -> bool:
        """Receive control values and signs of life."""
        moved = False
        while (message := self._comm.Improbe(self._mpi.ANY_SOURCE, _CONTROL, self._status)) is not None:
            self._heartbeat.heard(self._status.Get_source())
            item = json.loads(self._received(message))
            if "failed" in item:
                self._hear_failure(PeerFailure(*item["failed"]))
            else:
                self._given(item["to"], item)
            moved = True
        for process in self._heartbeat.beat(self._gone):
            for number in self.roster.local(process):
                self._lose(number, f"it has given no sign of life for {self.settings.heartbeat_timeout:g} s")
        return moved

    def _gone(self, process: int) -> bool:
        return all(number in self.lost for number in self.roster.local(process))

    def seconds_silent(self, number: int, peer: int) -> float:
        return self._heartbeat.seconds_silent(self.roster.processes[peer])

    def _hear_failure(self, failure: PeerFailure) -> None:
        super()._fail(failure)

    def _blocked(self, number: int, ready: Ready, until: float) -> None:
        self._waiting += 1

    def _unblocked(self, number: int) -> None:
        self._waiting -= 1

    def _pause(self, idle: int, remaining: float) -> None:
        self._pauses.pause(idle, remaining, self._transfers.arrays > 0)

    # --- the end ---

    def _cancel(self, number: int, gone: int) -> None:
        ends = {(number, gone), (gone, number)}
        for abandoned in self._transfers.abandon(lambda transfer: (transfer.source, transfer.to) in ends):
            if abandoned.waiting is not None:
                self._finish(abandoned.waiting[0])
            if isinstance(abandoned.message, Sending):
                self._finish(abandoned.message)

    def _fail(self, failure: PeerFailure) -> None:
        """Lock held: tell all processes of a failure, and wait a moment for the receipt."""
        if self.failure is not None:
            return
        super()._fail(failure)
        for to in (self.roster.local(process)[0] for process in self._heartbeat.others):
            if to not in self.lost:
                self._send_control(failure.source, to, {"failed": [failure.source, failure.text, failure.exit_code]})
        until, idle = time.monotonic() + FAREWELL, 0
        while time.monotonic() < until and not self._transfers.settled:
            idle = 0 if self._advance() else idle + 1
            self._pause(idle, until - time.monotonic())

    def _settled(self) -> bool:
        return self._transfers.settled

    def _takers(self, number: int) -> set[int]:
        ways = self._transfers.under_way
        return super()._takers(number) | {
            transfer.to for transfer in ways if transfer.source == number and not transfer.control
        }

    def _closed(self) -> None:
        self._open = {number for number, mailbox in self.mailboxes.items() if not mailbox.closed}
        if not self._open:
            self._stop()

    def leave(self, code: int) -> None:
        """End this process at once, without MPI's Finalize: a collective that a dead process never joins."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def abort(self, code: int) -> None:
        """End all processes of the job at once."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._comm.Abort(code)


def _move_on(ref: weakref.ref[MpiHub], ended: threading.Event) -> None:
    """Advance transfers while the threads of the endpoints compute."""
    pause = LAST_SLEEP
    while not ended.wait(pause):
        if (hub := ref()) is None:
            return
        with hub.changed:
            idle = not hub._waiting and not ended.is_set()
            if idle:
                try:
                    if hub._advance():
                        hub.changed.notify_all()
                except Exception as error:
                    Hub._fail(hub, PeerFailure.of(next(iter(hub.mailboxes)), error))
                    return
            pause = BUSY_SLEEP if idle and hub._transfers.arrays else LAST_SLEEP
        del hub  # a thread that held it would keep it alive
