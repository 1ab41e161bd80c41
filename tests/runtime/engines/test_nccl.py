"""The nccl engine over a GPU that is not there: every call, whole trainings, faults planted in the order of work."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from fake_gpu import Fabric, FakeCudart, FakeNccl, FakeRuntime, together
from helpers import FIXTURES
from products import part, spread
from runtime_graphs import make

import gopt
from gopt.artifact.manifest_entries import InputKind
from gopt.collectives.table import COLLECTIVES
from gopt.errors import OptionError, RunError
from gopt.ir.graph import COMM, Node
from gopt.ir.types import numpy_dtype
from gopt.offline.merge import merge
from gopt.passes.pipeline import build_pipeline
from gopt.records.mesh import Mesh
from gopt.runtime import session
from gopt.runtime.device import HOST
from gopt.runtime.engines import nccl
from gopt.runtime.engines.base import run_threads
from gopt.runtime.engines.cuda import Cuda
from gopt.runtime.engines.gpu import Gpu, Sessions
from gopt.runtime.engines.nccl import NcclEngine, StreamCollectives, on_gpus
from gopt.runtime.engines.staging import equal_parts
from gopt.runtime.execution_plan import plan_execution
from gopt.runtime.executor import Executor
from gopt.runtime.proto import build_model
from gopt.runtime.training.job import Job, read_manifest
from gopt.runtime.training.train import Trainer
from gopt.verification import sampling

SCHEDULES = {"all late": (), "compute at once": (0,), "calls at once": (1,)}
"""Streams that run what they are given at once: those that compute, or those of calls. The others run when awaited."""


@pytest.fixture
def runtime(monkeypatch):
    made = FakeRuntime()
    monkeypatch.setattr(session, "runtime", lambda: made)
    return made


class Rank:
    """One rank's GPU and engine."""

    def __init__(self, mesh: Mesh, words: Any, fabric: Fabric, eager: tuple[int, ...] = ()) -> None:
        self.api = FakeCudart(mesh.ranks, eager)
        self.gpu = Gpu(Cuda(self.api), words.rank)
        self.nccl = FakeNccl(fabric)
        self.engine = NcclEngine(mesh, words, self.gpu, self.nccl)

    def value(self, array: np.ndarray) -> Any:
        """A value at which the compute stream still works."""
        return self.gpu.to_device(array)


# --- every call -----------------------------------------------------------------------------------------------------

FLAT = {
    "even": [0, 8, 16, 24], "short": [0, 16, 32, 37], "empty": [0, 16, 16, 16], "uneven": [0, 3, 30, 37],
    "beyond its memory": [0, 176, 352, 508],
}  # fmt: skip
"""The last in equal parts is longer than what 508 elements are given."""
KINDS = ("float32", "float16", "bfloat16", "float64", "int64", "int16", "uint16", "uint8")


def drawn(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    if dtype == "bool":
        return generator.random(shape) < 0.3
    values = 4 * generator.standard_normal(shape)
    return np.asarray(values if "float" in dtype else np.abs(values) * 20).astype(numpy_dtype(dtype))


def cases() -> Any:
    """Operator, attributes, and for every rank of three the shapes that it gives."""
    whole = [[(4, 3), (), (0, 2), (5,)]] * 3
    for how in ("sum", "mean", "max", "min"):
        yield "AllReduce", {"reduce": how}, whole, how
    yield "Reduce", {"reduce": "mean", "root": 1}, whole, "mean"
    yield "Reduce", {"reduce": "max", "root": 2}, whole, "max"
    stated = {"shapes": ["4,3", "", "0,2", "5"]}
    yield "Broadcast", {"root": 1, **stated}, [[], whole[0], []], None
    for name, cuts in FLAT.items():
        given = [[(cuts[-1] - 6,), (3, 2)]] * 3
        for how in ("sum", "max") if name in ("short", "uneven", "beyond its memory") else ("mean",):
            yield "ReduceScatter", {"reduce": how, "cuts": cuts}, given, how
        shards = [[(stop - start,)] for start, stop in itertools.pairwise(cuts)]
        yield "AllGather", {"cuts": cuts, "shapes": [f"{cuts[-1] - 6}", "3,2"]}, shards, None
    for axis, sizes in ((0, [2, 2, 2]), (0, [1, 0, 4]), (1, [3, 3, 3]), (2, [0, 1, 3])):
        shape = tuple(sum(sizes) if place == axis else 2 + place for place in range(3))
        yield "ReduceScatter", {"reduce": "sum", "axis": axis, "sizes": sizes}, [[shape]] * 3, "sum"
        parts = [[(*shape[:axis], size, *shape[axis + 1 :])] for size in sizes]
        yield "AllGather", {"axis": axis, "sizes": sizes}, parts, None
    for out, into in ((0, 1), (1, 0), (2, 0), (1, 2)):
        split, concat = [2, 0, 3], [1, 4, 2]
        shapes = [[tuple(5 if a == out else size if a == into else 3 for a in range(3))] for size in concat]
        layout = {"split_axis": out, "concat_axis": into, "split_sizes": split, "concat_sizes": concat}
        yield "AllToAll", layout, shapes, None


def typed(case: Any) -> Iterator[tuple[dict[str, Any], list[Any], list[Any], str]]:
    """A case in each type that its operator takes: attributes, what each rank gives, what each is due, and the type."""
    op, attributes, shapes, how = case
    for dtype in (*KINDS, "bool") if how is None or how in ("max", "min") else KINDS:
        if how == "mean" and "float" not in dtype:
            continue
        given = [[drawn(shape, dtype, 10 * rank + slot) for slot, shape in enumerate(each)]
                 for rank, each in enumerate(shapes)]  # fmt: skip
        full = {"group": "shard", **attributes}
        full |= {"dtype": dtype} if op == "Broadcast" else {}
        yield full, given, [each or [] for each in COLLECTIVES[op].execute(full, given, dtype)], dtype


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else f"{value[0]}-{json.dumps(value[1])}"


@pytest.mark.parametrize(("case", "schedule"), spread(cases(), SCHEDULES), ids=_shown)
def test_every_call_is_the_references(case, schedule, runtime):
    op, _, _, how = case
    mesh, fabric = Mesh.parse("shard=3"), Fabric()
    for full, given, wanted, dtype in typed(case):
        node = Node(op, ["x"], ["y"], domain=COMM, attributes=full)

        def work(words, node=node, given=given):
            rank = Rank(mesh, words, fabric, SCHEDULES[schedule])
            rank.engine.prepare(["shard"])
            inputs = [rank.value(array) for array in given[words.rank]]
            found = [rank.gpu.to_host(block) for block in rank.engine.call(0, node, inputs)]
            # What was given is as it was.
            assert all(np.array_equal(rank.gpu.to_host(b), a) for b, a in zip(inputs, given[words.rank]))
            return found

        for found, due in zip(together(mesh, work), wanted):
            assert len(found) == len(due)
            for mine, theirs in zip(found, due):
                assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
                close(mine, theirs, how, dtype)


def close(mine: np.ndarray, theirs: np.ndarray, how: str | None, dtype: str) -> None:
    """Equal; a mean, of which each part is divided before it is added, up to a rounding."""
    if how == "mean":
        loose = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-6}.get(dtype, 1e-14)
        np.testing.assert_allclose(mine.astype("f8"), theirs.astype("f8"), rtol=loose, atol=loose)
    else:
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("op", ["AllReduce", "Reduce", "ReduceScatter"])
@pytest.mark.parametrize("how", ["max", "min"])
def test_nan_wins(op, how, dtype, runtime):
    mesh, fabric = Mesh.parse("shard=2"), Fabric()
    arrays = [np.array([1, np.nan, 3, np.inf, -np.inf], numpy_dtype(dtype)),
              np.array([np.nan, 2, 5, 1, 1], numpy_dtype(dtype))]  # fmt: skip
    more = {"Reduce": {"root": 0}, "ReduceScatter": {"cuts": [0, 1, 5]}}.get(op, {})
    attributes = {"group": "shard", "reduce": how, **more}
    wanted = COLLECTIVES[op].execute(attributes, [[array] for array in arrays], dtype)

    def work(words):
        rank = Rank(mesh, words, fabric)
        rank.engine.prepare(["shard"])
        node = Node(op, ["x"], ["y"], domain=COMM, attributes=attributes)
        found = rank.engine.call(0, node, [rank.value(arrays[words.rank])])
        rank.gpu.synchronize()
        return [rank.gpu.to_host(block).astype("f8") for block in found]

    for found, due in zip(together(mesh, work), wanted):
        np.testing.assert_array_equal([*found], [each.astype("f8") for each in due or []])


def test_send_and_receive(runtime):
    mesh, fabric = Mesh.parse("dp=2,pp=2"), Fabric()
    arrays = [drawn((3, 2), "float16", 1), drawn((), "float16", 2)]

    def work(words):
        rank = Rank(mesh, words, fabric, (1,))
        rank.engine.prepare(["dp", "pp"])
        peer = words.rank ^ 1
        attributes: dict[str, Any] = {"group": "pp", "peer": peer, "tag": 3}
        if words.rank % 2 == 0:
            node = Node("Send", ["x", "z"], [], domain=COMM, attributes=attributes)
            return rank.engine.call(0, node, [rank.value(array + words.rank) for array in arrays])
        attributes |= {"dtype": "float16", "shapes": ["3,2", ""]}
        node = Node("Recv", [], ["x", "z"], domain=COMM, attributes=attributes)
        return [rank.gpu.to_host(block) for block in rank.engine.call(0, node, [])]

    found = together(mesh, work)
    assert found[0] == found[2] == []
    for rank in (1, 3):
        for mine, array in zip(found[rank], arrays):
            np.testing.assert_array_equal(mine, array + (rank - 1))


@pytest.mark.parametrize(
    ("cuts", "calls"),
    [
        (FLAT["even"], ["reduce_scatter", "allgather"]),
        (FLAT["short"], ["reduce_scatter", "allgather"]),
        (FLAT["uneven"], ["reduce"] * 3 + ["broadcast"] * 3),
        ([0, 40, 40, 40], ["reduce", "broadcast"]),
    ],
)
def test_equal_shards_are_scattered_and_gathered_at_once(cuts, calls, runtime):
    """Flat shards, of which the last may be short, need no more than one call of NCCL's; one owner's bucket is not
    sent in three."""
    mesh, fabric = Mesh.parse("shard=3"), Fabric()
    size = cuts[-1]

    def work(words):
        rank = Rank(mesh, words, fabric)
        rank.engine.prepare(["shard"])
        scatter = Node("ReduceScatter", ["x"], ["y"], domain=COMM, attributes={"group": "shard", "cuts": cuts})
        gather = {"group": "shard", "cuts": cuts, "shapes": [f"{size}"]}
        mine = rank.engine.call(0, scatter, [rank.value(np.arange(size, dtype="f4"))])
        whole = rank.engine.call(1, Node("AllGather", ["y"], ["z"], domain=COMM, attributes=gather), mine)
        return rank.nccl.made, rank.gpu.to_host(whole[0])

    for made, whole in together(mesh, work):
        assert made == calls
        np.testing.assert_array_equal(whole, 3 * np.arange(size, dtype="f4"))


def test_parts_are_equal_only_where_little_is_sent_in_vain():
    assert equal_parts([16, 16, 5]) == 16 and equal_parts([16, 0, 0]) == 16
    assert equal_parts([64, 0, 0]) == 0 and equal_parts([3, 27, 7]) == 0 and equal_parts([0, 0]) == 0


# --- whole trainings ------------------------------------------------------------------------------------------------


def written(name: str, ranks: str, folder: Path, **options: Any) -> Path:
    given = {key.replace("_", "-"): value for key, value in options.items()}
    micro_steps = given.pop("accumulate", 1)
    pipeline = build_pipeline(defaults={"shard": given})
    source = gopt.load(FIXTURES / f"{name}.onnx")
    gopt.shard(source, Mesh.parse(ranks), accumulate=micro_steps, pipeline=pipeline).write(folder / "out")
    generator, training = np.random.default_rng(3), source.training
    ranges = sampling.integer_ranges(training)
    batches = [sampling.draw_inputs(training, training.batch, generator, ranges) for _ in range(12)]
    np.savez(folder / "data.npz", **{key: np.stack([batch[key] for batch in batches]) for key in batches[0]})
    return folder / "out"


def job(folder: Path, out: Path, steps: int = 3, **more: Any) -> Job:
    manifest, _ = read_manifest(folder)
    hyper = {each.name: "0.01" for each in manifest.inputs_of(InputKind.HYPER)}
    return Job(folder=folder, data=str(folder.parent / "data.npz"), steps=steps, settings=hyper, checkpoint=out, **more)


def train_on_gpus(work: Job, eager: tuple[int, ...] = (), fault: Any = None) -> list[Any]:
    _, mesh = read_manifest(work.folder)
    fabric = Fabric()
    told: list[Any] = []

    def live(words):
        rank = Rank(mesh, words, fabric, eager)
        if fault is not None:
            fault(rank)
        Trainer(work, rank.engine, lambda step, call: None, rank.gpu, StreamCollectives).run(told.append)

    together(mesh, live)
    return told


def train_on_threads(work: Job) -> list[Any]:
    _, mesh = read_manifest(work.folder)
    told: list[Any] = []
    run_threads(mesh, 120.0, lambda engine: Trainer(work, engine, lambda step, call: None).run(told.append))
    return told


def states(checkpoint: Path, step: int = 3) -> dict[str, np.ndarray]:
    target = checkpoint.parent / f"{checkpoint.name}.onnx"
    merge(checkpoint / f"step_{step:08d}", target, force=True)
    training = gopt.load(target).training
    return {state.tensor: np.array(training.graph.initializers[state.tensor].numpy()) for state in training.states}


def differing(first: dict[str, np.ndarray], second: dict[str, np.ndarray], loose: float = 2e-5) -> list[str]:
    found = []
    for name, value in first.items():
        one, other = value.astype("f8"), second[name].astype("f8")
        if not np.allclose(one, other, rtol=loose, atol=loose * 0.1):
            found.append(name)
    return found


TRAININGS = [
    ("mlp_adamw", "shard=2", {"stage": 1}),
    ("mlp_adamw", "shard=3", {"stage": 2}),
    ("gpt_adamw", "shard=2", {"stage": 3, "bucket_mb": 0}),
    ("mlp_adamw", "shard=3", {"stage": 2, "partition": "rows"}),
    ("mlp_lamb", "shard=2", {"stage": 2, "partition": "whole", "style": "broadcast"}),
    ("mlp_mom_clip_sched", "dp=2", {"stage": 0}),
    ("mlp_adamw", "shard=2", {"stage": 2, "accumulate": 2}),
    ("cnn_mom_fp16", "shard=2", {"stage": 2}),
    ("mlp_adamw_fp16_scaler", "shard=3", {"stage": 3, "bucket_mb": 0}),
    ("mlp_adamw_bf16", "dp=2,shard=2", {"stage": 2}),
    ("gpt_adamw", "pp=2", {"stage": 0, "accumulate": 4}),
    ("mlp_adamw", "pp=2,shard=2", {"stage": 3, "accumulate": 2}),
]


@pytest.mark.parametrize(
    "training", part(map(pytest.param, TRAININGS), 3), ids=lambda each: f"{each[0]}-{each[1]}-{json.dumps(each[2])}"
)
def test_gpus_train_as_threads_do(training, runtime, tmp_path):
    name, mesh, options = training
    folder = written(name, mesh, tmp_path, **options)
    slow = train_on_threads(job(folder, tmp_path / "threads"))
    due = states(tmp_path / "threads")
    for number, eager in enumerate(SCHEDULES.values()):
        told = train_on_gpus(job(folder, tmp_path / f"gpus{number}"), eager)
        np.testing.assert_allclose([t.losses for t in told], [t.losses for t in slow], rtol=2e-3)
        loose = 2e-5 if "16" not in name else 1e-2
        assert differing(due, states(tmp_path / f"gpus{number}"), loose) == []


def test_the_first_ranks_states_and_a_resumed_run(runtime, tmp_path):
    folder = written("mlp_adamw", "shard=2", tmp_path, stage=2)
    train_on_gpus(job(folder, tmp_path / "whole", steps=4))
    for steps, sync in ((2, "all"), (4, None)):
        train_on_gpus(job(folder, tmp_path / "parts", steps=steps, resume=True, sync_init=sync))
    whole, parts = states(tmp_path / "whole", 4), states(tmp_path / "parts", 4)
    assert all(np.array_equal(whole[name], parts[name]) for name in whole)


# --- the order of work ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stream", "eager"), [(0, SCHEDULES["compute at once"]), (1, SCHEDULES["calls at once"])],
    ids=["compute waits for no call", "calls wait for no compute"],
)  # fmt: skip
def test_a_wait_that_is_missing_shows(stream, eager, runtime, tmp_path):
    """The fake can tell: without either of the two waits, states differ."""
    folder = written("mlp_adamw", "shard=2", tmp_path, stage=2)
    train_on_threads(job(folder, tmp_path / "threads"))

    def fault(rank):
        rank.api.forget.add(stream)

    train_on_gpus(job(folder, tmp_path / "gpus"), eager, fault)
    assert differing(states(tmp_path / "threads"), states(tmp_path / "gpus"))


def one_rank(runtime: Any, eager: tuple[int, ...], work: Any) -> Any:
    mesh, fabric = Mesh.parse("shard=1"), Fabric()

    def live(words):
        rank = Rank(mesh, words, fabric, eager)
        rank.engine.prepare(["shard"])
        return work(rank)

    return together(mesh, live)[0]


@pytest.mark.parametrize("holds", [True, False])
def test_memory_of_a_call_under_way_is_not_given_away(holds, runtime):
    """What a call reads is let go by the program at once; held by the call, it is not overwritten before."""
    array = np.arange(1000, dtype="f4")
    node = Node("AllReduce", ["x"], ["y"], domain=COMM, attributes={"group": "shard"})

    def work(rank):
        started = rank.engine.start(0, node, [rank.value(array)])
        if not holds:
            started.held = []
        rank.value(np.zeros_like(array))
        return rank.gpu.to_host(started.result()[0])

    assert np.array_equal(one_rank(runtime, (0,), work), array) == holds


def test_a_result_of_unknown_length_is_the_runtimes_own(runtime, tmp_path):
    nodes = [onnx.helper.make_node("NonZero", ["x"], ["found"]), onnx.helper.make_node("Neg", ["x"], ["y"])]
    spec = {"found": ("int64", [1, "n"]), "y": ("float32", [5])}
    graph = make(tmp_path, nodes, {"x": ("float32", [5])}, spec)

    def work(rank):
        program = Executor(plan_execution(graph, {}, rank.gpu), rank.gpu.sessions())
        made = program.run({"x": np.array([0, 2, 0, 1, 3], "f4")}, lambda *_: [])
        return {name: rank.gpu.to_host(block).tolist() for name, block in made.items()}

    assert one_rank(runtime, (), work) == {"found": [[1, 3, 4]], "y": [0, -2, 0, -1, -3]}


def test_an_array_that_is_fed_again_is_read_again(runtime, tmp_path):
    """A source of batches may fill the same arrays each time."""
    nodes = [onnx.helper.make_node("Neg", ["x"], ["y"])]
    graph = make(tmp_path, nodes, {"x": ("float32", [2])}, {"y": ("float32", [2])})

    def work(rank):
        program = Executor(plan_execution(graph, {}, rank.gpu), rank.gpu.sessions())
        batch, made = np.zeros(2, "f4"), []
        for value in (1, 2):
            batch[:] = value
            made += rank.gpu.to_host(program.run({"x": batch}, lambda *_: [])["y"]).tolist()
        return made

    assert one_rank(runtime, (), work) == [-1, -1, -2, -2]


def test_memory_is_used_again(runtime):
    def work(rank):
        pointers = {rank.value(np.ones(9, "f4")).pointer for _ in range(5)}
        held = [rank.value(np.ones(9, "f4")) for _ in range(5)]
        return pointers, {block.pointer for block in held}

    pointers, held = one_rank(runtime, (), work)
    assert len(pointers) == 1 and len(held) == 5


def test_what_takes_long_is_named(runtime):
    node = Node("AllReduce", ["x"], ["y"], domain=COMM, attributes={"group": "shard"})

    def work(rank):
        for index in (4, 7):
            rank.engine.start(index, node, [rank.value(np.ones(3, "f4"))])
        stream = rank.api.streams[1]
        names = [rank.engine._unfinished()]
        stream.advance(len(stream.work) // 2)
        names.append(rank.engine._unfinished())
        rank.engine.gather(None)
        return [*names, rank.engine._unfinished()]

    assert one_rank(runtime, (), work) == [
        "call 4 (AllReduce over shard)", "call 7 (AllReduce over shard)", "the GPU",
    ]  # fmt: skip


def test_before_words_all_work_is_done(runtime):
    node = Node("AllReduce", ["x"], ["y"], domain=COMM, attributes={"group": "shard"})

    def work(rank):
        rank.engine.start(0, node, [rank.value(np.ones(3, "f4"))])
        before = [stream.done < len(stream.work) for stream in rank.api.streams]
        rank.engine.gather(None)
        return before, [stream.done == len(stream.work) for stream in rank.api.streams]

    assert one_rank(runtime, (), work) == ([True, True], [True, True])


def test_halves_are_left_to_the_provider(runtime, tmp_path):
    nodes = [onnx.helper.make_node("Add", ["x", "x"], ["y"])]
    graph = make(tmp_path, nodes, {"x": ("float16", [5])}, {"y": ("float16", [5])})

    def kinds(rank):
        return [
            [node.op_type for node in Executor(plan_execution(graph, {}, device), device.sessions()).graph.nodes]
            for device in (HOST, rank.gpu)
        ]

    assert one_rank(runtime, (), kinds) == [["Cast", "Add", "Cast"], ["Add"]]


def test_events_are_not_left_behind(runtime):
    node = Node("AllReduce", ["x"], ["y"], domain=COMM, attributes={"group": "shard"})

    def work(rank):
        for index in range(10):
            rank.engine.call(index, node, [rank.value(np.ones(3, "f4"))])
        rank.engine.gather(None)
        return len(rank.api.events)

    assert one_rank(runtime, (), work) == 0


def test_a_failure_frees_the_kernels_that_wait(runtime):
    def work(rank):
        rank.engine.fail(RunError("the loss is nan"))
        return [comm.aborted for comm in rank.engine._comms.values()], rank.engine._control.node_error.message

    assert one_rank(runtime, (), work) == ([True], "the loss is nan")


# --- refusals -------------------------------------------------------------------------------------------------------


def test_a_session_that_fell_back_to_the_cpu_is_refused(runtime, tmp_path):
    runtime.provider = "CPUExecutionProvider"
    folder = written("mlp_adamw", "shard=1", tmp_path)
    with pytest.raises(RunError, match="fell back to the CPU"):
        train_on_gpus(job(folder, tmp_path / "gpus"))


def places(counts: list[int], buses: list[bytes], monkeypatch: Any) -> list[Any]:
    """GPUs that ranks take on one machine, each seeing so many of them on those buses."""
    mesh = Mesh((("shard", len(counts)),))
    apis = [FakeCudart(count, bus=bus) for count, bus in zip(counts, buses)]
    local: dict[int, Any] = {}
    import threading

    monkeypatch.setattr(nccl, "bindings", lambda: local[threading.get_ident()])
    monkeypatch.setattr(nccl, "library", lambda: FakeNccl(Fabric()))

    def live(words):
        local[threading.get_ident()] = apis[words.rank]
        return on_gpus(mesh, words)[1].index

    return together(mesh, live)


def test_every_rank_takes_a_gpu_of_its_own(runtime, monkeypatch):
    assert places([3, 3, 3], [b"a"] * 3, monkeypatch) == [0, 1, 2]
    assert places([1, 1], [b"a", b"b"], monkeypatch) == [0, 0]
    with pytest.raises(OptionError, match="ranks 0 and 2 would share a GPU") as refused:
        places([2, 2, 2], [b"a"] * 3, monkeypatch)
    assert refused.value.exit_code == 2


def test_one_rank_without_a_gpu_speaks_for_all(runtime, monkeypatch):
    with pytest.raises(RunError, match="cudaGetDeviceCount: cudaErrorInsufficientDriver"):
        places([1, 0, 0], [b"a", b"b", b"c"], monkeypatch)


def has_gpu() -> bool:
    try:
        Cuda(__import__("cuda.bindings.runtime", fromlist=["runtime"]))
    except (ImportError, RunError):
        return False
    return True


@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
def test_a_runtime_without_a_gpu_is_refused():
    """The real one: it raises where memory of a GPU is asked for."""
    with pytest.raises(RunError, match="ONNX Runtime cannot use the GPU: ") as refused:
        Gpu(Cuda(FakeCudart()), 0)
    assert "\n" not in refused.value.message and "pip install" in refused.value.hints[0]


@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
def test_a_session_of_the_real_runtime_that_falls_back_is_refused(tmp_path, capfd):
    graph = make(
        tmp_path, [onnx.helper.make_node("Neg", ["x"], ["y"])], {"x": ("float32", [5])}, {"y": ("float32", [5])}
    )
    model = build_model(graph.header, graph.nodes, graph.inputs, graph.outputs)
    session.runtime().set_default_logger_severity(4)
    try:
        with pytest.raises(RunError, match="fell back to the CPU"):
            Sessions(0, 0).build(model.SerializeToString())
    finally:
        session.runtime().set_default_logger_severity(2)
    assert capfd.readouterr() == ("", "")


@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
def test_the_command_refuses_in_one_line(tmp_path):
    pytest.importorskip("mpi4py")
    folder = written("mlp_adamw", "shard=1", tmp_path)
    arguments = ["run", str(folder), "--data", str(tmp_path / "data.npz"), "--steps", "1", "--set", "lr=0.01"]
    command = [sys.executable, "-m", "gopt.cli", *arguments, "--engine", "nccl", "--launch", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 5 and done.stdout == ""
    lines = done.stderr.splitlines()
    assert lines[0].startswith("gopt: error: ") and all(line.startswith("  hint: ") for line in lines[1:])
    assert "gopt[nccl]" in done.stderr
