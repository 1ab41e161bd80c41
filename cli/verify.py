"""``gopt verify``: the proof."""

from __future__ import annotations

import json

import click


@click.command("verify")
@click.argument("paths", nargs=-1, required=True, metavar="[MODEL] DIR", type=click.Path())
@click.option("--steps", default=3, show_default=True, type=click.IntRange(1), metavar="K", help="Steps to run.")
@click.option(
    "--seed", default=0, show_default=True, metavar="S", help="Seed of batches and of states without a value."
)
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="A hyper-parameter.  [default: 0.01]")
@click.option("--no-confirm", is_flag=True, help="Skip confirming the gradients by finite differences.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    paths: tuple[str, ...], steps: int, seed: int, settings: tuple[str, ...], no_confirm: bool, as_json: bool
) -> int:
    """Run the source and all ranks, each rank on its own batch, and compare every state and loss.

    Repeats the run with all local gradients × 1/64 and × 64, and with one infinite gradient where the step checks for
    it. Exit code 1 when anything is beyond tolerance.

    \b
    Example:
      gopt verify step.ranks
      gopt verify step.onnx step.ranks --steps 5
    """
    from gopt.errors import OptionError

    from .render import progress, render_verification

    if len(paths) > 2:
        raise OptionError("verify takes at most a model and a folder")
    hyper = {}
    for text in settings:
        name, _, value = text.partition("=")
        try:
            hyper[name] = float(value)
        except ValueError:
            raise OptionError(f"cannot read --set {text!r}", "write --set lr=1e-3") from None
    from gopt.runtime.verify import Verifier

    with progress() as advance:
        advance("loading")
        verifier = Verifier(paths[-1], paths[0] if len(paths) == 2 else None)
        result = verifier.run(steps=steps, seed=seed, hyper=hyper, confirm=not no_confirm, advance=advance)
    if as_json:
        click.echo(json.dumps(result.to_json(), indent=1))
    else:
        render_verification(result.to_json())
    return 0 if result.equal else 1
