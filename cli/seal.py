"""``gopt seal``: new digests of a folder."""

from __future__ import annotations

import click

from .terminal import print_result


@click.command("seal")
@click.argument("folder", metavar="DIR|CHECKPOINT", type=click.Path(readable=False))
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def command(folder: str, as_json: bool) -> None:
    """Take the files of a folder as they are: write their sizes and digests into its manifest or index.

    Commands that read a folder compare its files with these digests, and refuse an edited or damaged file. Seal a
    folder after an edit by hand, or a folder without digests from an older gopt. DIR is a folder of gopt shard or
    gopt split, or a folder of checkpoints; CHECKPOINT is one step's folder, and then counts as a checkpoint of the run
    beside it.

    \b
    Example:
      gopt seal step.ranks
      gopt seal checkpoints/step_00000100
    """
    from gopt.offline.seal import seal

    from .render import render_sealed

    done = seal(folder)
    print_result(done, as_json, render_sealed)
