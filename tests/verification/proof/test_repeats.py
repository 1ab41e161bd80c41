"""The update of a parameter that is numbered after another one's has the expressions that the laws give."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_proof_prove import SETS, SPLIT_SETS, sharded

from gopt.verification.proof.expected import SourceSweep
from gopt.verification.proof.expressions import Elements
from gopt.verification.proof.folder import folder_relation
from gopt.verification.proof.prove import Prover
from gopt.verification.proof.repeats import Repeats
from gopt.verification.proof.sweep import Sweep


@pytest.mark.parametrize("kind", ["copies", "hybrid", "all", "three axes"])
def test_a_group_has_the_expressions_it_has_by_the_laws(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sharded("gpt_adamw", (SETS | SPLIT_SETS)[kind], tmp_path / "ranks")
    repeated = list[int]()
    numbered = Repeats._numbered

    def counted(self: Repeats, *arguments):  # type: ignore[no-untyped-def]
        values = numbered(self, *arguments)
        repeated.append(values is not None)
        return values

    def both(sweep: SourceSweep, graphs, inputs):  # type: ignore[no-untyped-def]
        results = [dict(values) for values in Sweep.run(sweep, graphs, inputs)]
        sweep._calls.clear()
        for memo in (sweep.expressions.read, sweep.expressions._results):
            memo.clear()
        with monkeypatch.context() as patch:
            patch.setattr(Repeats, "_kind", lambda *_: (None, []))
            assert [dict(values) for values in Sweep.run(sweep, graphs, inputs)] == results
        return results

    monkeypatch.setattr(Repeats, "_numbered", counted)
    monkeypatch.setattr(SourceSweep, "run", both)
    assert Prover(folder_relation(tmp_path / "ranks")).run().proven
    assert any(repeated)


def test_an_expression_like_another_has_the_facts_it_has_by_its_operands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sharded("gpt_adamw", SETS["all"], tmp_path / "ranks")
    repeated, compared = Elements.repeated, list[int]()

    def both(self: Elements, like: int, operands: tuple[int, ...]) -> int:
        number = repeated(self, like, operands)
        expression = self.all[number]
        del self._numbers[expression]
        again = self.apply(*expression)
        self._numbers[expression] = number
        assert [facts[again] for facts in self._facts] == [facts[number] for facts in self._facts]
        compared.append(number)
        return number

    monkeypatch.setattr(Elements, "repeated", both)
    assert Prover(folder_relation(tmp_path / "ranks")).run().proven
    assert compared
