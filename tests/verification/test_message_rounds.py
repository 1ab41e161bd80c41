"""``gopt verify`` of a split: equal where it is, and each planted error is seen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from helpers import accept, source

from gopt import api
from gopt.artifact.server_entries import Mode, PullAt
from gopt.errors import UnsupportedError
from gopt.parameter_server.options import SplitOptions
from gopt.parameter_server.slicing import Slicing
from gopt.verification.verify import Verifier


def split(tmp_path: Path, name: str, **given: object) -> Path:
    options = SplitOptions(**{"trainers": 2, "servers": 3, "minimum": 16, **given})  # type: ignore[arg-type]
    api.split(source(name), options).write(tmp_path / "out")
    return tmp_path / "out"


def verified(folder: Path) -> int:
    return Verifier(folder, deadline=60).run(confirm=False, steps=2).exit_code


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("mlp_adamw", {}),
        ("mlp_adamw", {"accumulate": 2}),
        ("cnn_sgd", {"pull": PullAt.END}),
        ("mlp_lamb", {"slicing": Slicing.CLASSIC}),
        ("mlp_muon", {}),
        ("mlp_mom_clip_sched", {"trainers": 3}),
        ("mlp_adamw_fp16_scaler", {"slicing": Slicing.OFF, "cap": 64}),  # servers with unequal numbers of messages
        ("mlp_adagrad", {"slicing": Slicing.OFF, "servers": 6}),  # servers without anything
    ],
)
def test_a_split_equals_its_source(name: str, given: dict[str, object], tmp_path: Path) -> None:
    assert verified(split(tmp_path, name, **given)) == 0


def _attribute(node: onnx.NodeProto, name: str) -> onnx.AttributeProto:
    return next(each for each in node.attribute if each.name == name)


def sum_instead_of_mean(graph: onnx.GraphProto) -> None:
    node = next(node for node in graph.node if node.op_type == "Aggregate")
    _attribute(node, "reduce").s = b"sum"


def second_moment_forgotten(graph: onnx.GraphProto) -> None:
    node = next(node for node in graph.node if node.op_type == "Sqrt")
    node.op_type = "Identity"


def local_norm(graph: onnx.GraphProto) -> None:
    node = next(node for node in graph.node if node.op_type == "AllReduce")
    for number, name in enumerate(node.output):
        graph.node.append(onnx.helper.make_node("Identity", [node.input[number]], [name]))
    graph.node.remove(node)
    nodes = [*graph.node][-1:] + [*graph.node][:-1]
    made: set[str] = set()
    ordered: list[onnx.NodeProto] = []
    while nodes:  # a node stands behind those that it reads
        known = {name for each in nodes for name in each.output}
        ready = next(each for each in nodes if known.isdisjoint(set(each.input) - made))
        made.update(ready.output)
        ordered.append(ready)
        nodes.remove(ready)
    del graph.node[:]
    graph.node.extend(ordered)


@pytest.mark.parametrize(
    ("name", "plant"),
    [("mlp_adamw", sum_instead_of_mean), ("mlp_adamw", second_moment_forgotten), ("mlp_mom_clip_sched", local_norm)],
)
def test_planted_errors_are_seen(name: str, plant: Callable[[onnx.GraphProto], None], tmp_path: Path) -> None:
    folder = split(tmp_path, name)
    for path in sorted(folder.glob("server_*.onnx")):
        model = onnx.load(path, load_external_data=False)
        plant(model.graph)
        onnx.save(model, path)
    accept(folder)
    assert verified(folder) == 1


def test_what_depends_on_the_order_of_messages_is_not_compared(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="order of messages"):
        Verifier(split(tmp_path, "mlp_adamw", mode=Mode.ASYNC))
