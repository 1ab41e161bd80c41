"""Writes the certificate of a proof: the expression of every value of the source and of all ranks, line by line."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from gopt.analysis.loss_reduction import LossReduction
from gopt.artifact.manifest_check import read_manifest
from gopt.errors import UnsupportedError
from gopt.ir.graph import COMM, Graph, Node
from gopt.ir.graph_index import walk
from gopt.ir.load import load
from gopt.ir.node_kinds import record_of
from gopt.ir.opaque.expand import expand
from gopt.runtime.inlined_functions import inlined
from gopt.verification.certificate.lines import FORMAT, OPERATOR, encoded, operator_name, order_of, sealed
from gopt.verification.certificate.nodes import rule_of
from gopt.verification.proof.forms import EXTREME_PART, FLAT, PARTED, TAKE, VIEW
from gopt.verification.proof.prove import Prover
from gopt.verification.proof.rank_sweep import UNDEFINED, SweptValues, Values
from gopt.verification.proof.relation import RankRelation
from gopt.verification.reference_graphs import combined, local_graph, subgraph, update_graph

Line = dict[str, Any]
Section = dict[str, tuple[int, str, str]]
"""Value of a graph -> the expression, the kind: an input, a constant, or an operator; and the rule."""


class CertificateWriter:
    """The certificate of a folder that is proven."""

    def __init__(self, home: Path, prover: Prover) -> None:
        self.home, self.prover, self.expressions = home, prover, prover.expressions
        self.expected, self.training = prover.expected, prover.training
        self.manifest, mesh = read_manifest(home)
        sizes = dict(mesh.axes)
        self.several = self.manifest.accumulate > 1 or any(sizes[axis] > 1 for axis in mesh.data_axes)
        self.claims: list[Line] = []
        self.values: list[Line] = []

    def text(self) -> str:
        """The whole file. Raises UnsupportedError for a folder without a certificate."""
        relation = self.prover.relation
        met = any(reduction.points for reduction in relation.reductions)
        if (
            relation.plan is not None
            or relation.synchronised.points
            or met
            or self.prover.constants.roundings
            or self.manifest.files is None
        ):
            raise UnsupportedError(
                f"{self.home} has no certificate: servers, statistics that ranks reduce, or casts beside the source's",
                "gopt prove proves it without one",
            )
        self._source()
        self._ranks()
        expressions = self._expressions()
        lines = [*expressions, *self.claims, *self.values]
        head = {
            "format": FORMAT, "mesh": self.manifest.mesh.axes, "accumulate": self.manifest.accumulate,
            "files": self.manifest.read_digests, "lines": len(lines),
        }  # fmt: skip
        return sealed([head, *lines])

    # --- values ---

    def _source(self) -> None:
        """The claims, and the values of the source before and behind the combined gradients."""
        training, expected = self.training, self.expected
        graph = inlined(expand(load(self.home / self.manifest.source, own=True)))
        local, update = expected.programs
        for state in self.manifest.states:
            name = state.tensor
            numbers = {"start": expected.start[name], "during": expected.during[name], "new": expected.states[name]}
            self.claims.append({"state": name, **numbers})
        inputs = {entry.name: expected.start[entry.name] for entry in self.manifest.common.inputs}
        self.claims += [{"input": name, "number": number} for name, number in inputs.items()]
        reduction = LossReduction.parse(self.manifest.loss_reduction)
        rows = [
            {"combined": name, **self._combined(name, reduction), "number": update[name]}
            for name in combined(training)
            if name in update and self.several
        ]
        self.claims += sorted(
            rows,
            key=lambda line: (next(key for key in ("parameter", "shared", "state") if key in line), line["combined"]),
        )
        self.claims += [
            {"shown": entry.name, "number": expected.shown[entry.name]} for entry in self.manifest.common.outputs
        ]
        wanted = local_graph(training, reduction.value, training.forward_metrics).outputs
        before = self._swept(subgraph(graph, graph.nodes, wanted, ()), expected.during | inputs, local)
        section = self._section({"program": "local"}, graph, before, {}, ())
        met = {name: update[name] for name in combined(training) if name in update}
        wanted = update_graph(training, [name for name in training.shown if name not in before]).outputs
        behind = self._swept(subgraph(graph, graph.nodes, wanted, met), expected.start | inputs | met, update)
        self._section({"program": "update"}, graph, behind, section, ())

    def _combined(self, name: str, reduction: LossReduction) -> Line:
        """Where a combined value comes from, and by which rule."""
        training = self.training
        parameter = next((of for of, gradient in training.gradients.items() if gradient == name), None)
        if parameter is not None:
            return {"parameter": parameter, "rule": reduction.rule_of(parameter).value}
        tensor = next((of for of, output in training.chosen.items() if output == name), None)
        return {"shared": training.shared[name], "rule": "mean"} if tensor is None else {"state": tensor, "rule": "new"}

    def _swept(self, graph: Graph, fed: Values, recorded: Values) -> Values:
        """The values of a part of the source; the prover reads the rest, such as copies that it leaves out."""
        reader = self.prover.reader(graph)
        stored = {
            name: self.prover.constants.stored(tensor) for name, tensor in graph.initializers.items() if name not in fed
        }
        results: Values = {}
        for node in graph.nodes:
            if node.domain == COMM:
                raise UnsupportedError(
                    "a source with collectives has no certificate", "gopt prove proves it without one"
                )
            numbers = [recorded.get(name, -1) for name in node.outputs]
            fitting = [
                number >= 0 and self._fits(graph, name, number) for name, number in zip(node.outputs, numbers) if name
            ]
            if not all(fitting):
                values = stored | fed | results
                numbers = reader.results(
                    node, [values[name] if name else None for name in (*node.inputs, *node.captures)]
                )
            results.update(zip(node.outputs, numbers))
        return stored | results

    def _fits(self, graph: Graph, name: str, number: int) -> bool:
        type, shape = graph.type_of(name), self.expressions.shape(number)
        return not type.static or shape == type.shape

    def _ranks(self) -> None:
        """The values of all ranks, and the states that micro-steps leave behind."""
        prover, lead, entries = self.prover, dict[str, Section](), {entry.rank: entry for entry in self.manifest.ranks}
        for rank, values in zip(prover.relation.ranks, prover.ranks):
            moving, fed = dict[str, int](), self.manifest.fed(entries[rank.rank])
            for (phase, times), results in zip(prover.relation.schedule.items(), values.files):
                moving |= {name: results[name] for name in moving.keys() & rank.graphs[phase].inputs.keys()}
                graph = rank.graphs[phase]
                if times > 1 and rank.sums:
                    results = self._generic(rank, graph, results)
                head = {"rank": rank.rank, "phase": phase}
                section = self._section(head, graph, results, lead.get(phase, {}), fed)
                lead.setdefault(phase, section)
                moved = [state for state in rank.states if state.output in graph.outputs]
                moving |= {state.input: values.step[state.input] for state in moved} if times > 1 else {}
            self.values += [{"moved": name, "number": number} for name, number in moving.items()]

    def _generic(self, rank: RankRelation, graph: Graph, results: SweptValues) -> SweptValues:
        """The values of a micro-step for any values of the sums so far."""
        sums = [entry for entry in rank.sums if entry.output in graph.outputs]
        before = {entry.input: self.prover._any(entry.input, rank.rank, results[entry.output]) for entry in sums}
        after = self.prover._behind(graph, results, before)
        if after is None:
            raise UnsupportedError(
                "calls on sums of micro-steps have no certificate", "gopt prove proves them without one"
            )
        return {**results, **after}

    def _section(
        self, head: Line, graph: Graph, values: SweptValues, lead: Section, fed: Collection[str]
    ) -> Section:  # fmt: skip
        """Write the values of a graph without an equal in another graph, ``lead``; return all. A stored value beside
        no input in ``fed`` is a constant."""
        self.values.append(head)
        producers, section = graph.producers(), Section()
        for name in order_of(graph):
            number = values.get(name)
            if number is None or self.expressions.all[number].op == UNDEFINED:
                continue
            node = producers.get(name) if name not in graph.inputs else None
            stored = name in graph.initializers and name not in fed
            kind = "constant" if stored else "input" if node is None else operator_name(node)
            before, of, rule = lead.get(name, (-1, "", ""))
            if (before, of) != (number, kind):
                due = kind if node is None else self._rule(node, values)
                if (before, rule) != (number, due):
                    self.values.append({"value": name, "number": number, "rule": due})
                rule = due
            section[name] = number, kind, rule
        return section

    def _rule(self, node: Node, values: SweptValues) -> str:
        """The rule of a node: the operator itself where the results are ones."""
        results = [values[name] for name in node.outputs if name in values]
        forms = [self.expressions.all[number] for number in results]
        if record_of(node).elementwise:
            forms = [self.expressions.all[root] for number in results for root in self._roots(number)]
        plain = all(form.op == operator_name(node) and form.attributes is not None for form in forms)
        if not record_of(node).elementwise:
            pairs = [pair for form in forms for pair in zip(node.reads, form.operands)]
            plain = plain and all(values.get(name, operand) == operand for name, operand in pairs)
        return OPERATOR if plain and node.domain != COMM else rule_of(node)

    def _roots(self, number: int) -> Iterator[int]:
        """The expressions under ranges of elements."""
        op, _, operands, _ = self.expressions.all[number]
        if op in (VIEW, TAKE, FLAT):
            for operand in dict.fromkeys(operands):
                yield from self._roots(operand)
        else:
            yield number

    # --- expressions ---

    def _expressions(self) -> list[Line]:
        """All expressions behind the lines, renumbered from 0 on."""
        lines = [*self.claims, *self.values]
        keys = ("number", "start", "during", "new")
        used = {line[key] for line in lines for key in keys if key in line}
        numbers = sorted({0, *walk(used, lambda number: self.expressions.all[number].operands)})
        index = {number: at for at, number in enumerate(numbers)}
        for line in lines:
            line.update({key: index[line[key]] for key in keys if key in line})
        result = []
        for number in numbers:
            op, attributes, operands, shape = self.expressions.all[number]
            line = {"expression": index[number], "form": op, "attributes": encoded(attributes),
                    "operands": [index[operand] for operand in operands], "shape": encoded(shape)}  # fmt: skip
            if op in (PARTED, EXTREME_PART):
                line["attributes"] = encoded((index[attributes[0]], *attributes[1:]))
            if not operands:
                line["varies"] = sorted(self.expressions.varies[number])
            result.append(line)
        return result
