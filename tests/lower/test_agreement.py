"""A pass that loses a reduction is caught at ``shard``, with the name of the state; and each such loss is a real one:
with the check taken out, the ranks that are written are unequal to the source."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import onnx
import pytest
from helpers import FIXTURES, Builder, perceptron, sgd
from plants import Case, change_attributes, hand_on, planted_pipeline, substitute
from products import part

import gopt
from gopt.analysis.role_map import RoleMap
from gopt.errors import InvariantError, UnsupportedError
from gopt.ir.graph import COMM, SPMD, Node
from gopt.records.mesh import Mesh, axis_kinds
from gopt.records.placements import FlatShard, Sharding
from gopt.spmd.program import SpmdProgram
from gopt.spmd.verifier import infer_shardings
from gopt.verification.verify import Verifier


def calls(step: SpmdProgram, op_type: str, *groups: str) -> Iterator[Node]:
    found = [
        node for node in step.graph.nodes
        if node.domain == COMM and node.op_type == op_type and (not groups or node.attributes["group"] in groups)
    ]  # fmt: skip
    assert found, f"the step has no {op_type}"
    yield from found


# --- what is planted ------------------------------------------------------------------------------------------------


def no_all_reduce(step: SpmdProgram) -> None:
    for node in list(calls(step, "AllReduce")):
        hand_on(step, node)


def no_sum_over_members(step: SpmdProgram) -> None:
    """Gradients of norms that read parts of the tokens are averaged over samples alone."""
    gradients = set(step.source.gradients.values())
    for node in list(calls(step, "AllReduce", "tp")):
        if gradients.intersection(node.outputs):
            hand_on(step, node)


def summed_over_samples(step: SpmdProgram) -> None:
    """The same gradients, the final norm's among them, are summed over another group."""
    gradients = set(step.source.gradients.values())
    for node in list(calls(step, "AllReduce", "tp")):
        if gradients.intersection(node.outputs):
            change_attributes(step, node, group="dp")


def no_member_is_asked(step: SpmdProgram) -> None:
    """As where one group of one rank switches off the reductions of all groups."""
    for node in list(calls(step, "AllReduce", "tp")):
        hand_on(step, node)


def one_axis_of_two(step: SpmdProgram) -> None:
    for node in list(calls(step, "AllReduce", "dp+shard")):
        change_attributes(step, node, group="shard")


def no_outer_reduction(step: SpmdProgram) -> None:
    for node in list(calls(step, "AllReduce", "dp")):
        hand_on(step, node)


def no_scalar_call(step: SpmdProgram) -> None:
    for node in list(calls(step, "AllReduce", "shard")):
        hand_on(step, node)


def own_part(step: SpmdProgram) -> None:
    """A rank cuts its part out of its own gradients."""
    for number, node in enumerate(list(calls(step, "ReduceScatter"))):
        cuts = tuple(node.attributes["cuts"])
        sizes = [step.graph.types[name].elements for name in node.inputs]
        starts = [sum(sizes[:place]) for place in range(len(sizes))]
        local, joined = f"planted{number}", node.outputs[0]
        step.graph.types[local] = step.graph.types[joined]
        attributes = {"starts": starts, "sizes": sizes}
        span, whole = FlatShard(cuts, 0, cuts[-1]), {"group": "shard", "sizes": [cuts[-1]]}
        substitute(
            step, node,
            [
                Node(
                    "LocalSlice", node.inputs, [local], domain=SPMD, attributes=attributes,
                    sharding=Sharding.along("shard", span), made_by="plant",
                ),
                Node("LocalConcat", [local], [joined], domain=SPMD, attributes=whole, made_by="plant"),
            ],
        )  # fmt: skip


def one_rank_for_all(step: SpmdProgram) -> None:
    """All take the gradient of one."""
    for node in list(calls(step, "AllReduce", "shard")):
        types = [step.graph.types[name] for name in node.outputs]
        attributes = {
            "group": node.attributes["group"], "root": 0, "dtype": types[0].dtype,
            "shapes": [",".join(map(str, type.dims)) for type in types],
        }  # fmt: skip
        sent = Node("Broadcast", node.inputs, node.outputs, domain=COMM, attributes=attributes, made_by="plant")
        substitute(step, node, [sent])


def local_gradient(step: SpmdProgram) -> None:
    """One node of the update reads the gradient before it is reduced."""
    reduced = {
        new: old for node in calls(step, "AllReduce") for old, new in zip(node.inputs, node.outputs)
    }  # fmt: skip
    for node in step.graph.nodes:
        if node.domain == "" and any(name in reduced for name in node.inputs):
            node.inputs = [reduced.get(name, name) for name in node.inputs]
            return
    raise AssertionError("no node reads a reduced gradient")


def loss_in_the_update(step: SpmdProgram) -> None:
    """A rank's own scalar is added to what becomes a parameter."""
    loss, updated = step.training.loss, step.training.parameters[0].updated
    producer = next(node for node in step.graph.nodes if updated in node.outputs)
    whole, zero = "planted.whole", "planted.loss"
    producer.outputs = [whole if name == updated else name for name in producer.outputs]
    step.graph.types[whole] = step.graph.types[updated]
    step.graph.types[zero] = step.graph.types[loss]
    step.graph.nodes.append(Node("Add", [whole, loss], [updated], made_by="plant"))


def no_statistics_call(step: SpmdProgram) -> None:
    names = {state.updated for state in step.training.states if state.kind.value == "statistic"}
    for node in list(calls(step, "AllReduce")):
        if names.intersection(node.outputs):
            kept = [(old, new) for old, new in zip(node.inputs, node.outputs) if new not in names]
            lost = [(old, new) for old, new in zip(node.inputs, node.outputs) if new in names]
            made = [Node("Identity", [old], [new], made_by="plant") for old, new in lost]
            if kept:
                node.inputs, node.outputs = map(list, zip(*kept))
                made.insert(0, node)
            substitute(step, node, made)


def accumulator_is_kept(step: SpmdProgram) -> None:
    """The update hands the sums on instead of zeros."""
    held = step.accumulators[0]
    producer = next(node for node in step.graph.nodes if held.output in node.outputs)
    substitute(
        step, producer, [Node("Identity", [held.input], [held.output], sharding=producer.sharding, made_by="plant")]
    )


def shifted_parts(step: SpmdProgram) -> None:
    """A class of a bucket takes its gradient from another place of it."""
    node = next(node for node in step.graph.nodes if node.domain == SPMD and node.op_type == "ShardSlice")
    assert node.sharding.flat is not None
    axis, span = node.sharding.flat
    node.sharding = Sharding.along(axis, FlatShard(span.cuts, span.start + 16, span.stop + 16))


def no_reduce(step: SpmdProgram) -> None:
    """An owner takes its own gradient for the mean."""
    for node in list(calls(step, "Reduce")):
        hand_on(step, node)


def another_root(step: SpmdProgram) -> None:
    """The mean of a gradient ends where nobody updates with it."""
    node = next(calls(step, "Reduce"))
    change_attributes(step, node, root=1 - int(node.attributes["root"]))


def lone_share(step: SpmdProgram) -> None:
    """A member reads its share of a norm where the whole norm belongs."""
    given = next(node for node in step.graph.nodes if node.domain == SPMD and node.op_type == "Select")
    made = next(node for node in calls(step, "AllReduce", "shard") if given.outputs[0] in node.inputs)
    whole = made.outputs[made.inputs.index(given.outputs[0])]
    for node in step.graph.nodes:
        node.inputs = [given.outputs[0] if name == whole else name for name in node.inputs]


def reduced_twice(step: SpmdProgram) -> None:
    """What a call made goes through another one."""
    for node in [each for each in calls(step, "AllReduce", "shard") if each.attributes["reduce"] == "sum"]:
        once = [f"{name}.once" for name in node.outputs]
        step.graph.types.update({new: step.graph.types[name] for new, name in zip(once, node.outputs)})
        again = Node("AllReduce", once, node.outputs, domain=COMM, attributes=dict(node.attributes), made_by="plant")
        node.outputs = once
        substitute(step, node, [node, again])


def mean_of_shards(step: SpmdProgram) -> None:
    """Members take the mean of their shards for a term of the whole's."""
    for node in step.graph.nodes:
        if node.is_a("ReduceSum", "ReduceSumSquare") and node.sharding.flat is not None:
            node.op_type, node.proto = "ReduceMean", None


def no_mark(step: SpmdProgram) -> None:
    """Nothing says that micro-steps change a statistic: its mean is taken of what it was."""
    assert step.loop_carried
    step.loop_carried.clear()


def _equal_pair(step: SpmdProgram, names: list[str]) -> tuple[int, int]:
    """The places of two values of one shape."""
    types = [step.graph.types[name] for name in names]
    return next(
        ((a, b) for b in range(len(names)) for a in range(b) if types[a] == types[b]),
        (0, 0),
    )


def swapped(step: SpmdProgram, op_type: str, slot: str) -> None:
    """Two tensors of equal shape change places in the operands or results of a node."""
    for node in step.graph.nodes:
        a, b = _equal_pair(step, getattr(node, slot)) if node.op_type == op_type else (0, 0)
        if a != b:
            names = getattr(node, slot)
            names[a], names[b] = names[b], names[a]
            return
    raise AssertionError(f"no {op_type} has two tensors of one shape")


def swapped_gather(step: SpmdProgram) -> None:
    swapped(step, "AllGather", "outputs")


def swapped_regather(step: SpmdProgram) -> None:
    """What the backward gathers anew."""
    for node in step.graph.nodes:
        again = node.op_type == "AllGather" and ".again" in node.outputs[0]
        a, b = _equal_pair(step, node.outputs) if again else (0, 0)
        if a != b:
            node.outputs[a], node.outputs[b] = node.outputs[b], node.outputs[a]
            return
    raise AssertionError("nothing is gathered anew")


def swapped_slice(step: SpmdProgram) -> None:
    swapped(step, "LocalSlice", "inputs")


def swapped_scatter(step: SpmdProgram) -> None:
    swapped(step, "ReduceScatter", "inputs")


def reversed_gather(step: SpmdProgram) -> None:
    """A gather cuts the bucket up from its other end."""
    for node in list(calls(step, "AllGather")):
        if len(node.outputs) > 1:
            node.outputs = node.outputs[::-1]
            change_attributes(step, node, shapes=list(node.attributes["shapes"])[::-1])
            return
    raise AssertionError("no gather has several tensors")


def swapped_states(step: SpmdProgram) -> None:
    """What ranks hold of a bucket lists two tensors of one size in the other order."""
    for place, state in enumerate(step.states):
        for first, second in zip(state.slices, state.slices[1:]):
            if first.elements == second.elements:
                new = {
                    first: replace(second, offset=first.offset), second: replace(first, offset=second.offset),
                }  # fmt: skip
                step.states[place] = replace(state, slices=tuple(new.get(each, each) for each in state.slices))
                return
    raise AssertionError("no state has two tensors of one size")


WHOLE = {"partition": "whole", "style": "broadcast"}
CASES = [
    Case(no_all_reduce, "mlp_adamw", "shard=3", 0, r"state 'fc1.*along shard"),
    Case(no_all_reduce, "mlp_adamw", "dp=2,shard=2", 0, r"state 'fc1.*along dp\+shard"),
    Case(no_all_reduce, "mlp_adamw", "shard=2", 0, r"state 'fc1.*along shard", 2),
    Case(no_sum_over_members, "gpt_adamw", "shard=2,tp=2", 2, r"state '.* along tp$", split={"sequence": True}),
    Case(summed_over_samples, "gpt_adamw", "dp=2,tp=2", 0, r"state 'blocks.*ln.* along tp$", split={"sequence": True}),
    Case(no_member_is_asked, "mlp_mom_clip_sched", "dp=1,tp=2", 0, r"state 'fc.* along tp$", split={"sequence": False}),
    Case(one_axis_of_two, "mlp_adamw", "dp=2,shard=2", 0, r"state 'fc1.*along dp$"),
    Case(one_axis_of_two, "cnn_mom_fp16", "dp=2,shard=2", 0, r"along dp$"),
    Case(no_outer_reduction, "mlp_adamw", "dp=2,shard=2", 2, r"state 'fc1.*along dp$"),
    Case(no_outer_reduction, "mlp_adamw", "dp=2,shard=2", 2, r"state 'fc1.*along dp$", 2),
    Case(no_outer_reduction, "mlp_sgd", "dp=2,shard=2", 3, r"state 'fc.* in shards.*along dp$"),
    Case(no_scalar_call, "mlp_mom_clip_sched", "shard=2", 2, r"Sqrt .* is a partial sum along shard"),
    Case(no_scalar_call, "mlp_mom_clip_sched", "shard=3", 3, r"Sqrt .* is a partial sum along shard"),
    Case(no_scalar_call, "gpt_adamw_clip_sched_fp16", "shard=2", 1, r"along shard"),
    Case(own_part, "mlp_adamw", "shard=3", 2, r"LocalSlice .* is each member's own along shard"),
    Case(own_part, "mlp_sgd", "shard=2", 1, r"LocalSlice .* is each member's own along shard"),
    Case(own_part, "gpt_adamw_clip_sched_fp16", "shard=2", 3, r"LocalSlice .* is each member's own along shard"),
    Case(one_rank_for_all, "mlp_sgd", "shard=2", 0, r"Broadcast .* is each member's own along shard"),
    Case(local_gradient, "mlp_adamw", "shard=2", 0, r"state 'fc.*along shard"),
    Case(local_gradient, "mlp_mom_clip_sched", "dp=3", 2, r"along dp"),
    Case(loss_in_the_update, "mlp_adamw", "shard=2", 0, r"state 'fc.*along shard"),
    Case(no_statistics_call, "cnn_mom_fp16", "shard=2", 2, r"statistic 'bn.*along shard"),
    Case(no_statistics_call, "cnn_mom_fp16", "shard=2", 2, r"statistic 'bn.*along shard", 2),
    Case(accumulator_is_kept, "mlp_adamw", "shard=2", 2, r"accumulator .* is not zero again", 2),
    Case(accumulator_is_kept, "mlp_adamw", "shard=2", 0, r"accumulator .* is not zero again", 2),
    Case(own_part, "mlp_adamw", "shard=2", 2, r"along shard", 2),
    Case(shifted_parts, "mlp_torchoptim_adamw", "shard=2", 2, r" is elements \d+ to \d+ of a bucket", runs=False),
    Case(no_reduce, "mlp_muon", "shard=2", 2, r"Add .* is each member's own along shard", options=WHOLE),
    Case(another_root, "mlp_muon", "shard=2", 2, r"Add .* is on member 1 alone along shard", runs=False, options=WHOLE),
    Case(reduced_twice, "mlp_mom_clip_sched", "shard=2", 2, r"AllReduce .* is replicated along shard"),
    Case(reduced_twice, "gpt_adamw_clip_sched_fp16", "shard=3", 3, r"AllReduce .* is replicated along shard"),
    Case(mean_of_shards, "mlp_mom_clip_sched", "shard=3", 2, r"ReduceMean .* reads .* of a bucket .* along shard"),
    Case(lone_share, "mlp_mom_clip_sched", "shard=2", 2, r"Sqrt .* is a partial sum along shard"),
    Case(no_mark, "cnn_mom_fp16", "shard=2", 2, r"statistic 'bn1.running_mean' follows no batch", 2),
    Case(swapped_gather, "cnn_mom_fp16", "shard=2", 2, r"AllGather .* makes 'bn2.\w+_out' of .* of 'bn2.\w+'"),
    Case(swapped_gather, "cnn_mom_fp16", "shard=3", 3, r"AllGather .* makes 'bn.* of elements of 'bn"),
    Case(swapped_gather, "gpt_adamw_clip_sched_fp16", "dp=2,shard=2", 2, r"AllGather .* of elements of"),
    Case(swapped_regather, "gpt_adamw", "shard=2", 3, r"reads '.*again.* for 'b.*of 'b", options={"bucket_mb": 0.02}),
    Case(swapped_slice, "cnn_mom_fp16", "shard=2", 2, r"elements .* of 'bn2"),
    Case(swapped_scatter, "cnn_mom_fp16", "shard=2", 2, r"elements .* of 'bn2"),
    Case(swapped_scatter, "cnn_mom_fp16", "shard=2", 1, r"elements .* of 'bn2", 2),
    Case(swapped_scatter, "cnn_mom_fp16", "shard=2", 2, r"elements .* of 'bn2", 2),
    Case(reversed_gather, "mlp_adamw", "shard=3", 2, r"AllGather .* elements"),
    Case(reversed_gather, "mlp_adamw", "shard=3", 3, r"AllGather .* elements"),
    Case(swapped_states, "cnn_mom_fp16", "shard=2", 2, r"elements .* of 'bn2"),
]


def test_only_statistics_may_stay_apart():
    def plant(step: SpmdProgram) -> None:
        step.states[0] = replace(step.states[0], local=True)

    with pytest.raises(InvariantError, match=r"state 'fc1.weight' is held as each rank's own"):
        gopt.shard(gopt.load(FIXTURES / "mlp_sgd.onnx"), 2, pipeline=planted_pipeline(plant, 0))


def test_an_axis_that_the_user_named():
    """What ranks along it see decides whether a reduction over it is missing."""

    def plant(step: SpmdProgram) -> None:
        for node in list(calls(step, "AllReduce")):
            change_attributes(step, node, group="shard")

    for kind in ("data", "replica"):
        mesh = Mesh.parse("zone=2,shard=2", axis_kinds({"zone": kind}))
        source = gopt.load(FIXTURES / "mlp_adamw.onnx")
        if kind == "replica":
            gopt.shard(source, mesh, pipeline=planted_pipeline(plant, 0))
            continue
        with pytest.raises(InvariantError, match=r"(?m)along zone$"):
            gopt.shard(source, mesh, pipeline=planted_pipeline(plant, 0))


def scattered(folder: Path, *, gathered: bool) -> Path:
    """A source in which members of ``tp`` reduce a gradient in parts; only some bring it together again."""
    b = Builder()
    b.extra_domains += ["gopt.comm"]
    net = perceptron(b, (3, 4, 2))
    own = {"domain": "gopt.comm", "group": "tp", "axis": 0, "sizes": [2, 2]}
    part = b.op("ReduceScatter", net.gradients["b0"], reduce="mean", **own)
    whole = b.op("AllGather", part, **own) if gathered else b.op("Concat", part, part, axis=0)
    net.gradients["b0"] = b.output("gradient", whole, (4,))
    sgd(b, net)
    return b.save(folder / "step.onnx")


def test_a_source_that_parts_ranks_itself(tmp_path):
    """As a layer norm under sequence parallelism does, whose gradient nobody adds up over its ranks."""
    roles, mesh = RoleMap(params={"b0": "gradient"}), Mesh.parse("shard=2,tp=2")
    gopt.shard(gopt.load(scattered(tmp_path, gathered=True), roles=roles), mesh)
    source = gopt.load(scattered(tmp_path, gathered=False), roles=roles)
    with pytest.raises(UnsupportedError, match=r"state 'b0' is held equal along tp, .* reads 'gradient'"):
        gopt.shard(source, mesh)


def test_absent_results_and_operands(tmp_path):
    """They have one name, and are no value."""
    b = Builder()
    net = perceptron(b)
    b.nodes.append(onnx.helper.make_node("LayerNormalization", ["x", b.const([1, 1, 1])], ["n", "", "spread"]))
    b.output("metric", "spread", (4, 1))
    for name in net.gradients:
        net.gradients[name] = b.op("Clip", net.gradients[name], "", b.const(0.5))
    sgd(b, net)
    source = gopt.load(b.save(tmp_path / "step.onnx"), roles=RoleMap(loss="loss"))
    for stage in (0, 2, 3):
        made = gopt.shard(source, 2, stage=stage)
        made.write(tmp_path / f"out{stage}")
        assert Verifier(tmp_path / f"out{stage}").run(steps=2, confirm=False).equal


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_refused(case):
    with pytest.raises(InvariantError, match=f"(?m){case.match}") as caught:
        case.shard()
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("case", part([case for case in CASES if case.runs], 4), ids=str)
def test_it_is_an_error(case, tmp_path, monkeypatch):
    """What the check refuses would have trained ranks apart, or on less than all data."""
    monkeypatch.setattr("gopt.lower.lowering.infer_shardings", partial(infer_shardings, strict=False))
    monkeypatch.setattr("gopt.lower.lowering.check_placements", lambda program, shardings: 0)
    monkeypatch.setattr("gopt.lower.lowering.check_bucket_order", lambda program: None)
    monkeypatch.setattr("gopt.lower.lowering.check_carried_values", lambda program: None)
    monkeypatch.setattr("gopt.lower.lowering.check_kept_nodes", lambda program: None)
    case.shard().write(tmp_path / "out")
    assert not gopt.prove(tmp_path / "out").proven
    assert not Verifier(tmp_path / "out").run(steps=2, confirm=False).equal
