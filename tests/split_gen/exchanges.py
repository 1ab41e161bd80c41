"""Splits of mode geo: trainers' own steps and their exchanges, after the files, against the rule that the page states.

delta = (local - last) / trainers; server += delta; local -= last + delta - pulled; last = pulled
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rank_files import Program, Values, has_halves

from gopt.parameter_server.options import SplitOptions
from split_gen.arrivals import Served

ROUNDS = 3


@dataclass
class Exchange(Served):
    """A folder of mode geo. ``local``: what each trainer holds, by input."""

    local: list[Values] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        record = self.trainers[0]
        self.files = {
            phase: Program(self.folder / file, has_halves(self.folder)) for phase, file in record["files"].items()
        }
        self.local = [
            {state["input"]: self.given[state["pieces"][0]["tensor"]] for state in self._held(each)}
            for each in self.trainers
        ]

    def phase(self, trainer: int, phase: str, fed: Mapping[str, Any]) -> Iterator[None]:
        """Run a phase of a trainer; yields before its first pull, when all is pushed."""
        program, waits = self.files[phase], True
        feeds = {**fed, **self.local[trainer], "gopt.round": np.asarray(1, np.int64)}
        run, answer = program.run({name: feeds[name] for name in program.inputs if name in feeds}), None
        try:
            while True:
                node, operands = run.send(answer)  # type: ignore[arg-type]
                if node.op_type == "Push":
                    answer = self.pushed(trainer, node, operands)
                    continue
                if waits:
                    yield
                waits = False
                answer = self.pulled(node, lambda key: self.keys[key].pull(trainer))
        except StopIteration as end:
            for state in self._held(self.trainers[trainer]):
                if state["output"] in end.value:
                    self.local[trainer][state["input"]] = end.value[state["output"]]

    def of(self, trainer: int) -> Values:
        """A trainer's states, by tensor of the source."""
        return {
            state["pieces"][0]["tensor"]: self.local[trainer][state["input"]]
            for state in self._held(self.trainers[trainer]) if not state["input"].startswith("gopt.")
        }  # fmt: skip


def exchanged(
    made: Exchange, step: Callable[[Values, Values], Values], start: Values, how: SplitOptions,
    batches: Iterator[Values], hyper: Values, seed: int,
) -> Iterator[tuple[str, Values, Values]]:  # fmt: skip
    """After each exchange: what each trainer and the servers hold, and what they must. ``step``: the source's."""
    r, trainers = random.Random(seed), range(how.trainers)
    names = list(dict.fromkeys(key["pieces"][0]["tensor"] for key in made.manifest["parameter_server"]["keys"]))
    local, server = [dict(start) for _ in trainers], {name: start[name] for name in names}
    last = [dict(server) for _ in trainers]

    def pulled(trainer: int, delta: Values) -> None:
        for name in names:
            behind = last[trainer][name] + delta[name] - server[name]
            local[trainer][name], last[trainer][name] = local[trainer][name] - behind, server[name]

    for turn in range(ROUNDS):
        for trainer in trainers:
            for _ in range(how.every):
                fed = {**next(batches), **{name: np.asarray(value / (1 + turn)) for name, value in hyper.items()}}
                assert not list(made.phase(trainer, "step", fed))
                local[trainer] = step(local[trainer], fed)
        together, waiting = r.random() < 0.5, []
        for trainer in r.sample(trainers, len(trainers)):
            run = made.phase(trainer, "sync", {})
            next(run)
            delta = {name: (local[trainer][name] - last[trainer][name]) / how.trainers for name in names}
            server = {name: server[name] + delta[name] for name in names}
            waiting.append((run, trainer, delta))
            if not together:
                assert not list(run)
                pulled(trainer, delta)
        for run, trainer, delta in waiting if together else ():
            assert not list(run)
            pulled(trainer, delta)
        for trainer in trainers:
            yield f"round {turn}: trainer {trainer}", made.of(trainer), local[trainer]
        yield f"round {turn}: servers", made.states(), server
