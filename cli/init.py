"""``gopt init``: a file with a factory to fill in, accepted by ``gopt export``."""

from __future__ import annotations

from pathlib import Path

import click

from .terminal import print_json

TEMPLATE = Path(__file__).with_name("demo_files") / "factory.txt"


@click.command("init")
@click.argument("file", metavar="[FILE.py]", default="factory.py", type=click.Path(readable=False))
@click.option("--force", is_flag=True, help="Replace an existing file.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def command(file: str, force: bool, as_json: bool) -> None:
    """Write a Python file with a function that returns what gopt export traces, with comments on what to fill in.

    FILE.py is the file to write, factory.py where none is given. It works as it is, and nothing is imported.

    \b
    Example:
      gopt init
      gopt export factory.py:make -o step.onnx
    """
    from gopt.errors import OptionError
    from gopt.offline.state_values import new_file, put_new

    shown = Path(file)
    if shown.suffix != ".py":
        raise OptionError(f"{shown} is not a Python file", "let its name end in .py")
    text = TEMPLATE.read_text(encoding="utf-8").replace("{name}", str(shown))
    put_new(new_file(file, force, "gopt init NAME.py"), shown, force, lambda opened: opened.write(text.encode()))
    if as_json:
        print_json({"format": "gopt-init/1", "file": file})
        return
    from .render import console

    out = console()
    out.print(f"{file}: a function make, with comments on what to fill in")
    out.print(f"next:  gopt export {file}:make -o step.onnx")
