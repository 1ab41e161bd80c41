"""Checks the keys of trainers and servers in a manifest: each key's states on the server, and that keys tile
parameters.

Already checked: the servers' states (``server_plan_check``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

from gopt.analysis.training import StateKind
from gopt.artifact.manifest import Manifest
from gopt.artifact.manifest_entries import LocalState
from gopt.artifact.server_entries import KeyEntry, KeyKind, ServerPlanEntry
from gopt.errors import InputError
from gopt.ir.types import known, overflows
from gopt.text.sanitize import show

_PS = "parameter_server"
_WIRES = ("float16", "bfloat16")


def check_keys(
    name: str, manifest: Manifest, entry: ServerPlanEntry, states_of: Sequence[Mapping[str, LocalState]]
) -> None:  # fmt: skip
    """Refuse keys unlike the servers' states.

    ``name``: the manifest's file. ``states_of``: each server's states by input. Raises InputError naming the key. Takes
    time linear in the manifest.
    """
    _Keys(name, manifest, entry, states_of).check()


class _Keys:
    def __init__(
        self, name: str, manifest: Manifest, entry: ServerPlanEntry, states: Sequence[Mapping[str, LocalState]]
    ) -> None:  # fmt: skip
        self.name, self.manifest, self.entry, self.held = name, manifest, entry, states
        self.states = {state.tensor: state for state in manifest.states}
        self.everywhere = {
            input: state for input, state in states[0].items() if all(row.get(input) == state for row in states[1:])
        }
        """States that are equal on every server."""

    def check(self) -> None:
        buckets: dict[int, tuple[int, KeyEntry]] = {}
        ranges: dict[str, list[tuple[int, int, int]]] = {}
        for index, key in enumerate(self.entry.keys):
            self._key(index, key)
            self._bucket(index, key, buckets)
            for piece in key.pieces:
                ranges.setdefault(piece.tensor, []).append((piece.start, piece.stop, index))
        self._tiled(ranges)

    def _refuse(self, where: str, what: str) -> NoReturn:
        raise InputError(f"{self.name}: {where}: {what}")

    def _key(self, index: int, key: KeyEntry) -> None:
        where = f"{_PS}.keys[{index}]"
        if key.server is not None and key.server >= self.entry.servers:
            self._refuse(f"{where}.server", f"{key.server}, there are {self.entry.servers} servers")
        if not known(key.dtype) or key.dtype == "string":
            self._refuse(f"{where}.dtype", f"{show(key.dtype)} is not a numeric type")
        if key.wire != key.dtype and key.wire not in _WIRES:
            self._refuse(f"{where}.wire", f"{show(key.wire)} is neither {key.dtype}, float16 nor bfloat16")
        if overflows(key.shape):
            self._refuse(f"{where}.shape", "a tensor of 2**63 bytes or more")
        if key.kind is KeyKind.PARAMETER:
            self._parameter(where, key)
        else:
            self._beside(where, key)

    def _parameter(self, where: str, key: KeyEntry) -> None:
        if not key.pieces:
            self._refuse(f"{where}.pieces", "a parameter's key is of at least one piece")
        for number, piece in enumerate(key.pieces):
            state = self.states.get(piece.tensor)
            if state is None or state.kind is not StateKind.PARAMETER:
                self._refuse(f"{where}.pieces[{number}].tensor", f"{show(piece.tensor)} is not a parameter")
            if state.dtype != key.dtype:
                self._refuse(f"{where}.dtype", f"{key.dtype}, but {show(piece.tensor)} is {state.dtype}")
        elements = sum(piece.elements for piece in key.pieces)
        if key.elements != elements:
            self._refuse(f"{where}.shape", f"{key.elements} elements, its pieces have {elements}")
        if not key.inputs or len(key.inputs) != len(key.outputs):
            self._refuse(f"{where}.inputs", f"{len(key.inputs)} inputs and {len(key.outputs)} outputs")
        if key.wire != key.dtype and key.dtype not in ("float32", "float64"):
            self._refuse(f"{where}.wire", f"{show(key.wire)}, but elements of {key.dtype} travel as they are")
        states = self._held(where, key)
        if states[key.inputs[0]].pieces != key.pieces:
            self._refuse(f"{where}.pieces", f"the server holds other pieces in {show(key.inputs[0])}")

    def _held(self, where: str, key: KeyEntry) -> Mapping[str, LocalState]:
        """Return the states on a key's servers, with all inputs and outputs of the key."""
        states = self.everywhere if key.server is None else self.held[key.server]
        who = "every server" if key.server is None else f"server {key.server}"
        for number, (input, output) in enumerate(zip(key.inputs, key.outputs)):
            if input not in states:
                self._refuse(f"{where}.inputs[{number}]", f"{show(input)} is not a state of {who}")
            if states[input].output != output:
                self._refuse(f"{where}.outputs[{number}]", f"{show(output)} does not replace {show(input)}")
        return states

    def _beside(self, where: str, key: KeyEntry) -> None:
        """Check a key beside the keys of parameters: a single number on all servers, unless a state."""
        state = key.kind is KeyKind.STATE
        if key.server is not None and not state:
            self._refuse(f"{where}.server", f"every server has a {key.kind}: it must be null")
        if key.pieces:
            self._refuse(f"{where}.pieces", f"a {key.kind} cannot have pieces")
        if key.elements != 1 and not state:
            self._refuse(f"{where}.shape", f"a {key.kind} is one number, not {key.elements}")
        if (key.kind is KeyKind.VALUE) != bool(key.gradient):
            self._refuse(f"{where}.gradient", f"{show(key.gradient)}: of these keys a value alone is pushed")
        counts = {KeyKind.VALUE: (0, 0), KeyKind.METRIC: (0, 1)}.get(key.kind, (1, 1))
        if (len(key.inputs), len(key.outputs)) != counts:
            self._refuse(f"{where}.inputs", f"a {key.kind} has {counts[0]} inputs and {counts[1]} outputs")
        if key.inputs:
            self._whole(where, key)
        elif key.kind is KeyKind.METRIC:
            shown = {output.name for output in self.manifest.common.outputs} - {*self.manifest.losses}
            if key.outputs[0] not in shown:
                self._refuse(f"{where}.outputs[0]", f"{show(key.outputs[0])} is not a metric")

    def _whole(self, where: str, key: KeyEntry) -> None:
        """Check the key of a state: its servers hold the whole state, in the key's type."""
        pieces = self._held(where, key)[key.inputs[0]].pieces
        state = self.states.get(pieces[0].tensor) if len(pieces) == 1 else None
        if state is None or pieces[0].elements != key.elements:
            self._refuse(f"{where}.inputs[0]", f"{show(key.inputs[0])} is not the whole of a state")
        if (key.dtype, key.shape) != (state.dtype, state.shape):
            self._refuse(f"{where}.shape", f"{key.dtype}{list(key.shape)}, but {show(state.tensor)} is {state.type}")

    def _bucket(self, index: int, key: KeyEntry, buckets: dict[int, tuple[int, KeyEntry]]) -> None:
        """Keys of a bucket travel in one message between the same two endpoints."""
        where = f"{_PS}.keys[{index}].bucket"
        if key.bucket >= len(self.entry.keys):
            self._refuse(where, f"{key.bucket}, but {len(self.entry.keys)} keys need no more buckets than that")
        owner, entry = buckets.setdefault(key.bucket, (index, key))
        if (key.kind, key.server, key.wire) != (entry.kind, entry.server, entry.wire):
            self._refuse(where, f"{key.bucket} has key {owner} too, of another server, kind or type")
        if owner != index and key.kind is not KeyKind.PARAMETER:
            self._refuse(where, f"{key.bucket} has key {owner} too: a {key.kind} travels alone")

    def _tiled(self, ranges: dict[str, list[tuple[int, int, int]]]) -> None:
        """Every element of a parameter with a key is in exactly one key."""
        for tensor, bounds in ranges.items():
            ordered = sorted(bounds)
            end = 0
            for start, stop, index in ordered:
                if start != end or stop < start:
                    what = f"elements {min(start, end)} to {max(start, end)} of {show(tensor)}"
                    fault = "are in another key too" if start < end else "are in no key"
                    self._refuse(f"{_PS}.keys[{index}].pieces", f"{what} {fault}")
                end = stop
            if end != self.states[tensor].type.elements:
                index = ordered[-1][2]
                what = f"{show(tensor)} ends at {end} of {self.states[tensor].type.elements} elements"
                self._refuse(f"{_PS}.keys[{index}].pieces", what)
