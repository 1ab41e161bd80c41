"""Scalars of the forward read by the update: means over the ranks, one call each, to be packed."""

from __future__ import annotations

from gopt.errors import OptionError
from gopt.ir.rewriter import GraphRewriter
from gopt.passes.shard import emit
from gopt.spmd.program import SpmdProgram


def share(program: SpmdProgram, rewriter: GraphRewriter, data: str | None) -> None:
    """Let each shared value be a mean over ``data``, the ranks with different batches."""
    shared = program.training.shared
    if shared and program.micro_steps > 1:
        name = next(iter(shared.values()))
        raise OptionError(
            f"--accumulate: the update reads {name!r} of the forward, and every micro-step has its own",
            "leave --accumulate out",
        )
    if not shared or data is None:
        return
    producers = program.training.graph.producers()
    for mean, local in shared.items():
        rewriter.remove(producers[mean], "the update reads the mean over the ranks")
        emit.all_reduce(rewriter, data or "", [local], [mean], "mean")
