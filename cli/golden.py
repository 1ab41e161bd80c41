"""``gopt golden``: short texts of what gopt makes of models, for review and CI."""

from __future__ import annotations

import click

from .annotations import format_option, print_golden_annotations
from .terminal import print_json, print_result


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

    All goldens are written in one step, or no golden is.

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
    console().print(*(changed or ["nothing changed"]))
    return 0


@command.command("check")
@click.argument("folder", metavar="[DIR]", required=False, type=click.Path(readable=False))
@format_option
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def check(folder: str | None, form: str, as_json: bool) -> int:
    """Compare the goldens in DIR/golden with what gopt makes now.

    Without DIR: of the only folder with a gopt-golden.toml, which is the current one or below it. Where goldens
    differ, the diff is printed and the exit code is 1.

    \b
    Example:
      gopt golden check goldens
      gopt golden check goldens --json
      gopt golden check --format github
    """
    from gopt.offline.goldens.golden_files import only_folder

    from .golden_texts import golden_check
    from .render_golden import render_check
    from .render_progress import progress

    where = folder if folder is not None else str(only_folder())
    with progress() as advance:
        result = golden_check(where, advance=advance)
    print_result(result, as_json, render_check, where)
    if form == "github":
        names = [f"golden/{name} is missing" for name in result.missing]
        names += [f"golden/{name} is of no case" for name in result.extra]
        print_golden_annotations(where, result.differing, names)
    return result.exit_code
