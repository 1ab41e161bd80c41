"""``gopt.verify``: the proof that ranks compute the source's step."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import Unpack

from gopt.errors import OptionError
from gopt.options.records import changed
from gopt.options.types import checked
from gopt.runtime.training.data import check_data
from gopt.system.progress import ProgressCallback, no_progress
from gopt.verbs.on_disk import Folder, on_disk
from gopt.verification.options import VerifyKeywords, VerifyOptions
from gopt.verification.replay.replay import replay
from gopt.verification.result import Verification
from gopt.verification.verify import Verifier


@checked
def verify(
    folder: Folder,
    model: str | os.PathLike[str] | None = None,
    options: VerifyOptions | None = None,
    *,
    advance: ProgressCallback = no_progress,
    **changes: Unpack[VerifyKeywords],
) -> Verification:
    """Run the source and all ranks, each on its own batch, and compare every state, loss and metric.

    ``model`` replaces the kept source. Options are fields of ``VerifyOptions``: as keywords (``steps=1``), as one
    record, or as a record with changes. ``advance`` is called with each phase. Raises InputError for an incomplete
    folder, UnsupportedError for random nodes that cannot be fed, RunError for a failed rank.

    >>> gopt.verify(gopt.shard("fixtures/mlp_sgd.onnx", 2), steps=1).equal
    True
    """
    chosen = changed(options, VerifyOptions, changes)
    if chosen.replay is not None:
        _check_alone(chosen, model)
        with on_disk(folder) as path:
            return replay(path, chosen.replay, chosen.data, chosen.deadline, advance)
    if chosen.data is not None:
        check_data(chosen.data)  # before the folder is read, which takes long
    with on_disk(folder) as path:
        return Verifier(path, model, chosen.deadline, advance, chosen.engine).run(chosen, advance=advance)


def _check_alone(chosen: VerifyOptions, model: object) -> None:
    """Refuse options without meaning beside ``replay``: the record has the run's options."""
    usual = VerifyOptions(deadline=chosen.deadline, data=chosen.data, replay=chosen.replay)
    names = [field.name for field in fields(VerifyOptions) if getattr(chosen, field.name) != getattr(usual, field.name)]
    if names or model is not None:
        raise OptionError(
            f"{names[0] if names else 'a model'} cannot be combined with a replay: the record says what the run was",
            "leave it out",
        )
