"""``gopt doctor``: the parts of this installation, and missing parts by kind of work."""

from __future__ import annotations

import click

from .terminal import print_json


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
def command(as_json: bool) -> int:
    """Show versions of gopt, Python and packages, ONNX Runtime's devices, MPI, GPUs and PyTorch, and how to get what
    is missing.

    Exit code 0; 1 where something is missing or broken that gopt requires.

    \b
    Example:
      gopt doctor
      gopt doctor --json
    """
    from gopt.offline.environment import examine

    environment = examine()
    if as_json:
        print_json(environment.to_json())
    else:
        from .render import console, table

        out = console()
        rows = [(finding.name, finding.found or "missing", finding.needed) for finding in environment.findings]
        out.print(table("Installation", ("", "found", "for"), rows))
        for row in environment.findings:
            if row.get:
                out.print(f"{row.name}: {row.get}")
        out.print("nothing that gopt requires is missing" if environment.sound else "gopt is not whole: see above")
    return 0 if environment.sound else 1
