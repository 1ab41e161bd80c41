"""Each rule by numbers and without ranks: an operator on what members hold makes what its rule says they then hold.

All operators of the table meet operands of all placements, uneven and empty shards among them. What a rule accepts is
run per member and compared with the operator on the whole; what must be accepted is listed.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from chunks import Array, Chunks, agrees, run, take_apart

from gopt.records.placements import (
    FLAG_COUNT,
    PER_MEMBER,
    REPLICATED,
    FlagCount,
    FlatShard,
    OnMember,
    Partial,
    PerMember,
    Place,
    Placement,
    Replicated,
    Shard,
    holder,
)
from gopt.spmd.rules import FULL_REDUCTIONS, RULES, Mismatch, Operand, Use, result

MEMBERS = 4
FLAT = FlatShard.whole((0, 3, 3, 5, 7))
"""Uneven, and one member has nothing."""
OTHER = FlatShard.whole((0, 1, 4, 6, 7))
EVEN = FlatShard.whole((0, 2, 4, 6, 8))
SOLE = FlatShard((0, 3, 3, 10, 12), 3, 10)
"""A part of a bucket that one member has all of."""
ALONE = OnMember(2)
ROWS = Shard(0, (3, 0, 2, 2))
NUMBERS: list[Placement] = [
    REPLICATED, PER_MEMBER, ALONE, FLAT, OTHER, SOLE, ROWS, Partial("sum"), Partial("mean"), Partial("max"),
    Partial("min"), Partial("sum", FLAT),
]  # fmt: skip
FLAGS: list[Placement] = [REPLICATED, PER_MEMBER, ALONE, FLAT, Partial("any"), Partial("all")]
PLACES: list[Place] = [REPLICATED, ALONE, FLAT, SOLE]
BINARY = ("Add", "Sub", "Mul", "Div", "Max", "Min", "Pow", "Sum", "Greater", "Equal")
FLAGGED = ("And", "Or", "Xor")
NULLARY: dict[str, dict[str, object]] = {"Cast": {"to": 11}, "Not": {}}
WHOLE = ("BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitShift", "Mod")
"""Of two whole numbers."""
OTHER_TYPES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(WHOLE, ("uint8", "uint8")), "BitwiseNot": ("uint8",), "CastLike": ("float64",),
    "Clip": ("float64", "float64", "float64"), "Where": ("bool", "float64", "float64"), "PRelu": ("float64", "float64"),
    **dict.fromkeys(["GreaterOrEqual", "Less", "LessOrEqual"], ("float64", "float64")),
    **dict.fromkeys(["IsInf", "IsNaN", "Acosh", "Shrink", "Mish"], ("float64",)),
}  # fmt: skip
"""Elementwise operators of other types or of more operands -> the types of their operands."""
REFERENCE_HAS_NOT = frozenset({"Swish", "Softsign", "Mean"})
"""Elementwise as others: onnx's reference does not run them, or not on all shapes."""
UNARY = sorted(set(RULES) - {*BINARY, *FLAGGED, "Not", *OTHER_TYPES, *REFERENCE_HAS_NOT})
OTHERS = ("Softmax", "CumSum", "Reshape", "Unsqueeze", "Transpose", "Flatten", "Expand", "Concat")


def value(generator: np.random.Generator, count: int, *, single: bool, flags: str) -> Array:
    """Numbers, or with ``flags`` flags of that type; whole numbers where it is one of those."""
    shape = () if single else (count,)
    if flags.startswith("uint"):
        return np.asarray(generator.integers(1, 5, shape)).astype(flags)
    made = generator.uniform(0.2, 0.9, shape)
    return np.asarray(made > 0.5).astype(flags) if flags else np.asarray(made)


def attempt(
    op_type: str,
    placements: tuple[Placement, ...],
    place: Place,
    singles: tuple[bool, ...],
    *,
    flags: str = "",
    dtypes: tuple[str, ...] = (),
    more: tuple[Array, ...] = (),
    seed: int = 0,
) -> bool | None:
    """Whether the rule accepts and the numbers agree: None where it refuses, False where it is wrong."""  # fmt: skip
    generator = np.random.default_rng(seed)
    attributes = dict(NULLARY.get(op_type, {})) if op_type in NULLARY else _attributes(op_type)
    count = 8 if EVEN in placements else 7
    dtypes = dtypes or (flags,) * len(singles)
    drawn = ["" if dtype.startswith("float") and not flags else dtype for dtype in dtypes]
    wholes = [value(generator, count, single=single, flags=kind) for single, kind in zip(singles, drawn)]
    wholes = [np.asarray(each.astype(dtype or "float64")) for each, dtype in zip(wholes, dtypes)]
    wholes = [np.asarray(each + 1) for each in wholes] if op_type == "Acosh" else wholes
    operands = [
        Operand(f"x{number}", placement, single, dtype or "float64")
        for number, (placement, single, dtype) in enumerate(zip(placements, singles, dtypes))
    ] + [Operand(f"c{number}", REPLICATED, each.size == 1, zero=not each.any()) for number, each in enumerate(more)]
    expected = run(op_type, [*wholes, *more], attributes)
    try:
        made = result(Use(op_type, tuple(operands), place, expected.size == 1))
    except Mismatch:
        return None
    parts = [take_apart(whole, each, MEMBERS, generator) for whole, each in zip(wholes, placements)]
    parts += [[each] * MEMBERS for each in more]
    chunks: Chunks = []
    for member in range(MEMBERS):
        given = [part[member] for part in parts]
        here = place.covers(member) and all(each is not None for each in given)
        chunks.append(run(op_type, [each for each in given if each is not None], attributes) if here else None)
    if isinstance(
        made, (Replicated, PerMember, FlagCount)
    ):  # who reads it elsewhere is refused by gopt.lower.invariants
        chunks = [chunk for member, chunk in enumerate(chunks) if place.covers(member)]
    return agrees(chunks, made, expected)


def _attributes(op_type: str) -> dict[str, object]:
    if op_type in FULL_REDUCTIONS:
        return {"keepdims": 0}
    given = {"Softmax": {"axis": 0}, "Concat": {"axis": 0}, "Flatten": {"axis": 0}, "BitShift": {"direction": "LEFT"}}
    return given.get(op_type, {"lambd": 0.4} if op_type == "Shrink" else {})


def more(op_type: str) -> tuple[Array, ...]:
    """Operands that say where to."""
    ints = {"Reshape": [-1, 1], "Unsqueeze": [0], "Expand": [2, 7]}
    if op_type in ("CumSum", "CastLike"):
        return (np.array(0, np.int64 if op_type == "CumSum" else np.float64),)
    return (np.array(ints[op_type]),) if op_type in ints else ()


def swept(
    op_type: str, count: int, kinds: list[Placement], *, flags: str = "", dtypes: tuple[str, ...] = ()
) -> dict[str, int]:
    """Every combination of placements, sizes and places; the numbers of what was accepted and refused."""
    seen = {"right": 0, "refused": 0}
    for placements in product(kinds, repeat=count):
        for singles in product((False, True), repeat=count):
            if any(isinstance(each, (FlatShard, Shard)) and one for each, one in zip(placements, singles)):
                continue
            if op_type in ("CumSum", "Softmax", "Expand", "Concat") and any(singles):
                continue
            for place in PLACES:
                right = attempt(op_type, placements, place, singles, flags=flags, dtypes=dtypes, more=more(op_type))
                assert right is not False, f"{op_type} of {list(map(str, placements))} {singles} on {place}"
                seen["refused" if right is None else "right"] += 1
    return seen


@pytest.mark.parametrize("op_type", UNARY)
def test_one_operand(op_type):
    seen = swept(op_type, 1, NUMBERS)
    assert seen["right"] > 4 and seen["refused"] > 4


@pytest.mark.parametrize("op_type", BINARY)
def test_two_operands(op_type):
    seen = swept(op_type, 2, NUMBERS)
    assert seen["right"] > 30 and seen["refused"] > 30


@pytest.mark.parametrize("op_type", OTHER_TYPES)
def test_other_types_and_more_operands(op_type):
    dtypes = OTHER_TYPES[op_type]
    terms = Partial("any") if dtypes[0] == "bool" else Partial("sum")
    kinds: list[Placement] = [REPLICATED, PER_MEMBER, FLAT, OTHER, SOLE, ROWS]
    seen = swept(op_type, len(dtypes), kinds + [terms] * (dtypes[-1] != "uint8" and len(dtypes) < 3), dtypes=dtypes)
    assert seen["right"] > 4 and seen["refused"] > 4


def test_every_elementwise_operator_is_tried():
    assert {*UNARY, *BINARY, *FLAGGED, "Not", *OTHER_TYPES, *REFERENCE_HAS_NOT} == set(RULES)


@pytest.mark.parametrize("op_type", [*FLAGGED, "Not", "Cast"])
def test_flags(op_type):
    seen = swept(op_type, 1 if op_type in NULLARY else 2, FLAGS, flags="bool")
    assert seen["right"] > 4 and seen["refused"] > 4


@pytest.mark.parametrize(
    "op_type", [*sorted({*BINARY} - {"Div"}), "Neg", "Sqrt", "Cast", "Reshape", "Unsqueeze", "Concat", "ReduceSum"]
)
def test_numbers_of_flags(op_type):
    """A sum of flags that members set is not a flag: it counts."""
    count = 2 if op_type in (*BINARY, "Concat") else 1
    seen = swept(
        op_type, count, [REPLICATED, PER_MEMBER, FLAG_COUNT, Partial("count"), Partial("sum")], flags="float64"
    )
    assert seen["right"] and seen["refused"]


@pytest.mark.parametrize(
    "dtypes", [("float64", "float32"), ("float32", "float64"), ("bool", "float32"), ("float32", "bool")]
)
def test_a_cast_to_the_type_of_another_value_is_a_cast(dtypes):
    """The value whose type is read may have any placement that every member has."""
    old, new = dtypes
    terms = [FLAG_COUNT, *map(Partial, ("sum", "mean", "max", "any", "all", "count"))]
    accepted = 0
    for placement, like, single, place in product([*NUMBERS, *terms], [*NUMBERS, *terms], (True, False), PLACES):
        x, y = Operand("x", placement, single, old), Operand("y", like, single, new)
        cast = placed(Use("Cast", (x,), place, single, new))
        made = placed(Use("CastLike", (x, y), place, single, new))
        on_all = not isinstance(like, (OnMember, FlatShard)) and getattr(like, "on", None) is None
        if on_all and not isinstance(place, OnMember):
            assert made == cast, (x, y, place)
            accepted += made is not None
        assert made in (cast, None, OnMember(holder(place) or 0)), (x, y, place)
    assert accepted > 100


def placed(use: Use) -> Placement | None:
    """The placement of a result; None where it is refused."""
    try:
        return result(use)
    except Mismatch:
        return None


def test_a_number_of_flags_is_compared_with_zero():
    accepted = set()
    for op_type, other in product(("Equal", "Greater", "Less", "GreaterOrEqual", "Add", "Mul"), (0.0, 1.0, 2.0)):
        for seed in range(6):
            given = {"flags": "float64", "more": (np.array(other),), "seed": seed}
            right = attempt(op_type, (FLAG_COUNT,), REPLICATED, (True,), **given)
            assert right is not False, (op_type, other)
            accepted.update([(op_type, other)] if right else [])
    assert accepted == {("Equal", 0.0), ("Greater", 0.0)}
    zero, number = Operand("zero", REPLICATED, True, zero=True), Operand("x", FLAG_COUNT, True)
    assert result(Use("Less", (zero, number), REPLICATED, True, "bool")) == REPLICATED
    assert result(Use("Cast", (number,), REPLICATED, True, "bool")) == REPLICATED
    for op_type, operands in (("Greater", (zero, number)), ("Less", (number, zero)), ("Equal", (number, number))):
        with pytest.raises(Mismatch, match="the flag itself"):
            result(Use(op_type, operands, REPLICATED, True, "bool"))


@pytest.mark.parametrize("op_type", sorted(set(FULL_REDUCTIONS) - {"ReduceLogSumExp"}))
def test_full_reductions(op_type):
    seen = swept(op_type, 1, [*NUMBERS, EVEN])
    assert seen["right"] > 4 and seen["refused"] > 4


@pytest.mark.parametrize("op_type", OTHERS)
def test_operators_that_mix_or_move(op_type):
    seen = swept(op_type, 2 if op_type == "Concat" else 1, NUMBERS)
    assert seen["right"] > 4 and seen["refused"] > 4


ACCEPTED = [
    ("Add", (FLAT, FLAT), (False, False), FLAT, FLAT),
    ("Mul", (FLAT, REPLICATED), (False, True), FLAT, FLAT),
    ("Sqrt", (FLAT,), (False,), REPLICATED, FLAT),
    ("ReduceSumSquare", (FLAT,), (False,), FLAT, Partial("sum", FLAT)),
    ("ReduceMax", (FLAT,), (False,), FLAT, Partial("max", FLAT)),
    ("ReduceMean", (EVEN,), (False,), REPLICATED, Partial("mean")),
    ("Add", (Partial("sum"), Partial("sum")), (True, True), REPLICATED, Partial("sum")),
    ("Div", (Partial("sum", FLAT), REPLICATED), (True, True), FLAT, Partial("sum", FLAT)),
    ("Max", (Partial("max"), Partial("max")), (True, True), REPLICATED, Partial("max")),
    ("Softmax", (SOLE,), (False,), SOLE, ALONE),
    ("MatMul", (SOLE, REPLICATED), (False, False), SOLE, ALONE),
    ("Cast", (Partial("sum", FLAT),), (True,), FLAT, Partial("sum", FLAT)),
    ("MatMul", (ALONE, REPLICATED), (False, False), ALONE, ALONE),
    ("MatMul", (PER_MEMBER, REPLICATED), (False, False), REPLICATED, PER_MEMBER),
]


@pytest.mark.parametrize(("op_type", "placements", "singles", "place", "made"), ACCEPTED, ids=lambda each: str(each))
def test_what_passes_write_is_accepted(op_type, placements, singles, place, made):
    operands = tuple(Operand("x", each, single) for each, single in zip(placements, singles))
    reduces = op_type in FULL_REDUCTIONS
    assert result(Use(op_type, operands, place, reduces or all(singles))) == made


REFUSED = [
    ("Sqrt", (Partial("sum"),), "Sqrt of terms is not a term of its result"),
    ("Mul", (Partial("sum"), Partial("sum")), "Mul of terms"),
    ("Add", (Partial("sum"), REPLICATED), "Add of terms"),
    ("Add", (Partial("count"), REPLICATED), "Add of terms"),
    ("Expand", (REPLICATED, Partial("sum")), "Expand of terms"),
    ("Div", (REPLICATED, Partial("sum")), "Div of terms"),
    ("Concat", (Partial("sum"), REPLICATED), "Concat of terms"),
    ("Max", (Partial("sum"), Partial("sum")), "Max of terms"),
    ("Add", (Partial("sum"), Partial("mean")), "a partial sum, as the others are"),
    ("Add", (Partial("sum"), PER_MEMBER), "a value equal on all members"),
    ("Add", (FLAT, OTHER), "the shard that it reads beside it"),
    ("Add", (FLAT, PER_MEMBER), "the shard that it reads beside it"),
    ("ReduceMean", (FLAT,), "the mean of unequal shards' means is not the mean"),
    ("ReduceL2", (FLAT,), "not a term of ReduceL2"),
    ("MatMul", (FLAT, REPLICATED), "equal on all members, or each member's own"),
    ("Softmax", (ROWS,), "equal on all members, or each member's own"),
    ("CumSum", (ROWS, REPLICATED), "equal on all members, or each member's own"),
    ("MatMul", (PER_MEMBER, ROWS), "equal on all members, or each member's own"),
    ("Add", (ALONE, REPLICATED), "equal on all members, or each member's own"),
]


@pytest.mark.parametrize(("op_type", "placements", "expected"), REFUSED, ids=lambda each: str(each))
def test_what_is_wrong_is_refused(op_type, placements, expected):
    operands = tuple(Operand("x", each, True) for each in placements)
    with pytest.raises(Mismatch) as caught:
        result(Use(op_type, operands, REPLICATED, True))
    assert expected in caught.value.expected


def test_terms_are_not_cut_off():
    """A cast to whole numbers, to flags, and a quotient of whole numbers are not linear."""
    term, one = Operand("x", Partial("sum"), True, "float32"), Operand("c", REPLICATED, True, "int32")
    assert result(Use("Cast", (term,), REPLICATED, True, "float16")) == Partial("sum")
    whole = Operand("x", Partial("sum"), True, "int32")
    for use in (
        Use("Cast", (term,), REPLICATED, True, "int32"), Use("Cast", (term,), REPLICATED, True, "bool"),
        Use("Div", (whole, one), REPLICATED, True, "int32"),
        Use("ReduceMean", (Operand("x", EVEN, False, "int32"),), REPLICATED, True, "int32"),
    ):  # fmt: skip
        with pytest.raises(Mismatch):
            result(use)


@pytest.mark.parametrize(("op_type", "op"), [("ReduceMax", "any"), ("ReduceMin", "all")])
def test_the_largest_of_flags_is_whether_one_is_set(op_type, op):
    generator = np.random.default_rng(1)
    for seed in range(6):
        flags = np.random.default_rng(seed).uniform(size=7) > (0.9 if op == "any" else 0.1)
        made = result(Use(op_type, (Operand("x", FLAT, dtype="bool"),), REPLICATED, True))
        assert made == Partial(op)
        reduce, nothing = (np.any, False) if op == "any" else (np.all, True)
        chunks = [
            part if part is not None else np.array([nothing]) for part in take_apart(flags, FLAT, MEMBERS, generator)
        ]
        assert agrees([np.asarray(reduce(chunk)) for chunk in chunks], made, np.asarray(reduce(flags)))


@pytest.mark.parametrize(
    ("old", "new", "made"),
    [
        ("any", "float32", Partial("count")), ("any", "bool", Partial("any")), ("count", "float16", Partial("count")),
        ("count", "int32", Partial("count")), ("count", "int8", None), ("count", "bool", None),
        ("all", "float32", None), ("max", "float16", Partial("max")), ("max", "int32", Partial("max")),
        ("sum", "float16", Partial("sum")),
    ],
)  # fmt: skip
def test_terms_in_another_type(old, new, made):
    """The sum of a count in a short whole type may come round to zero."""
    use = Use("Cast", (Operand("x", Partial(old), True, "bool" if old in ("any", "all") else "float32"),), dtype=new)
    if made is not None:
        assert result(use) == made
        return
    with pytest.raises(Mismatch):
        result(use)


def test_an_operator_of_another_domain_takes_no_shard():
    for placement in (FLAT, Partial("sum"), ALONE, ROWS):
        with pytest.raises(Mismatch):
            result(Use("Add", (Operand("x", placement),), REPLICATED, standard=False))
    assert isinstance(result(Use("Add", (Operand("x", PER_MEMBER),), REPLICATED, standard=False)), PerMember)
    assert isinstance(result(Use("Add", (), REPLICATED, standard=False)), Replicated)


@pytest.mark.parametrize(
    ("op_type", "given"),
    [("ReduceSum", FLAT), ("Add", FLAT), ("Identity", Partial("sum")), ("Cast", FLAG_COUNT), ("Equal", FLAG_COUNT),
     ("Reshape", FLAG_COUNT), ("Or", Partial("any"))],
)  # fmt: skip
def test_an_operator_of_another_domain_has_no_rule(op_type, given):
    """Its name says nothing: it takes what is equal on all members, or each member's own."""
    zero = Operand("zero", REPLICATED, True, zero=True)
    operands = (Operand("x", given, True), *([zero] if op_type == "Equal" else []))
    assert result(Use(op_type, operands, REPLICATED, True, "bool"))
    with pytest.raises(Mismatch):
        result(Use(op_type, operands, REPLICATED, True, "bool", standard=False))
    assert result(Use(op_type, (Operand("x", PER_MEMBER),), REPLICATED, True, standard=False)) == PER_MEMBER


def test_on_its_owner_an_operator_of_another_domain_makes_a_whole_value():
    operands = (Operand("x", SOLE),)
    assert result(Use("Sqrt", operands, SOLE)) == SOLE
    assert result(Use("Sqrt", operands, SOLE, standard=False)) == OnMember(2)


@pytest.mark.parametrize(
    ("op_type", "placements", "dtypes", "made"),
    [
        ("Not", [Partial("any")], ("bool", "bool"), Partial("all")),
        ("Not", [Partial("all")], ("bool", "bool"), Partial("any")),
        ("Max", [Partial("max"), REPLICATED], ("float32", "float32"), Partial("max")),
        ("Neg", [Partial("sum")], ("float32", "float32"), Partial("sum")),
        ("Mul", [Partial("mean"), REPLICATED], ("float32", "float32"), Partial("mean")),
        ("Cast", [Partial("min")], ("float32", "int32"), Partial("min")),
        ("Cast", [Partial("max")], ("float32", "bool"), None),
        ("Cast", [Partial("all")], ("bool", "float32"), None),
    ],
    ids=str,
)
def test_what_terms_pass_through(op_type, placements, dtypes, made):
    operands = tuple(Operand(f"x{place}", each, True, dtypes[0]) for place, each in enumerate(placements))
    use = Use(op_type, operands, REPLICATED, True, dtypes[1])
    if made is not None:
        assert result(use) == made
        return
    with pytest.raises(Mismatch, match="the value itself"):
        result(use)


def test_on_an_owner_of_scalars_alone_a_result_is_whole():
    assert result(Use("Sqrt", (Operand("c", REPLICATED, True),), SOLE)) == OnMember(2)
