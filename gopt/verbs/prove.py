"""``gopt.prove``: the proof that ranks are the source's step, without a run."""

from __future__ import annotations

from gopt.options.types import checked
from gopt.system.progress import ProgressCallback, no_progress
from gopt.verbs.on_disk import Folder, on_disk
from gopt.verification.proof.folder import folder_relation
from gopt.verification.proof.prove import Prover
from gopt.verification.proof.result import RankProof


@checked
def prove(folder: Folder, *, advance: ProgressCallback = no_progress) -> RankProof:
    """Prove every new state, loss and metric of all ranks equal to the source's step, for all values.

    Nothing runs, but for a counter-example where values differ. ``advance`` is called with each phase. Raises
    InputError for an incomplete folder, UnsupportedError for trainers and servers without rounds.

    >>> gopt.prove(gopt.shard("fixtures/mlp_sgd.onnx", 2)).proven
    True
    """
    with on_disk(folder) as path:
        return Prover(folder_relation(path, advance), advance).run()
