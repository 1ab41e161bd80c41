"""Simulated schedules as timelines: in text, and as SVG."""

from __future__ import annotations

from collections.abc import Iterator

from gopt.schedules.actions import ActionKind
from gopt.schedules.simulation import Simulated, TimedAction

BOXES = 6000
"""Actions of a picture."""
_COLOURS = {
    ActionKind.FORWARD: (0x7F, 0xB2, 0xEA), ActionKind.BACKWARD: (0x7C, 0xC9, 0x9A),
    ActionKind.INPUT: (0x7C, 0xC9, 0x9A), ActionKind.WEIGHT: (0xE8, 0xB9, 0x6A),
}  # fmt: skip
"""Dark letters are legible on all, and so are all on light and dark pages."""
_PALER = 0.45
"""The part of white in the colour of a member's last stage."""
_LABEL, _ROW, _GAP = 74, 22, 4
_WIDTH, _WIDEST, _CELL, _DIGIT = 900, 4000, 15, 7
"""Pixels of a picture, and of the shortest action with a number of one digit, up to the widest picture."""


def timeline_text(simulated: Simulated, width: int = 80) -> str:
    """A line for every stage, by member, with a cell for every action: letter of the kind, and micro-batch.

    Cells too narrow for this have the letter; of actions shorter than a column, the last one shows."""
    rows = list(_stage_rows(simulated))
    plain = simulated.schedule.placement == tuple(range(len(simulated.slots)))
    labels = [f"stage {stage} " if plain else f"stage {stage} on {member} " for member, stage, _ in rows]
    margin = max(map(len, labels))
    room = max(width - margin, 1)
    makespan, shortest = simulated.makespan or 1, _shortest(simulated)
    columns = int(room * shortest / makespan) / shortest
    slots = [slot for _, _, row in rows for slot in row]
    numbered = all(len(_cell(slot)) <= end - start for slot in slots for start, end in [_columns(slot, columns)])
    lines = []
    for label, (_, _, row) in zip(labels, rows, strict=True):
        line = [" "] * room
        for slot in row:
            start, end = _columns(slot, columns or room / makespan)
            cell = _cell(slot) if numbered else _cell(slot)[0]
            line[start : max(end, start + 1)] = cell.ljust(end - start, "-" if columns else cell)
        lines.append(f"{label:{margin}}{''.join(line[:room])}".rstrip())
    kinds = ", ".join(f"{kind[0].upper()} {kind}" for kind in simulated.schedule.kinds)
    return "\n".join([*lines, f"{kinds}; members wait {100 * simulated.bubble:.1f} % of the time", ""])


def _stage_rows(simulated: Simulated) -> Iterator[tuple[int, int, list[TimedAction]]]:
    for member, row in enumerate(simulated.slots):
        for stage in dict.fromkeys(sorted(slot.action.stage for slot in row)):
            yield member, stage, [slot for slot in row if slot.action.stage == stage]


def _shortest(simulated: Simulated) -> float:
    """The time of the shortest action that takes time."""
    times = (slot.end - slot.start for row in simulated.slots for slot in row)
    return min((time for time in times if time > 0), default=1)


def _cell(slot: TimedAction) -> str:
    return f"{slot.action.kind[0].upper()}{slot.action.micro_batch}"


def _columns(slot: TimedAction, scale: float) -> tuple[int, int]:
    return round(slot.start * scale), round(slot.end * scale)


def timeline_svg(simulated: Simulated) -> str:
    """A row for every member, a box for every action with the number of its micro-batch, paler for later stages.

    Of more than ``BOXES`` actions, those that start first."""
    schedule = simulated.schedule
    slots = sorted((slot for row in simulated.slots for slot in row), key=lambda slot: slot.start)
    shown = slots[:BOXES]
    end = max((slot.end for slot in shown), default=0) or 1
    cell = _CELL + _DIGIT * (len(str(schedule.micro_batches - 1)) - 1)
    scale = min(max((_WIDTH - _LABEL) / end, cell / _shortest(simulated)), (_WIDEST - _LABEL) / end)
    wide, high = round(_LABEL + end * scale) + 2, (_ROW + _GAP) * len(simulated.slots) + 30
    about = (
        f"{len(simulated.slots)} members, {schedule.stages} stages, {schedule.micro_batches} micro-batches; members "
        f"wait {100 * simulated.bubble:.1f} % of the time"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="schedule" viewBox="0 0 {wide} {high}" width="{wide}" '
        f'height="{high}" role="img" font-family="Helvetica, Arial, sans-serif" font-size="11">',
        f"<title>Schedule: {about}</title>",
        "<style>.schedule text{fill:#11161c}.schedule .ink{fill:var(--text,#6b7785)}</style>",
    ]
    parts += [
        f'<text class="ink" x="0" y="{member * (_ROW + _GAP) + 15}">member {member}</text>'
        for member in range(len(simulated.slots))
    ]
    for slot in shown:
        left, right = _LABEL + slot.start * scale, _LABEL + slot.end * scale
        member, number = schedule.placement[slot.action.stage], str(slot.action.micro_batch)
        top = member * (_ROW + _GAP)
        parts.append(
            f'<rect x="{left:.1f}" y="{top}" width="{max(right - left - 1, 0.5):.1f}" height="{_ROW}" '
            f'fill="{_colour(simulated, slot)}"><title>{slot.action}</title></rect>'
        )
        if right - left > _DIGIT * len(number):
            parts.append(f'<text x="{(left + right - 1) / 2:.1f}" y="{top + 15}" text-anchor="middle">{number}</text>')
    at = _LABEL
    for kind in schedule.kinds:
        parts.append(f'<rect x="{at}" y="{high - 20}" width="12" height="12" fill="{_mixed(kind, 0)}"/>')
        parts.append(f'<text class="ink" x="{at + 17}" y="{high - 10}">{kind}</text>')
        at += 80
    paler = "; paler: later stages" if schedule.stages > len(simulated.slots) else ""
    left_out = f"; the first {BOXES} of {len(slots)} actions" if len(slots) > BOXES else ""
    parts.append(f'<text class="ink" x="{at}" y="{high - 10}">{about}{paler}{left_out}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _colour(simulated: Simulated, slot: TimedAction) -> str:
    """The colour of an action, paler for the later ones of a member's stages."""
    placement, stage = simulated.schedule.placement, slot.action.stage
    mine = [other for other, member in enumerate(placement) if member == placement[stage]]
    return _mixed(slot.action.kind, _PALER * mine.index(stage) / max(len(mine) - 1, 1))


def _mixed(kind: ActionKind, white: float) -> str:
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in _COLOURS[kind])
