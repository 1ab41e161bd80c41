"""Blocks of keys: they compute what the source does, counters stand apart, and what is not updated by itself is
refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from async_steps import SourceUpdate, scheduled, served
from helpers import ROOT, executed_lines, run_graph

from gopt.artifact.pieces import cut
from gopt.artifact.server_entries import KeyEntry, ServerPlanEntry
from gopt.artifact.table_parts import part_piece, table_layout
from gopt.errors import InvariantError, UnsupportedError
from gopt.parameter_server.blocks import Block, find_blocks
from gopt.runtime.session import Array, SessionCache


def part_of(block: Block, values: Mapping[str, Array], plan: ServerPlanEntry, server: int) -> Array:
    """What a server has of a parameter or a gradient."""
    if isinstance(block.entry, KeyEntry):
        (piece,) = block.entry.pieces
        return values[piece.tensor].reshape(-1)[piece.start : piece.stop]
    layout = table_layout(plan.tables[block.key])
    return cut(part_piece(layout, block.entry.name, server), values[block.entry.name])


def pushed(block: Block, gradients: Mapping[str, Array], plan: ServerPlanEntry, server: int) -> dict[str, Array]:
    """What a block is fed of gradients; of a table all rows of the part."""
    own = part_of(block, gradients, plan, server)
    if isinstance(block.entry, KeyEntry):
        return {block.pushed: own.reshape(block.update.inputs[block.pushed].dims)}
    layout = table_layout(plan.tables[block.key])
    rows, columns = layout.local_rows(server), len(layout.columns(server))
    return {block.entry.ids: np.arange(rows), block.entry.gradient: own.reshape(rows, columns)}


@pytest.mark.parametrize(
    ("name", "rows"),
    [("scheduled", ""), ("mlp_lamb", ""), ("mlp_torchoptim_adamw", ""), ("optim/nadam", ""),
     ("sparse/dlrm_adagrad", "dense"), ("sparse/dlrm_adagrad", "lazy"), ("sparse/dlrm_adam", "lazy")],
)  # fmt: skip
def test_with_one_trainer_blocks_compute_what_the_source_does(name: str, rows: str, tmp_path: Path) -> None:
    model = scheduled(tmp_path / "m.onnx") if name == "scheduled" else ROOT / f"fixtures/{name}.onnx"
    tables = {"tables": {"*": "modulo"}, "rows": {"*": rows}} if rows else {}
    split = served(model, tmp_path / "out", trainers=1, **tables)
    update = SourceUpdate(split.training)
    hyper = {each: np.array(0.1, np.float32) for each in split.training.hyper}
    wanted, held = update.start(), split.values()
    counters = [{block.entry: dict(held[at]) for block in blocks} for at, (_, _, blocks) in enumerate(split.servers)]
    generator, cache = np.random.default_rng(0), SessionCache()
    for _ in range(3):
        gradients = update.gradients(generator)
        wanted = update(wanted, gradients, hyper)
        for at, (_, _, blocks) in enumerate(split.servers):
            for block in blocks:
                own = counters[at][block.entry]
                given = {name: own[name] for name in block.counters} | {each: hyper[each] for each in block.hyper}
                states = {each: held[at][each] for each in block.states}
                feeds = {**pushed(block, gradients, split.plan, at), **states, **given}
                made = run_graph(block.update, {n: v for n, v in feeds.items() if n in block.update.inputs}, cache)
                held[at].update((each, made[new]) for each, new in block.states.items())
                if block.counter is not None:
                    fed = {n: v for n, v in given.items() if n in block.counter.inputs}
                    made = run_graph(block.counter, fed, cache)
                    own.update((each, made[new]) for each, new in block.counters.items())
    for at, (_, _, blocks) in enumerate(split.servers):
        for block in blocks:
            found = held[at][block.entry.inputs[0]].reshape(-1)
            assert found.tobytes() == part_of(block, wanted, split.plan, at).tobytes()
            for name in block.counters:
                assert counters[at][block.entry][name].tobytes() == wanted[name].tobytes()


def test_a_schedule_is_no_part_of_what_gradients_change(tmp_path: Path) -> None:
    split = served(scheduled(tmp_path / "m.onnx"), tmp_path / "out")
    for _, _, blocks in split.servers:
        for block in blocks:
            assert block.counters == {"step": "step_out"} and block.counter is not None
            assert {node.op_type for node in block.counter.nodes} == {"Add"}
            assert "If" in {node.op_type for node in block.update.nodes}
            assert "step_out" not in block.update.outputs and block.pushed not in block.counter.inputs


def test_every_state_of_a_server_is_in_a_block(tmp_path: Path) -> None:
    # The step counters of this optimizer are read by no update.
    split = served(ROOT / "fixtures/optim/rmsprop.onnx", tmp_path / "out", servers=1, minimum=1 << 20)
    ((_, states, blocks),) = split.servers
    assert {name for block in blocks for name in (*block.states, *block.counters)} == set(states)
    assert not any(block.counters for block in blocks[1:])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("optim/clip_global_adamw", "servers wait for one another"),
        ("mlp_adamw_fp16_scaler", "no rounds, after which all have the same"),
    ],
)
def test_what_is_not_updated_by_itself_is_refused_when_split(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=message) as caught:
        served(ROOT / f"fixtures/{name}.onnx", tmp_path / "out")
    assert any("--mode sync" in hint for hint in caught.value.hints)


def test_states_of_another_key_are_refused(tmp_path: Path) -> None:
    split = served(scheduled(tmp_path / "m.onnx"), tmp_path / "out", servers=1)
    ((graph, states, blocks),) = split.servers
    one, other = blocks[0].entry, blocks[1].entry
    node = next(node for node in graph.nodes if one.outputs[0] in node.outputs)
    node.inputs[0] = other.inputs[0]
    node.encoded = None
    with pytest.raises(UnsupportedError, match=f"'{one.name}' is updated with state .* of '{other.name}'"):
        find_blocks(graph, split.plan, 0, states, [])


def test_a_graph_of_another_split_is_refused(tmp_path: Path) -> None:
    split = served(scheduled(tmp_path / "m.onnx"), tmp_path / "out")
    graph, states, _ = split.servers[0]
    with pytest.raises(InvariantError, match="the server's graph"):
        find_blocks(graph, split.plan, 1, states, [])


def test_the_time_grows_with_the_graph(tmp_path: Path) -> None:
    small = served(ROOT / "fixtures/mlp_adamw.onnx", tmp_path / "one", servers=1, minimum=1 << 20)
    large = served(ROOT / "fixtures/gpt_adamw.onnx", tmp_path / "two", servers=1, minimum=1 << 20)
    lines = []
    for split in (small, large):
        ((graph, states, blocks),) = split.servers
        count = executed_lines(lambda: find_blocks(graph, split.plan, 0, states, ["lr"]))  # noqa: B023 - used at once
        lines.append(count / len(blocks))
    assert lines[1] < 2 * lines[0]
