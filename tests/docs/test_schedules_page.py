"""docs/schedules.md: the file on the page is read, and the timeline is what gopt draws."""

from __future__ import annotations

import page_blocks
from helpers import ROOT

from gopt.schedules.builders import NAMES, build_schedule
from gopt.schedules.schedule_file import from_text, to_text

TEXT = (ROOT / "docs/schedules.md").read_text(encoding="utf-8")


def test_the_blocks_of_the_page(capsys) -> None:
    file, script, drawing = (block for block in page_blocks.blocks(TEXT))
    assert file.text == to_text(build_schedule("1f1b", 2, 2))
    assert from_text(file.text, "schedule.txt") == build_schedule("1f1b", 2, 2)
    exec(compile(script.text, "docs/schedules.md", "exec"), {})
    assert capsys.readouterr().out.strip() == drawing.text.strip()


def test_the_table_has_every_schedule() -> None:
    assert [line.split("`")[1] for line in TEXT.splitlines() if line.startswith("| `")] == list(NAMES)
