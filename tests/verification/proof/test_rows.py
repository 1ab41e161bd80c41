"""The laws of rows of tables, by numbers: what is drawn is computed by NumPy, and from the expressions."""

from __future__ import annotations

import random
from fractions import Fraction

import numpy as np
import pytest
from helpers import Builder

from gopt.ir.load import load
from gopt.verification.proof.constants import ConstantTable
from gopt.verification.proof.evaluation import ExpressionValues
from gopt.verification.proof.exponentials import Expressions
from gopt.verification.proof.operators import NodeReader
from gopt.verification.proof.rows import RowLaws


class Drawn:
    """A table, lists of row numbers and rows: the number of each expression, and its value."""

    def __init__(self, seed: int) -> None:
        self.random, generator = random.Random(seed), np.random.default_rng(seed)
        self.expressions = Expressions({"dp": 2})
        self.constants = ConstantTable(self.expressions)
        self.laws = RowLaws(self.expressions, self.constants)
        self.rows, self.width = self.random.choice([(1, 3), (5, 1), (6, 4)])
        self.leaves: dict[object, np.ndarray] = {}
        self.table = self.leaf("table", generator.uniform(-1, 1, (self.rows, self.width)))
        lists = []
        for index in range(self.random.randint(1, 3)):
            count = self.random.randint(1, 4)
            ids = generator.integers(-self.rows, self.rows, count)
            rows = generator.uniform(-1, 1, (count, self.width))
            lists.append((self.leaf(f"ids{index}", ids), ids, self.leaf(f"rows{index}", rows), rows))
        self.ids, self.rows_pushed = (self.joined([each[place] for each in lists]) for place in (0, 2))
        self.id_values = np.concatenate([each[1] for each in lists])
        self.row_values = np.concatenate([each[3] for each in lists])

    def leaf(self, name: str, value: np.ndarray) -> int:
        self.leaves[name] = value
        return self.expressions.leaf("batch", name, value.shape)

    def joined(self, numbers: list[int]) -> int:
        return self.expressions.flat(piece for number in numbers for piece in self.expressions.pieces(number))

    def value(self, number: int) -> np.ndarray:
        values = ExpressionValues(
            self.expressions, lambda leaf, _: self.leaves.get(leaf.attributes), self.constants.origins
        )
        return values.values([number], {})[0]

    def sum(self, rows: np.ndarray) -> np.ndarray:
        total = np.zeros((self.rows, self.width))
        np.add.at(total, self.id_values, rows)
        return total


@pytest.mark.parametrize("seed", range(40))
def test_rows_that_are_looked_up(seed):
    drawn = Drawn(seed)
    number = drawn.laws.looked_up(drawn.table, drawn.ids)
    assert number is not None
    np.testing.assert_allclose(drawn.value(number), drawn.leaves["table"][drawn.id_values])


@pytest.mark.parametrize("seed", range(40))
def test_rows_that_are_added(seed):
    drawn = Drawn(seed)
    number = drawn.laws.added((drawn.rows, drawn.width), drawn.ids, drawn.rows_pushed)
    assert number is not None
    np.testing.assert_allclose(drawn.value(number), drawn.sum(drawn.row_values))


@pytest.mark.parametrize("seed", range(40))
def test_a_sum_of_rows_is_linear(seed):
    """Scaled and shifted rows are a scaled sum, and a sum of ones."""
    drawn = Drawn(seed)
    expressions, shape = drawn.expressions, (drawn.rows, drawn.width)
    ones = expressions.constant(Fraction(1, 3), expressions.shape(drawn.rows_pushed))
    scaled = expressions.elementwise(expressions.added, [expressions.scaled(drawn.rows_pushed, Fraction(-5, 2)), ones])
    number = drawn.laws.added(shape, drawn.ids, scaled)
    assert number is not None
    np.testing.assert_allclose(drawn.value(number), drawn.sum(-2.5 * drawn.row_values + 1 / 3), atol=1e-12)


@pytest.mark.parametrize(("low", "high", "keeps"), [(-4, 3, True), (-9, 9, True), (-4, 2, False), (0, 3, False)])
def test_limits_that_keep_each_number_in_a_lookup(low, high, keeps, tmp_path):
    b = Builder()
    clipped = b.op("Clip", b.input("ids", (5,), "int64"), b.const(low, "int64"), b.const(high, "int64"))
    b.output("new", clipped, (5,), "int64")
    graph = load(b.save(tmp_path / "step.onnx"))
    expressions = Expressions({})
    table = ConstantTable(expressions)
    ids = expressions.leaf("batch", "ids", (5,))
    limits = [table.stored(tensor) for tensor in graph.initializers.values()]
    [number] = NodeReader(expressions, graph, frozenset(), table).results(graph.nodes[0], [ids, *limits])
    laws, rows = RowLaws(expressions, table), expressions.leaf("batch", "rows", (5, 2))
    before = laws.added((4, 2), number, rows)
    laws.looked_up(expressions.leaf("state", "table", (4, 2)), ids)
    after = laws.added((4, 2), number, rows)
    assert before is not None and after is not None
    assert expressions.all[before].operands[0] == number, "the numbers may be of no row"
    assert (expressions.all[after].operands[0] == ids) == keeps
