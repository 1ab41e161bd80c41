"""Whose the elements of a bucket are: the sweep follows them from operands to results, and names the first mistake.

One rule at a time, on a bucket of two parameters of three elements. Errors planted in fixtures are in
``test_bucket_steps.py``.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from small_buckets import BUCKET, CUT, GATHER, IN_A, IN_B, SCATTER, SHAPES, held, made, part, said, step_of, update
from small_steps import PHASES, kept, node

from gopt.ir.graph import COMM
from gopt.ir.opaque.refold import RefoldedCall
from gopt.records.placements import OnMember, Sharding
from gopt.spmd.program import BucketSlice


def test_a_step_in_order():
    assert said(step_of(), update()) == ""


def test_a_bucket_of_another_order():
    wrong = update(GATHER.replace("a_new b_new", "b_new a_new"))
    assert "AllGather 'b_new' makes 'b_new' of elements of 'a' (they must be elements of 'b')" in said(step_of(), wrong)
    nodes = update()
    nodes[0].inputs = ["db", "da"]
    assert "Sub 'bucket.q' reads elements 0 to 3 of a bucket as elements of 'a' beside" in said(step_of(), nodes)
    assert said(step_of(), wrong, live=wrong[:-1]) == "", "what nothing needs is not looked at"


@pytest.mark.parametrize(
    ("slices", "fine"),
    [([IN_A, IN_B], True), ([BucketSlice("b", 0, 3), BucketSlice("a", 3, 3)], False), ([IN_A], True),
     ([BucketSlice("a", 0, 3, 1), IN_B], False), ([BucketSlice("a", 0, 3), BucketSlice("a", 2, 3)], False),
     ([BucketSlice("lr", 0, 3), IN_B], True), ([BucketSlice("b", 0, 0), IN_A, IN_B], True)],
)  # fmt: skip
def test_a_state_is_held_as_its_new_value_is_made(slices, fine):
    step = step_of()
    step.states[2:] = [held("bucket", *slices)]
    step.states[2].output = "bucket.q"
    found = said(step, update())
    assert (found == "") == fine, found
    assert fine or "the new value of state 'bucket' has elements" in found
    step.states[2].sharding = Sharding.along("shard", OnMember(0))
    step.states[2].input = "other"
    assert said(step, update()) == "", "one that is no part of a bucket lists nothing"


def test_a_shard_of_a_state_has_its_parameters_elements():
    step = step_of()
    step.states[2:] = [held("bucket.m", BucketSlice("b", 3, 3), BucketSlice("a", 0, 3))]
    assert said(step, [*update(), made("U Mul bucket.m bucket.g -> bucket.m_new")]) == ""
    step.states[2:] = [held("bucket.m", BucketSlice("b", 0, 3), BucketSlice("a", 3, 3))]
    assert "Mul 'bucket.m_new' reads elements 0 to 3" in said(
        step, [*update(), made("U Mul bucket.m bucket.g -> bucket.m_new")]
    )


@pytest.mark.parametrize("copy", [True, False])
def test_a_narrow_copy_belongs_to_its_parameter(copy):
    """One that is held whole, and what is gathered for it."""
    step = step_of()
    step.states[2:] = [held("copy.of_b", BucketSlice("b", 0, 3), flat=False, copy=copy)]
    reader = kept(step.training.graph.nodes[0])
    reader.inputs = ["x", "copy.of_b"]
    assert "reads 'copy.of_b' for 'a': these are elements of 'b'" in said(step, [reader])
    step.states[2].slices = (IN_A,)
    assert said(step, [reader]) == ""
    gather = made("U AllGather bucket.q -> copy.of_b_new b_new", **SHAPES)
    step.states[2].slices = (BucketSlice("b", 0, 3),)
    assert ("makes 'copy.of_b_new' of elements of 'a'" in said(step, [*update()[:3], gather])) == copy


def test_sums_over_micro_steps_are_followed_first():
    """The update, which reads them, may stand in front of the micro-step that makes them."""
    step = step_of()
    step.accumulators = [SimpleNamespace(input="bucket.sum", added="bucket.sum_added")]
    micro = [made(SCATTER, **BUCKET), made("B Add bucket.sum bucket.g -> bucket.sum_added")]
    rest = update()[1:]
    rest[1].inputs = ["bucket.p", "bucket.sum"]
    assert said(step, [*rest, *micro]) == ""
    micro[0].inputs = ["db", "da"]
    assert "Sub 'bucket.q' reads elements 0 to 3" in said(step, [*rest, *micro])


@pytest.mark.parametrize("gradients", [{"a": "da", "b": "da"}, {"a": "da", "b": "db"}])
def test_a_gradient_of_two_parameters_is_nobodys(gradients):
    step = step_of(gradients=gradients)
    reader = kept(step.training.graph.nodes[4])
    reader.inputs = ["a", "mean.of_b"]
    shared = gradients["b"] == "da"
    found = said(step, [made("U AllReduce db -> mean.of_b", group="dp"), reader])
    assert (found == "") == shared, found
    assert said(step, [made("U Neg da -> mean.of_b"), reader]) == ""
    reader.inputs = ["a", "a"]
    assert said(step, [reader]) == ""


@pytest.mark.parametrize(
    ("op_type", "domain", "fine"), [("Pull", COMM, True), ("Pull", "my", False), ("Send", COMM, False)]
)
def test_messages_do_not_say_whose_elements_they_bring(op_type, domain, fine):
    """Where a step has any, what stands for a gradient need not be known."""
    step = step_of()
    reader, message = kept(step.training.graph.nodes[4]), made(f"U {op_type} -> got")
    reader.inputs, message.domain = ["a", "unknown"], domain
    message.attributes["group"] = "dp"
    found = said(step, [made("U Abs x -> unknown"), message, reader])
    assert (found == "") == fine
    assert fine or "reads 'unknown' for 'da': these are elements of no parameter that is known" in found


@pytest.mark.parametrize(
    ("place", "old", "new", "fine"),
    [
        (4, "a", "b", False), (4, "da", "db", False), (4, "a", "gopt.unknown", True), (4, "da", "gopt.unknown", False),
        (4, "da", "lr", True), (0, "x", "b", True), (4, "a", "none.at_all", True),
    ],
)  # fmt: skip
def test_what_a_node_of_the_source_reads_instead(place, old, new, fine):
    """Of another parameter: never. Of none that is known: not for a gradient, unless it is a scalar."""
    step = step_of()
    reader = kept(step.training.graph.nodes[place])
    reader.inputs = [new if name == old else name for name in reader.inputs]
    found = said(step, [reader])
    assert (found == "") == fine, found
    assert fine or f"reads {new!r} for {old!r}" in found


def test_the_cast_of_a_gradient_is_the_parameters():
    nodes = [
        node("B Abs x -> da"),
        node("B Cast da -> da16"),
        node("B Neg da -> other"),
        node("U Mul da16 other -> a_new"),
    ]
    step = step_of(nodes)
    for place, name, fine in ((0, "da16", False), (1, "other", True)):
        reader = kept(nodes[3])
        reader.inputs[place] = "b"
        found = said(step, [reader])
        assert (found == "") == fine
        assert fine or f"reads 'b' for {name!r}: these are elements of 'b' (they must be elements of 'a')" in found


@pytest.mark.parametrize("op_type", ["AllReduce", "Reduce", "Broadcast"])
def test_calls_keep_tensors_apart(op_type):
    step = step_of()
    assert said(step, [made(f"U {op_type} a b -> a_new b_new", group="dp")]) == ""
    assert "makes 'a_new' of elements of 'b'" in said(step, [made(f"U {op_type} b a -> a_new b_new", group="dp")])
    whose = [made(f"U {op_type} da db -> r.a r.b", group="dp"), made("U ReduceScatter r.b r.a -> bucket.g", **BUCKET)]
    assert "Sub" in said(step, [*whose, *update()[1:]])
    shards = [*update()[:1], made(f"U {op_type} bucket.g -> bucket.mean", group="dp"), *update()[1:]]
    shards[3].inputs = ["bucket.p", "bucket.mean"]
    assert said(step, shards) == ""
    shards[0].inputs = ["db", "da"]
    assert "Sub" in said(step, shards)
    assert said(step, [made(f"U {op_type} unknown -> a_new", group="dp")]) == ""


def test_a_call_of_forward_or_backward_may_join_what_it_likes():
    step = step_of()
    joined = node("B ReduceScatter da x -> bucket.g", **BUCKET)
    assert said(step, [joined]) == ""
    joined.phase = PHASES["U"]
    assert "ReduceScatter 'bucket.g' reads 'x' in a bucket of gradients" in said(step, [joined])
    joined.phase, joined.made_by = PHASES["B"], "plant"
    assert "ReduceScatter 'bucket.g' reads 'x' in a bucket of gradients" in said(step, [joined])


@pytest.mark.parametrize(
    ("inputs", "attributes", "fine"),
    [
        ("da tiny", BUCKET, True),
        ("x h", BUCKET, True),
        ("da x", {"group": "shard", "axis": 0}, True),
        ("x da", BUCKET, False),
    ],
)
def test_what_a_bucket_of_gradients_holds(inputs, attributes, fine):
    """Scalars are no parameter's, a bucket of other values is none of gradients; along a dimension there is none."""
    assert (said(step_of(), [made(f"U ReduceScatter {inputs} -> bucket.g", **attributes)]) == "") == fine


@pytest.mark.parametrize(
    ("outputs", "shapes", "fine"),
    [
        ("a_new b_new", ["3", "3"], True), ("a_new none_1 b_new", ["3", "0", "3"], True),
        ("none_1 b_new a_new", ["0", "3", "3"], False), ("both_new", ["6"], True), ("a_new", ["6"], False),
        ("tiny_1 a_new tiny_2 tiny_3", ["1", "3", "1", "1"], False), ("other_1 b_new", ["3", "3"], True),
        ("b_new", ["3"], False), ("other_1 other_2 a_new", ["2", "4", "3"], True),
    ],
)  # fmt: skip
def test_how_a_gather_cuts_a_bucket(outputs, shapes, fine):
    found = said(step_of(), update(f"U AllGather bucket.q -> {outputs}", **{**BUCKET, "shapes": shapes}))
    assert (found == "") == fine, found


def test_what_a_gather_makes_is_its_parameters():
    nodes = update("U AllGather bucket.q -> whole.a whole.b", **SHAPES)
    step = step_of()
    reader = kept(step.training.graph.nodes[0])
    for name, fine in (("whole.a", True), ("whole.b", False)):
        reader.inputs = ["x", name]
        assert (said(step, [*nodes, reader]) == "") == fine
    assert said(step, [made(GATHER.replace("bucket.q", "bucket.unknown"), **SHAPES)]) == ""
    nodes[3].attributes.pop("cuts")
    assert said(step, [*nodes, reader]) == "", "along a dimension"
    nodes = [*update()[:3], made("U AllToAll bucket.q -> b_new", **SHAPES)]
    assert said(step, nodes) == ""


@pytest.mark.parametrize(
    ("nodes", "fine"),
    [
        ([made("U LocalSlice a b -> bucket.p", **CUT)], True),
        ([made("U LocalSlice b a -> bucket.p", **CUT)], False),
        ([made("U LocalSlice a b -> bucket.p", starts=[0, 2], sizes=[3, 3])], False),
        ([made("U LocalSlice a b -> bucket.p", **CUT, firsts=[0, 0])], True),
        ([made("U LocalSlice a b -> bucket.p", **CUT, firsts=[1, 0])], False),
        ([made("U LocalSlice a tiny b -> bucket.p", starts=[0, 3, 3], sizes=[3, 0, 3])], True),
        ([made("U LocalConcat a b -> bucket.p", sizes=[3, 3])], True),
        ([made("U LocalConcat b a -> bucket.p", sizes=[3, 3])], False),
        ([made("U ShardSlice bucket.g -> bucket.first", sharding=part(0, 3)),
          made("U ShardSlice bucket.g -> bucket.second", sharding=part(3, 6)),
          made("U LocalConcat bucket.first bucket.second -> bucket.p")], True),
        ([made("U ShardSlice bucket.unknown -> bucket.p", sharding=part(0, 3))], True),
        ([made("U LocalSlice b -> bucket.p", starts=[0], sizes=[3], sharding=part(0, 3))], False),
        ([made("U LocalSlice b a b -> bucket.p", starts=[0, 0, 3], sizes=[0, 3, 3])], True),
        ([made("U LocalSlice b a -> bucket.t", **CUT), made("U LocalConcat bucket.t -> bucket.p")], False),
        ([made("U LocalSlice b a -> bucket.t", starts=[3, 0], sizes=[3, 3]),
          made("U ShardSlice bucket.t -> bucket.p", sharding=part(3, 6))], True),
        ([made("U LocalSlice a b -> bucket.t", starts=[3, 0], sizes=[3, 3]),
          made("U ShardSlice bucket.t -> bucket.p", sharding=part(3, 6))], False),
    ],
    ids=str,
)  # fmt: skip
def test_layouts_of_a_bucket(nodes, fine):
    """The parameters of what they make, by offset, beside a bucket of gradients."""
    used = made("U Sub bucket.p bucket.g -> bucket.q")
    found = said(step_of(), [made(SCATTER, **BUCKET), *nodes, used])
    assert (found == "") == fine, found


@pytest.mark.parametrize(
    ("start", "stop", "others", "fine"),
    [
        (0, 3, "a", True),
        (0, 3, "b", False),
        (3, 6, "b", True),
        (3, 6, "a", False),
        (2, 3, "a", True),
        (3, 3, "a", True),
    ],
)
def test_a_part_of_a_bucket_has_the_parameters_in_it(start, stop, others, fine):
    """Its elements are those of the parameters that lie there: not of one that only touches it."""
    cut = made("U ShardSlice bucket.g -> bucket.part", sharding=part(start, stop))
    whole = made(
        f"U LocalSlice {others} -> bucket.other", starts=[start // 3 * 3], sizes=[3], sharding=part(start, stop)
    )
    found = said(step_of(), [made(SCATTER, **BUCKET), cut, whole, made("U Sub bucket.part bucket.other -> bucket.q")])
    assert (found == "") == fine, found


def test_a_layout_operator_of_another_domain_is_none():
    odd = made("U ShardSlice bucket.g -> bucket.p", sharding=part(0, 3))
    odd.op_type = "Odd"
    bad = made("U LocalSlice b -> bucket.other", starts=[0], sizes=[3])
    nodes = [made(SCATTER, **BUCKET), odd, bad, made("U Sub bucket.p bucket.other -> bucket.q")]
    assert said(step_of(), nodes) == "", "nothing is known of what it makes"
    whole = made("U ShardSlice bucket.g -> bucket.p")
    whole.sharding = Sharding()
    assert said(step_of(), [made(SCATTER, **BUCKET), whole]) == ""


@pytest.mark.parametrize(
    ("nodes", "fine"),
    [
        ([made("U Mul a da -> m")], True),  # of one parameter
        ([made("U Mul b db -> m")], False),
        ([made("U Mul a db -> m")], True),  # of two: nobody's
        ([made("U Mul b lr -> m")], False),  # a scalar is nobody's
        ([made("U MatMul b b -> m")], False),
        ([made("U Mul a db -> n"), made("U Mul b n -> m")], False),  # beside nobody's
        ([made("U ReduceSum b -> tiny_m"), made("U Expand tiny_m size -> m")], True),  # through one element
        ([made("B Mul b b -> m")], False),
        ([node("B Mul b b -> m")], True),  # forward and backward of the source compute what they like
    ],
    ids=str,
)
def test_whose_a_whole_value_is(nodes, fine):
    """It is read for parameter ``a`` afterwards."""
    step = step_of()
    reader = kept(step.training.graph.nodes[4])
    reader.inputs = ["m", "da"]
    assert (said(step, [*nodes, reader]) == "") == fine


@pytest.mark.parametrize(
    ("inputs", "fine"),
    [
        ("bucket.a lr", True), ("bucket.b lr", False), ("bucket.b bucket.a", True), ("bucket.turned lr", True),
        ("bucket.end lr", True), ("bucket.start lr", False), ("bucket.unknown lr", True),
    ],
)  # fmt: skip
def test_the_owner_of_a_tensor_has_it_whole_again(inputs, fine):
    """A node that is not elementwise, on the one member that has all of one parameter; of two it is nobody's."""
    one = made("U LocalSlice a -> bucket.a", starts=[0], sizes=[3], sharding=part(0, 3))
    other = made("U LocalSlice b -> bucket.b", starts=[3], sizes=[3], sharding=part(3, 6))
    step = step_of()
    reader = kept(step.training.graph.nodes[4])
    reader.inputs = ["m", "da"]
    more = [
        made("U LocalSlice b a -> bucket.turned", **CUT),
        made("U ShardSlice bucket.turned -> bucket.start", sharding=part(0, 3)),
        made("U ShardSlice bucket.turned -> bucket.end", sharding=part(3, 6)),
        made("U LocalSlice x -> bucket.unknown", starts=[0], sizes=[3]),
    ]
    assert (said(step, [one, other, *more, made(f"U MatMul {inputs} -> m"), reader]) == "") == fine


def test_a_result_of_the_source_under_another_name():
    step = step_of()
    producer, reader = kept(step.training.graph.nodes[2]), kept(step.training.graph.nodes[4])
    producer.outputs, reader.inputs = ["own.db"], ["a", "own.db"]
    assert "reads 'own.db' for 'da': these are elements of 'b'" in said(step, [producer, reader])


def test_refolded_optimizers_compute_element_by_element():
    """Each of an operator's weights is one parameter's, or one run of a bucket."""
    for inputs, fine in ((("bucket.p", "bucket.g"), True), (("bucket.wrong", "bucket.g"), False)):
        weight = SimpleNamespace(inputs=dict(enumerate(inputs)), outputs={0: "bucket.q"})
        call = made("U LocalConcat -> bucket.q")
        call.op_type, call.origin = "Adam", RefoldedCall(None, {}, {}, (weight,), "adam")
        wrong = made("U LocalSlice b a -> bucket.wrong", **CUT)
        found = said(step_of(), [*update()[:2], wrong, call, made(GATHER, **SHAPES)])
        assert (found == "") == fine
        assert fine or "Adam 'bucket.q' reads elements 0 to 3" in found
    weight.inputs = {0: "bucket.p", 1: "bucket.g"}
    turned = made(GATHER.replace("a_new b_new", "b_new a_new"), **SHAPES)
    assert "makes 'b_new' of elements of 'a'" in said(step_of(), [*update()[:2], call, turned])


def test_a_part_that_is_all_of_one_parameter():
    """It ends where another begins: that one has no elements there."""
    step = step_of()
    reader = kept(step.training.graph.nodes[5])
    reader.inputs = ["m", "db"]
    for start, fine in ((0, True), (3, False)):
        cut = made("U ShardSlice bucket.t -> bucket.part", sharding=part(start, start + 3))
        nodes = [made("U LocalSlice b a -> bucket.t", **CUT), cut, made("U MatMul bucket.part lr -> m"), reader]
        assert (said(step, nodes) == "") == fine


def test_a_moment_belongs_to_its_parameter_and_a_statistic_to_itself():
    step = step_of(moments={"a.m": "a"}, statistics={"run": "run_new", "var": "var_new"})
    whole = (BucketSlice(name, 0, 3) for name in ("a.m", "run", "var"))
    step.states[2:] = [held(piece.tensor, piece, flat=False) for piece in whole]
    reader = kept(step.training.graph.nodes[4])
    for name, fine in (("a.m", True), ("run", False)):
        reader.inputs = [name, "da"]
        assert (said(step, [reader]) == "") == fine
    assert said(step, [made("U AllReduce run var -> run_new var_new", group="dp")]) == ""
    assert "makes 'run_new' of elements of 'var'" in said(step, [made("U AllReduce var -> run_new", group="dp")])


def test_parameters_of_two_elements_and_of_none():
    step = step_of(states={"a": "a_new", "b": "b_new", "two": "two_new", "none": "none_new"})
    step.states[2:] = [held("two", BucketSlice("two", 0, 2), flat=False)]
    reader = kept(step.training.graph.nodes[4])
    reader.inputs = ["two", "da"]
    assert "reads 'two' for 'a': these are elements of 'two'" in said(step, [reader])
    shapes = {**BUCKET, "shapes": ["3", "0", "3"]}
    assert said(step, update("U AllGather bucket.q -> a_new none_new b_new", **shapes)) == ""


def test_a_cast_of_another_domain_says_nothing_of_its_result():
    nodes = [node("B Abs x -> da"), node("B Cast da -> da16"), node("U Mul da16 lr -> a_new")]
    nodes[1].domain = "my"
    reader = kept(nodes[2])
    reader.inputs[0] = "b"
    assert said(step_of(nodes), [reader]) == ""


def test_an_absent_result_is_no_operand_of_others():
    swapped = made("U LocalSlice b a -> bucket.r", **CUT)
    clip = made("U Clip bucket.r - lr -> bucket.s")
    clip.inputs[1] = ""
    nodes = [*update()[:3], swapped, clip]
    nodes[2].outputs.append("")
    assert said(step_of(), nodes) == ""
