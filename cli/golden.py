"""``gopt golden``: short texts of what gopt makes of models, for review and CI."""

from __future__ import annotations

import click

from .terminal import print_text


@click.group("golden")
def command() -> None:
    """Keep what gopt makes of models as short texts, so that changes are reviewed.

    \b
    Example:
      gopt golden update goldens
      gopt golden check goldens
    """


@command.command("update")
@click.argument("folder", metavar="DIR", type=click.Path())
def update(folder: str) -> int:
    """Write the goldens that DIR/gopt-golden.toml names into DIR/golden: all of them in one step, or none."""
    from .golden_texts import golden_update
    from .render_progress import progress

    with progress() as advance:
        changed = golden_update(folder, advance=advance)
    print_text("\n".join(changed or ["nothing changed"]))
    return 0


@command.command("check")
@click.argument("folder", metavar="DIR", type=click.Path())
def check(folder: str) -> int:
    """Compare the goldens in DIR/golden with what gopt makes now. Exit code 1, with the diff, where they differ."""
    from .golden_texts import golden_check
    from .render_golden import render_check
    from .render_progress import progress

    with progress() as advance:
        found = golden_check(folder, advance=advance)
    render_check(found, folder)
    return found.exit_code
