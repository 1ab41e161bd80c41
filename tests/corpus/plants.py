"""Real silent errors of sharding, each planted in the rank files of a small step.

Sources are issues of public repositories, and the appendix of TrainVerify (arXiv 2506.15961): br1 to br14. A planted
folder loads, runs and trains: its step is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from helpers import FIXTURES, calls, edit_file
from onnx import ModelProto, NodeProto, helper, numpy_helper

import gopt
from gopt.records.mesh import Mesh

KINDS = {
    "M": "missing reduction", "G": "wrong group or axis", "K": "wrong kind of collective", "S": "scale",
    "C": "constant", "W": "wiring", "O": "order or time", "N": "norm or clip", "P": "placement",
    "L": "layout or slice", "B": "bookkeeping of checkpoints",
}  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """A folder: a fixture, a mesh and options of ``gopt.shard``, or numbers of trainers and servers and options of
    ``gopt.split``."""

    fixture: str
    mesh: str
    options: Mapping[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        return " ".join([self.fixture, self.mesh, *(f"{name}={value}" for name, value in self.options.items())])

    @property
    def folder(self) -> str:
        """A name for its folder."""
        return str(self).split("/")[-1].replace("=", "").replace(" ", "-")

    @property
    def served(self) -> bool:
        """Whether it has trainers and servers."""
        return self.mesh.startswith("trainers")

    def write(self, folder: Path) -> None:
        """Shard or split the fixture."""
        source = gopt.load(FIXTURES / f"{self.fixture}.onnx")
        if self.served:
            counts = {name: int(number) for name, number in (part.split("=") for part in self.mesh.split(","))}
            options = gopt.SplitOptions(**counts, **self.options)  # type: ignore[arg-type]
            gopt.split(source, options).write(folder)
            return
        gopt.shard(source, Mesh.parse(self.mesh), **self.options).write(folder)  # type: ignore[arg-type]


Edit = Callable[[ModelProto], object]
"""Does one thing wrong in a file of a rank."""


@dataclass(frozen=True)
class Plant:
    """An error: where it was seen, what goes wrong, the folder that it is planted in, and the edit of each file.

    ``ranks``: those that are edited, None for all; ``phase``: the file of a rank, where there are several, and how the
    files of trainers or servers begin; ``step``: whether the step is wrong, else the values that it begins with are."""

    number: int
    source: str
    kind: str
    wrong: str
    recipe: Recipe
    edit: Edit
    ranks: tuple[int, ...] | None = None
    phase: str = ""
    step: bool = True

    @property
    def name(self) -> str:
        ranks = "" if self.ranks is None else "-rank" + "".join(map(str, self.ranks))
        return f"{self.number:02d}-{self.recipe.folder}{ranks}"

    @property
    def where(self) -> str:
        """The folder and the ranks, in words."""
        who = self.phase if self.recipe.served else "rank"
        which = "" if self.ranks is None else f" {', '.join(map(str, self.ranks))}"
        return f"{self.recipe}, {who}{which}" if which or self.recipe.served else str(self.recipe)

    def plant(self, folder: Path) -> None:
        """Edit the files of a folder, and seal it."""
        for path in self.files(folder):
            edit_file(path, all_of(self.edit, in_order, with_types))

    def files(self, folder: Path) -> list[Path]:
        """The files that are edited."""
        ending = f".{self.phase}.onnx" if self.phase else ".onnx"
        found = [path for path in sorted(folder.glob("rank_*.onnx")) if path.name[len("rank_0000") :] == ending]
        if self.recipe.served:
            found = sorted(folder.glob(f"{self.phase}*.onnx"))
        return found if self.ranks is None else [found[rank] for rank in self.ranks]


# --- edits ------------------------------------------------------------------------------------------------------------


def maker(model: ModelProto, value: str) -> NodeProto:
    """The node that makes a value."""
    return next(node for node in model.graph.node if value in node.output)


def call_of(model: ModelProto, value: str, *op_types: str) -> NodeProto:
    """The call that reads a value."""
    return next(node for node in calls(model, *op_types) if value in node.input)


def insert(
    model: ModelProto, place: NodeProto, before: Iterable[NodeProto] = (), after: Iterable[NodeProto] = ()
) -> None:
    """Put nodes around a node."""
    nodes = list(model.graph.node)
    index = next(index for index, node in enumerate(nodes) if node == place)
    del model.graph.node[:]
    model.graph.node.extend([*nodes[:index], *before, nodes[index], *after, *nodes[index + 1 :]])


def remove(model: ModelProto, node: NodeProto, instead: Iterable[NodeProto] = ()) -> None:
    """Put other nodes in the place of a node."""
    insert(model, node, instead)
    model.graph.node.remove(node)


def in_order(model: ModelProto) -> None:
    """Put each node behind those whose values it reads, and leave the order else as it is."""
    waiting = list(model.graph.node)
    made = {name for node in waiting for name in node.output}
    del model.graph.node[:]
    while waiting:
        ready = next(node for node in waiting if made.isdisjoint(node.input))
        model.graph.node.append(ready)
        waiting.remove(ready)
        made.difference_update(ready.output)


def with_types(model: ModelProto) -> None:
    """Give the types of values that cross calls."""
    for node in calls(model):
        typed = {each.name: each for each in onnx.shape_inference.infer_shapes(model).graph.value_info}
        typed |= {each.name: each for each in (*model.graph.input, *model.graph.output, *model.graph.value_info)}
        pairs = [*zip(node.input, node.input), *(zip(node.output, node.input) if node.op_type == "AllReduce" else ())]
        given = {each.name for each in (*model.graph.value_info, *model.graph.input, *model.graph.output)}
        for name, like in pairs:
            if name and name not in given:
                copy = onnx.ValueInfoProto.FromString(typed[like].SerializeToString())
                copy.name = name
                model.graph.value_info.append(copy)


def constant(model: ModelProto, value: object, dtype: str = "float32") -> str:
    """A new stored value."""
    name = f"planted.{len(model.graph.initializer)}"
    model.graph.initializer.append(numpy_helper.from_array(np.asarray(value, dtype), name))
    return name


def behind(model: ModelProto, value: str, make: Callable[[str], list[NodeProto]]) -> None:
    """Let a value be made of what it was: ``make`` gives the nodes behind the right value."""
    node, right = maker(model, value), f"{value}.right"
    for typed in [each for each in (*model.graph.value_info, *model.graph.output) if each.name == value]:
        model.graph.value_info.append(typed)
        model.graph.value_info[-1].name = right
    copy = NodeProto.FromString(node.SerializeToString())
    copy.output[:] = [right if name == value else name for name in node.output]
    remove(model, node, [copy, *make(right)])


def scale(value: str, factor: float) -> Edit:
    """Multiply a value."""
    return lambda model: behind(
        model, value, lambda right: [helper.make_node("Mul", [right, constant(model, factor)], [value])]
    )


def operand(value: str, place: int, other: str) -> Edit:
    """Let the node that makes a value read another operand."""

    def edit(model: ModelProto) -> None:
        maker(model, value).input[place] = other

    return edit


def exchange(first: str, second: str) -> Edit:
    """Let the calls that read two values read each other's."""

    def edit(model: ModelProto) -> None:
        swapped = {first: second, second: first}
        for node in calls(model):
            node.input[:] = [swapped.get(name, name) for name in node.input]

    return edit


def factor(value: str, number: float, place: int = 1) -> Edit:
    """Let the node that makes a value read another constant."""

    def edit(model: ModelProto) -> None:
        maker(model, value).input[place] = constant(model, number)

    return edit


def attribute(find: Callable[[ModelProto], NodeProto], **changes: object) -> Edit:
    """Change attributes of a node."""

    def edit(model: ModelProto) -> None:
        node = find(model)
        unchanged = [each for each in node.attribute if each.name not in changes]
        made = [helper.make_attribute(name, value) for name, value in changes.items()]
        del node.attribute[:]
        node.attribute.extend([*unchanged, *made])

    return edit


def reader(value: str, *op_types: str) -> Callable[[ModelProto], NodeProto]:
    return lambda model: call_of(model, value, *op_types)


def bypass(*values: str) -> Edit:
    """Let values pass the calls that reduce them."""

    def edit(model: ModelProto) -> None:
        for value in values:
            node = call_of(model, value, "AllReduce")
            pairs = list(zip(node.input, node.output))
            own = [helper.make_node("Identity", [old], [new]) for old, new in pairs if old == value]
            others = [(old, new) for old, new in pairs if old != value]
            copy = NodeProto.FromString(node.SerializeToString())
            copy.input[:], copy.output[:] = [old for old, _ in others], [new for _, new in others]
            remove(model, node, [*([copy] if others else []), *own])

    return edit


def rank_of(model: ModelProto) -> int:
    return next(int(each.value) for each in model.metadata_props if each.key == "gopt.rank")


def own_cut(value: str) -> Edit:
    """Let ranks take their parts of their own gradients, where they should be reduced and scattered."""

    def edit(model: ModelProto) -> None:
        node, rank = call_of(model, value), rank_of(model)
        cuts = next(each for each in node.attribute if each.name == "cuts").ints
        flat = constant(model, [-1], "int64")
        parts = [helper.make_node("Reshape", [name, flat], [f"{name}.flat"]) for name in node.input]
        ends = [constant(model, [end], "int64") for end in cuts[rank : rank + 2]]
        remove(model, node, [
            *parts, helper.make_node("Concat", [part.output[0] for part in parts], ["planted.all"], axis=0),
            helper.make_node("Slice", ["planted.all", *ends], list(node.output)),
        ])  # fmt: skip

    return edit


def again(value: str, reduce: str, group: str) -> Edit:
    """Reduce a value that needs no reduction."""
    return lambda model: behind(model, value, lambda right: [reduction(right, value, reduce, group)])


def reduction(old: str, new: str, reduce: str, group: str) -> NodeProto:
    return helper.make_node("AllReduce", [old], [new], domain="gopt.comm", reduce=reduce, group=group)


def instead(value: str, *nodes: tuple[str, list[str]]) -> Edit:
    """Make a value by another node."""
    return lambda model: remove(
        model, maker(model, value), [helper.make_node(op_type, names, [value]) for op_type, names in nodes]
    )


def divided(value: str, read_by: str, by: str) -> Edit:
    """Divide what a node reads by another value."""

    def edit(model: ModelProto) -> None:
        node = maker(model, read_by)
        insert(model, node, [helper.make_node("Div", [value, by], [f"{value}.wrong"])])
        node = maker(model, read_by)
        node.input[:] = [f"{value}.wrong" if name == value else name for name in node.input]

    return edit


def all_of(*edits: Edit) -> Edit:
    """Several edits of one error."""

    def edit(model: ModelProto) -> None:
        for each in edits:
            each(model)

    return edit


def gathered(value: str) -> Edit:
    """Gather a gradient and take the first member's, where all should be averaged."""

    def edit(model: ModelProto) -> None:
        node = call_of(model, value, "AllReduce")
        group = next(each for each in node.attribute if each.name == "group").s.decode()
        result = dict(zip(node.input, node.output))[value]
        bypass(value)(model)
        rows = 10
        model.graph.value_info.append(helper.make_tensor_value_info("planted.all", 1, [2 * rows]))
        cut = [constant(model, [0], "int64"), constant(model, [rows], "int64")]
        remove(model, maker(model, result), [
            helper.make_node("AllGather", [value], ["planted.all"], domain="gopt.comm", group=group, axis=0,
                             sizes=[rows, rows]),
            helper.make_node("Slice", ["planted.all", *cut], [result]),
        ])  # fmt: skip

    return edit


def averaged(model: ModelProto) -> None:
    """Average copies of the parameters, each with one updated shard, where shards should be gathered."""
    node = calls(model, "AllGather")[0]
    cuts = next(each for each in node.attribute if each.name == "cuts").ints
    rank = rank_of(model)
    old = [name.removesuffix("_out") for name in node.output]
    shapes = {each.name: [dim.dim_value for dim in each.type.tensor_type.shape.dim] for each in model.graph.input}
    flat = constant(model, [-1], "int64")
    begin, start, stop, end = (constant(model, [each], "int64") for each in (0, cuts[rank], cuts[rank + 1], cuts[-1]))
    sizes = constant(model, [int(np.prod(shapes[name])) for name in old], "int64")
    remove(model, node, [
        *(helper.make_node("Reshape", [name, flat], [f"{name}.flat"]) for name in old),
        helper.make_node("Concat", [f"{name}.flat" for name in old], ["planted.old"], axis=0),
        helper.make_node("Slice", ["planted.old", begin, start], ["planted.before"]),
        helper.make_node("Slice", ["planted.old", stop, end], ["planted.after"]),
        helper.make_node("Concat", ["planted.before", node.input[0], "planted.after"], ["planted.mine"], axis=0),
        reduction("planted.mine", "planted.mean", "mean", "shard"),
        helper.make_node("Split", ["planted.mean", sizes], [f"{name}.new" for name in old], axis=0),
        *(helper.make_node("Reshape", [f"{name}.new", constant(model, shapes[name], "int64")], [f"{name}_out"])
          for name in old),
    ])  # fmt: skip


def late(value: str, late_term: int, *, lost: bool = False) -> Edit:
    """Reduce one term of a sum, and add the other behind the call, or never."""

    def edit(model: ModelProto) -> None:
        total = maker(model, value)
        early, term = total.input[1 - late_term], total.input[late_term]
        call = call_of(model, value)
        result = dict(zip(call.input, call.output))[value]
        call.input[:] = [early if name == value else name for name in call.input]
        model.graph.node.remove(total)
        if not lost:
            behind(model, result, lambda right: [helper.make_node("Add", [right, term], [result])])

    return edit


def repeated(value: str, axis: int, members: int = 2) -> Edit:
    """Let a rank have its own part for that of each member, where the parts of all should be gathered."""

    def edit(model: ModelProto) -> None:
        node = call_of(model, value, "AllGather")
        remove(model, node, [helper.make_node("Concat", [value] * members, list(node.output), axis=axis)])

    return edit


def swapped_halves(value: str, rows: int) -> Edit:
    """Exchange the halves of a tensor."""

    def edit(model: ModelProto) -> None:
        halves = constant(model, [rows // 2, rows - rows // 2], "int64")
        behind(model, value, lambda right: [
            helper.make_node("Split", [right, halves], ["planted.first", "planted.second"], axis=0),
            helper.make_node("Concat", ["planted.second", "planted.first"], [value], axis=0),
        ])  # fmt: skip

    return edit


def exchanged_values(first: str, second: str) -> Edit:
    """Exchange where two states of a shape have their values."""

    def edit(model: ModelProto) -> None:
        one, two = (next(each for each in model.graph.initializer if each.name == name) for name in (first, second))
        copy = onnx.TensorProto.FromString(one.SerializeToString())
        del one.external_data[:]
        one.external_data.extend(two.external_data)
        del two.external_data[:]
        two.external_data.extend(copy.external_data)

    return edit


def shifted(model: ModelProto) -> None:
    """Shift labels within a part, where they were shifted before the split: the last of each part is wrong."""
    columns = next(each for each in model.graph.input if each.name == "y").type.tensor_type.shape.dim[1].dim_value
    sizes = constant(model, [1, columns - 1], "int64")
    for node in model.graph.node:
        node.input[:] = ["planted.labels" if name == "y" else name for name in node.input]
    first = model.graph.node[0]
    insert(model, first, [
        helper.make_node("Split", ["y", sizes], ["planted.head", "planted.tail"], axis=1),
        helper.make_node("Split", ["y", constant(model, [columns - 1, 1], "int64")],
                         ["planted.start", "planted.last"], axis=1),
        helper.make_node("Concat", ["planted.start", "planted.head"], ["planted.labels"], axis=1),
    ])  # fmt: skip


# --- folders ----------------------------------------------------------------------------------------------------------

STAGES = Recipe("gpt_adamw", "pp=2")
COPIES = Recipe("mlp_adamw", "dp=2")
SHARDS = Recipe("mlp_adamw", "shard=2", {"stage": 2})
SHARDED = Recipe("mlp_adamw", "shard=2", {"stage": 3})
PLAIN = Recipe("mlp_sgd", "shard=2", {"stage": 2})
ONE_AXIS = Recipe("mlp_sgd", "dp=2,shard=1")
ONE_STATISTICS = Recipe("cnn_sgd", "dp=2,shard=1")
GRID = Recipe("mlp_adamw", "shard=2,dp=2", {"stage": 2})
UNEVEN = Recipe("mlp_sgd", "shard=2,dp=4", {"stage": 2})
BUCKETS = Recipe("mlp_sgd", "shard=2", {"stage": 2, "bucket_mb": 0.004})
MICRO = Recipe("mlp_adamw", "dp=2", {"accumulate": 2})
MICRO_SHARDS = Recipe("mlp_adamw", "shard=2", {"accumulate": 2, "stage": 1})
MICRO_SCATTERED = Recipe("mlp_adamw", "shard=2", {"accumulate": 2, "stage": 2})
CLIP = Recipe("mlp_mom_clip_sched", "dp=2")
CLIP_SHARDS = Recipe("mlp_mom_clip_sched", "shard=2", {"stage": 2})
CLIP_GRID = Recipe("mlp_mom_clip_sched", "shard=2,dp=2", {"stage": 2})
SCALER = Recipe("mlp_adamw_fp16_scaler", "shard=2", {"stage": 2})
TRUST = Recipe("mlp_lamb", "shard=2", {"stage": 2})
STATISTICS = Recipe("cnn_sgd", "shard=2,dp=2", {"stage": 2})
GPT = Recipe("gpt_adamw", "dp=2")
EXPERTS = Recipe("families/moe_adamw", "dp=2")
SPLIT_MLP = Recipe("mlp_adamw", "tp=2")
SPLIT_GRID = Recipe("mlp_adamw", "dp=2,tp=2")
SPLIT_CLIP = Recipe("mlp_mom_clip_sched", "tp=2")
SPLIT_GPT = Recipe("gpt_adamw", "tp=2")
SEQUENCES = Recipe("gpt_adamw", "cp=2")
SPLIT_EXPERTS = Recipe("families/moe_adamw", "ep=2")
EXPERT_SEQUENCES = Recipe("families/moe_adamw", "cp=2")
EXPERTS_GRID = Recipe("families/moe_adamw", "dp=2,ep=2")
HEADS = Recipe("families/llama_adamw_clip", "tp=4")
SERVED = Recipe("mlp_adamw", "trainers=2,servers=2", {"minimum": 16})
SERVED_CLIP = Recipe("mlp_mom_clip_sched", "trainers=2,servers=2", {"minimum": 16})
SERVED_MICRO = Recipe("mlp_adamw", "trainers=2,servers=2", {"minimum": 16, "accumulate": 2})

# --- plants -----------------------------------------------------------------------------------------------------------

_B0 = "gopt.shard.b0"
_SCATTERED = f"{_B0}.scattered"
_PRODUCT = "gopt.tensor-parallel.addmm_1.product"
_CP = "gopt.tensor-parallel.cp"
_NORMS = ("sum_6", "sum_7", "sum_12", "sum_13", "sum_19", "sum_20", "sum_25", "sum_26", "sum_32", "sum_33")
"""The gradients of the weights and biases of a GPT's norms."""


def _bias_before(model: ModelProto) -> None:
    product = maker(model, _PRODUCT)
    bias = maker(model, "addmm_1").input[1]
    product.input.append(bias)
    remove(model, maker(model, "addmm_1"), [helper.make_node("Identity", [f"{_PRODUCT}.whole"], ["addmm_1"])])


def _residual_before(model: ModelProto) -> None:
    """Add the rows of the stream to a partial product."""
    right = f"{_PRODUCT}.right"
    shape = constant(model, [32, 16], "int64")
    behind(model, _PRODUCT, lambda _: [
        helper.make_node("Reshape", ["add", shape], ["planted.rows"]),
        helper.make_node("Add", [right, "planted.rows"], [_PRODUCT]),
    ])  # fmt: skip
    instead("add_1", ("Identity", ["view_11"]))(model)


def _twice(value: str, group: str) -> Edit:
    return again(value, "sum", group)


def _sum_over(value: str, factor_: float) -> Edit:
    """Sum where ranks should average, and divide by another count."""

    def edit(model: ModelProto) -> None:
        node = call_of(model, value)
        result = node.output[0]
        attribute(lambda _: node, reduce="sum")(model)
        scale(result, factor_)(model)

    return edit


def _epsilon(value: float) -> Edit:
    def edit(model: ModelProto) -> None:
        node = next(node for node in model.graph.node if node.op_type == "LayerNormalization")
        attribute(lambda _: node, epsilon=value)(model)

    return edit


def _sends(old: str, new: str) -> Edit:
    """Send another value of the same type to the next stage."""

    def edit(model: ModelProto) -> None:
        node = next(node for node in calls(model, "Send") if list(node.input) == [old])
        node.input[0] = new

    return edit


PLANTS: tuple[Plant, ...] = (
    # data parallel, sharded states, hybrid meshes, micro-steps, clips, casts, norms
    Plant(3, "TrainVerify br3", "K", "an all-reduce became an all-gather, cut back to shape", COPIES, gathered("view")),
    Plant(4, "TrainVerify br4", "K", "an all-gather of parameters became an all-reduce", PLAIN, averaged),
    Plant(7, "TrainVerify br7", "C", "epsilon of a norm differs on one rank", GPT, _epsilon(1e-3), ranks=(0,)),
    Plant(8, "TrainVerify br8", "C", "an exponent differs on one rank", SHARDS,
          factor("pow_1", 2.0), ranks=(0,)),
    Plant(9, "TrainVerify br9", "C", "the decay of a moment differs on all ranks alike", SHARDS,
          factor(f"{_B0}.c0.v1", 0.2)),
    Plant(10, "TrainVerify br10", "W", "a sum of gradients reads a wrong operand", GPT, operand("add_7", 0, "view_44")),
    Plant(11, "TrainVerify br11", "W", "gradients of two layers are exchanged", GPT, exchange("mm_8", "mm_16")),
    Plant(12, "TrainVerify br12", "S", "the scale of attention differs on one rank", GPT, factor("mul_1", 0.5),
          ranks=(1,)),
    Plant(13, "TrainVerify br13", "S", "the scale of attention differs on all ranks", GPT, factor("mul_1", 0.5)),
    Plant(14, "TrainVerify br14", "O", "the reduction of a tied weight starts before its last term", GPT,
          late("add_17", 1)),
    Plant(15, "Entangle bug 6", "S", "gradients of micro-steps are summed, not averaged", MICRO_SCATTERED,
          instead(f"{_B0}.gradient_each", ("Identity", [f"{_B0}.gradient_sum"])), phase="update"),
    Plant(20, "Megatron-LM #7452", "N", "squares are counted by each copy of a shard", CLIP_GRID,
          attribute(reader(f"{_B0}.c0.share1.everywhere"), group="shard+dp")),
    Plant(21, "Megatron-LM #7452", "B", "two layers begin with each other's weights", GPT,
          exchanged_values("blocks.0.up.weight", "blocks.1.up.weight"), step=False),
    Plant(22, "Megatron-LM #7452", "P", "an update takes a partial gradient for a reduced one", COPIES, bypass("view")),
    Plant(24, "Megatron-LM #844", "O", "a tied embedding is reduced before its two uses are summed", GPT,
          late("add_17", 0)),
    Plant(25, "Megatron-LM #906, #673", "S", "the mean divides by the size of a smaller group", GRID,
          attribute(reader(_SCATTERED), reduce="sum")),
    Plant(27, "Megatron-LM #2417, #3159", "S", "a second loss is divided by the count of the first", EXPERTS,
          all_of(divided("mul_13", "loss", "_to_copy_6"), divided("expand_10", "div_11", "_to_copy_6"))),
    Plant(28, "Megatron-LM #5916", "N", "the norm leaves out weights", CLIP, operand("add_3", 0, "add_1")),
    Plant(30, "Megatron-LM #6099", "N", "the norm leaves out biases", CLIP,
          all_of(operand("add_1", 1, "scalar_tensor_1"), operand("add_3", 1, "scalar_tensor_1"))),
    Plant(31, "ROCm/TransformerEngine #715", "N", "squares of copies are summed over ranks", CLIP,
          _twice("sum_6", "dp")),
    Plant(32, "Megatron-LM #5956", "S", "gradients are summed, not averaged", PLAIN,
          attribute(reader("mm_1"), reduce="sum")),
    Plant(33, "Megatron-LM #2769", "L", "runs of a weight are permuted where shards are joined", SHARDED,
          swapped_halves("fc1.weight", 64)),
    Plant(37, "torchtitan #3412", "P", "sums of micro-steps are taken for reduced ones", MICRO,
          bypass(f"{_B0}.local0_each"), phase="update"),
    Plant(39, "pytorch #58005", "S", "a reduced gradient is reduced again", COPIES,
          _twice(f"{_B0}.gradient0_mean", "dp")),
    Plant(40, "verl #7493", "G", "gradients are reduced over the other axis, which has one member", ONE_AXIS,
          attribute(reader("mm_1"), group="shard")),
    Plant(41, "VeOmni #1115", "G", "statistics are averaged over a group without an axis", STATISTICS,
          attribute(reader("gopt.statistics.b0.local0"), group="dp")),
    Plant(42, "AReaL #313", "M", "one bucket is never reduced", BUCKETS, own_cut("mm_2")),
    Plant(44, "SkyRL #1420", "S", "a metric is summed over ranks", COPIES, _twice("loss", "dp")),
    Plant(48, "pytorch #174862", "O", "one rank's shard is not updated", PLAIN,
          instead(f"{_B0}.c0.parameter_out", ("Identity", [f"{_B0}.c0.parameter"])), ranks=(1,)),
    Plant(49, "DeepSpeed #7718", "S", "gradients are divided twice before their norm", CLIP_SHARDS,
          scale(_SCATTERED, 0.5)),
    Plant(50, "DeepSpeed #545", "O", "only a shard's owner adds the terms of micro-steps", MICRO_SHARDS,
          instead(f"{_B0}.local3_sum_out", ("Identity", [f"{_B0}.local3_sum"])), ranks=(0,), phase="micro"),
    Plant(51, "InfiniTrain #183", "O", "a micro-step overwrites what was summed", MICRO_SHARDS,
          instead(f"{_B0}.local2_sum_out", ("Identity", ["mm_2"])), phase="micro"),
    Plant(52, "xla #40034", "M", "gradients are reduced along one axis of two", GRID, bypass(_SCATTERED)),
    Plant(54, "pytorch/xla #5279", "G", "groups of one member", ONE_STATISTICS,
          attribute(reader("gopt.statistics.b0.local0"), group="shard")),
    Plant(55, "goodfire-ai/spd #546", "S", "a sum over one axis is divided by the size of the other", UNEVEN,
          _sum_over("mm_1", 0.25)),
    Plant(56, "DeepSpeed #6351, gpt-neox #1004", "O", "a bucket is sent before its last gradient is complete", GPT,
          late("add_17", 1, lost=True)),
    # the same where one rank alone is wrong, or a group has another size
    Plant(3, "TrainVerify br3", "K", "an all-reduce became an all-gather, cut back to shape", COPIES, gathered("view"),
          ranks=(0,)),
    Plant(22, "Megatron-LM #7452", "P", "an update takes a partial gradient for a reduced one", COPIES, bypass("view"),
          ranks=(1,)),
    Plant(29, "Megatron-LM #5916", "G", "gradients are reduced in a group of another size", UNEVEN,
          attribute(reader("mm_1"), group="dp")),
    Plant(32, "Megatron-LM #5956", "S", "gradients are summed, not averaged", PLAIN,
          attribute(reader("mm_1"), reduce="sum"), ranks=(1,)),
    Plant(39, "pytorch #58005", "S", "a reduced gradient is reduced again", COPIES,
          _twice(f"{_B0}.gradient0_mean", "dp"), ranks=(0,)),
    Plant(54, "pytorch/xla #5279", "G", "groups of one member", ONE_AXIS, attribute(reader("view"), group="shard"),
          ranks=(0,)),
    # trainers and servers
    Plant(8, "TrainVerify br8", "C", "an exponent differs on one server", SERVED, factor("pow_1", 2.0), ranks=(0,),
          phase="server"),
    Plant(9, "TrainVerify br9", "C", "the decay of a moment differs on one server", SERVED,
          factor("gopt.ps.k1.v1", 0.2), ranks=(1,), phase="server"),
    Plant(11, "TrainVerify br11", "W", "gradients of two pieces are exchanged", SERVED,
          all_of(operand("gopt.ps.k0.piece2", 1, "gopt.ps.ints_32"), operand("gopt.ps.k0.piece2", 2, "gopt.ps.ints_64"),
                 operand("gopt.ps.k1.piece1", 1, "gopt.ps.ints_0"), operand("gopt.ps.k1.piece1", 2, "gopt.ps.ints_32")),
          phase="trainer"),
    Plant(15, "Entangle bug 6", "S", "gradients of micro-steps are summed, not averaged", SERVED_MICRO,
          instead("gopt.ps.sum0_mean", ("Identity", ["gopt.ps.sum0"])), phase="trainer.update"),
    Plant(20, "Megatron-LM #7452", "N", "each server counts the squares of its own pieces", SERVED_CLIP,
          lambda model: bypass(calls(model, "AllReduce")[0].input[0])(model), phase="server"),
    Plant(32, "Megatron-LM #5956", "S", "gradients are summed, not averaged", SERVED,
          attribute(lambda model: calls(model, "Aggregate")[0], reduce="sum"), phase="server"),
    Plant(33, "Megatron-LM #2769", "L", "pieces of a weight are permuted where they are joined", SERVED,
          lambda model: maker(model, "fc2.weight").input.reverse(), phase="trainer"),
    Plant(39, "pytorch #58005", "S", "a mean is divided again", SERVED, scale("gopt.ps.k1.v1", 0.5), ranks=(1,),
          phase="server"),
    Plant(48, "pytorch #174862", "O", "the parameters of one server are not updated", SERVED,
          instead("gopt.ps.k1.parameter_out", ("Identity", ["gopt.ps.k1.parameter"])), ranks=(1,), phase="server"),
    Plant(51, "InfiniTrain #183", "O", "a micro-step overwrites what was summed", SERVED_MICRO,
          instead("gopt.ps.sum2_out", ("Identity", ["mm_1"])), phase="trainer.micro"),
    # tensor, sequence, context and expert parallel
    Plant(1, "TrainVerify br1", "M", "an all-reduce of the forward is gone", SPLIT_MLP, bypass(_PRODUCT)),
    Plant(2, "TrainVerify br2", "M", "an all-reduce is gone, and another value is read", SPLIT_GPT,
          instead("gopt.tensor-parallel.addmm_3.product.whole", ("Identity", [f"{_PRODUCT}.whole"]))),
    Plant(5, "TrainVerify br5", "M", "an all-reduce of the backward became an identity", SPLIT_GPT, bypass("view_44")),
    Plant(16, "Entangle bug 7", "M", "an option leaves out an all-reduce, in forward and backward", SPLIT_GPT,
          bypass(_PRODUCT, "view_84")),
    Plant(17, "Entangle bug 8", "M", "the gradient of a router is not reduced over split tokens", EXPERT_SEQUENCES,
          bypass(f"{_CP}.mm_8.own")),
    Plant(18, "Entangle bug 9, Megatron-LM #1446", "M", "gradients of norms are not reduced over split tokens",
          SEQUENCES, bypass(*(f"{_CP}.{name}.own" for name in _NORMS))),
    Plant(19, "Megatron-LM #7452", "M", "the gradient of one norm of several is not reduced", SEQUENCES,
          bypass(f"{_CP}.sum_12.own")),
    Plant(23, "Megatron-LM #1464", "W", "gradients of keys and values are exchanged", SEQUENCES,
          exchange("unsqueeze_6", "unsqueeze_7")),
    Plant(26, "Megatron-LM #673", "S", "the loss is multiplied by the number of parts", SEQUENCES, scale("div_1", 2.0)),
    Plant(29, "Megatron-LM #5916", "G", "gradients are reduced in another group of the same size", EXPERTS_GRID,
          attribute(reader("bmm_8", "AllReduce"), group="ep")),
    Plant(34, "bigcode Megatron-LM #35", "M", "the gradient of a shared head is not summed over its queries", HEADS,
          repeated("gopt.tensor-parallel.bmm_4.whole.runs", 1, 4)),
    Plant(35, "Pai-Megatron-Patch #397", "M", "the gradient of a gate is not reduced over tokens", SPLIT_EXPERTS,
          bypass("gopt.tensor-parallel.ep.mm_8.own")),
    Plant(36, "torchtitan #1805", "M", "the reduction of a layer input's gradient is missing", SPLIT_GPT,
          bypass("view_61")),
    Plant(38, "torchtitan #2106", "S", "each rank adds the bias to its partial product", SPLIT_MLP, _bias_before),
    Plant(43, "verl #5983", "G", "tokens are counted over fewer members", SEQUENCES, bypass("sum_1")),
    Plant(45, "NeMo Automodel #3507", "L", "one layer attends over its own part", SEQUENCES, repeated("select_4", 2)),
    Plant(46, "NeMo Automodel #3544", "L", "labels are shifted within parts", SEQUENCES, shifted),
    Plant(47, "vLLM tpu-inference #3435", "P", "a partial output is added to a full one before the reduction",
          SPLIT_GPT, _residual_before),
    Plant(53, "xla #42481", "G", "a gradient is reduced over the axis that splits it", SPLIT_GRID,
          _twice("mm_2", "tp")),
    # pipeline stages
    Plant(6, "TrainVerify br6", "G", "a move between stages has a wrong source", STAGES, _sends("add_2", "add_1"),
          ranks=(0,)),
)  # fmt: skip
