"""The request of ``gopt shard``: options of the command line override a configuration's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gopt.errors import OptionError

from .auto import split_link
from .options import axis_table, build_mesh, group_types, parse_ranks, pass_option, read_config, role_map
from .terminal import print_text

if TYPE_CHECKING:
    from gopt.analysis.role_map import RoleMap
    from gopt.api import Sharded, ShardOptions, Source
    from gopt.documents.config import GoptConfig
    from gopt.records.mesh import AxisKind, Mesh
    from gopt.system.progress import ProgressCallback
    from gopt.verbs.shard import Auto


@dataclass(frozen=True, slots=True)
class ShardRequest:
    """The arguments of ``gopt.load`` and ``gopt.shard`` from the command line and the configuration."""

    model: str
    mesh: Mesh
    options: ShardOptions
    roles: RoleMap
    state: str | None
    group_types: dict[str, str]
    axes: dict[str, AxisKind]

    @classmethod
    def of(cls, model: str, args: dict[str, Any]) -> ShardRequest:
        """Read and check all that needs no model. Raises OptionError and InputError."""
        config = read_config(args["config"])
        axes = axis_table(args["axis"], config.axes)
        mesh = build_mesh(args["ranks"], args["mesh"], config.mesh, axes)
        options = shard_options(args, config, split_link(args, mesh))
        roles = role_map(
            args["loss"], args["params"], args["states"], args["batch"], config, args["shared"],
            args["statistics"],
        )  # fmt: skip
        return cls(model, mesh, options, roles, args["state"], group_types(args["group_type"]), axes)

    def load(self, advance: ProgressCallback) -> Source:
        from gopt.steps.source import load

        return load(
            self.model, roles=self.roles, state=self.state, group_types=self.group_types, axes=self.axes,
            advance=advance,
        )  # fmt: skip

    def make(
        self, source: Source, advance: ProgressCallback, auto: Auto | None = None, *, prove: bool = False
    ) -> Sharded:
        """The sharded step, checked; nothing is written."""
        from gopt.verbs.shard import shard

        return shard(source, self.mesh, self.options, auto=auto, prove=prove, advance=advance)


def shard_options(args: dict[str, Any], config: GoptConfig, link: str | None) -> ShardOptions:
    """The options of the command line, and a configuration's where the command line has none. Raises OptionError."""
    from gopt.analysis.role_map import parse_statistics
    from gopt.steps.shard_options import PASS_OPTIONS, ShardOptions

    merged = args | {"link": link, "statistics": parse_statistics(",".join(args["statistics"]))[0]}
    chosen = {name: merged[name] for name in PASS_OPTIONS if merged.get(name) is not None}
    passes = {name: dict(table) for name, table in (config.passes or {}).items()}
    for owner, option in map(PASS_OPTIONS.__getitem__, chosen):
        passes.get(owner, {}).pop(option, None)  # options override the file
    for owner, option, value in map(pass_option, args["options"]):
        passes.setdefault(owner, {})[option] = value
    options = ShardOptions(
        **chosen, accumulate=args["accumulate"] or config.accumulate or 1, passes=passes,
        pipeline=_passes_in_order(args, config), only_ranks=parse_ranks(args["only_ranks"]),
        verify_each=args["verify_each"], after_each=_printer(args["print_after"], args["print_dir"]),
    )  # fmt: skip
    options.passes_to_run()
    return options


def _passes_in_order(args: dict[str, Any], config: GoptConfig) -> list[tuple[str, dict[str, str]]] | None:
    """Passes of ``--pipeline``, or of the configuration, with the options; None: the default passes."""
    from gopt.passes import DEFAULT
    from gopt.passes.pipeline import parse_pipeline

    if args["pipeline"] is not None:
        return parse_pipeline(args["pipeline"])
    if config.pipeline is None:
        return None
    if config.pipeline.passes is None:
        raise OptionError("[pipeline] takes one key: passes, a list of names", f"passes = {list(DEFAULT)}")
    return [(name, {}) for name in config.pipeline.passes]


def _printer(name: str | None, folder: str | None) -> Any:
    """The function to call after each pass, which prints the graph's canonical text."""
    if name is None:
        if folder is not None:
            raise OptionError("--print-dir needs --print-after", "add --print-after PASS")
        return None
    from gopt.passes import find

    if name != "all":
        find(name)
    if folder is not None:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OptionError(f"--print-dir {folder} cannot be a folder: {error.strerror}", "choose another") from None

    def write(done: str, step: Any) -> None:
        if name not in ("all", done):
            return
        from gopt.offline.text import canonical_text

        text = canonical_text(step.graph)
        if folder is None:
            print_text(text, error=True)
        else:
            Path(folder, f"{len(step.applied):02d}_{done}.txt").write_text(text, encoding="utf-8")

    return write
