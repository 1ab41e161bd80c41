"""The law of what ``gopt merge --training-info`` writes: three readers of one step compute the same bits.

The source runs as a plain step. What is written runs as the standard says, without gopt, and as gopt reads it again.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from training_info_standard import Program, StandardTrainer, Values

import gopt
from gopt.analysis.training import TrainingGraph
from gopt.artifact.serialize import model_bytes
from gopt.ir.graph_index import GraphIndex, ancestors
from gopt.offline.folder_contents import step_at
from gopt.offline.training_info.write import TrainingInfo, merge_training_info
from gopt.operators.kinds import HEAVY
from gopt.verification.batches import SampledBatches
from gopt.verification.random_inputs import RandomInputs
from gopt.verification.sampling import integer_ranges

STEPS = 3


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether type, shape and every bit are equal."""
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def last_product(training: TrainingGraph) -> str:
    """The last product of the forward: what a user would name as the model's output."""
    needed, _ = ancestors(GraphIndex(training.graph), [training.loss])
    return [node.outputs[0] for node in training.graph.nodes if id(node) in needed and node.op_type in HEAVY][-1]


class PlainTrainer:
    """Runs a step as gopt reads it, optimizers written out."""

    def __init__(self, training: TrainingGraph) -> None:
        self.updates = {state.tensor: state.updated for state in training.states}
        graph = training.graph
        self.values = {name: graph.initializers[name].numpy() for name in self.updates}
        fed = graph.inputs | {name: graph.types[name] for name in self.updates}
        rest = {name: tensor for name, tensor in graph.initializers.items() if name not in self.updates}
        alone = replace(graph, inputs=fed, initializers=rest, file_nodes=None)
        self.program = Program(onnx.ModelProto.FromString(model_bytes(alone, {}, "", {})))

    def step(self, feeds: Values) -> Values:
        found = self.program.run({**feeds, **self.values})
        self.values = {name: found[value] for name, value in self.updates.items()}
        return found


def feeds_of(training: TrainingGraph, number: int) -> Values:
    """A batch, and hyper-parameters."""
    batches = SampledBatches(training, RandomInputs(), 5, integer_ranges(training))
    found = batches.batch(number, 0)
    types = training.graph.inputs
    return found | {name: np.full(types[name].dims, 0.01, np.float32) for name in training.hyper}


def check_law(source: Path, target: Path, *outputs: str) -> TrainingInfo:
    """Write a step or ranks of one, and compare all three readers, every state and the loss; returns the record."""
    training = step_at(source).training
    assert not training.random or all("seed" in node.attributes for node in training.random)
    written = merge_training_info(source, target, outputs=outputs or [last_product(training)])
    onnx.checker.check_model(str(target), full_check=True)
    compare_readers(training, target)
    return written


def compare_readers(training: TrainingGraph, target: Path) -> None:
    """Run a step and what is written of it, as the standard says and as gopt reads it: every state and the loss."""
    again = gopt.load(target).training
    assert again.loss == training.loss
    assert {(each.tensor, each.kind) for each in again.states} == {(each.tensor, each.kind) for each in training.states}
    assert again.gradients.keys() == training.gradients.keys()
    assert sorted(again.batch) == sorted(training.batch)
    start = {name: tensor.numpy() for name, tensor in training.graph.initializers.items()}
    runs = [PlainTrainer(training), StandardTrainer(target), PlainTrainer(again)]
    for number in range(STEPS):
        feeds = feeds_of(training, number)
        first, *others = [run.step(feeds) for run in runs]
        for other, run in zip(others, runs[1:], strict=True):
            assert same_bits(first[training.loss], other[training.loss])
            assert run.values.keys() == runs[0].values.keys()
            assert [name for name, value in runs[0].values.items() if not same_bits(value, run.values[name])] == []
    moved = [name for name in training.gradients if not same_bits(start[name], runs[0].values[name])]
    assert moved, "a step that changes nothing shows nothing"
