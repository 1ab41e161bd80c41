"""For whom a server waited: by a clock that the test moves."""

from __future__ import annotations

from gopt.runtime.parameter_server.waits import ENOUGH, ServerSummary, Waits, straggler


def play(rounds: int, late: int) -> Waits:
    """In each round 0 comes first, ``late`` a second behind the other one."""
    now = [0.0]
    waits = Waits(lambda: now[0])
    for _ in range(rounds):
        for missing, spent in (((0, 1, 2), 5.0), ((1, 2), 0.5), ((late,), 1.0)):
            begun = now[0]
            now[0] += spent
            waits.add(missing, 3, begun)
        waits.end_round()
    return waits


def summary(waits: Waits) -> ServerSummary:
    return ServerSummary(4, waits.rounds, 7, 1, 2, 3, waits.seconds, waits.last)


def test_nobody_waits_while_all_compute() -> None:
    assert play(2, 2).seconds == {1: 1.0, 2: 3.0}


def test_a_trainer_that_comes_last_in_nearly_every_round_is_named() -> None:
    assert straggler([summary(play(ENOUGH, 2))]) == (
        "trainer 2 came last in 10 of 10 rounds: server 4 waited 15 s for it while others had come"
    )


def test_few_rounds_and_turns_make_no_straggler() -> None:
    assert not straggler([summary(play(ENOUGH - 1, 2))])
    turns = play(ENOUGH, 2)
    turns.last.update({1: 5, 2: -5})
    assert not straggler([summary(turns)])


def test_a_summary_reads_as_json() -> None:
    found = summary(play(1, 2)).to_json()
    assert found["waits"] == {"1": 0.5, "2": 1.5} and found["last"] == {"2": 1} and found["dropped"] == 3
