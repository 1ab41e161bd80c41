"""``gopt split``: from one training step to trainers and servers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gopt.errors import OptionError
from gopt.system.background import processes
from gopt.system.garbage import gc_paused

from .options import is_given, jobs_option, read_config, role_map, role_options, statistics_option
from .server_options import MODES, build_split_options, split_options
from .sharding_options import accumulate_option
from .terminal import print_json

if TYPE_CHECKING:
    from gopt.analysis.role_map import RoleMap
    from gopt.api import Sharded, ShardOptions, Source, Split
    from gopt.parameter_server.options import SplitOptions
    from gopt.records.mesh import Mesh
    from gopt.system.progress import ProgressCallback

_SERVERS_ALONE = (
    "servers", "pull", "slicing", "minimum", "placement", "server_map", "roles", "fixed_trainers", "every",
    "delay_compensation", "count", "wire", "table", "no_tables", "table_memory", "rows", "init",
)  # fmt: skip
"""Options that mean nothing where there is no server."""


@click.command("split")
@click.argument("model", type=click.Path(readable=False))
@split_options(*MODES, "allreduce")
@accumulate_option("push: two files, micro and update")
@click.option("-o", "--output", metavar="DIR", help="The folder to write.  [default: the model's stem + .split]")
@click.option("--config", metavar="FILE", help="Read accumulate and [roles] from this gopt.toml.")
@click.option(
    "--state", metavar="FILE", help="Read values of states from a .safetensors or .npz file, where the model has none."
)
@click.option("--mesh", hidden=True)
@jobs_option
@click.option("--dry-run", is_flag=True, help="Do all the work, show the report, and write nothing.")
@click.option("--force", is_flag=True, help="Replace an existing output folder.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@role_options
@statistics_option
def command(model: str, **args: Any) -> None:
    """Split a step into one file for all trainers and one for each server: a parameter server.

    Trainers pull parameters, compute gradients, and push them. Servers hold parameters and optimizer states, and run
    the update. --mode says when: sync, once a round, when all trainers have pushed; async, for each push as it comes;
    half-async, the same, but trainers wait for one another behind every step; geo, trainers update on their own and
    push what has changed; allreduce, without servers, as gopt shard --stage 0 does it.

    \b
    Example:
      gopt split step.onnx --trainers 4 --servers 2
      gopt split step.onnx --trainers 4 --servers 2 \\
          --mode async --delay-compensation 0.04
      gopt split step.onnx --trainers 2 --servers 3 \\
          --slicing off --placement round-robin --dry-run
      gopt split step.onnx --trainers 2 --servers 2 \\
          --server-map servers.toml --wire bfloat16
      gopt split step.onnx --trainers 2 --servers 2 \\
          --rows lazy --init 'emb*=normal(0,0.02)@seed=7'
      gopt split step.onnx --trainers 2 --servers 2 \\
          --roles 'trainer:0,1;server:0,1'
      gopt split step.onnx --trainers 4 --mode allreduce
    """
    from gopt.api import Sharded
    from gopt.artifact.output_paths import check_output_folder
    from gopt.passes.preflight import check_disk_space

    from .render import render_report
    from .render_progress import progress
    from .render_split import print_split

    output = Path(args["output"] or f"{Path(model).stem}.split")
    request = SplitRequest.of(model, args)
    whole = None if args["dry_run"] else check_output_folder(output, force=args["force"])
    with gc_paused(), progress() as advance, processes(args["jobs"], own_process=True):
        source = request.load(advance)
        if whole is not None:
            check_disk_space(source.training, request.files, whole, split=request.mesh is None)
        result = request.make(source, advance)
        how = {"force": args["force"]}
        report = result.report() if args["dry_run"] else result.write(output, **how, advance=advance)
    shown = None if args["dry_run"] else output
    if args["as_json"]:
        print_json(report.to_json())
    elif isinstance(result, Sharded):
        render_report(report, shown)
    else:
        print_split(result.manifest(), report, shown)


@dataclass(frozen=True, slots=True)
class SplitRequest:
    """The arguments of ``gopt.load`` and ``gopt.split`` from the command line and the configuration.

    Without servers the request is the same as for ``gopt shard --mesh dp=T --stage 0``: ``mesh`` and ``shard`` are set
    then, else ``split``.
    """

    model: str
    roles: RoleMap
    state: str | None
    split: SplitOptions | None
    mesh: Mesh | None = None
    shard: ShardOptions | None = None

    @classmethod
    def of(cls, model: str, args: dict[str, Any]) -> SplitRequest:
        """Read and check all that needs no model. Raises OptionError and InputError."""
        if args["mesh"] is not None:
            raise OptionError(
                f"--mesh {args['mesh']}: a trainer is one rank, whose file has no calls to others; servers merge one "
                "push of each",
                "gopt shard --mesh splits the computation, without servers; --trainers T is the number of batches",
            )
        config = read_config(args["config"])
        if args["accumulate"] is None:
            args = args | {"accumulate": config.accumulate}
        roles = role_map(
            args["loss"], args["params"], args["states"], args["batch"], config, args["shared"],
            args["statistics"],
        )  # fmt: skip
        if args["mode"] == "allreduce":
            return cls(model, roles, args["state"], None, *_without_servers(args))
        return cls(model, roles, args["state"], build_split_options(args))

    @property
    def files(self) -> int:
        """Files with a forward and backward: all trainers of a split share a file."""
        return 1 if self.mesh is None else self.mesh.ranks

    def load(self, advance: ProgressCallback) -> Source:
        from gopt import api

        return api.load(self.model, roles=self.roles, state=self.state, advance=advance)

    def make(self, source: Source, advance: ProgressCallback) -> Sharded | Split:
        """The result, checked; nothing is written."""
        from gopt.verbs.shard import shard

        return (
            self.split_step(source, advance)
            if self.mesh is None
            else shard(source, self.mesh, self.shard, advance=advance)
        )

    def split_step(self, source: Source, advance: ProgressCallback) -> Split:
        """The split, where there are servers."""
        from gopt import api

        assert self.split is not None
        return api.split(source, self.split, advance=advance)


def _without_servers(args: dict[str, Any]) -> tuple[Mesh, ShardOptions]:
    """The mesh and the options of trainers that reduce gradients among themselves. Raises OptionError."""
    from gopt.api import ShardOptions
    from gopt.records.mesh import Mesh

    for name in _SERVERS_ALONE:
        if is_given(args[name]):
            hint = "gopt shard -O shard.reduce-dtype=… narrows gradients" if name == "wire" else "leave it out"
            raise OptionError(
                f"--{name.replace('_', '-')} has no effect with --mode allreduce: there are no servers", hint
            )
    trainers = args["trainers"]
    if trainers is None:
        raise OptionError("the number of trainers is missing", "give --trainers T")
    if trainers < 1:
        raise OptionError(f"--trainers cannot be {trainers}", "it is at least 1")
    options = ShardOptions(
        stage=0, bucket_mb=args["bucket_mb"], accumulate=args["accumulate"] or 1,
        loss_reduction=args["loss_reduction"],
    )  # fmt: skip
    return Mesh((("dp", trainers),)), options
