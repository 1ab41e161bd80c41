"""``gopt inspect``: what a model or an output folder is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .options import axis_option, axis_table, group_option, group_types, read_config, role_map, role_options
from .terminal import print_json, print_note, print_text

if TYPE_CHECKING:
    from gopt.errors import InputError
    from gopt.offline.inspect_folder import FolderInspection
    from gopt.offline.inspect_split import SplitInspection


@click.command("inspect")
@click.argument("path", metavar="MODEL|DIR", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("--text", "as_text", is_flag=True, help="Print the canonical text of the graph, made for golden files.")
@click.option("--config", metavar="FILE", help="A gopt.toml; its [roles] and [axes] are read.")
@axis_option
@group_option
@role_options
def command(path: str, as_json: bool, as_text: bool, config: str | None, **given: Any) -> None:
    """Show what a training step is: parameters, the optimizer and its constants, what steers it, casts, bytes.

    The optimizer is recognised by what the update computes, never by a name. For an output folder: the mesh and what
    each rank holds and sends. --text prints one node a line, the same for two equal graphs; of a folder, every rank's.

    \b
    Example:
      gopt inspect step.onnx
      gopt inspect step.onnx --text > tests/golden/step.txt
      gopt inspect step.ranks
    """
    from gopt.errors import InputError, OptionError

    if as_json and as_text:
        raise OptionError("--json and --text exclude each other")
    table = read_config(config)
    roles = role_map(given["loss"], given["params"], given["states"], given["batch"], table, given["shared"])
    folder = Path(path)
    if as_text:
        _print_text(folder, roles)
    elif folder.is_dir():
        from gopt.offline.inspect_folder import inspect_folder

        found = inspect_folder(folder)
        if as_json:
            print_json(found.to_json())
        else:
            _render(found, folder)
    else:
        from gopt import api
        from gopt.offline.inspect import inspect_model

        groups, axes = group_types(given["group_type"]), axis_table(given["axis"], table)
        try:
            source = api.load(path, roles=roles, group_types=groups, axes=axes)
        except InputError as error:
            _role_of(folder, error, as_json)
            return
        inspection = inspect_model(source)
        if as_json:
            print_json(inspection.to_json())
        else:
            from .render_inspect import render_inspection

            render_inspection(inspection)


def _role_of(path: Path, refusal: InputError, as_json: bool) -> None:
    """Show a file of a split, which no step is; raises ``refusal`` for any other file."""
    from gopt.offline.inspect_role import inspect_role

    part = inspect_role(path)
    if part is None:
        raise refusal
    if as_json:
        print_json(part.to_json())
        return
    from .render_split import render_role

    render_role(part)


def _render(found: FolderInspection | SplitInspection, folder: Path) -> None:
    from gopt.offline.inspect_split import SplitInspection

    if isinstance(found, SplitInspection):
        from .render_split import render_split

        render_split(found, folder, written=False)
        return
    from .render_inspect import render_folder

    render_folder(found)


def _print_text(path: Path, roles: Any) -> None:
    """The text of a model, with roles where there are any; of a folder, rank after rank."""
    from gopt.api import read_roles
    from gopt.artifact.manifest_check import read_manifest
    from gopt.errors import GoptError
    from gopt.ir.load import load
    from gopt.offline.text import canonical_text
    from gopt.opaque.expand import expand

    if path.is_dir():
        done: set[str] = set()
        for rank in read_manifest(path)[0].ranks:
            for phase, name in rank.files.items():
                if name in done:  # trainers have one file together
                    continue
                done.add(name)
                print_text(f"; rank {rank.rank}" + ("" if phase == "step" else f", {phase}"))
                print_text(canonical_text(load(path / name, own=True)))
        return
    graph = load(path, own=True)
    training = None
    if not graph.metadata.keys() & {"gopt.rank", "gopt.role"}:
        try:
            training = read_roles(expand(graph), roles)
        except GoptError as error:
            print_note(f"printed without roles: {error.message}")
    print_text(canonical_text(graph, training), newline=False)
