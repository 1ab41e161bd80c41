"""Embedding tables: parameters read by single rows, with gradients that are sums of rows.

Embeddings are such tables, and so are the weights and biases of output layers that look at sampled classes (sampled
softmax, noise-contrastive estimation) or at the nodes of a path (tree softmax). All is read from the data flow: the
forward gathers rows by ids, the backward adds rows into zeros at the same ids. Any other read of a table, or any other
part of the gradient, keeps the table dense, and the record says why."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from gopt.analysis.row_reads import Lookup, RowReads, row_reads
from gopt.analysis.row_sums import NoRowSum, RowSums, SparseGradient
from gopt.analysis.row_updates import RowUpdate, row_update
from gopt.analysis.row_values import RowValues
from gopt.analysis.training import TrainingGraph
from gopt.analysis.update_subgraphs import find_updates
from gopt.ir.graph_index import descendants

__all__ = ["EmbeddingTable", "Lookup", "RowUpdate", "SparseGradient", "find_embeddings"]


@dataclass(frozen=True, slots=True)
class EmbeddingTable:
    """A parameter with looked-up rows. ``why_not``: why the table stays dense; '' where the gradient is sparse.

    ``width``: elements of a row; 1 for a table of rank 1. ``lookups``: the reads in order. ``terms``: addends of the
    gradient, added in this order. ``update``: the treatment of rows; None for a dense table."""

    parameter: str
    gradient: str
    rows: int
    width: int
    dtype: str
    lookups: tuple[Lookup, ...]
    terms: tuple[SparseGradient, ...] = ()
    update: RowUpdate | None = None
    why_not: str = ""

    @property
    def sparse(self) -> bool:
        return not self.why_not

    @property
    def padding(self) -> tuple[int, ...]:
        """The ids whose rows no term of the gradient changes."""
        return tuple(sorted(set[int].intersection(*(set(term.padding) for term in self.terms)))) if self.terms else ()

    @property
    def prefetchable(self) -> bool:
        """Whether all looked-up rows are known before any parameter is read."""
        return all(lookup.prefetchable for lookup in self.lookups)


def find_embeddings(training: TrainingGraph) -> tuple[EmbeddingTable, ...]:
    """Return each parameter from which forward or backward gathers rows, in the order of the parameters.

    The result is cached on the training graph. Parameters read only as a whole are left out."""
    return training.once("embeddings", lambda: tuple(_find(training)))


def _find(training: TrainingGraph) -> list[EmbeddingTable]:
    values = RowValues(training.graph)
    after_parameters = descendants(values.index, (state.tensor for state in training.parameters))
    drawn = [name for node in training.random for name in node.outputs]
    tensors = [state.tensor for state in training.states]
    fed = descendants(values.index, [*training.batch, *training.hyper, *tensors, *drawn])
    reads = {state.tensor: row_reads(values, state.tensor, after_parameters) for state in training.parameters}
    return [_table(training, values, name, uses, fed) for name, uses in reads.items() if uses.lookups]


def _table(
    training: TrainingGraph, values: RowValues, name: str, reads: RowReads, fed: Collection[str]
) -> EmbeddingTable:  # fmt: skip
    """``fed``: values that may differ from step to step."""
    type, gradient = training.graph.types[name], training.gradients.get(name, "")
    rows, *rest = type.dims
    width, lookups = math.prod(rest), tuple(reads.lookups)

    def dense(why: str) -> EmbeddingTable:
        return EmbeddingTable(name, gradient, rows, width, type.dtype, lookups, why_not=why)

    if reads.whole:
        return dense(reads.whole)
    if not gradient:
        return dense("nothing trains it")
    if all(lookup.ids not in fed for lookup in lookups):
        return dense("its row numbers are constants, so that every step looks up the same rows")
    if rows < 2 or not width:
        return dense("it has one row" if rows == 1 else "it is empty")
    if len(training.weights_of(gradient)) > 1:
        return dense(f"it shares its gradient {gradient}")
    union = frozenset[int]().union(*(values.sources(lookup.ids) for lookup in lookups))
    sums = RowSums(values, rows, union)
    try:
        sums.read(gradient)
    except NoRowSum as error:
        return dense(str(error))
    subgraph = find_updates(training, whole_accumulators=False).subgraphs[name]
    update = row_update(values, subgraph)
    return EmbeddingTable(name, gradient, rows, width, type.dtype, lookups, tuple(sums.terms), update)
