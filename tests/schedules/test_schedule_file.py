"""``schedule.txt``: what is written is read, and a damaged line is named."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from drawn_schedules import draw

from gopt.errors import InputError, OptionError
from gopt.schedules.builders import build_schedule
from gopt.schedules.schedule_file import FILE, from_text, member_runs, to_text
from gopt.schedules.simulation import simulate

TEXT = to_text(build_schedule("zb-v", 2, 2))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved:2", "zb-h1", "zb-v"])
def test_a_text_is_read_as_it_was_written(name: str) -> None:
    schedule = build_schedule(name, 3, 6)
    assert from_text(to_text(schedule), "schedule.txt") == schedule


@pytest.mark.parametrize("seed", range(20))
def test_drawn_schedules_are_read_as_they_were_written(seed: int) -> None:
    schedule = draw(seed)
    assert from_text(to_text(schedule), "schedule.txt") == schedule


def test_a_user_writes_freely() -> None:
    text = "# mine\nformat gopt-schedule/1\n\nname my #1\nmembers 2\nstages 2\nmicro-batches 1\nplacement 0   1\n"
    rows = "0 forward 0 0\n1 forward 1 0\n# the turn\n1 backward 1 0\r\n 0 backward 0 0"
    assert from_text(text + rows, "mine.txt").members == build_schedule("1f1b", 2, 1).members
    assert from_text(text + rows, "mine.txt").name == "my #1"


@pytest.mark.parametrize("number", [number for number, line in enumerate(TEXT.split("\n"), 1) if line.strip("# ")])
def test_a_damaged_line_is_named(number: int) -> None:
    random = Random(number)
    lines = TEXT.split("\n")
    line = lines[number - 1]
    if line.startswith("#"):
        return
    word = random.choice(line.split()) if number != 2 else "name"
    lines[number - 1] = line.replace(word, f"{word}x", 1)
    with pytest.raises(InputError, match=rf"^schedule\.txt, line {number} (is|has|places) ") as refused:
        from_text("\n".join(lines), "schedule.txt")
    assert refused.value.hints[0].startswith("expected: ")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("format gopt-schedule/1", "format gopt-schedule/2", r"line 1 is 'format gopt-schedule/2'"),
        ("members 2", "members 0", r"line 3 has '0'"),
        ("micro-batches 2\n", "", r"line 5 is 'placement 0 1 1 0'"),
        ("placement 0 1 1 0", "placement 0 1 1 2", r"line 6 has '2'"),
        ("placement 0 1 1 0", "placement 0 1 1", r"line 6 places 3 stages"),
        (
            "       0 forward      0           1",
            "       1 forward      0           1",
            "line 10 is wrong: .* is on member 0",
        ),
        ("       0 forward      0           1", "       0 forward      0           0", "line 10 is wrong: .* twice"),
        (
            "       0 forward      0           1",
            "       0 forward      9           1",
            "line 10 is wrong: .* stages are 0 to 3",
        ),
        ("       0 forward      0           1", "       2 forward      0           1", "line 10 has '2'"),
        ("       0 forward      0           1", "       0 forward      0", "line 10 has 3 words"),
        ("       0 forward      0           1", "       0 forward      0           1e3", "line 10 has '1e3'"),
    ],
)
def test_a_wrong_line_is_named(old: str, new: str, message: str) -> None:
    assert old in TEXT
    with pytest.raises(InputError, match=message):
        from_text(TEXT.replace(old, new, 1), "schedule.txt")


def test_an_empty_text_is_refused() -> None:
    with pytest.raises(InputError, match=re.escape("schedule.txt, line 1 is ''")):
        from_text("", "schedule.txt")


def test_an_endless_schedule_is_refused() -> None:
    for key in ("members", "stages", "micro-batches"):
        with pytest.raises(OptionError, match="SCHEDULE_ACTIONS"):
            from_text(re.sub(rf"{key} \d", f"{key} 99999999999", TEXT), "schedule.txt")
    with pytest.raises(OptionError, match="SCHEDULE_ACTIONS"):
        from_text("#" * (65 << 20), "schedule.txt")


@pytest.mark.parametrize("seed", range(300))
def test_a_damaged_text_is_refused_or_a_schedule(seed: int) -> None:
    random = Random(seed)
    text = list(to_text(draw(seed % 20)))
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(text))
        text[at : at + random.choice((0, 1, 1, 30))] = random.choice(
            ("", "9", "-1", "\n", " ", "²", "\0", "forward", "0 0")
        )
    try:
        schedule = from_text("".join(text), "schedule.txt")
    except (InputError, OptionError):
        return
    assert from_text(to_text(schedule), "schedule.txt") == schedule
    with suppress(OptionError):
        simulate(schedule)


def test_a_name_of_several_lines_stays_on_one() -> None:
    schedule = replace(build_schedule("1f1b", 1, 1), name="a\nb")
    assert from_text(to_text(schedule), "schedule.txt").name == r"a\nb"


def test_phases_without_an_action_run_once_behind_all_others() -> None:
    schedule = build_schedule("1f1b", 2, 2)
    phases = ["reset", "forward", "backward", "update"]
    actions = [("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1)]
    assert member_runs(schedule, 1, (2, 2, 2), phases, Path(FILE)) == [*actions, ("reset", 0), ("update", 0)]


@pytest.mark.parametrize(
    ("sizes", "phases"),
    [((3, 2, 2), "forward backward"), ((2, 4, 2), "forward backward"), ((2, 2, 3), "forward backward"),
     ((2, 2, 2), "forward input weight")],
)  # fmt: skip
def test_a_schedule_of_another_pipeline_is_refused(sizes: tuple[int, int, int], phases: str) -> None:
    with pytest.raises(InputError, match=r"^schedule\.txt is for 2 members, 2 stages and 2 micro-batches, the ranks"):
        member_runs(build_schedule("1f1b", 2, 2), 0, sizes, phases.split(), Path(FILE))
