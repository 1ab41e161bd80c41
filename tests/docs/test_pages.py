"""Every command block of every page runs, in order, or says why it does not."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import page_blocks
import pytest
from helpers import ROOT

EXAMPLES = (ROOT / "examples/README.md", ROOT / "examples/llama/README.md")
PATHS = [ROOT / "README.md", *EXAMPLES, *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in PATHS}
COMMAND = re.compile(r"^\s*\$? ?(gopt [a-z]|python3? |pip |pytest )", re.M)

NOT_RUN = {
    "README.md": 3,
    "docs/adding-a-pass.md": 1,
    "docs/benchmarks.md": 7,
    "docs/coming-from-deepspeed.md": 3,
    "docs/coming-from-fsdp.md": 3,
    "docs/comparison.md": 3,
    "docs/disk.md": 1,
    "docs/export.md": 2,
    "docs/plan.md": 1,
    "docs/reproducers.md": 1,
    "docs/robustness.md": 1,
    "docs/running.md": 4,
    "docs/checkpoints.md": 1,
    "docs/tests.md": 1,
    "docs/tutorial.md": 1,
    "examples/README.md": 3,
    "examples/llama/README.md": 2,
}
"""Blocks of each page that do not run here. A new one needs a reason on the page and a number here."""

SLOW = {"docs/coming-from-megatron.md", "docs/reproducers.md", "docs/spatial.md", "docs/tensor-parallel.md"}
"""Pages that take longer than others: they run with ``-m slow``."""


def runs(text: str) -> bool:
    """Whether a page has a block of commands that is run."""
    return any(block.language == "bash" and not block.not_run for block in page_blocks.blocks(text))


PAGES = [
    pytest.param(name, marks=pytest.mark.slow if name in SLOW else []) for name, text in TEXTS.items() if runs(text)
]


@pytest.mark.parametrize("name", PAGES)
def test_the_commands_of_a_page_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("fixtures", "examples"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    for target, source in page_blocks.files(TEXTS[name]).items():
        shutil.copy(ROOT / source, target)
    assert page_blocks.run(TEXTS[name]) > 0


def test_blocks_that_do_not_run_are_counted() -> None:
    left_out = {
        name: sum(block.not_run is not None for block in page_blocks.blocks(text)) for name, text in TEXTS.items()
    }
    assert {name: count for name, count in left_out.items() if count} == NOT_RUN


WRITTEN = {"docs/report.md": "tests/docs/test_report_page.py", "docs/golden.md": "tests/docs/test_golden_page.py"}
"""Pages whose transcripts a script writes, and the tests that compare them."""


@pytest.mark.parametrize("name", TEXTS)
def test_commands_stand_in_bash_blocks(name: str) -> None:
    others = [block for block in page_blocks.blocks(TEXTS[name]) if block.language in ("", "text", "sh", "console")]
    if name in WRITTEN:
        assert (ROOT / WRITTEN[name]).is_file()
        others = [block for block in others if not block.text.startswith("$ gopt ")]
    lines = [block.line for block in others if COMMAND.search(block.text)]
    assert lines == [], "commands stand in ```bash blocks, which are run, or behind <!-- not run: REASON -->"


def test_the_runner_sees_what_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fence = "```bash\n{}\n```\n"
    with pytest.raises(AssertionError, match="line 1"):
        page_blocks.run(fence.format("gopt inspect nothing.onnx"))
    with pytest.raises(AssertionError, match="ended with 7"):
        page_blocks.run(fence.format("true && exit 7"))
    assert (
        page_blocks.run(
            fence.format("gopt inspect nothing.onnx  # exit code 3: no such file\nfalse | true # exit code 1")
        )
        == 2
    )
    assert page_blocks.run("<!-- not run: a\nreason -->\n" + fence.format("false")) == 0


def test_python_blocks_run_or_become_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (
        "```python\n# make.py\nopen('made', 'w').close()\n```\n```bash\npython make.py\n```\n```python\nassert 0\n```\n"
    )
    with pytest.raises(AssertionError):
        page_blocks.run(page)
    assert Path("made").is_file()
    page_blocks.run("```toml\n# a/b.toml\nx = 1\n```\n```toml\ny = 1\n```\n")
    assert Path("a/b.toml").read_text().endswith("x = 1\n")
    assert page_blocks.files("<!-- files: a=b/c, d=e -->") == {"a": "b/c", "d": "e"}
