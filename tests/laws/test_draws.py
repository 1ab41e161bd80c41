"""The loop of the generators' commands: what it prints, counts and ends with."""

from __future__ import annotations

import itertools

import draws
import pytest

OUTCOMES = {1: "equal", 2: "refused", 3: "equal", 4: "refused", 5: "WRONG"}


def one(seed: int) -> draws.Case:
    verdict = draws.Verdict(OUTCOMES[seed], f"value 'w{seed}' of {seed} elements" if seed % 3 else "")
    return draws.Case.of(seed, f"case {seed}", verdict)


def ran(capsys: pytest.CaptureFixture[str], *words: str, quiet: tuple[str, ...] = ("equal", "refused")):
    options = draws.parser("it", "What it does.").parse_args(words)
    code = draws.run(draws.of_seeds(options, one), options.minutes, quiet=quiet)
    return code, capsys.readouterr().out.splitlines()


def test_what_is_counted_and_what_is_printed(capsys):
    """Refusals that differ in names and numbers alone are of one kind."""
    code, lines = ran(capsys, "--seed", "1", "--count", "5")
    assert code == 1
    assert lines == [
        "WRONG case 5", "    value 'w5' of 5 elements",
        "5 cases, seed 1 to seed 5: {'equal': 2, 'refused': 2, 'WRONG': 1}",
        "    2 refused: value '…' of # elements (seed 2)",
    ]  # fmt: skip
    assert ran(capsys, "--seed", "1", "--count", "4")[0] == 0
    assert "refused case 4" in ran(capsys, "--seed", "4", "--count", "1", quiet=())[1]


def test_it_ends_when_the_time_is_over(capsys):
    assert ran(capsys, "--seed", "1", "--minutes", "0")[1][-1] == "1 cases, seed 1 to seed 1: {'equal': 1}"
    endless = (draws.Case("a", "a", "equal") for _ in itertools.count())
    assert draws.run(endless, 0.001, quiet=("equal",)) == 0


def test_which_outcomes_fail():
    cases = [draws.Case("a", "a", "odd")]
    assert draws.run(cases, 1, quiet=("odd",)) == 0
    assert draws.run(cases, 1, quiet=("odd",), wrong=lambda outcome: outcome != "equal") == 1
