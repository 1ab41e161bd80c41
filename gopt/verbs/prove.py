"""``gopt.prove``: a proof of ranks against the source, without a run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gopt.errors import InputError, OptionError
from gopt.options.types import checked
from gopt.system.garbage import gc_paused
from gopt.system.progress import ProgressCallback, no_progress
from gopt.system.staging import replace_file
from gopt.verbs.on_disk import Folder, on_disk
from gopt.verification.proof.folder import folder_relation
from gopt.verification.proof.prove import Prover, proof_of
from gopt.verification.proof.result import RankProof

if TYPE_CHECKING:
    from gopt.verification.certificate.result import CertificateCheck


@gc_paused()
@checked
def prove(
    folder: Folder,
    *,
    ranks: Sequence[str | os.PathLike[str]] = (),
    relation: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    certificate: str | os.PathLike[str] | None = None,
    advance: ProgressCallback = no_progress,
) -> RankProof:
    """Prove every new state, loss and metric of all ranks equal to the source's step, for all values.

    Nothing runs, but for a counter-example where values differ. With ``ranks``, ``folder`` is the source, a training
    step or a forward model, of rank files of another tool, and ``relation`` is a file, or the document, on inputs and
    outputs of ranks as values of the source. ``certificate``: a file to write if all is proven, for
    ``gopt.check_certificate``. ``advance`` is called with each phase. Raises InputError for an incomplete
    folder and for a rank's value without a relation, OptionError for an unknown axis of the mesh, UnsupportedError for
    trainers and servers without rounds.

    >>> gopt.prove(gopt.shard("fixtures/mlp_sgd.onnx", 2)).proven
    True
    """
    if (relation is None) != (not ranks):
        raise OptionError(
            "rank files and a relation go together", "give SOURCE, the files of all ranks, and --relation FILE"
        )
    if relation is not None and certificate is not None:
        raise OptionError("rank files of another tool have no certificate", "leave --certificate out")
    if relation is not None:
        if not isinstance(folder, str | os.PathLike):
            raise OptionError("the source of rank files is a file", "give its path")
        from gopt.verification.proof.files import files_relation

        return proof_of(files_relation(folder, ranks, relation, advance), advance)
    with on_disk(folder) as path:
        folder_of_ranks = folder_relation(path, advance)
        if certificate is None:
            return proof_of(folder_of_ranks, advance)
        prover = Prover(folder_of_ranks, advance)
        proof = prover.run()
        if proof.proven:
            from gopt.verification.proof.certificate import CertificateWriter

            replace_file(Path(certificate), CertificateWriter(path, prover).text().encode())
        return proof


@checked
def check_certificate(certificate: str | os.PathLike[str], folder: Folder) -> CertificateCheck:
    """Check every line of a certificate of ``gopt.prove`` beside the folder, without search and without the prover.

    Raises InputError for an unreadable certificate or a damaged folder.

    >>> ranks = gopt.shard("fixtures/mlp_sgd.onnx", 2)
    >>> gopt.prove(ranks, certificate="mlp.cert").proven
    True
    >>> gopt.check_certificate("mlp.cert", ranks).verdict
    'checked'
    """
    from gopt.verification.certificate.check import check

    try:
        text = Path(certificate).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{certificate} cannot be read: {error}", "gopt prove DIR --certificate FILE writes one"
        ) from None
    with on_disk(folder) as path:
        return check(path, text)
