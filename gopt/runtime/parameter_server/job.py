"""A run of trainers and servers: the folder, the participants, and their common checks before the first step."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gopt.artifact import manifest_check
from gopt.artifact.graph_check import EDITED, check_rank
from gopt.artifact.manifest import Manifest
from gopt.artifact.manifest_entries import LocalState, RankEntry
from gopt.artifact.path_diagnostics import check_folder
from gopt.artifact.server_entries import ServerPlanEntry
from gopt.errors import InputError, InvariantError, OptionError, RunError, UnsupportedError
from gopt.ir.graph import Graph
from gopt.ir.load import load
from gopt.parameter_server.blocks import Block, find_blocks
from gopt.records.roles import Roles
from gopt.runtime.exchanged_values import from_json, to_json
from gopt.runtime.messages.endpoint import Endpoint
from gopt.runtime.messages.roster import Roster
from gopt.runtime.parameter_server.faults import FaultOptions
from gopt.runtime.session import Array
from gopt.runtime.training.draws import seed_of
from gopt.runtime.training.folder_files import check_own, check_shared
from gopt.runtime.training.initial_states import initial_states
from gopt.runtime.training.job import Job
from gopt.runtime.training.kept_order import with_kept_order
from gopt.runtime.training.startup import startup_values


@dataclass(frozen=True, slots=True)
class ServerJob:
    """A job and a split. ``trainers``: the number of trainers in this run; ``manifest`` is for this number, ``written``
    is the folder's own."""

    job: Job
    manifest: Manifest
    plan: ServerPlanEntry
    trainers: int
    roles: Roles | None = None
    """Which process has which roles; None: one each, trainers first."""
    faults: FaultOptions = field(default_factory=FaultOptions)
    written: Manifest | None = None

    @classmethod
    def read(cls, job: Job, trainers: int | None = None, roles: str | None = None) -> ServerJob:
        """Read the folder of a job. ``roles``: the user's map of roles.

        Raises InputError for a damaged folder, and OptionError where the split has another fixed number of trainers, or
        the map another number of roles.
        """
        check_folder(job.folder)
        manifest, mesh = manifest_check.read_manifest(job.folder)
        plan = manifest.parameter_server
        if plan is None:
            raise OptionError(f"{job.folder} has no servers", "it is a sharded step: leave --trainers out")
        count = mesh.ranks if trainers is None else trainers
        if plan.fixed_trainers and count != mesh.ranks:
            raise OptionError(
                f"--trainers {count}, but {job.folder} was made for exactly {mesh.ranks}",
                "split without --fixed-trainers",
            )
        if count < 1:
            raise OptionError(f"--trainers cannot be {count}", "it is at least 1")
        parsed = None if roles is None else Roles.parse(roles)
        if parsed is None and plan.roles is not None and count == mesh.ranks:
            parsed = plan.roles.roles()  # the map that the split was made with
            parsed = None if parsed.is_open else parsed
        if parsed is not None:
            count = parsed.trainers if trainers is None else count
            parsed.check_counts(count, plan.servers)
        job = with_kept_order(job, manifest)
        return cls(job, manifest.with_trainers(count), plan, count, parsed, written=manifest)

    def processes(self, started: int) -> tuple[int, ...]:
        """The process of each endpoint; raises OptionError where a launcher started another number."""
        roles = self.roles or Roles.default(self.trainers, self.servers)
        roles.check_processes(started)
        return (*roles.trainer_ranks, *roles.server_ranks)

    @property
    def seed(self) -> int | None:
        """The seed of the random numbers of the job, as ``seed_of``."""
        return seed_of(self.job, self.manifest)

    @property
    def servers(self) -> int:
        return self.plan.servers

    @property
    def endpoints(self) -> int:
        """The number of endpoints. Trainers are endpoints 0 to T-1, servers the following ones."""
        return self.trainers + self.servers

    def server(self, number: int) -> int:
        """The endpoint of a server."""
        return self.trainers + number

    def roster(self, processes: tuple[int, ...] | None = None) -> Roster:
        """All endpoints with names; ``processes``: the process of each endpoint, by default one each."""
        names = [f"trainer {number}" for number in range(self.trainers)]
        return Roster.of([*names, *(f"server {number}" for number in range(self.servers))], processes)

    def describe_process(self, process: int) -> str:
        """The roles of a process, such as ``trainer 0`` or ``trainer 0 and server 1``."""
        roles = self.roles or Roles.default(self.trainers, self.servers)
        homes = (*roles.trainer_ranks, *roles.server_ranks)
        names = self.roster().names
        return " and ".join(names[number] for number, home in enumerate(homes) if home == process)

    def entry(self, endpoint: int) -> RankEntry:
        """The manifest's entry of an endpoint."""
        return self.manifest.ranks[endpoint]

    def graphs(self, endpoint: int) -> dict[str, Graph]:
        """The graphs of an endpoint by phase, newly loaded; raises RunError for a missing file, InputError for a graph
        that does not fit the manifest."""
        graphs = {}
        check_own(self.job.folder, self.manifest, endpoint)
        for phase, name in self.entry(endpoint).files.items():
            path = self.job.folder / Path(name).name
            if not path.is_file():
                raise RunError(f"there is no file {path}", "split again, or copy it here")
            graphs[phase] = load(path, own=True)
        check_rank(self.manifest, self.entry(endpoint), graphs, self.job.folder)
        return graphs

    def initial_states(
        self, endpoint: int, states: Sequence[LocalState], graphs: Mapping[str, Graph]
    ) -> dict[str, Array]:  # fmt: skip
        """States of an endpoint at the first step: of its start-up graph, stored, or of --state, as
        ``initial_states``."""
        computed: Mapping[str, Array] = {}
        file = self.entry(endpoint).startup
        if self.job.startup and file is not None:
            types = {name: type for graph in graphs.values() for name, type in graph.inputs.items()}
            computed = startup_values(self.job.folder / Path(file).name, types)
        return initial_states(states, graphs, self.job.state, computed)

    def blocks(self, number: int, graph: Graph, hyper: Collection[str]) -> list[Block]:
        """The blocks of a server's keys; raises InputError where the file has others than were written."""
        entry = self.entry(self.server(number))
        try:
            return find_blocks(graph, self.plan, number, {state.input: state.output for state in entry.state}, hyper)
        except (InvariantError, UnsupportedError) as error:
            path = self.job.folder / Path(entry.files["step"]).name
            raise InputError(f"{path}: {error.message}", EDITED) from error


@dataclass(slots=True)
class EndpointEngine:
    """The part of an engine for checkpoints: a rank, and a gather of small objects."""

    endpoint: Endpoint

    @property
    def rank(self) -> int:
        return self.endpoint.number

    def gather(self, item: Any) -> list[Any]:
        """Return the items of all endpoints; None for a lost one."""
        return [from_json(answer) for answer in self.endpoint.gather(to_json(item), what="the endpoints' agreement")]


def agree(endpoint: Endpoint, server_job: ServerJob) -> None:
    """Compare the start options of all endpoints. Where options differ, all raise RunError with the name of the
    first."""
    job = server_job.job
    mine: dict[str, Any] = {
        "the split": server_job.manifest.digest(), "--steps": job.steps, "--every": job.every,
        "--set": sorted(job.settings.items()), "--draws": server_job.seed,
        "--accumulate": server_job.manifest.accumulate,
        "the byte order": sys.byteorder, "checkpoints": job.checkpoint is not None, "--resume": job.resume,
        "--nan, --stop, --on-trainer-loss or --staleness": str(server_job.faults),
    }  # fmt: skip
    for number, theirs in enumerate(endpoint.gather(mine, what="say hello")):
        wrong = _difference(mine, theirs or mine)
        if wrong:
            peer = endpoint.roster.describe(number)
            raise RunError(
                f"{wrong} differs between {endpoint.roster.describe(endpoint.number)} and {peer}",
                "start all of them with the same folder and the same options",
            )
    check_shared(job.folder, server_job.manifest, EndpointEngine(endpoint))


START = 3600.0
"""Seconds that all have to compile. What one of them waits for then is no message of a round, so the deadline does not
count; one that dies is seen."""


def get_ready(endpoint: Endpoint, item: Any = None) -> list[Any]:
    """Wait until all endpoints have compiled, because the deadlines of the first round begin then. Returns the small
    JSON value passed by each."""
    return endpoint.gather(item, START, "the first round")


def _difference(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    jsoned = {
        name: [list(axes) for axes in value] if isinstance(value, list) else value for name, value in mine.items()
    }
    return next((name for name, value in jsoned.items() if theirs.get(name) != value), "")
