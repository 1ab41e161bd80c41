"""``gopt golden``: short texts of what gopt makes of models, for review and CI."""

from __future__ import annotations

import click

from .terminal import print_json


@click.group("golden")
def command() -> None:
    """Keep what gopt makes of models as short texts, so that changes are reviewed.

    DIR holds gopt-golden.toml, which names a case for each text:

    \b
      [case.mlp]
      model = "mlp_adamw.onnx"
      options = ["--ranks", "4", "--stage", "1"]

    \b
    Example:
      gopt golden update goldens
      gopt golden check goldens
    """


@command.command("update")
@click.argument("folder", metavar="DIR", type=click.Path(readable=False))
@click.option("--json", "as_json", is_flag=True, help="Print what changed as JSON.")
def update(folder: str, as_json: bool) -> int:
    """Write the goldens of DIR/gopt-golden.toml to DIR/golden.

    All of them are written in one step, or none.

    \b
    Example:
      gopt golden update goldens
    """
    from gopt.offline.goldens.golden_files import changes_to_json

    from .golden_texts import golden_update
    from .render import console
    from .render_progress import progress

    with progress() as advance:
        changed = golden_update(folder, advance=advance)
    if as_json:
        print_json(changes_to_json(changed))
        return 0
    console().print("\n".join(changed or ["nothing changed"]))
    return 0


@command.command("check")
@click.argument("folder", metavar="DIR", type=click.Path(readable=False))
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def check(folder: str, as_json: bool) -> int:
    """Compare the goldens in DIR/golden with what gopt makes now.

    Where they differ, the diff is printed and the exit code is 1.

    \b
    Example:
      gopt golden check goldens
      gopt golden check goldens --json
    """
    from .golden_texts import golden_check
    from .render_golden import render_check
    from .render_progress import progress

    with progress() as advance:
        found = golden_check(folder, advance=advance)
    if as_json:
        print_json(found.to_json())
    else:
        render_check(found, folder)
    return found.exit_code
