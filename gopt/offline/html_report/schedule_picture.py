"""The schedule of pipeline stages on the page: a picture, and what members wait and hold."""

from __future__ import annotations

from pathlib import Path

from gopt.offline.html_report.record import MemberRow, SchedulePicture
from gopt.schedules.builders import build_schedule, is_name
from gopt.schedules.drawing import timeline_svg
from gopt.schedules.schedule_file import FILE, read_schedule
from gopt.schedules.simulation import bubble_formula, simulate


def schedule_picture(folder: Path) -> SchedulePicture | None:
    """The schedule of a folder, if there is one; raises InputError for a broken file, OptionError for a schedule that
    cannot run."""
    if not (folder / FILE).is_file():
        return None
    schedule = read_schedule(folder / FILE)
    simulated = simulate(schedule)
    size = (schedule.name, len(schedule.members), schedule.micro_batches)
    formula = bubble_formula(*size) if is_name(schedule.name) and schedule == build_schedule(*size) else None
    rows = [
        MemberRow(
            member,
            tuple(stage for stage, home in enumerate(schedule.placement) if home == member),
            len(slots),
            1 - sum(slot.end - slot.start for slot in slots) / simulated.makespan,
            simulated.peak_live[member],
        )
        for member, slots in enumerate(simulated.slots)
    ]
    return SchedulePicture(
        schedule.name,
        schedule.micro_batches,
        simulated.bubble,
        None if formula is None else str(formula),
        timeline_svg(simulated),
        tuple(rows),
    )
