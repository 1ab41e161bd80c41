"""Options of ``gopt run`` for evaluation on held-out data, and for curves."""

from __future__ import annotations

import click

from .options import grouped

evaluation_options = grouped(
    click.option(
        "--peak-flops", type=float, metavar="N",
        help="Say what share of N floating-point operations a second, the peak of one rank's device, is used.",
    ),
    click.option(
        "--tensorboard", metavar="FOLDER",
        help="Write curves for TensorBoard: losses, learning rate, evaluations, rates.",
    ),
    click.option(
        "--patience", type=click.IntRange(1), metavar="N",
        help="End the run, with exit code 0, after N evaluations without a better one.",
    ),
    click.option(
        "--keep-best", metavar="METRIC[:min|max]",
        help="Keep the checkpoint with the best value of METRIC as CKPT/best.  [default: min, of the first metric]",
    ),
    click.option(
        "--eval-every", type=click.IntRange(1), metavar="K",
        help="Evaluate after every K steps, and at the end.  [default: at the end]",
    ),
    click.option(
        "--eval-data", metavar="PATH|MODULE:FUNCTION",
        help="Read held-out samples, in the forms of --data; a function must end.",
    ),
    click.option(
        "--eval", metavar="MODEL",
        help="Evaluate the parameters of the run by this model of the forward, which gopt export --eval writes.",
    ),
)  # fmt: skip
"""``--eval`` and what belongs to it; curves and figures."""
