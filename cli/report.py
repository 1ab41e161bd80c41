"""``gopt report``: an output folder as one HTML page."""

from __future__ import annotations

from pathlib import Path

import click

from .terminal import print_json_text, print_text
from .verbosity import Verbosity, verbosity


@click.command("report")
@click.argument("folder", metavar="DIR", type=click.Path(readable=False))
@click.option("--html", "page", metavar="FILE", help="Write the page to FILE.")
@click.option("--trace", metavar="FILE", help="Show measured times, from the file that gopt run --trace wrote.")
@click.option("--verification", metavar="FILE", help="Show the proof, from the file that gopt verify --json printed.")
@click.option("--force", is_flag=True, help="Replace a page that gopt wrote.")
@click.option("--json", "as_json", is_flag=True, help="Print what the page shows as JSON.")
def command(
    folder: str, page: str | None, trace: str | None, verification: str | None, force: bool, as_json: bool
) -> None:
    """Write one self-contained HTML page of an output folder.

    It shows the memory of each rank, the traffic of each group, the step as a timeline of compute and calls, the
    balance, every operator and value that was removed or added, and what was checked and proved. The page loads
    nothing from a network, and can be sent as it is.

    \b
    Example:
      gopt report step.ranks --html step.html
      gopt report step.ranks --html step.html \\
          --trace trace.json --verification proof.json
      gopt report step.ranks --json
    """
    from gopt.errors import OptionError
    from gopt.text.amounts import format_bytes
    from gopt.verbs.report import report

    from .json_text import strict_json
    from .render_progress import progress

    if page is None and not as_json:
        raise OptionError("report needs a file to write", "give --html FILE, or --json")
    with progress() as advance:
        record = report(folder, page, trace=trace, verification=verification, force=force, advance=advance)
    if as_json:
        print_json_text(strict_json(record.to_json(), 1))
    elif page is not None and verbosity() > Verbosity.QUIET:
        print_text(f"written to {page} ({format_bytes(Path(page).stat().st_size)})")
