"""Describes a folder of trainers and servers, by manifest and report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gopt.artifact.manifest import Manifest
from gopt.artifact.pass_facts import SplitFacts, SplitSettings, split_records
from gopt.artifact.report_groups import total
from gopt.artifact.report_record import Report, SourceEntry
from gopt.artifact.server_entries import KeyKind, ServerPlanEntry
from gopt.documents.draws import Draw
from gopt.documents.records import OPTIONAL, to_document
from gopt.errors import InputError
from gopt.text.amounts import balance
from gopt.text.notebook import HtmlTable


@dataclass(frozen=True, slots=True)
class ServerInspection:
    """One server. ``pushed`` and ``pulled``: bytes between one trainer and the server in one step."""

    server: int
    pieces: int
    parameters: int
    optimizer_states: int
    gradients: int
    pushed: int
    pulled: int


@dataclass(frozen=True, slots=True)
class SplitInspection(HtmlTable):
    """Distribution of a split over trainers and servers, and the traffic; bytes are of one step.

    ``messages``: pushes of one trainer. ``local``: states of the source that stay on trainers. ``balance``: bytes of
    parameters and states of the fullest server over the mean.
    """

    settings: SplitSettings
    roles: str
    source: SourceEntry
    loss: str
    states: Mapping[str, int]
    local: int
    keys: Mapping[str, int]
    facts: SplitFacts
    messages: int
    trainer_files: tuple[str, ...]
    per_server: tuple[ServerInspection, ...]
    balance: float
    removed_ops: int
    added_ops: int
    checks: int
    notes: tuple[str, ...]
    more_losses: tuple[str, ...] = field(default=(), metadata=OPTIONAL)
    draws: Mapping[str, Draw] | None = field(default=None, metadata=OPTIONAL)
    """As of ``FolderInspection``."""

    @property
    def pushed(self) -> int:
        """Bytes pushed by one trainer in one step."""
        return sum(self.facts.pushed_by_server)

    @property
    def pulled(self) -> int:
        """Bytes pulled by one trainer in one step."""
        return sum(self.facts.pulled_by_server)

    @property
    def idle(self) -> list[int]:
        """Servers without a piece."""
        return [server.server for server in self.per_server if not server.pieces and not server.parameters]

    def __repr__(self) -> str:
        settings = self.settings
        return f"<SplitInspection of {settings.trainers} trainers and {settings.servers} servers, {settings.mode}>"

    def to_json(self) -> dict[str, Any]:
        head = {"format": "gopt-inspection/1", "what": "split"}
        return head | to_document(self) | {"pushed": self.pushed, "pulled": self.pulled, "idle": self.idle}


def inspect_split(manifest: Manifest, entry: ServerPlanEntry, report: Report) -> SplitInspection:
    """Describe a split; raises InputError if the report belongs to another output."""
    records = split_records(report.pipeline)
    if records is None or {len(table) for table in _by_server(records[1])} != {entry.servers}:
        raise InputError("report.json was written for another split", "write the folder again with gopt split")
    settings, facts = records
    usages = report.ranks[-entry.servers :]

    servers = tuple(
        ServerInspection(
            number, facts.pieces_by_server[number], usage.nbytes.parameters, usage.nbytes.optimizer_states,
            usage.nbytes.gradients, facts.pushed_by_server[number], facts.pulled_by_server[number],
        )
        for number, usage in enumerate(usages)
    )  # fmt: skip
    sizes = [server.parameters + server.optimizer_states for server in servers]
    local = {
        piece.tensor for rank in manifest.ranks[:1] for state in rank.state if not state.copy for piece in state.pieces
    }
    trainer = next((usage for usage in report.ranks if usage.rank == 0), None)
    return SplitInspection(
        settings=settings,
        roles="" if entry.roles is None else str(entry.roles.roles()),
        source=report.source,
        loss=manifest.loss,
        more_losses=manifest.more_losses,
        draws=manifest.draws or None,
        states=Counter(state.kind.value for state in manifest.states),
        local=len(local),
        keys={kind.value: sum(key.kind is kind for key in entry.keys) for kind in KeyKind},
        facts=facts,
        messages=0 if trainer is None else sum(call.calls for call in trainer.communication),
        trainer_files=tuple(manifest.ranks[0].files.values()) if manifest.ranks else (),
        per_server=servers,
        balance=balance(sizes),
        removed_ops=total(report.removed_ops),
        added_ops=total(report.added_ops),
        checks=sum(check.count for check in report.checks),
        notes=report.notes,
    )


def _by_server(facts: SplitFacts) -> tuple[tuple[int, ...], ...]:
    return facts.pieces_by_server, facts.pushed_by_server, facts.pulled_by_server
