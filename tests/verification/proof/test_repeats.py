"""The update of a parameter that is numbered after another one's has the expressions that the laws give."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from pathlib import Path

import pytest
from helpers import edit_file
from onnx import ModelProto
from test_proof_prove import SETS, SPLIT_SETS, sharded

import gopt
from gopt.ir.graph import Node
from gopt.verification.proof.expected import SourceSweep
from gopt.verification.proof.folder import folder_relation
from gopt.verification.proof.numbering import Numbering, Step
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
        for memo in (sweep.expressions.read, sweep.expressions._added, sweep.expressions._products):
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
    repeat, compared = Numbering.repeat, list[int]()

    def both(self: Numbering, steps: Sequence[Step], values: list[int]) -> None:
        begun = len(values)
        repeat(self, steps, values)
        for number in values[begun:]:
            expression = self.all[number]
            del self._numbers[expression]
            again = self.apply(*expression)
            self._numbers[expression] = number
            assert [facts[again] for facts in self._facts] == [facts[number] for facts in self._facts]
            compared.append(number)

    monkeypatch.setattr(Numbering, "repeat", both)
    assert Prover(folder_relation(tmp_path / "ranks")).run().proven
    assert compared


@pytest.mark.parametrize("kind", ["gradients", "all", "three axes"])
def test_a_group_on_ranges_has_the_expressions_it_has_by_the_laws(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sharded("gpt_adamw", (SETS | SPLIT_SETS)[kind], tmp_path / "ranks")
    ranges, compared = Repeats._in_ranges, list[int]()

    def both(
        self: Repeats, group: list[Node], form: int, numbers: list[int | None], values: MutableMapping[str, int]
    ) -> bool:
        done = ranges(self, group, form, numbers, values)
        for node in group if done else ():
            operands = [values[name] for name in node.inputs]
            assert self.reader.results(node, operands) == [values[node.outputs[0]]]
        compared.append(done)
        return done

    monkeypatch.setattr(Repeats, "_in_ranges", both)
    assert Prover(folder_relation(tmp_path / "ranks")).run().proven
    assert any(compared)


OTHER = {"Add": "Sub", "Sub": "Add", "Mul": "Div", "Div": "Mul", "Sqrt": "Exp"}


@pytest.mark.rest
def test_each_other_operator_and_operand_of_a_group_on_ranges_is_found(tmp_path: Path) -> None:
    assert sharded("mlp_adamw", SETS["gradients"], tmp_path / "ranks")
    path = tmp_path / "ranks" / "rank_0001.onnx"
    before, counts = path.read_bytes(), list[int]()
    model = ModelProto.FromString(before)
    update = [
        at for at, node in enumerate(model.graph.node)
        if node.output[0].startswith("gopt.shard") and node.op_type in OTHER
    ]  # fmt: skip

    def operator(model: ModelProto) -> None:
        model.graph.node[position].op_type = OTHER[model.graph.node[position].op_type]

    def turned(model: ModelProto) -> None:
        node = model.graph.node[position]
        operands = [node.input[-1], *node.input[:-1]]
        del node.input[:]
        node.input.extend(operands)

    def earlier(model: ModelProto) -> None:
        node = model.graph.node[position]
        state = next(each.name for each in model.graph.input if each.name.endswith("state2"))
        node.input[0] = state if node.input[0] != state else state.replace("state2", "state1")

    for position in update:
        ordered = model.graph.node[position].op_type in ("Sub", "Div")
        for edit in (operator, earlier, turned) if ordered else (operator, earlier):
            edit_file(path, edit)
            assert not gopt.prove(tmp_path / "ranks").proven, (position, edit)
            path.write_bytes(before)
        counts.append(position)
    assert len(counts) >= 12
    edit_file(path, lambda _: None)
    assert gopt.prove(tmp_path / "ranks").proven
