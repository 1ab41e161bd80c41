"""The page as text: one file that asks nothing of a network, whose names are no markup, in colours that can be read."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from helpers import FIXTURES

import gopt
from gopt.artifact.report_groups import OpGroup, Row
from gopt.offline.html_report.data import report_page
from gopt.offline.html_report.page import data_block, page_text
from gopt.offline.html_report.record import ReportPage

HOSTILE = (
    "</script><script>window.hacked=1</script>", "<img src=x onerror=window.hacked=1>", "--><!-- %%DATA%% &amp; ]]>",
    "\u2028\u2029\u0000\x1b[31m", "${window.hacked=1}", '"\'`\\', "\ud800 alone", "<!--<script>",
)  # fmt: skip
_TEXT = [("text", "back"), ("text", "panel"), ("dim", "back"), ("dim", "panel"), ("accent", "back"), ("good", "back"),
         ("bad", "back"), ("warn", "back"), ("good", "panel"), ("bad", "panel"), ("warn", "panel")]  # fmt: skip


class Tags(HTMLParser):
    """Tags with their attributes, and the texts of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._in_script = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")
            self._in_script = True

    def handle_endtag(self, tag: str) -> None:
        self._in_script = self._in_script and tag != "script"

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.scripts[-1] += data


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> ReportPage:
    out: Path = tmp_path_factory.mktemp("page") / "out"
    gopt.shard(gopt.load(FIXTURES / "mlp_sgd.onnx"), 2).write(out)
    return report_page(out)


def hostile(record: ReportPage) -> ReportPage:
    """The record with such names everywhere a user's name can stand."""
    group = OpGroup(
        pass_name=HOSTILE[0], reason=HOSTILE[1], ranks="0-1", role=HOSTILE[2], count=len(HOSTILE),
        op_types=(HOSTILE[0],), rows=(Row(HOSTILE[1], HOSTILE),),
    )  # fmt: skip
    heading = replace(record.heading, file=HOSTILE[0], loss=HOSTILE[1])
    return replace(record, folder=HOSTILE[1], heading=heading, notes=HOSTILE, removed_ops=(group,))


def test_the_data_is_the_record_and_no_name_ends_its_block(record):
    for each in (record, hostile(record)):
        block = data_block(each)
        assert not re.search("[<>&\u2028\u2029]", block)
        assert json.loads(block) == json.loads(json.dumps(each.to_json()))
        block.encode("utf-8")


def test_hostile_names_add_no_tag(record):
    plain, bad = Tags(page_text(record)), Tags(page_text(hostile(record)))
    assert [tag for tag, _ in plain.tags] == [tag for tag, _ in bad.tags]
    assert len(bad.scripts) == 3 and json.loads(bad.scripts[0])["folder"] == HOSTILE[1]


def test_numbers_that_are_not_finite_are_null(record):
    odd = replace(record, figures={"calls": float("nan"), "hidden_share": float("inf")})
    assert json.loads(data_block(odd))["figures"] == {"calls": None, "hidden_share": None}


def test_nothing_is_loaded_from_anywhere(record):
    parsed = Tags(page_text(record))
    addresses = {
        (tag, name) for tag, attrs in parsed.tags for name in attrs if name in ("src", "srcset", "data", "action")
    }
    assert addresses == set()
    assert all(attrs["href"].startswith("#") for _, attrs in parsed.tags if attrs.get("href"))
    assert not {"link", "iframe", "img", "object", "embed", "base"} & {tag for tag, _ in parsed.tags}
    own = parsed.scripts[2]
    assert not re.search(r"https?://|\bfetch\(|XMLHttpRequest|WebSocket|import\(|sendBeacon|innerHTML|eval\(", own)
    style = re.search("<style>(.*?)</style>", page_text(record), re.S)
    assert style and not re.search(r"url\(|@import", style[1])


def test_the_policy_allows_these_scripts_and_no_request(record):
    parsed = Tags(page_text(record))
    [policy] = [a["content"] for t, a in parsed.tags if a.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(each.strip().split(" ", 1) for each in (policy or "").split(";"))
    assert rules["default-src"] == "'none'" and "unsafe-inline" not in rules["script-src"]
    digests = [
        f"'sha256-{base64.b64encode(hashlib.sha256(each.encode()).digest()).decode()}'" for each in parsed.scripts[1:]
    ]
    assert rules["script-src"].split() == digests
    assert set(rules) == {"default-src", "script-src", "style-src", "img-src", "base-uri", "form-action"}


def test_the_library_has_its_licence_beside_it():
    home = Path(gopt.__file__).parent / "offline/html_report/page"
    licence = (home / "chart.umd.min.LICENSE.txt").read_text(encoding="utf-8")
    library = (home / "chart.umd.min.js").read_text(encoding="utf-8")
    version = re.search(r"Chart\.js v([\d.]+)", library)
    assert version and f"Chart.js {version[1]} " in licence
    assert "The MIT License" in licence and "Chart.js Contributors" in licence and "Jukka Kurkela" in licence


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    bright, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def test_texts_and_bars_can_be_told_from_the_ground():
    """WCAG AA: 4.5 for text, 3 for bars. The dark colours stand twice: for the system's wish and for the button's."""
    style = (Path(gopt.__file__).parent / "offline/html_report/page/style.css").read_text(encoding="utf-8")
    blocks = re.findall(r"\{([^{}]*--back:[^{}]*)\}", style)
    themes = [dict(re.findall(r"--(\w+): (#\w{6})", block)) for block in blocks]
    light, system_dark, dark = themes
    assert system_dark == dark and light["back"] != dark["back"]
    for theme in (light, dark):
        assert [pair for pair in _TEXT if contrast(theme[pair[0]], theme[pair[1]]) < 4.5] == []
        assert [name for name in theme if re.fullmatch(r"c\d", name) and contrast(theme[name], theme["back"]) < 3] == []
