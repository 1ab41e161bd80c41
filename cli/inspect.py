"""``gopt inspect``: what a file or a folder is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .options import (
    axis_option,
    axis_table,
    group_option,
    group_types,
    read_config,
    role_map,
    role_options,
    statistics_option,
)
from .terminal import print_note, print_result, print_text


@click.command("inspect")
@click.argument("path", metavar="PATH", type=click.Path(readable=False))
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("--text", "as_text", is_flag=True, help="Print the canonical text of the graph, made for golden files.")
@click.option("--config", metavar="FILE", help="Read [roles] and [axes] from this gopt.toml.")
@axis_option
@group_option
@role_options
@statistics_option
def command(path: str, as_json: bool, as_text: bool, config: str | None, **args: Any) -> None:
    """Describe a training step: parameters, the optimizer with its constants and controls, casts, bytes.

    The optimizer is recognised by what the update computes, never by a name. For an output folder: the mesh and what
    each rank holds and sends. --text prints one node a line, the same for two equal graphs; of a folder, every rank's.

    Other files are recognised by their content: inference models, training artifacts and checkpoints of ONNX Runtime,
    models with training_info, rank files, manifests, reports, checkpoints of gopt, safetensors and .npz files.

    \b
    Example:
      gopt inspect step.onnx
      gopt inspect step.onnx --text > tests/golden/step.txt
      gopt inspect step.ranks
    """
    from gopt.errors import OptionError

    if as_json and as_text:
        raise OptionError("--json cannot be combined with --text", "take one of them")
    table = read_config(config)
    roles = role_map(
        args["loss"], args["params"], args["states"], args["batch"], table, args["shared"], args["statistics"]
    )  # fmt: skip
    if as_text:
        print_text_of(Path(path), roles)
        return
    from gopt.verbs.inspect import inspect

    from .render_kinds import render_found
    from .render_progress import progress

    with progress() as advance:
        groups, axes = group_types(args["group_type"]), axis_table(args["axis"], table.axes)
        description = inspect(path, roles=roles, group_types=groups, axes=axes, advance=advance)
    print_result(description, as_json, render_found, Path(path))


def print_text_of(path: Path, roles: Any) -> None:
    """The text of a model, with roles where there are any; of a folder, rank after rank."""
    from gopt.api import read_roles
    from gopt.artifact.integrity import check_files
    from gopt.artifact.manifest_check import read_manifest
    from gopt.errors import GoptError, InputError, UnsupportedError
    from gopt.importers.load import holds_step, load_step
    from gopt.ir.load import load, outline
    from gopt.ir.opaque.expand import expand
    from gopt.offline.text import canonical_text

    if path.is_dir() and not holds_step(path):
        done: set[str] = set()
        manifest, _ = read_manifest(path)
        check_files(path, manifest.files)  # values too: the text has their digests
        for rank in manifest.ranks:
            for phase, name in rank.files.items():
                if name in done:  # trainers have one file together
                    continue
                done.add(name)
                print_text(f"; rank {rank.rank}" + ("" if phase == "step" else f", {phase}"))
                print_text(canonical_text(load(path / name, own=True)))
        return
    try:
        graph = load_step(path, own=True)
    except (InputError, UnsupportedError) as error:
        shown = canonical_text(outline(path, error))
        print_note(f"printed without inferred types: {error.message}")
        print_text(shown, newline=False)
        return
    training = None
    if not graph.metadata.keys() & {"gopt.rank", "gopt.role"}:
        try:
            training = read_roles(expand(graph), roles)
        except GoptError as error:
            print_note(f"printed without roles: {error.message}")
    print_text(canonical_text(graph, training), newline=False)
