"""``gopt.prove``: a proof of ranks against the source, without a run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from gopt.errors import OptionError
from gopt.options.types import checked
from gopt.system.progress import ProgressCallback, no_progress
from gopt.verbs.on_disk import Folder, on_disk
from gopt.verification.proof.folder import folder_relation
from gopt.verification.proof.prove import Prover
from gopt.verification.proof.result import RankProof


@checked
def prove(
    folder: Folder,
    *,
    ranks: Sequence[str | os.PathLike[str]] = (),
    relation: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    advance: ProgressCallback = no_progress,
) -> RankProof:
    """Prove every new state, loss and metric of all ranks equal to the source's step, for all values.

    Nothing runs, but for a counter-example where values differ. With ``ranks``, ``folder`` is the source, a training
    step or a forward model, of rank files of another tool, and ``relation`` is a file, or the document, on inputs and
    outputs of ranks as values of the source. ``advance`` is called with each phase. Raises InputError for an incomplete
    folder and for a rank's value without a relation, OptionError for an unknown axis of the mesh, UnsupportedError for
    trainers and servers without rounds.

    >>> gopt.prove(gopt.shard("fixtures/mlp_sgd.onnx", 2)).proven
    True
    """
    if (relation is None) != (not ranks):
        raise OptionError(
            "rank files and a relation go together", "give SOURCE, the files of all ranks, and --relation FILE"
        )
    if relation is not None:
        if not isinstance(folder, str | os.PathLike):
            raise OptionError("the source of rank files is a file", "give its path")
        from gopt.verification.proof.files import files_relation

        return Prover(files_relation(folder, ranks, relation, advance), advance).run()
    with on_disk(folder) as path:
        return Prover(folder_relation(path, advance), advance).run()
