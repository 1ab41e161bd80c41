"""The page of a folder with ``schedule.txt`` has the schedule, and one without it has none."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import FIXTURES

import gopt
from gopt.errors import InputError, OptionError
from gopt.offline.html_report.data import report_page
from gopt.offline.html_report.schedule_picture import schedule_picture
from gopt.schedules.builders import build_schedule
from gopt.schedules.schedule_file import to_text


def write(folder: Path, text: str) -> None:
    (folder / "schedule.txt").write_text(text, encoding="utf-8")


def test_a_folder_with_a_schedule(tmp_path: Path) -> None:
    gopt.shard(gopt.load(FIXTURES / "mlp_adamw.onnx"), 2).write(tmp_path, force=True)
    assert report_page(tmp_path).schedule is None
    write(tmp_path, to_text(build_schedule("interleaved:2", 2, 4)))
    picture = report_page(tmp_path).schedule
    assert picture is not None
    assert (picture.name, picture.micro_batches, picture.formula) == ("interleaved:2", 4, "1/9")
    assert picture.bubble == pytest.approx(1 / 9) and picture.svg.count("<title>forward") == 16
    first, second = picture.members
    assert (first.stages, second.stages) == ((0, 2), (1, 3)) and (first.actions, first.live, second.live) == (16, 5, 3)
    assert first.waits == second.waits == pytest.approx(1 / 9)


def test_a_changed_schedule_has_no_formula(tmp_path: Path) -> None:
    text = to_text(build_schedule("gpipe", 1, 2)).replace("backward     0           0", "backward     0           x")
    text = text.replace("backward     0           1", "backward     0           0").replace("  x", "  1")
    write(tmp_path, text)
    picture = schedule_picture(tmp_path)
    assert picture is not None and picture.formula is None and picture.bubble == 0


def test_a_broken_schedule_is_refused(tmp_path: Path) -> None:
    text = to_text(build_schedule("gpipe", 1, 2))
    write(tmp_path, text.replace("backward", "backwards"))
    with pytest.raises(InputError, match=r"schedule\.txt, line 11 has 'backwards'"):
        schedule_picture(tmp_path)
    write(tmp_path, text.replace("       0 forward      0           1\n", ""))
    with pytest.raises(OptionError, match="member 0 lacks the forward of stage 0, micro-batch 1"):
        schedule_picture(tmp_path)
    (tmp_path / "schedule.txt").write_bytes(b"format \xff")
    with pytest.raises(InputError, match="byte 7 is not UTF-8"):
        schedule_picture(tmp_path)
