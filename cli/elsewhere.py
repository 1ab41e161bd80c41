"""Options under the names of other tools or commands: the meaning of an option unknown to a command."""

from __future__ import annotations

from collections.abc import Sequence

import click

MEANT = {
    "--stage N": ("zero", "zero-stage", "fsdp", "sharding-strategy"),
    "--ranks N": ("world-size", "nproc", "nproc-per-node", "num-gpus", "gpus", "devices", "num-processes", "np", "n"),
    "--mesh dp=2,shard=4": ("dp", "tp", "ep", "cp", "sp", "tensor-parallel", "tensor-parallel-size", "data-parallel"),
    "--launch N": ("nproc", "nproc-per-node", "num-processes", "np", "n", "workers"),
    "--accumulate K": ("gradient-accumulation", "gradient-accumulation-steps", "accumulation", "micro-steps"),
    "--set lr=1e-3": ("lr", "learning-rate", "hyper", "betas", "momentum", "weight-decay", "param"),
    "--bucket-mb M": ("bucket-cap-mb", "bucket-size", "bucket"),
    "--data FILE": ("dataset", "inputs", "input", "batches", "train-data"),
    "--epochs E": ("num-epochs", "num-train-epochs", "max-epochs"),
    "--steps K": ("iterations", "iters", "max-steps", "num-steps"),
    "--output DIR": ("out", "output-dir", "out-dir", "dir", "save-dir"),
    "--checkpoint DIR": ("save", "ckpt", "save-dir"),
    "--force": ("overwrite", "yes", "y"),
    "--loss NAME": ("criterion", "loss-fn", "objective"),
    "--lr X": ("learning-rate",),
    "--clip-norm X": ("max-norm", "max-grad-norm", "grad-clip", "gradient-clipping"),
    "--dry-run": ("check", "no-write"),
    "--json": ("format", "output-format"),
}  # fmt: skip
"""An option as it is written -> other names for it."""
_OF_OTHERS = {
    "lr": "the learning rate is an input of the step: gopt run DIR --set lr=1e-3, and gopt derive has --lr",
    "learning-rate": "the learning rate is an input of the step: gopt run DIR --set lr=1e-3, and gopt derive has --lr",
    "batch-size": "the batch has the size that the step was exported with; each rank takes one. "
    "gopt run has --batch-size N for a step of any size (gopt export --dynamic batch)",
    "fp16": "a step computes in the precision it was exported in: gopt export --autocast fp16",
    "bf16": "a step computes in the precision it was exported in: gopt export --autocast bf16",
    "zero": "gopt shard has --stage 0, 1, 2 or 3",
    "offload": "gopt offloads nothing: --stage 3 on more ranks holds less on each",
}  # fmt: skip
"""Name -> where to find what is meant, for commands that have no option for it."""


def meant_by(typed: str, command: click.Command | None, near: Sequence[str]) -> str:
    """The hint for an option a command does not have; '' where none is near."""
    name = typed.lstrip("-").lower().replace("_", "-")
    has = {option for param in command.params for option in param.opts} if command is not None else set()
    if f"--{name}" in has:
        return f"did you mean --{name}?"
    for written, names in MEANT.items():
        if name in names and written.split()[0] in has:
            return f"did you mean {written}?"
    return _OF_OTHERS.get(name) or next((f"did you mean {name}?" for name in near), "")
