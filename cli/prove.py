"""``gopt prove``: the proof without numbers."""

from __future__ import annotations

import click

from .reproducer_option import tell_result
from .terminal import print_result


@click.command("prove")
@click.argument("paths", metavar="DIR | SOURCE RANK...", nargs=-1, required=True, type=click.Path(readable=False))
@click.option("--relation", metavar="FILE", help="What relates RANK files of another tool to SOURCE (TOML or JSON).")
@click.option("--certificate", metavar="FILE", help="Write a certificate of what is proven, if all of DIR is.")
@click.option("--check", metavar="FILE", help="Check a certificate of DIR line by line, without the prover.")
@click.option("--json", "as_json", is_flag=True, help="Print every claim as JSON.")
def command(
    paths: tuple[str, ...], relation: str | None, certificate: str | None, check: str | None, as_json: bool
) -> int:
    """Prove all ranks equal to the source: every new state, loss and metric, for all values and any number of steps.

    Reads the graphs of all ranks and of the source as expressions in real arithmetic, with each cast that rounds, and
    compares the ranks' values at the end of a step with the source's step on the combined gradients of all batches. A
    state that is right at the start of a step is right at the end. No rank runs. Trainers and servers of gopt split
    are ranks, whose messages pair as calls do.

    For a different value, the first unexpected node is named, with the actual and the expected expression, and an
    element that differs for numbers drawn from a seed. A value is unproven if the laws do not decide: gopt verify
    compares such a value by numbers. Exit code 0, 1 for a different value, 4 for an unproven value.

    A certificate has the expression of every value of the source and of all ranks, and the rule that gave it. --check
    reads DIR and the certificate, and follows every line from the lines before. Exit code 0, 1 for a line that does not
    follow, 4 where lines rest on laws that the checker does not have.

    SOURCE RANK... are a step, or a forward model, and rank files that another tool wrote, one for each rank or one for
    all. FILE has the mesh, and what inputs and outputs of ranks are of the source: docs/proving.md. Collectives of
    gopt, ONNX Runtime and TensorRT (as Polygraphy writes them) are read.

    \b
    Example:
      gopt prove step.ranks
      gopt prove step.ranks --certificate step.cert
      gopt prove step.ranks --check step.cert
      gopt prove step.onnx rank0.onnx rank1.onnx --relation relation.toml
    """
    from gopt.verbs.prove import check_certificate, prove

    from .render_progress import progress
    from .render_prove import render_check, render_proof

    if check is not None:
        if len(paths) > 1 or relation is not None or certificate is not None:
            raise click.UsageError("--check FILE goes with DIR alone")
        checked = check_certificate(check, paths[0])
        tell_result(checked.reason())
        print_result(checked, as_json, render_check)
        return checked.exit_code
    with progress() as advance:
        result = prove(paths[0], ranks=paths[1:], relation=relation, certificate=certificate, advance=advance)
    tell_result(result.reason())
    print_result(result, as_json, render_proof, paths[0] if relation is None else None)
    return result.exit_code
