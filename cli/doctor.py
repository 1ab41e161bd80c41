"""``gopt doctor``: what this installation has, and what is missing for which work."""

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

    found = examine()
    if as_json:
        print_json(found.to_json())
    else:
        from .render import console, table

        out = console()
        rows = [(each.name, each.found or "missing", each.needed) for each in found.findings]
        out.print(table("Installation", ("", "found", "for"), rows))
        for each in found.findings:
            if each.get:
                out.print(f"{each.name}: {each.get}")
        out.print("nothing that gopt requires is missing" if found.sound else "gopt is not whole: see above")
    return 0 if found.sound else 1
