"""``gopt shard``: from a training step to a graph per rank."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import click

from gopt.system.background import processes
from gopt.system.garbage import free_at_exit, gc_paused

from .auto import auto_of, auto_options, check_auto
from .options import axis_option, group_option, jobs_option, pass_settings_option, role_options
from .shard_request import ShardRequest
from .sharding_options import accumulate_option, cut_options, no_prove_option, time_options
from .terminal import print_json, print_text


@click.command("shard")
@click.argument("model", type=click.Path(readable=False))
@click.option("--ranks", type=int, metavar="N", help="The number of ranks; each gets its own batch.")
@click.option("--mesh", metavar="AXES", help="The ranks as a grid, e.g. dp=2,shard=4.")
@click.option("-o", "--output", metavar="DIR", help="The folder to write.  [default: the model's stem + .ranks]")
@cut_options("2", "flat")
@click.option(
    "--bucket-mb",
    type=float,
    metavar="M",
    help="Send at most M MiB in one call; 0: each tensor by itself.  [default: total/8, 1 to 25]",
)
@accumulate_option(
    "update: two files per rank, micro and update; on pipeline stages (pp) a file for each action of a stage, and "
    "update",
)
@time_options("1f1b", "save all", "all on the device")
@click.option(
    "--loss-reduction",
    metavar="mean|sum|weighted:VALUE|sum:NAMES|auto",
    help="Combine the gradients of ranks: mean for a mean loss; sum for a summed loss; weighted:VALUE for a loss "
    "divided by the count in VALUE; sum:NAME,NAME for parameters whose gradients are sums where others are means; "
    "auto for each as the step has it.  [default: mean]",
)
@click.option(
    "--statistics",
    multiple=True,
    metavar="auto|mean|root|local|sync|INPUT=RULE",
    help="Combine running statistics of ranks: each as it follows the batch (auto), all by their mean, the first "
    "rank's (root), apart (local), or over all samples (sync); INPUT=mean, sum, max, min, gather (the rows of all "
    "ranks), root or local says it of one state. May be repeated.  [default: auto]",
)
@pass_settings_option
@axis_option
@group_option
@click.option(
    "--config", metavar="FILE", help="Read [mesh], [axes], [pipeline], [pass.NAME] and [roles] from this gopt.toml."
)
@click.option(
    "--pipeline",
    metavar="PASSES",
    help='Run these passes in order, e.g. "shard{stage=1},statistics,fuse-collectives,prune".',
)
@click.option(
    "--state", metavar="FILE", help="Read values of states from a .safetensors or .npz file, where the model has none."
)
@click.option("--only-ranks", metavar="RANKS", help="Write only these ranks, e.g. 0-3.")
@jobs_option
@click.option("--print-after", metavar="PASS|all", help="Write the graph as text after this pass, or after all.")
@click.option(
    "--print-dir", metavar="DIR", help="Write the texts of --print-after into this folder.  [default: to stderr]"
)
@click.option("--verify-each", is_flag=True, help="Verify the shardings after every pass, not only after the last.")
@click.option("--explain", metavar="VALUE", help="Say why a value is split as it is, and write nothing.")
@click.option(
    "--annotate",
    is_flag=True,
    help="Write the placement of each value into source.onnx, as sharding specs of ONNX IR 11.",
)
@no_prove_option
@click.option("--dry-run", is_flag=True, help="Do all the work, show the report, and write nothing.")
@click.option("--force", is_flag=True, help="Replace an existing output folder.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@auto_options
@role_options
def command(model: str, **args: Any) -> None:
    """Write one runnable graph per rank, with a manifest and a report of all that was removed and added.

    \b
    Example:
      gopt shard step.onnx --ranks 8
      gopt shard step.onnx --ranks 8 --stage 1 --bucket-mb 4 -o out
      gopt shard step.onnx --mesh dp=2,shard=4 --stage 3 --accumulate 4
      gopt shard step.onnx --mesh pp=2,shard=4 --micro-batches 8 --schedule zb-h1
      gopt shard step.onnx --ranks 4 --partition whole -O shard.style=broadcast
      gopt shard step.onnx --mesh dp=2,tp=4 -O tensor-parallel.sequence=true
      gopt shard step.onnx --mesh dp=2,tp=4 \\
          --link 4x200GB/s:5us,25GB/s:10us --annotate
      gopt shard step.onnx --mesh tp=2 --explain view_41
      gopt shard step.onnx --ranks 64 --auto --memory 80GB --link 200GB/s:5us
    """
    from gopt.artifact.output_paths import check_output_folder
    from gopt.passes.preflight import check_disk_space

    from .render import render_report
    from .render_progress import progress

    check_auto(args)
    written = not args["dry_run"] and args["explain"] is None
    request = ShardRequest.of(model, args)
    output = Path(args["output"] or f"{Path(model).stem}.ranks")
    whole = check_output_folder(output, force=args["force"]) if written else output
    with gc_paused(), progress() as advance, processes(args["jobs"], own_process=True):
        source = request.load(advance)
        if written:
            ranks = request.options.only_ranks
            check_disk_space(source.training, request.mesh.ranks if ranks is None else len(ranks), whole)
        proven = written and not args["no_prove"]
        sharded = request.make(source, advance, auto_of(args), prove=proven)
        if args["explain"] is not None:
            print_text("\n".join(sharded.explain(args["explain"])))
            return
        if written:
            how = {"force": args["force"], "annotate": args["annotate"]}
            report = sharded.write(output, **how, advance=advance)
        else:
            report = sharded.report()
        free_at_exit(source, sharded)
        gc.freeze()  # the process ends soon: no collection need walk over all that is left
    if args["as_json"]:
        print_json(report.to_json())
    else:
        render_report(report, output if written else None)
