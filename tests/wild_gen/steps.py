"""The steps that are written in other ways: small ones of few operators, and fixtures."""

from __future__ import annotations

from functools import cache

import onnx
from helpers import FIXTURES, Builder, perceptron
from onnx import ModelProto
from steps_gen.graphs import reads

from wild_gen.rewriting import LOSS, forward, replace_nodes

BATCH = 4


def momentum() -> ModelProto:
    """A perceptron of two layers with momentum, an input ``lr``, and a metric; its operators are the same since 13."""
    b = Builder(7)
    net = perceptron(b, (3, 5, 2), batch=BATCH)
    rate = b.input("lr", ())
    b.output("loss", net.loss, ())
    b.output("rounded", b.op("Cast", net.loss, to=7), (), "int64")
    for name, shape in net.params.items():
        held = b.small(f"{name}_m", shape)
        new = b.op("Add", b.op("Mul", held, b.const(0.9)), net.gradients[name])
        b.output(f"{name}_m_out", new, shape)
        b.output(f"{name}_out", b.op("Sub", name, b.op("Mul", new, rate)), shape)
    return b.model()


def forward_of(model: ModelProto) -> ModelProto:
    """The forward of a step alone: its output is the loss, and parameters are stored."""
    copy, nodes = ModelProto(), forward(model)
    copy.CopyFrom(model)
    read = {name for node in nodes for name in reads(node)} | {LOSS}
    held = {each.name for each in model.graph.initializer}
    replace_nodes(copy.graph, nodes)
    for table in (copy.graph.input, copy.graph.output, copy.graph.initializer):
        kept = [each for each in table if each.name in read and not (table is copy.graph.input and each.name in held)]
        del table[:]
        table.extend(kept)
    return copy


MADE = {"momentum": momentum}
STORED = ("mlp_adamw", "mlp_adamw_fp16_scaler", "emb_adamw", "cnn_mom_fp16", "mlp_mom_clip_sched")
NAMES = (*MADE, *STORED)


@cache
def _step(name: str) -> bytes:
    model = MADE[name]() if name in MADE else onnx.load(FIXTURES / f"{name}.onnx")
    for k, node in enumerate(model.graph.node):
        node.name = f"n{k}"
    return model.SerializeToString(deterministic=True)


def step(name: str) -> ModelProto:
    """A copy of a step, every node with a name of its own."""
    return ModelProto.FromString(_step(name))
