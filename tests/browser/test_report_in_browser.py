"""The page of ``gopt report`` in a browser: it draws, can be used by keys, can be read, and asks for nothing.

``tests/browser/chromium.sh`` finds Chromium, or installs Debian's in CI.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from browser import Browser, Page
from gopt.cli.main import main
from helpers import FIXTURES

import gopt
from gopt.artifact.report_groups import OpGroup, Row
from gopt.artifact.report_record import CallEntry, RankBytes, RankUsage
from gopt.offline.html_report import page_text, rank_groups, report_page
from gopt.offline.html_report.record import ReportPage
from gopt.offline.html_report.schedule_picture import schedule_picture
from gopt.schedules.builders import build_schedule
from gopt.schedules.schedule_file import to_text

pytestmark = pytest.mark.browser
ROLES = ("button", "link", "combobox", "searchbox", "checkbox", "image", "table", "region")
"""Of all that must have a name for a screen reader."""
HOSTILE = ("</script><script>window.hacked=1</script>", "<img src=x onerror=window.hacked=1>", "a" * 3000)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    found = subprocess.run([Path(__file__).with_name("chromium.sh")], capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip(found.stderr.strip().splitlines()[-1])
    browser = Browser(found.stdout.split()[0], tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out: Path = tmp_path_factory.mktemp("page") / "gpt.ranks"
    gopt.shard(gopt.load(FIXTURES / "gpt_adamw.onnx"), gopt.Mesh.parse("dp=2,shard=2,tp=2")).write(out)
    return out


@pytest.fixture(scope="module")
def record(folder: Path) -> ReportPage:
    return report_page(folder)


@pytest.fixture
def show(browser: Browser, tmp_path: Path) -> Iterator:
    opened: list[Page] = []

    def show(record: ReportPage, **options: object) -> Page:
        path = tmp_path / f"page{len(opened)}.html"
        path.write_text(page_text(record), encoding="utf-8")
        opened.append(Page(browser, path, **options))  # type: ignore[arg-type]
        page = opened[-1]
        assert page.complaints() == []
        assert page.requests() == [path.resolve().as_uri()], "the page itself, and nothing else"
        assert page.run("document.documentElement.dataset.ready") == "true"
        return page

    yield show
    for page in opened:
        page.close()


@pytest.fixture(scope="module")
def page(browser: Browser, record: ReportPage, tmp_path_factory: pytest.TempPathFactory) -> Page:
    """One page for the tests that press its keys: each begins with what it needs."""
    path = tmp_path_factory.mktemp("shared") / "page.html"
    path.write_text(page_text(record), encoding="utf-8")
    return Page(browser, path)


def many(record: ReportPage, differ: bool) -> ReportPage:
    """The record of 1,024 ranks that are all alike, or all different."""
    usages = [
        RankUsage(rank, RankBytes(4096, 1000 + rank * differ, 512), (CallEntry("AllReduce", "shard", 2, 99),))
        for rank in range(1024)
    ]
    heading = replace(record.heading, ranks=1024, mesh="shard=1024")
    return replace(
        record, heading=heading, ranks=rank_groups.alike(usages, {}), bars=rank_groups.bars(usages, {}),
        balance=rank_groups.balance(usages, {}), groups=rank_groups.traffic(usages),
    )  # fmt: skip


def painted(page: Page) -> list[int]:
    """Of each chart how many pixels have the first colour of bars."""
    found: list[int] = page.run("""[...document.querySelectorAll("canvas")].map((canvas) => {
      const colour = getComputedStyle(document.documentElement).getPropertyValue("--c1").trim();
      const bar = [...colour.match(/\\w\\w/g).map((x) => parseInt(x, 16)), 255];
      const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
      let count = 0;
      for (let at = 0; at < data.length; at += 4) count += bar.every((part, index) => data[at + index] === part);
      return count;
    })""")
    return found


@pytest.mark.parametrize("dark", [False, True])
def test_every_chart_is_drawn_in_both_themes(show, record, dark):
    page = show(record, dark=dark)
    assert len(painted(page)) == 3 and min(painted(page)) > 500
    ground = page.run("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(17, 22, 28)" if dark else "rgb(255, 255, 255)")


def test_the_button_changes_the_theme_and_the_charts_follow(page):
    page.run("document.getElementById('theme').focus()")
    for label in ("light", "dark"):
        page.press("Enter")
        assert page.run("document.getElementById('theme').textContent") == f"Colours: {label}"
    assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(17, 22, 28)"
    assert min(painted(page)) > 500, "in the dark theme's colour"
    page.press("Enter")
    assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


def rows(page: Page) -> list[str]:
    found: list[str] = page.run("[...document.querySelectorAll('#operators tbody tr')].map((row) => row.innerText)")
    return found


def test_operators_are_searched_filtered_sorted_and_turned_by_keys(page, record):
    assert len(rows(page)) == 50
    status = "document.querySelector('#operators .pager [role=status]').textContent"
    every = page.run(status)
    assert every.startswith("1 to 50 of ")
    page.run("document.getElementById('search').focus()")
    page.type("wte.weight mul")
    page.press("Enter")
    found = rows(page)
    assert found and all("wte.weight" in row for row in found) and len(found) < 50
    page.run("document.getElementById('search').value = ''")
    page.run("const f = document.getElementById('filter-what'); f.value = '1'; f.dispatchEvent(new Event('change'))")
    added = sum(each.count for each in record.added_ops)
    assert page.run(status).endswith(f"of {added} rows") and all("added operator" in row for row in rows(page))
    page.run("document.querySelectorAll('#operators th button')[1].focus()")
    page.press("Enter")
    assert page.run("document.querySelectorAll('#operators th')[1].getAttribute('aria-sort')") == "ascending"
    names = [row.split("\t")[1] for row in rows(page)]
    assert names == sorted(names)
    page.run("[...document.querySelectorAll('#operators form button')].at(-1).click()")
    page.run("document.querySelectorAll('#operators .pager button')[1].focus()")
    page.press("Enter")
    page.until(f"{status}.startsWith('51 to 100 of ')")


def test_the_timeline_moves_and_zooms_by_keys(page):
    status = "document.querySelector('#timeline [role=status]').textContent"
    whole = page.run(status)
    page.run("document.querySelector('#timeline canvas').focus()")
    seen = [whole]
    for key in ("+", "+", "ArrowRight", "-"):
        page.press(key)
        seen.append(page.run(status))
    assert len(set(seen)) == 5
    page.press("Home")
    assert page.run(status) == whole


def test_every_chart_has_a_table_and_every_control_a_name(page):
    page.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    page.run("new Promise((done) => setTimeout(done, 50))")
    for part in ("memory", "traffic", "timeline"):
        assert page.run(f"document.querySelectorAll('#{part} canvas[role=img][aria-label] ').length") == 1
        assert page.run(f"document.querySelectorAll('#{part} tbody tr').length") > 0
    nodes = page.send("Accessibility.getFullAXTree")["nodes"]
    controls = [node for node in nodes if not node["ignored"] and node["role"]["value"] in ROLES]
    assert len(controls) > 20
    unnamed = [node["backendDOMNodeId"] for node in controls if not node.get("name", {}).get("value")]
    told = [page.send("DOM.describeNode", backendNodeId=each)["node"] for each in unnamed]
    assert [(node["nodeName"], node["attributes"]) for node in told] == []
    levels = page.run("[...document.querySelectorAll('h1, h2, h3')].map((each) => Number(each.tagName[1]))")
    assert levels[0] == 1 and levels.count(1) == 1 and all(b <= a + 1 for a, b in pairwise(levels))


@pytest.mark.parametrize("dark", [False, True])
def test_a_schedule_is_drawn_in_both_themes(show, record, tmp_path, dark):
    (tmp_path / "schedule.txt").write_text(to_text(build_schedule("zb-v", 4, 8)), encoding="utf-8")
    assert "schedule" not in show(record, dark=dark).run("document.getElementById('nav').textContent").lower()
    page = show(replace(record, schedule=schedule_picture(tmp_path)), dark=dark)
    assert page.run("document.querySelectorAll('#schedule rect title').length") == 3 * 8 * 8
    box = page.run("JSON.stringify(document.querySelector('#schedule svg').getBoundingClientRect())")
    assert json.loads(box)["width"] > 800 and json.loads(box)["height"] > 100
    label = page.run("getComputedStyle(document.querySelector('#schedule svg .ink')).fill")
    assert label == page.run("getComputedStyle(document.body).color")
    assert page.run("document.querySelector('#schedule tbody').innerText").split()[:4] == ["0", "0,", "7", "48"]


@pytest.mark.parametrize("differ", [False, True])
def test_a_thousand_ranks_are_few_bars(show, record, differ):
    page = show(many(record, differ))
    height = page.run("document.querySelector('#memory canvas').clientHeight")
    assert height < (1000 if differ else 200)
    page.run("document.querySelector('#memory details').open = true")
    page.run("new Promise((done) => setTimeout(done, 50))")
    assert page.run("document.querySelectorAll('#memory tbody tr').length") == (50 if differ else 1)


def test_hostile_names_are_shown_as_they_are(show, record):
    group = OpGroup(
        pass_name=HOSTILE[0], reason=HOSTILE[1], ranks="0-1", role=HOSTILE[1], count=3, op_types=HOSTILE[:1],
        rows=(Row(HOSTILE[1], HOSTILE),),
    )  # fmt: skip
    heading = replace(record.heading, file=HOSTILE[0])
    page = show(replace(record, folder=HOSTILE[1], heading=heading, notes=HOSTILE, removed_ops=(group,)))
    assert page.run("window.hacked") is None
    assert page.run("document.getElementById('title').textContent") == f"{HOSTILE[0]} · {HOSTILE[1]}"
    assert page.run("document.querySelectorAll('main img, main script').length") == 0
    assert any(HOSTILE[0] in row for row in rows(page))
    assert page.run("document.documentElement.scrollWidth <= innerWidth"), "a name of 3,000 letters is broken"


def test_a_narrow_screen_scrolls_down_alone_and_the_first_key_skips_to_the_content(show, record):
    page = show(record, width=390, height=800)
    page.press("Tab")
    assert page.run("document.activeElement.className") == "skip"
    assert page.run("document.documentElement.scrollWidth") <= 390


def test_a_split_a_trace_and_a_proof(show, tmp_path):
    out = tmp_path / "split"
    model, counts = str(FIXTURES / "mlp_adamw.onnx"), ["--trainers", "2", "--servers", "2"]
    assert main(["split", model, *counts, "-o", str(out), "-q"]) == 0
    trace, proof = tmp_path / "trace.json", tmp_path / "proof.json"
    trace.write_text(json.dumps({"traceEvents": [
        {"name": "segment of 3", "ph": "X", "pid": rank, "tid": 0, "ts": 10.0 + 4000 * step, "dur": 3000}
        for rank in range(2) for step in range(3)
    ]}))  # fmt: skip
    proof.write_text(json.dumps({
        "format": "gopt-verification/1", "outcome": "unconfirmed", "tolerance": 1e-4, "steps": 1, "ranks": 2,
        "compared": 7, "worst": {"as it is": {"name": "fc1.weight", "error_over_tolerance": None}}, "gradients": [],
        "unconfirmed": [{"name": "fc2.bias", "why": "it does not move"}], "notes": [],
    }))  # fmt: skip
    page = show(report_page(out, trace=trace, verification=proof))
    assert min(painted(page)) > 500
    text = page.run("document.getElementById('checks').innerText")
    assert "NOT confirmed: 7 comparisons" in text and "not finite" in text and "it does not move" in text
    assert "trainers 0-1" in page.run("Chart.getChart(document.querySelector('#memory canvas')).data.labels")


def test_tables_fit_a_narrow_page_or_keep_the_names_of_their_rows(
    browser: Browser, folder: Path, tmp_path: Path
) -> None:
    assert main(["report", str(folder), "--html", str(tmp_path / "page.html"), "-q"]) == 0
    page = Page(browser, tmp_path / "page.html", width=400)
    assert page.run("document.documentElement.scrollWidth") <= 400
    wide = "[...document.querySelectorAll('.scroll')].filter((each) => each.scrollWidth > each.clientWidth)"
    left = (
        f"{wide}.map((each) => {{ each.scrollLeft = 60; return [each.getBoundingClientRect().left, "
        "each.querySelector('tbody tr').firstElementChild.getBoundingClientRect().left]; })"
    )
    assert all(abs(box - name) < 2 for box, name in page.run(left))
    page.close()
