"""Each facet of each operator's record, by numbers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper
from operator_forms import Array, Case, case, forms, ints, signed, x
from operator_probes import Probe, probes

from gopt.operators import executed, kinds
from gopt.operators.operator import Indices, Operator, Slope
from gopt.operators.table import OPERATORS, names

CURVES = (Slope.STEP, Slope.BENT, Slope.CURVED)
UNSEEN = frozenset({
    "CausalConvWithState", "Constant", "DequantizeLinear", "Dropout", "GRU", "GlobalLpPool", "LSTM", "LinearAttention",
    "MeanVarianceNormalization", "QuantizeLinear", "RNN", "STFT",
}) | {record.name for record in executed.OPERATORS}  # fmt: skip
"""Operators of which records say nothing that their results show."""
SEEN = sorted(OPERATORS.keys() - UNSEEN)


def operands(each: Case) -> list[Array | None]:
    """The operands, without the absent ones at the end."""
    last = max((place for place, value in enumerate(each.inputs) if value is not None), default=-1)
    return list(each.inputs[: last + 1])


def test_records_are_of_standard_operators():
    known = {schema.name for schema in onnx.defs.get_all_schemas_with_history() if schema.domain == ""}
    assert OPERATORS.keys() <= known
    assert all(forms(name) for name in SEEN)


@cache
def observed(name: str) -> dict[int, Slope]:
    """How the result is seen to follow each floating operand."""
    record, generator, found = OPERATORS[name], np.random.default_rng(5), dict[int, Slope]()
    for probe in probes(name, wide=True):
        for place in probe.floats:
            if place in (*record.aside, *record.lengths, *record.choosers) and record.slope(place) is Slope.NONE:
                continue
            found[place] = max(found.get(place, Slope.NONE), probe.slope(place, generator))
    return found


@pytest.mark.parametrize("name", SEEN)
def test_results_follow_operands_as_slopes_say(name):
    assert observed(name) == {place: OPERATORS[name].slope(place) for place in observed(name)}


@pytest.mark.parametrize("name", SEEN)
def test_families_hold_the_operators_that_numbers_show(name):
    record, slopes = OPERATORS[name], observed(name)
    followed = {*slopes.values()} - {Slope.NONE}
    if 0 in slopes:
        assert (name in kinds.STEPWISE) is (slopes[0] is Slope.STEP)
        alone = slopes[0] is Slope.LINEAR and not any(slope for place, slope in slopes.items() if place)
        assert (name in kinds.LINEAR_IN_FIRST | kinds.CASTS) is alone
    if slopes:
        assert (name in kinds.TERMS | {"Pad"}) is (followed == {Slope.AFFINE} and record.work is None)


PER_SAMPLE = {
    ("ReverseSequence", 1), ("SoftmaxCrossEntropyLoss", 1), ("NegativeLogLikelihoodLoss", 1), ("Attention", 6),
    ("RotaryEmbedding", 3), ("RNN", 4), ("GRU", 4), ("LSTM", 4), ("TensorScatter", 2),
}  # fmt: skip
"""Whole numbers of each sample: lengths of sequences, places, classes."""


def test_whole_numbers_that_the_standard_asks_for_are_lengths_settings_or_choosers():
    unnamed = set()
    for name, record in OPERATORS.items():
        for place, operand in enumerate(onnx.defs.get_schema(name).inputs):
            named = place in record.constants | {*record.choosers, *record.by_type}
            if {*operand.types} <= {"tensor(int64)", "tensor(int32)"} and not named:
                unnamed.add((name, place))
    assert unnamed == PER_SAMPLE


def powers(probe: Probe) -> set[float]:
    """The powers of 2 that multiply a result where 2 multiplies all floating operands, of either sign."""
    values = {at: signed(*probe.inputs[at].shape) for at in probe.floats}
    before, after = (probe.result({at: times * value for at, value in values.items()}) for times in (1, 2))
    if before.dtype.kind != "f":
        return {0.0} if np.array_equal(before, after) else set()
    told = np.isfinite(before) & ((before != 0) | (after != 0))
    return {each for each in (-1.0, 0.0, 0.5, 1.0, 2.0) if np.allclose(after[told], before[told] * 2.0**each)}


@pytest.mark.parametrize("name", sorted(names(lambda each: not {*each.slopes} <= {*Slope} - {*CURVES}) & {*SEEN}))
def test_results_are_multiplied_by_the_power_of_a_factor_that_records_say(name):
    found = set.intersection(*map(powers, (each for each in probes(name) if each.floats)))
    assert found == {OPERATORS[name].power} - {None}


@pytest.mark.parametrize("name", sorted(names(lambda each: each.signs or each.exponents)))
def test_sums_and_products_are_of_the_operands_with_the_signs_and_exponents_that_records_say(name):
    record = OPERATORS[name]
    for probe in (each for each in probes(name) if len(each.floats) == len(each.inputs)):
        told = record.signs or record.exponents
        told = [told[min(index, len(told) - 1)] for index in range(len(probe.inputs))]
        terms = [value.astype(np.float64) for value in probe.inputs]
        if record.signs:
            due = sum(sign * value for sign, value in zip(told, terms))
        else:
            with np.errstate(all="ignore"):
                due = np.prod(
                    np.broadcast_arrays(*(value ** float(power) for power, value in zip(told, terms))), axis=0
                )
        np.testing.assert_allclose(probe.result(), due, rtol=1e-6)
    exact = [each for each in OPERATORS if each in ("Add", "Sub", "Sum", "Neg", "Mul", "Div", "Reciprocal")]
    assert sorted(names(lambda each: each.signs or each.exponents)) == sorted(exact)


@pytest.mark.parametrize("name", sorted(names(lambda each: each.factors or each.scale)))
def test_factors_and_the_scale_multiply_what_a_contraction_sums_up(name):
    record = OPERATORS[name]
    for probe in (each for each in probes(name) if len(each.floats) == len(each.inputs)):
        terms = {place: value * 0 for place, value in enumerate(probe.inputs) if not record.exponent(place)}
        scaled, number = probe.result(terms), float(probe.case.attributes.get(record.scale, 1.0))
        for place in {*range(len(probe.inputs))} - {*terms}:
            twice = probe.result({**terms, place: probe.inputs[place] * 2})
            np.testing.assert_allclose(twice, scaled * 2.0 ** record.exponent(place), rtol=1e-5)
        if number != 1.0:
            case = replace(probe.case, attributes={**probe.case.attributes, record.scale: 1.0})
            np.testing.assert_allclose(Probe(name, case).result(terms) * number, scaled, rtol=1e-5, atol=1e-6)
    assert {*names(lambda each: each.factors)} == {*names(lambda each: each.work)}


@pytest.mark.parametrize("name", sorted(names(lambda each: each.indices)))
def test_indices_name_slices_elements_or_tuples(name):
    kind, data = OPERATORS[name].indices, np.arange(12.0, dtype=np.float32).reshape(3, 4)
    index = {
        Indices.SLICE: np.array([2]), Indices.ELEMENT: np.array([[2, 2, 2, 2]]), Indices.TUPLE: np.array([[2]])
    }[kind]  # fmt: skip
    if len(onnx.defs.get_schema(name).inputs) == 2:
        np.testing.assert_array_equal(Probe(name, case(data, index)).result(), data[2:])
    else:
        written = Probe(name, case(data, index, -np.ones((1, 4), np.float32))).result()
        np.testing.assert_array_equal(written, np.where(np.arange(3)[:, None] == 2, -1, data))
    assert kinds.GATHERS | kinds.SCATTERS - {"Scatter"} == names(lambda each: each.indices)


def test_comparisons_hold_by_their_signs_and_joins_put_operands_behind_each_other():
    signs = {"==": np.equal, ">": np.greater, ">=": np.greater_equal, "<": np.less, "<=": np.less_equal}
    left, right = x(5, 7).round(1), x(7).round(1)
    for name in names(lambda each: each.relation):
        due = signs[OPERATORS[name].relation](left, right)
        np.testing.assert_array_equal(Probe(name, case(left, right)).result(), due)
    for name in names(lambda each: each.joins):
        found = Probe(name, case(left, x(5, 2), axis=-1)).result({1: right[None, :2].repeat(5, 0)})
        np.testing.assert_array_equal(found, np.concatenate([left, right[None, :2].repeat(5, 0)], -1))


BOUNDS = {"Clip": [case(x(7, 13), -x(), x()), case(x(7, 13), opset=10, min=-0.3)]}
"""Uses as steps have them: bounds around zero."""


def zeros(record: Operator) -> list[bool]:
    """Whether the result is zero where the first operand is, for each use."""
    name, found = record.name, []
    uses = (Probe(name, each) for each in BOUNDS[name]) if name in BOUNDS else probes(name, wide=True)
    for probe in uses:
        if probe.floats[:1] == [0]:
            rest = {
                at: probe.inputs[at] * np.where(signed(*probe.inputs[at].shape) < 0, -1, 1)
                for at in probe.floats[1:]
                if at not in record.aside
            }
            if name in ("Pow", "BatchNormalization", "Clip"):
                rest = {}
            found.append(not probe.result({**rest, 0: np.zeros_like(probe.inputs[0])}).any())
    return found


@pytest.mark.parametrize("name", SEEN)
def test_results_are_zero_where_the_first_operand_is(name):
    record, found = OPERATORS[name], zeros(OPERATORS[name])
    if found and record.slope(0) is not Slope.NONE:
        assert all(found) if record.zero else not all(found)


@pytest.mark.parametrize("name", sorted(names(lambda each: each.elementwise)))
def test_elementwise_results_depend_on_their_place_alone(name):
    generator = np.random.default_rng(7)
    for probe in probes(name):
        whole = probe.result()
        if not whole.size:
            continue
        place = tuple(int(generator.integers(size)) for size in whole.shape)
        unread = OPERATORS[name].by_type
        values = {at: value for at, value in enumerate(probe.inputs) if value is not None and at not in unread}
        other = {at: _elsewhere(value, whole.shape, place, generator) for at, value in values.items()}
        np.testing.assert_array_equal(probe.result(other)[place], whole[place])


def _elsewhere(value: Array, shape: tuple[int, ...], place: tuple[int, ...], generator: np.random.Generator) -> Array:
    """A value with other elements, but for the one that meets a place of the result."""
    at = tuple(0 if size == 1 else place[len(shape) - value.ndim + dim] for dim, size in enumerate(value.shape))
    other = generator.permutation(value.reshape(-1)).reshape(value.shape)
    other[at] = value[at]
    return other


@pytest.mark.parametrize("name", sorted(names(lambda each: each.kernel is not None)))
def test_kernels_compute_what_the_reference_does(name):
    kernel = OPERATORS[name].kernel
    for probe in probes(name, 20):
        expected = probe.result()
        found = np.asarray(kernel(probe.case.attributes, operands(probe.case)))
        assert found.shape == expected.shape, probe.case
        assert found.astype(expected.dtype).dtype == found.dtype or name == "Mean"
        np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize(("left", "right"), [(7, 2), (-7, 2), (7, -2), (-7, -2), (0, 3)])
def test_quotients_of_whole_numbers_are_cut_off_as_the_runtime_does(left, right):
    pair = [np.array([left]), np.array([right])]
    graph = helper.make_graph(
        [helper.make_node("Div", ["a", "b"], ["y"])], "g",
        [helper.make_tensor_value_info(name, onnx.TensorProto.INT64, [1]) for name in "ab"],
        [helper.make_empty_tensor_value_info("y")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, dict(zip("ab", pair)))
    assert OPERATORS["Div"].kernel({}, pair).tolist() == expected.tolist()


@pytest.mark.parametrize("name", sorted(names(lambda each: each.total) - UNSEEN))
def test_total_operators_have_a_result_for_all_numbers(name):
    generator = np.random.default_rng(3)
    for probe in probes(name):
        nasty = np.array([0, -1, 1, np.inf, -np.inf, np.nan, 1e30, -1e30, 1e-30], np.float32)
        for _ in range(3):
            probe.result({at: generator.choice(nasty, probe.inputs[at].shape) for at in probe.floats})


@pytest.mark.parametrize("name", sorted(names(lambda each: each.finite) - UNSEEN))
def test_finite_operators_have_a_number_for_all_numbers(name):
    generator = np.random.default_rng(4)
    numbers = np.array([0, -1, 1, 0.5, -0.5, 30, -30, 1e-30, -1e-30, 2.5], np.float32)
    for probe in probes(name):
        for _ in range(4):
            result = probe.result({at: generator.choice(numbers, probe.inputs[at].shape) for at in probe.floats})
            assert result.dtype.kind != "f" or np.isfinite(result).all()


@pytest.mark.parametrize("name", sorted(names(lambda each: each.finite_above_zero) - UNSEEN))
def test_operators_finite_above_zero_have_a_number_for_all_numbers_there(name):
    generator = np.random.default_rng(5)
    numbers = np.array([1, 0.5, 30, 1e-30, 2.5], np.float32)
    for probe in probes(name):
        for _ in range(4):
            result = probe.result({at: generator.choice(numbers, probe.inputs[at].shape) for at in probe.floats})
            assert result.dtype.kind != "f" or np.isfinite(result).all()


def of_one_curve(record: Operator) -> bool:
    return record.elementwise and record.slopes[:1] == (Slope.CURVED,) and record.slope(1) is Slope.NONE


@pytest.mark.parametrize("name", sorted(names(lambda each: of_one_curve(each) and not each.finite) - UNSEEN - {"Tan"}))
def test_other_curved_operators_have_no_number_somewhere(name):
    """Of Tan, the poles stand between the numbers of a type."""
    numbers = np.array([0, -1, 1, 2, -2], np.float32)
    for probe in probes(name):
        shapes = {at: probe.inputs[at].shape for at in probe.floats}
        results = [probe.result({at: np.full(shape, number) for at, shape in shapes.items()}) for number in numbers]
        assert not all(np.isfinite(result).all() for result in results)


def test_places_are_those_of_operands_that_the_standard_has():
    for name, record in OPERATORS.items():
        versions = [each for each in onnx.defs.get_all_schemas_with_history() if each.name == name and not each.domain]
        count = max(each.max_input for each in versions)
        places = {*record.constants, *record.by_type, *record.choosers, *record.aside, *record.running}
        assert all(place < count for place in places), (name, places)


def test_operators_of_floats_that_set_nothing_up_are_total():
    def floats(name: str) -> bool:
        values = [value for probe in probes(name) for value in probe.inputs if value is not None]
        return bool(values) and all(value.dtype.kind == "f" for value in values)

    sized = names(lambda each: each.lengths or each.settings)
    assert {name for name in SEEN if floats(name)} - sized <= names(lambda each: each.total)


JOINED = {
    "sum": np.add.reduce, "mean": None, "max": np.maximum.reduce, "min": np.minimum.reduce,
    "l2": lambda parts: np.sqrt(np.add.reduce(np.square(parts))),
}  # fmt: skip


def pieces_join(name: str, how: str) -> bool:
    """Return whether full reductions of uneven pieces (even ones of a mean) make that of the whole."""
    whole = signed(12, 3).astype(np.float64) + 0.0
    if name in ("ReduceLogSum",):
        whole = np.abs(whole)
    cuts = [4, 8] if how == "mean" else [1, 5]
    results = [Probe(name, Case((part,), opset=13)).result() for part in (whole, *np.split(whole, cuts))]
    parts = np.stack(results[1:])
    return bool(np.allclose(parts.mean(0) if how == "mean" else JOINED[how](parts), results[0], rtol=1e-9, atol=0))


@pytest.mark.parametrize("name", sorted(names(lambda each: each.pieces is not None)))
def test_reductions_of_pieces_join_as_told(name):
    how = OPERATORS[name].pieces
    assert {each for each in JOINED if pieces_join(name, each)} == ({how} if how else set())


@pytest.mark.parametrize("name", sorted(names(lambda each: each.work is not None)))
def test_work_is_the_number_of_products(name):
    """With ones for operands, each product adds one to some element."""
    compared = 0
    for each in forms(name):
        ones = tuple(np.ones_like(value) for value in each.inputs if value is not None)
        ones = ones if name == "Einsum" else ones[:2]
        attributes = {key: value for key, value in each.attributes.items() if key not in ("alpha", "beta")}
        try:
            found = Probe(name, Case(ones, opset=each.opset, attributes=attributes)).result()
        except ValueError:
            continue  # a form that the reference has not
        counted = OPERATORS[name].work(attributes, [value.shape for value in ones], found.shape)
        equation = str(attributes.get("equation", ","))
        assert bool(counted) is (equation.count(",") == 1 and "." not in equation), equation
        padded = any(key in attributes for key in ("pads", "auto_pad", "output_padding"))
        if not padded and counted:
            compared += 1
            assert counted == found.sum(), attributes
        elif counted:
            assert counted >= found.sum(), attributes
    assert compared


@pytest.mark.parametrize("name", sorted(names(lambda each: each.lengths or each.shape is not None) - UNSEEN))
def test_operands_of_lengths_decide_the_shape(name):
    record = OPERATORS[name]
    places = {*record.lengths, record.shape} - {None}
    seen = set()
    for probe in probes(name):
        for place in places:
            value = probe.inputs[place] if place < len(probe.inputs) else None
            if value is None or value.dtype != np.int64 or not value.size:
                continue
            for other in (value + 1, value - 1, np.zeros_like(value), value.reshape(-1)[::-1].reshape(value.shape)):
                try:
                    changed = probe.result({place: other}).shape != probe.result().shape
                except Exception:
                    changed = True  # sizes that do not fit
                if changed:
                    seen.add(place)
    assert seen == places


@pytest.mark.parametrize("name", sorted(names(lambda each: each.choosers) - UNSEEN))
def test_choosers_choose_among_what_the_others_hold(name):
    record: Operator = OPERATORS[name]
    for probe in probes(name):
        if probe.case.attributes.get("reduction", "none") != "none":
            continue
        rest = [
            value.reshape(-1)
            for at, value in enumerate(probe.inputs)
            if value is not None and at not in (*record.choosers, *record.lengths)
        ]
        assert np.isin(probe.result(), np.concatenate(rest)).all()


@pytest.mark.parametrize("name", sorted(names(lambda each: each.by_type)))
def test_operands_by_type_are_not_looked_at(name):
    for probe in probes(name):
        rest = {at: probe.inputs[at] * 0 + 7 for at in OPERATORS[name].by_type}
        np.testing.assert_array_equal(probe.result(rest), probe.result())


def test_typed_results_have_the_type_of_the_operand_that_is_read_for_it():
    for name in kinds.TYPED:
        for probe in probes(name):
            like = [probe.inputs[place].dtype for place in OPERATORS[name].by_type]
            assert [probe.result().dtype] == like, name


@pytest.mark.parametrize("name", sorted(names(lambda each: each.running or each.switch is not None)))
def test_statistics_and_switches_stand_where_the_standard_names_them(name):
    record, declared = OPERATORS[name], [each.name for each in onnx.defs.get_schema(name).inputs]
    assert [declared[place] for place in record.running] == [
        each for each in declared if "mean" in each or "var" in each
    ]
    assert record.switch is None or declared[record.switch] == "training_mode"


def test_an_unknown_operator_has_no_facts():
    from gopt.operators.table import UNKNOWN, operator

    assert operator("SomethingElse") is UNKNOWN
    assert UNKNOWN.slope(0) is Slope.NONE
    assert ints(1).dtype == np.int64


WITHOUT = {
    "control flow: its graph is not run by the call of an operator": "If Loop Scan SequenceMap",
    "PyTorch has no texts": "RegexFullMatch StringConcat StringNormalizer StringSplit TfIdfVectorizer",
    "the length of its result is known behind the run": "NonMaxSuppression NonZero Unique",
    "it reads compressed images": "ImageDecoder",
    "no step of training has been seen with it": "AffineGrid Col2Im ConvInteger CumProd DFT DeformConv "
    "MaxRoiPool MaxUnpool MelWeightMatrix QLinearConv QLinearMatMul RoiAlign",
}
"""Reasons -> operators of the standard without a call of PyTorch. A new one gets a call, or a place here."""


def test_operators_without_a_call_of_pytorch_are_those_that_cannot_have_one():
    listed = " ".join(WITHOUT.values()).split()
    schemas = [each for each in onnx.defs.get_all_schemas() if each.domain == "" and not each.deprecated]
    assert {each.name for each in schemas} - names(lambda record: record.torch is not None) == {*listed}
