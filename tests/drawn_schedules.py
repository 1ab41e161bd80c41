"""Schedules drawn at random, and an executor with queues that shares nothing with the simulation."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace
from random import Random

from gopt.schedules.actions import Action, ActionKind, Schedule

FORWARD, BACKWARD, INPUT, WEIGHT = ActionKind


def draw(seed: int, members: int = 0, micro_batches: int = 0) -> Schedule:
    """A schedule that can run: members take turns at random, at each turn with any action whose operands are there.
    Sizes that are not given are drawn, too."""
    random = Random(seed)
    members = members or random.randint(1, 4)
    stages, micro_batches = members + random.randint(0, 4), micro_batches or random.randint(1, 5)
    placement = [*range(members), *(random.randrange(members) for _ in range(stages - members))]
    random.shuffle(placement)
    back = (INPUT, WEIGHT) if random.random() < 0.5 else (BACKWARD,)
    empty = Schedule("drawn", stages, micro_batches, tuple(placement), ((),) * members)
    executor = Executor(empty)
    left = {
        Action(kind, stage, mb) for kind in (FORWARD, *back) for stage in range(stages) for mb in range(micro_batches)
    }
    rows: list[list[Action]] = [[] for _ in range(members)]
    while left:
        action = random.choice(sorted(action for action in left if executor.can(action)))
        executor.run(action)
        left.remove(action)
        rows[placement[action.stage]].append(action)
    return replace(empty, members=tuple(map(tuple, rows)))


class Executor:
    """What has run, and the messages on their way: one queue for activations and one for gradients, for each pair.

    All stages take micro-batches in one order: that of the first to run."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.ran: set[Action] = set()
        self.orders: dict[ActionKind, list[int]] = {}
        self.turns: Counter[tuple[ActionKind, int]] = Counter()
        self.queues: dict[tuple[bool, int, int], deque[Action]] = {}

    def _source(self, action: Action) -> Action | None:
        if action.kind is WEIGHT:
            return None
        stage = action.stage + (-1 if action.kind is FORWARD else 1)
        return Action(action.kind, stage, action.micro_batch) if 0 <= stage < self.schedule.stages else None

    def _queue(self, source: Action, reader: Action) -> deque[Action]:
        home = self.schedule.placement
        return self.queues.setdefault((source.kind is FORWARD, home[source.stage], home[reader.stage]), deque())

    def can(self, action: Action) -> bool:
        """Whether an action may run now."""
        source, turn = self._source(action), self.turns[action.kind, action.stage]
        order = self.orders.get(action.kind, [])[turn : turn + 1]
        if action.kind is not WEIGHT and order not in ([], [action.micro_batch]):
            return False
        if action.kind is WEIGHT and Action(INPUT, action.stage, action.micro_batch) not in self.ran:
            return False
        if action.kind in (BACKWARD, INPUT) and Action(FORWARD, action.stage, action.micro_batch) not in self.ran:
            return False
        if source is None or self.schedule.placement[source.stage] == self.schedule.placement[action.stage]:
            return source is None or source in self.ran
        queue = self._queue(source, action)
        return bool(queue) and queue[0] == source

    def run(self, action: Action) -> None:
        """Run it: take its message, and send its result."""
        home = self.schedule.placement
        source = self._source(action)
        if source is not None and home[source.stage] != home[action.stage]:
            self._queue(source, action).popleft()
        reader = action.stage + (1 if action.kind is FORWARD else -1)
        if action.kind is not WEIGHT and 0 <= reader < self.schedule.stages and home[reader] != home[action.stage]:
            self._queue(action, Action(action.kind, reader, action.micro_batch)).append(action)
        self.ran.add(action)
        order = self.orders.setdefault(action.kind, [])
        if self.turns[action.kind, action.stage] == len(order):
            order.append(action.micro_batch)
        self.turns[action.kind, action.stage] += 1

    @staticmethod
    def accepts(schedule: Schedule) -> bool:
        """Whether all members come to their ends."""
        executor = Executor(schedule)
        rows = [deque(actions) for actions in schedule.members]
        moved = True
        while moved:
            moved = False
            for row in rows:
                while row and executor.can(row[0]):
                    executor.run(row.popleft())
                    moved = True
        return not any(rows)
