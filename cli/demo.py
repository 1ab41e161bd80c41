"""``gopt demo``: a sample step with data, to try an installed gopt."""

from __future__ import annotations

import io
import os
from pathlib import Path

import click

from .terminal import print_json

FILES = Path(__file__).with_name("demo_files")
"""The folder of the step, which is in the wheel."""
STEP, SAMPLES, COUNT = "step.onnx", "samples.npz", 512


@click.command("demo")
@click.argument("folder", metavar="[DIR]", default="gopt-demo", type=click.Path(readable=False))
@click.option("--force", is_flag=True, help="Replace the files of an existing folder.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def command(folder: str, force: bool, as_json: bool) -> None:
    """Write a training step of a small network and samples to learn from, and say what to do with them.

    DIR is the folder to write, gopt-demo where none is given.

    \b
    Example:
      gopt demo
      gopt shard gopt-demo/step.onnx --ranks 4 && gopt verify step.ranks
      gopt run step.ranks --data gopt-demo/samples.npz \\
          --steps 200 --set lr=3e-3
    """
    from gopt.artifact.output_folder import replaced_folder
    from gopt.artifact.output_paths import resolve_output
    from gopt.errors import OptionError
    from gopt.system.files import write_new

    target = Path(folder)
    whole = resolve_output(target)
    if os.path.lexists(whole) and not force:
        raise OptionError(f"{target} exists already", "give another folder, or replace its files with --force")
    with replaced_folder(target, whole, lambda old: _check_ours(target, old)) as staged:
        write_new(staged / STEP, (FILES / STEP).read_bytes())
        write_new(staged / SAMPLES, _samples())
    if as_json:
        print_json({"format": "gopt-demo/1", "folder": folder, "step": STEP, "samples": SAMPLES, "count": COUNT})
        return
    from .render import console

    out = console()
    out.print(f"{folder}/{STEP}: a training step of a network with 4 parameters, AdamW")
    out.print(f"{folder}/{SAMPLES}: {COUNT} samples, each with one of 10 labels")
    out.print("next:")
    for line in (
        f"gopt shard {folder}/{STEP} --ranks 4", "gopt verify step.ranks",
        f"gopt run step.ranks --data {folder}/{SAMPLES} --steps 200 --set lr=3e-3",
    ):  # fmt: skip
        out.print(f"  {line}")


def _check_ours(target: Path, folder: Path) -> None:
    """Raise OptionError unless a folder holds nothing but files of a demo; ``target`` is its path in messages."""
    from gopt.errors import OptionError

    if folder.is_symlink() or not folder.is_dir() or set(os.listdir(folder)) - {STEP, SAMPLES}:
        raise OptionError(f"{target} holds other files: --force does not replace it", "give another folder")


def _samples() -> bytes:
    """An archive with an array for each input of the batch; labels depend on the samples, so that a run learns."""
    import numpy as np

    random = np.random.default_rng(0)
    x = random.standard_normal((COUNT, 32), dtype=np.float32)
    file = io.BytesIO()
    np.savez(file, x=x, y=(x @ random.standard_normal((32, 10))).argmax(1))
    return file.getvalue()
