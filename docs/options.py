"""Write docs/options.md, every option of every command and pass: ``python docs/options.py``."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
from gopt.cli.main import COMMANDS, group

from gopt.parameter_server.options import SplitOptions
from gopt.passes import PASSES
from gopt.passes.base import option_table

PAGE = Path(__file__).with_name("options.md")
INTRO = """\
# Options

Every option of every command and every pass. `python docs/options.py` writes this page from the commands themselves; a
test compares them. [Configuration](configuration.md) explains those of `gopt shard`, [Parameter
server](parameter-server.md) those of `gopt split`. Where a table gives no default, the text does, or there is none.
"""
COMMON = ("--quiet", "--verbose", "--json", "--reproducer", "--reproducer-values")
"""Options that most commands share: they have a table of their own."""
SAID = re.compile(r" ?\[default: (.+)\]$")
"""A default that the help says itself."""


@dataclass(frozen=True, slots=True)
class Option:
    """An option as a user types it."""

    names: tuple[str, ...]
    takes: str
    """Its value as help shows it; empty for a flag."""
    choices: tuple[str, ...]
    default: str
    """Empty where there is none, or where it depends on something."""
    text: str

    @property
    def row(self) -> str:
        """A line of a table."""
        cells = (
            ", ".join(f"`{name}`" for name in self.names),
            self.takes and f"`{self.takes}`",
            self.default,
            self.text,
        )
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def commands(parent: click.Group = group, prefix: str = "") -> Iterator[tuple[str, click.Command]]:
    """Every command with its name, such as ``golden check``."""
    context = click.Context(parent)
    for name in parent.list_commands(context):
        command = parent.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, f"{prefix}{name} ")
        yield prefix + name, command


def options(name: str, command: click.Command) -> list[Option]:
    """The options of a command, but for --help."""
    context = click.Context(command)
    found = []
    for each in command.params:
        if isinstance(each, click.Option) and not each.hidden:
            choices = tuple(map(str, each.type.choices)) if isinstance(each.type, click.Choice) else ()
            takes = "" if each.is_flag else _takes(each.make_metavar(context))
            text = re.sub(r"\s+", " ", each.help or "").strip()
            told = SAID.search(text)
            default = told[1] if told else f"`{value}`" if (value := default_of(name, each)) else ""
            found.append(Option((*each.opts, *each.secondary_opts), takes, choices, default, SAID.sub("", text)))
    return found


def _takes(metavar: str) -> str:
    """A value as a table shows it: N for a number."""
    return "N" if metavar.startswith(("INTEGER", "FLOAT")) else metavar.strip("[]")


def default_of(command: str, option: click.Option) -> str:
    """The default of an option, or of the record or pass that it sets; empty where there is none."""
    name = max(option.opts, key=len)[2:]
    value = option.default
    if isinstance(value, bool) or value in (None, "") or "UNSET" in repr(value):
        value = None
    if value is None and command == "split":
        value = {each.name.replace("_", "-"): each.default for each in dataclasses.fields(SplitOptions)}.get(name)
    if value is None and command == "shard" and not option.is_flag:
        value = next((row[2] for spec in PASSES.values() for row in option_table(spec) if row[0] == name), None)
        value = None if value == "auto" else value
    value = getattr(value, "value", value)
    plain = isinstance(value, str | int | float) and not isinstance(value, bool)
    return str(value) if plain else ""


def page() -> str:
    """The page as it should stand in docs/options.md."""
    every = {name: options(name, command) for name, command in commands()}
    shared = {max(each.names, key=len): each for name in every for each in every[name]}
    head = ["| option | value | default | what it does |", "|---|---|---|---|"]
    parts = [INTRO, "## Of most commands\n", *head, *(shared[name].row for name in COMMON), ""]
    for name, found in every.items():
        own = [each for each in found if max(each.names, key=len) not in COMMON]
        if own:
            parts += [f"## gopt {name}\n", *([COMMANDS[name], ""] if name in COMMANDS else []), *head]
            parts += [*(each.row for each in own), ""]
    parts += ["## Passes\n", "`-O PASS.OPTION=VALUE` sets one; `gopt passes` shows the same.\n"]
    parts += ["| pass | option | takes | default |", "|---|---|---|---|"]
    for spec in PASSES.values():
        for option, kind, default in option_table(spec):
            cells = (f"`{spec.name}`", f"`{option}`", kind.replace("|", "\\|"), f"`{default}`" if default else "")
            parts.append("| " + " | ".join(cells) + " |")
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
