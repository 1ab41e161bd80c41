"""``gopt prove``: the proof without numbers."""

from __future__ import annotations

import click

from .reproducer_option import tell_result
from .terminal import print_json


@click.command("prove")
@click.argument("folder", metavar="DIR", type=click.Path(readable=False))
@click.option("--json", "as_json", is_flag=True, help="Print every claim as JSON.")
def command(folder: str, as_json: bool) -> int:
    """Prove all ranks equal to their source: every new state, loss and metric, for all values and any number of steps.

    Reads the graphs of DIR and of its source as expressions in real arithmetic, with each cast that rounds, and
    compares what the ranks hold at the end of a step with the source's step on the combined gradients of all batches.
    A state that is held right at the start of a step is held right at its end. No rank runs.

    A value is proven, or different: then the first node, what it has and what is expected are named, with an element
    that differs for numbers drawn from a seed. What the laws do not decide is unproven, which is no error of the ranks:
    gopt verify compares it by numbers. Exit code 0, 1 where a value is different, 4 where one is unproven.

    \b
    Example:
      gopt prove step.ranks
      gopt prove step.ranks --json
    """
    from gopt.verbs.prove import prove

    from .render_progress import progress
    from .render_prove import render_proof

    with progress() as advance:
        result = prove(folder, advance=advance)
    tell_result(result.reason())
    if as_json:
        print_json(result.to_json())
    else:
        render_proof(result, folder)
    return result.exit_code
