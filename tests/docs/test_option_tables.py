"""Every option that a page names exists, with the values and defaults that it says; docs/options.md has them all."""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import dataclass

import click
import pytest
from helpers import ROOT, script_of

from gopt.errors import GoptError
from gopt.passes import PASSES
from gopt.passes.base import build_options, option_table

PATHS = [ROOT / "README.md", ROOT / "examples/README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = {path.name if path.parent.name != "examples" else "examples.md": path.read_text("utf-8") for path in PATHS}
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
NAMED = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
OF_PASS = re.compile(r"-O ([a-z-]+)\.([a-z0-9-]+)(?:=(\S+))?")
ELSEWHERE = re.compile(r"^(python|pip|pytest|mkdocs|mpiexec|unshare|nsys|cd |srun|torchrun|deepspeed|ruff|python3)\b")
"""Commands of others: their options are theirs."""
FOREIGN = {"--help", "--version", "--debug"}
NOT_THERE = {"export.md": {"--dynamic"}}
"""Options that a page says gopt has not."""
ALL = re.compile(r"<!-- all options: (?:pass ([\w-]+)|gopt ([\w -]+?))(?: but (.+?))? -->\n(.+?)(?:\n\n|\Z)", re.S)


SCRIPT = script_of("docs/options.py")
OPTIONS = {name: SCRIPT.options(name, command) for name, command in SCRIPT.commands()}
KNOWN = {option for every in OPTIONS.values() for each in every for option in each.names} | FOREIGN
OF_SCRIPTS = {
    name
    for folder in ("benchmarks", "tests", "examples")
    for path in (ROOT / folder).rglob("*.py")
    for name in re.findall(r"add_argument\(\s*\"(--[a-z-]+)\"", path.read_text(encoding="utf-8"))
}
"""Options of the repository's own scripts, which pages for developers name."""
FOR_DEVELOPERS = {"benchmarks.md", "comparison.md", "tests.md", "disk.md", "steps.md"}


@dataclass(frozen=True, slots=True)
class Wrong:
    """What a page says, and why that is not so."""

    span: str
    why: str


def wrong(text: str, foreign: bool = False, also: Set[str] = frozenset()) -> list[Wrong]:
    """Options in inline code that gopt has not; of tables with foreign options only what follows the first column."""
    plain = re.sub(r"^( *)(```+).*?^\1\2$", "", text, flags=re.M | re.S)
    if foreign:
        plain = re.sub(r"^\| .+? \| ", "| ", plain, flags=re.M)
        plain = re.sub(r"^\*\*What gopt does not have\*\*.*?\n\n", "", plain, flags=re.M | re.S)
    return [each for span in SPAN.findall(plain) for each in _wrong_span(span, KNOWN | also)]


def _wrong_span(span: str, known: Set[str]) -> list[Wrong]:
    if ELSEWHERE.match(span):
        return []
    found = [Wrong(span, f"no command has {name}") for name in NAMED.findall(span) if name not in known]
    command = re.match(r"gopt ((?:golden )?[a-z-]+)", span)
    if command and command[1] in OPTIONS and not found:
        own = {option for each in OPTIONS[command[1]] for option in each.names} | FOREIGN
        found = [
            Wrong(span, f"gopt {command[1]} has no {name}")
            for name in NAMED.findall(span.split(" -- ")[0])
            if name not in own
        ]
    for name, option, value in OF_PASS.findall(span):
        try:
            build_options(PASSES[name], {option: value} if value and not value[0].isupper() else {})
            if option not in {row[0] for row in option_table(PASSES[name])}:
                found.append(Wrong(span, f"pass {name} has no option {option}"))
        except (GoptError, KeyError) as error:
            found.append(Wrong(span, str(error)))
    return found + _wrong_choice(span)


def _wrong_choice(span: str) -> list[Wrong]:
    """A value that no command takes for its option: ``--stage 4``."""
    found = []
    for name, value in re.findall(r"(--[a-z][a-z0-9-]*)[ =]([a-z][\w-]*)", span):
        takers = [each for every in OPTIONS.values() for each in every if name in each.names]
        choices = [each.choices for each in takers if each.choices]
        if takers and len(choices) == len(takers) and all(value not in each for each in choices):
            found.append(Wrong(span, f"{name} takes {', '.join(choices[0])}"))
        if takers and all(not each.takes for each in takers):
            found.append(Wrong(span, f"{name} takes no value"))
    return found


@pytest.mark.parametrize("name", PAGES)
def test_every_option_on_a_page_exists(name: str) -> None:
    also = NOT_THERE.get(name, set()) | (OF_SCRIPTS if name in FOR_DEVELOPERS else set())
    assert wrong(PAGES[name], foreign=name.startswith("coming-from"), also=also) == []


def test_every_page_for_others_names_options() -> None:
    pages = [text for name, text in PAGES.items() if name.startswith("coming-from")]
    assert len(pages) == 4 and all(len(NAMED.findall(text)) > 10 for text in pages)


def test_what_is_wrong_is_found() -> None:
    text = (
        "`--stag 2` `gopt run --stage 2` `-O shard.persit=3` `-O shard.style=x` `-O shart.x` `--partition cols` "
        "`--force x` `pip install --x` `--stage 2` `--partition rows`\n```bash\ngopt --y\n```\n| `--a` | `--b` |\n"
    )
    assert [each.span for each in wrong(text)] == [
        "--stag 2", "gopt run --stage 2", "-O shard.persit=3", "-O shard.style=x", "-O shart.x", "--partition cols",
        "--force x", "--a", "--b",
    ]  # fmt: skip
    assert [each.span for each in wrong("| `--a` | `--b` |\n", foreign=True)] == ["--b"]


def _listed(table: str) -> list[str]:
    return [cell.strip("`") for row in re.findall(r"^\| (.+?) \|", table, re.M)[1:] for cell in SPAN.findall(row)]


@pytest.mark.parametrize("name", [name for name, text in PAGES.items() if ALL.search(text)])
def test_a_table_of_all_options_has_them_all(name: str) -> None:
    for found in ALL.finditer(PAGES[name]):
        listed = {cell.split(" ")[0] for cell in _listed(found[4]) if cell[0] != "-" or cell[:2] == "--"}
        if found[1]:
            options = {row[0] for row in option_table(PASSES[found[1]])}
        else:
            options = {max(each.names, key=len) for each in OPTIONS[found[2]]}
        left_out = set((found[3] or "").split(", ")) - {""}
        assert left_out <= options and listed == options - left_out


def test_pages_have_tables_of_all_options() -> None:
    marked = {name: len(ALL.findall(text)) for name, text in PAGES.items() if ALL.search(text)}
    assert marked.keys() >= {"configuration.md", "collectives.md", "golden.md"}


def test_defaults_in_help_are_those_of_the_options() -> None:
    """Help may say a default in its own words; where it is one word, it is the value."""
    checked = 0
    for name, command in SCRIPT.commands():
        for option in (each for each in command.params if isinstance(each, click.Option)):
            told = SCRIPT.SAID.search(option.help or "")
            value = SCRIPT.default_of(name, option)
            if told and value and " " not in told[1]:
                assert told[1] == value, (name, option.opts)
                checked += 1
    assert checked > 3


@pytest.mark.parametrize("name", ["parameter-server.md", "export.md", "coming-from-deepspeed.md"])
def test_defaults_on_pages_are_those_of_the_options(name: str) -> None:
    """``--placement bytes | ... (the default)`` and ``--minimum N | ... (8192)``."""
    defaults = {option: each.default.strip("`") for each in OPTIONS["split"] for option in each.names}
    rows = re.findall(r"^\| `(--[a-z-]+) ([\w-]+)` \| (.*) \|$", PAGES[name], re.M)
    for option, value, text in rows:
        if "(the default)" in text:
            assert defaults.get(option) == value, option
        if option in defaults and (number := re.search(r"\((\d+)\)", text)):
            assert defaults[option] == number[1], option


def test_the_page_of_options_is_what_the_script_makes() -> None:
    assert SCRIPT.PAGE.read_text(encoding="utf-8") == SCRIPT.page(), "python docs/options.py writes it"


def test_every_option_is_on_the_page_of_options() -> None:
    text = PAGES["options.md"]
    assert len(KNOWN) > 90 and [name for name in sorted(KNOWN - FOREIGN) if f"`{name}`" not in text] == []
