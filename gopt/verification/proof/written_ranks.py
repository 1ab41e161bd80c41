"""The proof of ranks that ``gopt shard`` has written, before their folder is there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gopt.analysis.training import TrainingGraph
from gopt.artifact.kinds import Kinds
from gopt.artifact.manifest import Manifest
from gopt.artifact.report_record import ProofEntry
from gopt.errors import InputError, InvariantError, UnsupportedError
from gopt.verification.proof.folder import ranks_relation
from gopt.verification.proof.prove import proof_of
from gopt.verification.proof.result import ProofVerdict, RankProof

UNPROVEN = ProofVerdict.UNPROVEN.value
_HINTS = (
    "this is a defect of gopt: please report it, with the model",
    "with --no-prove the ranks are written; gopt verify compares them by numbers",
)


def proof_entry(folder: Path, manifest: Manifest, training: TrainingGraph, kinds: Kinds | None = None) -> ProofEntry:
    """The proof of files of ranks in a folder against the source, for the report, without the digest of the files.
    ``kinds``: all ranks, where some are not written. Raises InvariantError for a value unlike the source's."""
    mesh = manifest.mesh.mesh()
    unwritten = mesh.ranks - len(manifest.ranks)
    peers = {} if kinds is None else kinds.peers
    if kinds is not None:
        manifest = replace(manifest, ranks=kinds.entries)
    try:
        proof = proof_of(ranks_relation(folder, manifest, training, mesh, peers=peers))
    except UnsupportedError as error:
        return ProofEntry(UNPROVEN, 0, (), error.message, "")
    except InputError as error:
        raise InvariantError(f"the files of ranks are no expressions: {error.message}", *_HINTS) from None
    if proof.verdict is ProofVerdict.DIFFERENT:
        raise InvariantError(_difference(proof), *_HINTS)
    names = tuple(claim.name for claim in proof.open())
    reason = "the laws of gopt prove do not decide the rest" if names else ""
    return ProofEntry(proof.verdict.value, len(proof.claims) - len(names), names, reason, "", unwritten)


def _difference(proof: RankProof) -> str:
    """The first value unlike the source's."""
    claim = proof.open()[0]
    wrong = claim.mismatch
    if wrong is None:
        return f"{claim.kind} {claim.name!r} of the ranks differs from the source"
    node = f", first in {wrong.node!r}" if wrong.node else ""
    return (
        f"{claim.kind} {claim.name!r} of rank {wrong.rank} differs from the source{node}: {wrong.actual}; expected "
        f"{wrong.expected}"
    )
