"""Prints the result of ``gopt derive``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gopt.spmd.pass_records import format_bytes

from .render import console

if TYPE_CHECKING:
    from gopt.frontends.derive.derive import Derived


def render_derived(derived: Derived) -> None:
    """The file, the inputs fed by a run, and the confirmed gradients."""
    out = console()
    beside = f", values in {derived.data}" if derived.data else ""
    out.print(
        f"{derived.forward_nodes} forward nodes -> {derived.nodes} nodes, {derived.parameters} parameters, "
        f"{derived.states} states, {format_bytes(derived.nbytes)}"
    )
    rate = "" if derived.lr is None else f" ({derived.lr_input}: {derived.lr:g} is usual)"
    out.print(f"inputs: {', '.join(derived.inputs)}{rate}")
    out.print(f"gradients confirmed by finite differences: {derived.confirmed} of {derived.parameters}")
    for note in derived.notes:
        out.print(f"note: {note}")
    out.print(f"written to {derived.model}{beside}; gopt shard {derived.model} --ranks 2 shards it")
