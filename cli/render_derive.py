"""Prints the result of ``gopt derive``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .render import console, render_shards_it, render_step

if TYPE_CHECKING:
    from gopt.frontends.derive.derive import Derived


def render_derived(derived: Derived) -> None:
    """The file, the inputs fed by a run, and the confirmed gradients."""
    out = console()
    rate = "" if derived.lr is None else f" ({derived.lr_input}: {derived.lr:g} is usual)"
    render_step(out, derived, f"{derived.forward_nodes} forward nodes -> ", rate)
    out.print(f"gradients confirmed by finite differences: {derived.confirmed} of {derived.parameters}")
    for note in derived.notes:
        out.print(f"note: {note}")
    render_shards_it(out, derived)
