"""Options of ``gopt shard`` and ``reshard`` that say what a rank holds, and when it computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from .options import F, grouped


class _Stage(click.IntRange):
    """A stage; an error lists them."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return int(super().convert(value, param, ctx))
        except click.BadParameter:
            self.fail(f"{value!r} is not one of 0, 1, 2, 3.", param, ctx)


def cut_options(stage: str, partition: str) -> Callable[[F], F]:
    """``--stage`` and ``--partition``, and what holds without them."""
    return grouped(
        click.option(
            "--partition", type=click.Choice(["flat", "rows", "whole"]),
            help=f"Cut tensors anywhere, between rows, or not at all.  [default: {partition}]",
        ),
        click.option(
            "--stage", type=_Stage(0, 3), metavar="0|1|2|3",
            help="0: nothing sharded; 1: optimizer states; 2: gradients too, also those that micro-steps sum; "
            f"3: parameters too.  [default: {stage}]",
        ),
    )  # fmt: skip


def accumulate_option(what: str, default: str = "1") -> Callable[[F], F]:
    """``--accumulate``; ``what`` is done once for all micro-steps."""
    return click.option(
        "--accumulate", "--micro-batches", "accumulate", type=click.IntRange(1), metavar="K",
        help=f"Sum the gradients of K micro-steps for one {what}.  [default: {default}]",
    )  # fmt: skip


def time_options(schedule: str, recompute: str, offload: str) -> Callable[[F], F]:
    """``--schedule``, ``--recompute`` and ``--offload``, and what holds without them."""
    return grouped(
        click.option(
            "--offload", metavar="states|activations|PATTERN|BYTES",
            help="Keep values in the memory of the host, beside a device: optimizer states, which are updated there "
            "(states), values between forward and backward (activations), those that a PATTERN names, or as few as "
            f"leave a rank at most BYTES alive; several with commas between.  [default: {offload}]",
        ),
        click.option(
            "--recompute", metavar="full|selective|BYTES",
            help="Compute values of the forward again in the backward: all inside of repeated blocks (full), values of "
            "few operations for their bytes (selective), or the fewest operations with which a rank has at most BYTES "
            f"alive, such as 200MiB.  [default: {recompute}]",
        ),
        click.option(
            "--schedule", metavar="NAME|FILE",
            help="Order the micro-batches of pipeline stages: gpipe, 1f1b, interleaved:V, zb-h1, zb-v, or a file such "
            f"as schedule.txt.  [default: {schedule}]",
        ),
    )  # fmt: skip


def no_prove_option(function: F) -> F:
    """``--no-prove``: files of ranks are not compared with the source."""
    return click.option(
        "--no-prove", is_flag=True, help="Write ranks without a proof that they equal the source: see gopt prove."
    )(function)
