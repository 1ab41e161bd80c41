"""Prints the result of ``gopt export``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .render import console, render_shards_it, render_step

if TYPE_CHECKING:
    from gopt.frontends.pytorch.check import ExportCheck
    from gopt.frontends.pytorch.export import Exported


def render_exported(exported: Exported) -> None:
    """The file, the inputs fed by a run, and the distance from eager PyTorch."""
    out = console()
    render_step(out, exported)
    if exported.draws:
        names = ", ".join(f"{name} from {draw}" for name, draw in exported.draws.items())
        out.print(f"gopt run draws, where the data does not give them: {names}")
    if exported.hyper:
        values = ", ".join(f"{name} {value}" for name, value in exported.hyper.items())
        out.print(f"gopt run feeds, where none is set: {values}")
    if exported.evaluation:
        out.print(f"evaluation: {exported.evaluation} computes {', '.join(exported.metrics)}")
    _render_check(exported.checked)
    for note in exported.notes:
        out.print(f"note: {note}")
    render_shards_it(out, exported)


def _render_check(checked: ExportCheck | None) -> None:
    out = console()
    if checked is None:
        out.print("not compared with eager PyTorch: a step without values cannot run")
        return
    worst = f"; largest difference {checked.worst:.1e} of a change, {checked.worst_state}" if checked.worst else ""
    losses = " ".join(f"{loss:.6g}" for loss in checked.losses)
    count = len(checked.losses)
    out.print(f"equal to eager PyTorch over {count} step{'s' * (count != 1)}: loss {losses}{worst}")
    if checked.rounding:
        out.print(f"compared in float64; in float32 {checked.rounding}: rounding, which training amplifies")
