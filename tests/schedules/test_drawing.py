"""Timelines in text and as SVG: every action once, at its time."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from drawn_schedules import draw

from gopt.schedules import drawing
from gopt.schedules.builders import build_schedule
from gopt.schedules.drawing import timeline_svg, timeline_text
from gopt.schedules.simulation import DEFAULT_SECONDS, Costs, simulate

ONE = """\
stage 0 F0F1F2F3            B0--F4B1--F5B2--F6B3--F7B4--  B5--  B6--  B7--
stage 1   F0F1F2        B0--F3B1--F4B2--F5B3--F6B4--F7B5--  B6--  B7--
stage 2     F0F1    B0--F2B1--F3B2--F4B3--F5B4--F6B5--F7B6--  B7--
stage 3       F0B0--F1B1--F2B2--F3B3--F4B4--F5B5--F6B6--F7B7--
F forward, B backward; members wait 27.3 % of the time
"""


def test_a_timeline_of_eighty_columns() -> None:
    assert timeline_text(simulate(build_schedule("1f1b", 4, 8))) == ONE


def test_stages_of_one_member_have_lines_of_their_own() -> None:
    text = timeline_text(simulate(build_schedule("zb-v", 2, 2)))
    assert [line.split("F")[0].rstrip() for line in text.split("\n")[:4]] == [
        "stage 0 on 0", "stage 3 on 0", "stage 1 on 1", "stage 2 on 1",
    ]  # fmt: skip
    assert text.count("F0") == text.count("I1") == text.count("W0") == 4


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("width", [80, 40, 8])
def test_no_line_is_wider_than_asked(seed: int, width: int) -> None:
    lines = timeline_text(simulate(draw(seed)), width).split("\n")
    assert max(map(len, lines[:-2])) <= max(width, len("stage 0 on 0 F"))


def test_long_schedules_show_letters() -> None:
    text = timeline_text(simulate(build_schedule("1f1b", 2, 200)))
    assert text.startswith("stage 0 F") or text.startswith("stage 0 B")
    assert set(text.split("\n")[1][8:]) == {"F", "B"}


def test_a_schedule_that_takes_no_time_is_drawn() -> None:
    free = Costs({(kind, stage): 0 for kind in DEFAULT_SECONDS for stage in range(2)})
    simulated = simulate(build_schedule("1f1b", 2, 2), free)
    assert simulated.makespan == simulated.bubble == 0
    assert "stage 1" in timeline_text(simulated) and "member 1" in timeline_svg(simulated)


@pytest.mark.parametrize("name", ["1f1b", "interleaved:3", "zb-v"])
def test_a_picture_has_a_box_for_every_action(name: str) -> None:
    schedule = build_schedule(name, 3, 12)
    root = ElementTree.fromstring(timeline_svg(simulate(schedule)))
    space = "{http://www.w3.org/2000/svg}"
    titles = [title.text for rect in root.iter(f"{space}rect") for title in rect]
    assert sorted(titles) == sorted(str(action) for actions in schedule.members for action in actions)
    numbers = [each.text for each in root.iter(f"{space}text") if "class" not in each.attrib]
    assert sorted(numbers) == sorted(str(action.micro_batch) for actions in schedule.members for action in actions)
    boxes = {member: [] for member in range(3)}
    for rect in root.iter(f"{space}rect"):
        if len(rect):
            boxes[int(rect.attrib["y"]) // 26].append((float(rect.attrib["x"]), float(rect.attrib["width"])))
    for row in boxes.values():
        assert all(x + width <= after for (x, width), (after, _) in zip(sorted(row), sorted(row)[1:], strict=False))


def test_of_endless_schedules_the_beginning_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "BOXES", 7)
    text = timeline_svg(simulate(build_schedule("1f1b", 2, 40)))
    assert text.count("<rect") == 7 + 2 and "the first 7 of 160 actions" in text
