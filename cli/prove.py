"""``gopt prove``: the proof without numbers."""

from __future__ import annotations

import click

from .reproducer_option import tell_result
from .terminal import print_json


@click.command("prove")
@click.argument("paths", metavar="DIR | SOURCE RANK...", nargs=-1, required=True, type=click.Path(readable=False))
@click.option("--relation", metavar="FILE", help="What relates RANK files of another tool to SOURCE (TOML or JSON).")
@click.option("--json", "as_json", is_flag=True, help="Print every claim as JSON.")
def command(paths: tuple[str, ...], relation: str | None, as_json: bool) -> int:
    """Prove all ranks equal to the source: every new state, loss and metric, for all values and any number of steps.

    Reads the graphs of all ranks and of the source as expressions in real arithmetic, with each cast that rounds, and
    compares the ranks' values at the end of a step with the source's step on the combined gradients of all batches. A
    state that is right at the start of a step is right at the end. No rank runs. Trainers and servers of gopt split
    are ranks, whose messages pair as calls do.

    For a different value, the first unexpected node is named, with the actual and the expected expression, and an
    element that differs for numbers drawn from a seed. A value is unproven if the laws do not decide: gopt verify
    compares such a value by numbers. Exit code 0, 1 for a different value, 4 for an unproven value.

    SOURCE RANK... are a step, or a forward model, and rank files that another tool wrote, one for each rank or one for
    all. FILE has the mesh, and what inputs and outputs of ranks are of the source: docs/proving.md. Collectives of
    gopt, ONNX Runtime and TensorRT (as Polygraphy writes them) are read.

    \b
    Example:
      gopt prove step.ranks
      gopt prove step.ranks --json
      gopt prove step.onnx rank0.onnx rank1.onnx --relation relation.toml
    """
    from gopt.verbs.prove import prove

    from .render_progress import progress
    from .render_prove import render_proof

    with progress() as advance:
        result = prove(paths[0], ranks=paths[1:], relation=relation, advance=advance)
    tell_result(result.reason())
    if as_json:
        print_json(result.to_json())
    else:
        render_proof(result, paths[0] if relation is None else None)
    return result.exit_code
