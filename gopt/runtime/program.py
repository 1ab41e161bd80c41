"""Graphs cut at their calls and made ready to run.

In training, long elementwise runs go in tiles, and what one call sends lies in one buffer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from gopt.errors import RunError
from gopt.ir.graph import Graph, Node
from gopt.ir.types import TensorType, known
from gopt.opaque.expand import expand
from gopt.runtime.cut import Call, Segment, cut, dropped
from gopt.runtime.device import HOST, Device, Piece
from gopt.runtime.lower import lower_halves
from gopt.runtime.memory import aligned, is_aligned, joined, same_memory
from gopt.runtime.order import in_order
from gopt.runtime.places import lay
from gopt.runtime.products import fold_transposes
from gopt.runtime.rooms import Rooms
from gopt.runtime.session import (
    Array,
    SessionCache,
    array_dtype,
    session_of,
)
from gopt.runtime.tiles import Run, split, tiled


class Awaited(Protocol):
    """Outputs of a call that is under way, such as a Future."""

    def result(self) -> list[Any]: ...


CallBack: TypeAlias = Callable[..., list[Any] | Awaited]
"""What does a collective: number of the call in the file, its node, its inputs -> its outputs, or their promise.

Programs for training may give it a fourth, room: flat memory that the call may write. Of a reduction it is its inputs'
own, of a gather the place for what it makes.
"""


Mark: TypeAlias = Callable[[str, float, float], None]


def no_mark(name: str, begin: float, end: float) -> None:
    """For who is not listening."""


class Program:
    """A rank's graph, or one without collectives, made ready to run on the CPU, or on another ``device``.

    Halves are lowered to float32 operators on the CPU. ``graph`` is not changed. Raises UnsupportedError where a
    type that is needed is unknown, NoKernelError where the runtime has no kernel, RunError where it refuses.

    ``replaces`` (output -> input) is for training: long elementwise runs go in tiles, a result that replaces a state is
    written over the very array that was fed for it where nothing reads that any more, and what one call sends lies in
    one buffer. Without it no array that was fed is written.
    """

    def __init__(
        self, graph: Graph, cache: SessionCache, replaces: Mapping[str, str] | None = None, device: Device = HOST
    ) -> None:
        graph = expand(graph, "gopt.run")
        self.graph = graph = fold_transposes(lower_halves(graph)) if device.lowers else graph
        self._device = device
        self._inputs = graph.inputs
        self._initial = {name: graph.initializers[name] for name in graph.inputs if name in graph.initializers}
        self._outputs = tuple(graph.outputs)
        rooms = Rooms(graph) if replaces is None else device.rooms(graph, replaces)
        self._trains = replaces is not None
        self._keeps = self._trains and device.shares
        self._fed: dict[str, list[tuple[Any, Any]]] = {}
        """What was fed lately, and the value made of it: states mostly come back as they went, or one of two."""
        graph, types = rooms.graph, graph.types | graph.inputs
        steps: list[Segment | Run | Call] = []
        for each in cut(graph):
            steps += split(each, types) if self._keeps and isinstance(each, Segment) else [each]
        borders = [step.segment if isinstance(step, Run) else step for step in steps]
        over = self._over(steps, borders, replaces or {}, rooms)
        self.common, late = in_order(rooms, borders, over)
        """Number of a gather -> what ranks may have in common, and when this one reads and writes it."""
        lost = {name for name, call in rooms.shards.items() if call not in self.common}
        if lost:  # else a rank keeps all that it gathers for itself
            rooms = rooms.without(lost)
            over = self._over(steps, borders, replaces or {}, rooms)  # nothing that is gathered has to be read before
        self._rooms = rooms
        self._places = {name: device.put(place) for name, place in rooms.places().items()}
        self._dropped = dropped(borders, self._outputs)
        self._own = dict(rooms.gathered)
        """Number of a call -> flat memory that it may write, where that is the same in every step."""
        self._landed = {name: self._places[name] for name in rooms.delivered}
        for place in self._landed.values() if self._keeps else ():
            place.lasting = True
        self._waits = [(*step.inputs, *late.get(place, ())) for place, step in enumerate(borders)]
        """For every step, what must have come before it runs."""
        self._steps = self._ready(steps, borders, over, types, cache)
        self._own |= self._buffers(borders)
        self._constants = self._resident(graph)
        self._passed = self._passed_on(replaces or {})
        self.mark: Mark = no_mark
        """Hears of every segment: its name, and when it began and ended."""

    def _ready(
        self, steps: Sequence[Segment | Run | Call], borders: Sequence[Segment | Call],
        over: Mapping[int, dict[str, str]], types: dict[str, TensorType], cache: SessionCache,
    ) -> list[Call | Piece]:  # fmt: skip
        """Steps with their sessions and memory."""
        graph, rooms = self._rooms.graph, self._rooms
        places: Mapping[str, Sequence[Any]] | None = None
        if self._keeps:
            written = frozenset[str]().union(*over.values())
            laid = lay(borders, self._dropped, types, rooms, written, self._outputs)
            places = laid.places
            self._own |= laid.landing
            gathers = [step for step in borders if isinstance(step, Call) and step.index in laid.landing]
            self._landed |= {name: laid.places[name][0] for step in gathers for name in step.outputs}
            # What has a place costs nothing more while it stays.
            self._dropped = [tuple(name for name in gone if name not in laid.places) for gone in self._dropped]
        elif self._trains:
            places = {name: [self._device.put(place)] for name, place in rooms.sent.items()}
        made: list[Call | Piece] = []
        for place, step in enumerate(steps):
            if isinstance(step, Call):
                made.append(step)
            elif isinstance(step, Segment):
                made.append(self._device.piece(step, session_of(step, graph, types, cache), types, places))
            else:
                run = tiled(step, over[place], graph, types, cache, places or {})
                run.overwrites = rooms.touched(run.overwrites)
                made.append(run)
        return made

    def _over(
        self, steps: Sequence[Segment | Run | Call], borders: Sequence[Segment | Call], replaces: Mapping[str, str],
        rooms: Rooms,
    ) -> dict[int, dict[str, str]]:  # fmt: skip
        """Number of a run -> which of its results are written over which of its rows."""
        last = {name: place for place, each in enumerate(borders) for name in each.inputs}
        gathered: dict[int, int] = {}
        """Number of a gather -> the last step that reads what it made."""
        for name in rooms.delivered.keys() & rooms.pieces.keys():
            call = rooms.pieces[name].call
            gathered[call] = max(gathered.get(call, -1), last.get(name, -1))
        found, kept = {}, frozenset(self._outputs)
        for place, step in enumerate(steps):
            if isinstance(step, Run):
                states = {output: replaces[output] for output in step.segment.outputs if output in replaces}
                free = {
                    output: name for output, name in states.items() if last.get(name) == place and name not in kept
                    and (name not in rooms.pieces or gathered.get(rooms.pieces[name].call, -1) < place)
                }  # fmt: skip
                own = {name: rooms.in_place(name, step.rows, place, last) for name in step.segment.outputs}
                free |= {name: row for name, row in own.items() if row is not None}
                found[place] = {
                    name: row for name, row in free.items() if row in step.rows and name not in rooms.sent
                }  # fmt: skip
        return found

    def _buffers(self, borders: Sequence[Segment | Call]) -> dict[int, Array]:
        """Number of a call -> what it sends, one behind the other, where that has its place and is not read again."""
        sent = self._rooms.sent
        calls = [step for step in borders if isinstance(step, Call) and step.index in self._rooms.spare]
        flats = {
            step.index: joined([sent[name] for name in step.inputs])
            for step in calls if step.inputs and all(name in sent for name in step.inputs)
        }  # fmt: skip
        return {number: flat for number, flat in flats.items() if flat is not None}

    def _resident(self, graph: Graph) -> dict[str, Any]:
        """Constants that stand in no model: large ones, those that a call reads, and those that are outputs."""
        read = {name for step in self._steps for name in step.inputs} | set(self._outputs)
        names = [name for name in graph.initializers if name in read and name not in graph.inputs]
        return {name: self._device.put(graph.initializers[name].numpy()) for name in names}

    def _passed_on(self, replaces: Mapping[str, str]) -> frozenset[str]:
        """Outputs that nothing makes and that become another state: its memory would be that of what is fed, or of a
        constant, and places that take turns are written again while it is still read."""
        made = {name for step in self._steps for name in step.outputs}
        others = {name for name in self._outputs if replaces.get(name, name) != name}
        return frozenset(others - made) if self._keeps else frozenset()

    @property
    def lent(self) -> Mapping[int, Array]:
        """Numbers of calls -> the memory that the engine lent for what they send."""
        return self._rooms.lent

    def move_in(self, held: dict[str, Any]) -> None:
        """Put states where they are to lie, one by one, so that the first step need not hold two of each."""
        for name in self._inputs.keys() & held.keys():
            if self._keeps:
                array, room = held[name], self._rooms.states.get(name)
                if not is_aligned(array) if room is None else not same_memory(room, array):
                    held[name] = aligned(array.shape, array.dtype) if room is None else room
                    np.copyto(held[name], array)

    def run(self, feeds: Mapping[str, Array], call: CallBack) -> dict[str, Array]:
        """One step: values for the inputs in, the graph's outputs out.

        A state that is not fed has its stored value. Outputs are memory of their own, but for those that are inputs
        or constants of the graph, which may be the very arrays that were fed. ``call`` is asked for every collective
        in file order; it may give no outputs where they are undefined (Reduce off its root). Raises RunError on
        feeds that do not fit, and when a segment fails.
        """
        mark = self.mark
        values = self._start(feeds)
        promised: dict[str, _Promise] = {}
        for step, waits, dead in zip(self._steps, self._waits, self._dropped, strict=True):
            for name in waits if promised else ():
                if name in promised:
                    promised[name].settle(values, promised)
            if isinstance(step, Call):
                self._call(step, values, promised, call)
            else:
                here = {id(each): each for each in promised.values()} if promised and step.overwrites else {}
                for promise in here.values():
                    if not step.overwrites.isdisjoint(promise.node.inputs):
                        promise.settle(values, promised)
                begin = time.perf_counter()
                values.update(zip(step.outputs, step.run(values), strict=True))
                mark(step.title, begin, time.perf_counter())
            for name in dead:
                values.pop(name, None)
        while promised:
            next(iter(promised.values())).settle(values, promised)
        shown = {name: self._device.show(values[name]) for name in self._outputs}
        return shown | {name: shown[name].copy() for name in self._passed}

    def _start(self, feeds: Mapping[str, Array]) -> dict[str, Any]:
        unknown = sorted(feeds.keys() - self._inputs.keys())
        if unknown:
            raise RunError(f"the graph has no input {unknown[0]!r}")
        values = self._constants | self._places
        for name, type in self._inputs.items():
            if name in feeds:
                given = feeds[name]
            elif name in self._initial:
                given = self._initial[name].numpy()
            else:
                raise RunError(f"input {name!r} ({type}) was not fed, and the file stores no value")
            for before, value in self._fed.get(name, ()):
                if before is given:
                    value.lasting = True
                    values[name] = value
                    break
            else:
                values[name] = self._take(name, type, given)
        return values

    def _take(self, name: str, type: TensorType, given: Any) -> Any:
        shown = given if hasattr(given, "dtype") else np.asarray(given)
        _check_fed(name, type, shown)
        if self._keeps:
            # Loops and bindings go by the address. A copy is no value of what was given, which may change.
            shown = np.require(shown, requirements="C")
        room = self._rooms.states.get(name)
        if room is not None and not same_memory(shown, room):
            np.copyto(room, shown)
        value = self._device.put(shown) if room is None else self._places[name]
        if self._keeps and shown is given:
            self._fed[name] = [(given, value), *self._fed.get(name, [])[:1]]
        return value

    def _call(self, step: Call, values: dict[str, Any], promised: dict[str, _Promise], call: CallBack) -> None:
        missing = [name for name in step.inputs if name not in values]
        if missing:
            raise RunError(f"{missing[0]!r} is undefined on this rank, and {step.node.op_type} reads it")
        sent, show, number = self._rooms.sent, self._device.show, step.index
        given = [sent[name] if name in sent else show(values[name]) for name in step.inputs]
        own = self._own.get(number)
        if own is None and number in self._rooms.spare:
            own = joined(given)
        room = self._rooms.lent.get(number, own)
        results = call(number, step.node, given, *([] if room is None else [room]))
        promise = _Promise(step.node, results, self._put)
        if not isinstance(results, list):
            promised.update(dict.fromkeys(step.node.outputs or [f"{number}"], promise))
        else:
            promise.settle(values, promised)

    def _put(self, names: Sequence[str], shown: Sequence[Any]) -> dict[str, Any]:
        """The values of what a call made; what has a room goes there, if the call did not put it there itself."""
        if not names or names[0] not in self._landed:
            return {name: self._device.put(each) for name, each in zip(names, shown) if name}
        # A call has its outputs in one buffer, in this order.
        if not same_memory(shown[0], self._landed[names[0]].array):
            if names[0] not in self._rooms.delivered:
                return {name: self._device.put(each) for name, each in zip(names, shown)}
            for name, each in zip(names, shown):
                np.copyto(self._rooms.delivered[name], each)
        return {name: self._landed[name] for name in names}


@dataclass(frozen=True, slots=True)
class _Promise:
    """A call under way, or its results."""

    node: Node
    results: list[Any] | Awaited
    put: Callable[[Sequence[str], Sequence[Any]], dict[str, Any]]

    def settle(self, values: dict[str, Any], promised: dict[str, _Promise]) -> None:
        """Wait for the call and put its outputs among the values."""
        results = self.results if isinstance(self.results, list) else self.results.result()
        names = self.node.outputs
        if results and len(results) != len(names):
            raise RunError(f"{self.node.op_type} {self.node.label!r} gave {len(results)} values, not {len(names)}")
        if results:
            values.update(self.put(names, results))
        for name in [name for name, promise in promised.items() if promise is self]:
            del promised[name]


def _check_fed(name: str, type: TensorType, array: Array) -> None:
    fits = type.shape is None or (
        len(type.shape) == array.ndim
        and all(size == due for size, due in zip(array.shape, type.shape) if isinstance(due, int))
    )
    if not fits or (known(type.dtype) and array_dtype(array) != type.dtype):
        raise RunError(f"input {name!r} is {type}, but was fed {array.dtype}{list(array.shape)}")
