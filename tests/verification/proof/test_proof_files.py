"""``gopt prove SOURCE RANK... --relation FILE``: rank files written by hand, and by another tool."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from gopt.cli.main import main
from helpers import FIXTURES
from onnx import ModelProto, NodeProto, TensorProto, helper

import gopt
from gopt.artifact.manifest_check import read_manifest
from gopt.errors import GoptError, InputError, UnsupportedError
from gopt.verification.proof.result import ProofVerdict

FORMAT = {"format": "gopt-relation/1"}
STEP = FIXTURES / "mlp_sgd.onnx"
TOOL = Path(__file__).parent / "polygraphy"
Edit = Callable[[ModelProto], object]


def all_reduce(source: str, target: str, domain: str = "com.microsoft", **attributes: Any) -> NodeProto:
    return helper.make_node("AllReduce", [source], [target], f"{target}.call", domain=domain, **attributes)


def half(source: str, target: str, ranks: int = 2) -> list[NodeProto]:
    """A multiple by 1/ranks."""
    value = onnx.numpy_helper.from_array(np.array(1 / ranks, np.float32))
    constant = helper.make_node("Constant", [], [f"{target}.part"], value=value)
    return [constant, helper.make_node("Mul", [source, f"{target}.part"], [target], f"{target}.mean")]


def mean(source: str, target: str) -> list[NodeProto]:
    """The mean over two ranks as a sum and a multiple."""
    return [all_reduce(source, f"{target}.sum"), *half(f"{target}.sum", target)]


def data_parallel(model: ModelProto, reduce: Callable[[str, str], list[NodeProto]] = mean) -> None:
    """Put calls behind the gradients of the step, as another tool would do."""
    gradients = set(gopt.load(STEP).training.gradients.values())
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        behind = [name for name in node.output if name in gradients]
        node.output[:] = [f"{name}.own" if name in behind else name for name in node.output]
        nodes.append(node)
        for name in behind:
            nodes += reduce(f"{name}.own", name)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    imported = {node.domain for node in nodes} - {"", *(entry.domain for entry in model.opset_import)}
    model.opset_import.extend(helper.make_opsetid(domain, 1) for domain in sorted(imported))


def written(folder: Path, edits: Sequence[Edit], source: Path = STEP) -> list[Path]:
    """A rank's file for each edit of the source."""
    paths = []
    for rank, edit in enumerate(edits):
        model = onnx.load(source)
        edit(model)
        paths.append(folder / f"rank{rank}.onnx")
        onnx.save(model, paths[-1])
    return paths


def relation(mesh: str = "dp=2", **keys: Any) -> dict[str, Any]:
    axes = {name: int(size) for name, _, size in (part.partition("=") for part in mesh.split(","))}
    return {**FORMAT, "mesh": axes, **keys}


def verdicts(proof: gopt.verbs.prove.RankProof) -> dict[str, str]:
    return {claim.name: claim.verdict.value for claim in proof.claims}


# --- steps ------------------------------------------------------------------------------------------------------------


def test_ranks_with_calls_of_onnx_runtime_are_proven(tmp_path):
    ranks = written(tmp_path, [data_parallel] * 2)
    proof = gopt.prove(STEP, ranks=ranks, relation=relation())
    assert proof.proven and {claim.kind for claim in proof.claims} == {"parameter", "loss", "start value"}
    assert gopt.prove(STEP, ranks=ranks[:1], relation=relation()).proven, "one file is that of all ranks"


def _only_first(reduce: Callable[[str, str], list[NodeProto]]) -> Callable[[str, str], list[NodeProto]]:
    """Another reduction of the first gradient alone."""
    names: list[str] = []

    def of(source: str, target: str) -> list[NodeProto]:
        names.append(target)
        return reduce(source, target) if target == names[0] else mean(source, target)

    return of


PLANTS: dict[str, Callable[[str, str], list[NodeProto]]] = {
    "no call": lambda source, target: [helper.make_node("Identity", [source], [target])],
    "no division": lambda source, target: [all_reduce(source, target)],
    "no call, but the division": half,
    "two calls": lambda source, target: [*mean(source, f"{target}.once"), all_reduce(f"{target}.once", target)],
    "a maximum": lambda source, target: [all_reduce(source, target, "gopt.comm", group="dp", reduce="max")],
}


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_error_is_different_and_named(plant, tmp_path):
    ranks = written(tmp_path, [lambda model: data_parallel(model, _only_first(PLANTS[plant]))] * 2)
    proof = gopt.prove(STEP, ranks=ranks, relation=relation())
    (claim,) = proof.open()
    assert claim.verdict is ProofVerdict.DIFFERENT and claim.mismatch and claim.mismatch.example
    assert claim.mismatch.node


def test_a_sum_that_may_overflow_is_refused_with_a_hint_for_files(tmp_path):
    text = '<ir_version: 8, opset_import: ["" : 18, "gopt.comm" : 1]> g (int8[4] x) => (int8[4] y) {{ y = {}(x) }}'
    onnx.save(onnx.parser.parse_model(text.format("Identity")), tmp_path / "source.onnx")
    reduced = 'gopt.comm.AllReduce <reduce="sum", group="tp">'
    onnx.save(onnx.parser.parse_model(text.format(reduced)), tmp_path / "rank.onnx")
    keys = relation("tp=2", forward=True)
    with pytest.raises(UnsupportedError, match="may overflow") as refusal:
        gopt.prove(tmp_path / "source.onnx", ranks=[tmp_path / "rank.onnx"], relation=keys)
    assert not any("gopt verify" in hint for hint in refusal.value.hints)


def test_a_call_over_another_axis_is_different(tmp_path):
    def over(axis: str) -> Edit:
        return lambda model: data_parallel(
            model, lambda a, b: [all_reduce(a, b, "gopt.comm", group=axis, reduce="mean")]
        )

    mesh = relation("dp=2,rep=2", axes={"rep": "replica"})
    assert gopt.prove(STEP, ranks=written(tmp_path, [over("dp")] * 4), relation=mesh).proven
    assert gopt.prove(STEP, ranks=written(tmp_path, [over("rep")] * 4), relation=mesh).exit_code == 1


def test_values_of_other_names_are_related_by_the_file(tmp_path):
    state = gopt.load(STEP).training.states[0]

    def renamed(model: ModelProto) -> None:
        data_parallel(model)
        for name, new in ((state.tensor, "w"), (state.updated, "w.next"), ("x", "features"), ("loss", "cost")):
            for node in model.graph.node:
                node.input[:] = [new if value == name else value for value in node.input]
                node.output[:] = [new if value == name else value for value in node.output]
            for value in (*model.graph.input, *model.graph.output, *model.graph.initializer):
                value.name = new if value.name == name else value.name

    ranks = written(tmp_path, [renamed, data_parallel])
    tables = {
        "inputs": {"w": {"of": state.tensor}, "features": {"of": "x"}}, "states": {"w": "w.next"},
        "outputs": {"cost": {"of": "loss"}},
    }  # fmt: skip
    assert gopt.prove(STEP, ranks=ranks, relation=relation(ranks=[{"rank": 0, **tables}])).proven
    with pytest.raises(InputError, match="'features', which is no input of the source") as caught:
        gopt.prove(STEP, ranks=ranks, relation=relation(ranks=[{"rank": 0, "inputs": {"w": {"of": state.tensor}}}]))
    assert any("[inputs.features]" in hint for hint in caught.value.hints)
    with pytest.raises(InputError, match=r"no output 'fc\d.\w+_out' replaces 'w'"):
        without = {**tables, "states": {}}
        gopt.prove(STEP, ranks=ranks, relation=relation(ranks=[{"rank": 0, **without}]))


HALF = ["-O", "shard.reduce_dtype=float16"]


@pytest.mark.parametrize("options", [["--stage", "2"], ["--stage", "3", "--bucket-mb", "0"], HALF])
def test_a_manifest_is_such_a_relation(options, tmp_path):
    """The pieces of a folder's states, written as a relation, prove the folder's files."""
    folder = tmp_path / "out"
    assert main(["shard", str(FIXTURES / "mlp_adamw.onnx"), "--ranks", "2", *options, "-o", str(folder), "-q"]) == 0
    manifest, _ = read_manifest(folder)

    def tables(states: Any) -> dict[str, Any]:
        pieces = {state.input: [{"tensor": p.tensor, "start": p.start, "stop": p.stop} for p in state.pieces]
                  for state in states}  # fmt: skip
        return {
            "inputs": {name: {"pieces": each} for name, each in pieces.items()},
            "states": {state.input: state.output for state in states},
        }

    ranks = [{"rank": entry.rank, **tables(entry.state)} for entry in manifest.ranks]
    said = {"reduce_dtype": manifest.reduce_dtype} if options is HALF else {}
    document = relation("shard=2", **said, **tables(manifest.common.state), ranks=ranks)
    (tmp_path / "relation.json").write_text(json.dumps(document))
    files = sorted(folder.glob("rank_*.onnx"))
    proof = gopt.prove(folder / "source.onnx", ranks=files, relation=tmp_path / "relation.json")
    assert proof.proven
    claims = [claim for claim in proof.claims if claim.kind != "start value"]
    assert claims == gopt.prove(folder).claims and len(claims) < len(proof.claims)
    if options is HALF:
        del document["reduce_dtype"]
        assert not gopt.prove(folder / "source.onnx", ranks=files, relation=document).proven


def test_a_state_with_overlapping_pieces_is_not_whole(tmp_path):
    """As many elements as the state has, but the last ones are on no rank."""
    state = gopt.load(STEP).training.states[0].tensor

    ranks = written(tmp_path, [data_parallel] * 2)
    pieces = {state: {"pieces": [{"tensor": state, "start": 0, "stop": 1024}] * 2}}
    proof = gopt.prove(STEP, ranks=ranks, relation=relation(inputs=pieces))
    assert verdicts(proof)[state] != "proven"


def test_start_values_of_ranks_are_compared(tmp_path):
    def without(model: ModelProto) -> None:
        data_parallel(model)

    state = gopt.load(STEP).training.states[0].tensor

    def moved(model: ModelProto) -> None:
        data_parallel(model)
        tensor = next(each for each in model.graph.initializer if each.name == state)
        value = onnx.numpy_helper.to_array(tensor) + 1
        tensor.CopyFrom(onnx.numpy_helper.from_array(value, state))

    proof = gopt.prove(STEP, ranks=written(tmp_path, [without, moved]), relation=relation())
    assert [(claim.kind, claim.name, claim.mismatch.rank) for claim in proof.open()] == [("start value", state, 1)]
    bare = onnx.load(STEP)
    states = {state.tensor for state in gopt.load(STEP).training.states}
    kept = [tensor for tensor in bare.graph.initializer if tensor.name not in states]
    del bare.graph.initializer[:]
    bare.graph.initializer.extend(kept)
    source = saved(tmp_path / "bare.onnx", bare)
    proof = gopt.prove(source, ranks=written(tmp_path, [without, moved]), relation=relation())
    assert [(claim.kind, claim.name) for claim in proof.open()] == [("start value", state)]


# --- forward models ---------------------------------------------------------------------------------------------------


def forward(nodes: Sequence[NodeProto], inputs: Mapping[str, Sequence[Any]], outputs: Mapping[str, Sequence[Any]],
            weights: Mapping[str, np.ndarray] | None = None) -> ModelProto:  # fmt: skip
    infos = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in table.items()]
             for table in (inputs, outputs)]  # fmt: skip
    stored = [onnx.numpy_helper.from_array(value, name) for name, value in (weights or {}).items()]
    graph = helper.make_graph(list(nodes), "forward", infos[0], infos[1], stored)
    domains = sorted({node.domain for node in nodes} | {""})
    opsets = [helper.make_opsetid(domain, 17 if not domain else 1) for domain in domains]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def saved(path: Path, model: ModelProto) -> Path:
    onnx.save(model, path)
    return path


GENERATOR = np.random.default_rng(0)
TERMS = {name: GENERATOR.standard_normal((4, 3)).astype(np.float32) for name in ("a", "b")}
X, Y = {"x": [2, 4]}, {"y": [2, 3]}
BOTH = [
    helper.make_node("MatMul", ["x", "a"], ["xa"]), helper.make_node("MatMul", ["x", "b"], ["xb"]),
    helper.make_node("Add", ["xa", "xb"], ["y"]),
]  # fmt: skip


def term(name: str, folder: Path, output: str = "y", tail: Sequence[NodeProto] = ()) -> Path:
    """A rank with one of two terms."""
    nodes = [helper.make_node("MatMul", ["x", name], [output]), *tail]
    return saved(folder / f"{name}.onnx", forward(nodes, X, Y, {name: TERMS[name]}))


def test_terms_of_an_output_sum_up_to_it(tmp_path):
    source = saved(tmp_path / "source.onnx", forward(BOTH, X, Y, TERMS))
    ranks = [term("a", tmp_path), term("b", tmp_path)]
    mesh = {"mesh": {"tp": 2}, **FORMAT}
    proof = gopt.prove(source, ranks=ranks, relation={**mesh, "outputs": {"y": {"sum": "tp"}}})
    assert proof.proven and verdicts(proof) == {"y": "proven"}
    assert gopt.prove(source, ranks=ranks, relation={**mesh, "outputs": {"y": {"mean": "tp"}}}).exit_code == 1
    assert gopt.prove(source, ranks=ranks, relation=mesh).exit_code == 1
    assert gopt.prove(source, ranks=[ranks[0]] * 2, relation={**mesh, "outputs": {"y": {"sum": "tp"}}}).exit_code == 1


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (all_reduce("t", "y"), 0),
        (all_reduce("t", "y", "gopt.comm", group="tp", reduce="mean"), 1),
        (helper.make_node("Identity", ["t"], ["y"]), 1),
    ],
)
def test_a_call_completes_terms(call, code, tmp_path):
    source = saved(tmp_path / "source.onnx", forward(BOTH, X, Y, TERMS))
    ranks = [term(name, tmp_path, "t", [call]) for name in TERMS]
    assert gopt.prove(source, ranks=ranks, relation=relation("tp=2")).exit_code == code


def test_ranks_of_a_forward_model_have_batches_of_their_own(tmp_path):
    source = saved(tmp_path / "source.onnx", forward(BOTH, X, Y, TERMS))
    averaged = [*BOTH[:2], helper.make_node("Add", ["xa", "xb"], ["own"]), *mean("own", "y")]
    rank = saved(tmp_path / "rank.onnx", forward(averaged, X, Y, TERMS))
    own = {"inputs": {"x": {"own": True}}}
    assert gopt.prove(source, ranks=[source], relation=relation(**own)).proven
    assert gopt.prove(source, ranks=[rank], relation=relation(**own)).exit_code == 1
    assert gopt.prove(source, ranks=[rank], relation=relation(**own, outputs={"y": {"mean": "dp"}})).proven
    with pytest.raises(InputError, match="no input has any"):
        gopt.prove(source, ranks=[source], relation=relation())


def test_stored_values_are_compared_with_the_source_s(tmp_path):
    source = saved(tmp_path / "source.onnx", forward(BOTH, X, Y, TERMS))
    other = {**TERMS, "b": TERMS["b"] + np.eye(4, 3, dtype=np.float32)}
    rank = saved(tmp_path / "rank.onnx", forward(BOTH, X, Y, other))
    named = relation("tp=2", inputs={"a": {}, "b": {}})
    assert gopt.prove(source, ranks=[source], relation=named).proven
    proof = gopt.prove(source, ranks=[source, rank], relation=named)
    assert [(claim.name, claim.verdict.value) for claim in proof.open()] == [("b", "different")]
    assert proof.open()[0].mismatch.rank == 1
    assert gopt.prove(source, ranks=[rank], relation=relation("tp=2")).exit_code == 1


# --- what a user may do wrong -----------------------------------------------------------------------------------------

WRONG: dict[str, tuple[dict[str, Any], str, int]] = {
    "an unknown key": (relation(output={}), "there is no key 'output'", 3),
    "another format": ({**relation(), "format": "gopt-manifest/1"}, "is not a relation", 3),
    "an unknown axis": (relation("data=2"), "no mesh axis is called 'data'", 2),
    "another number of ranks": (relation("dp=3"), "has 3 ranks, and 2 files are given", 2),
    "a rank outside": (relation(ranks=[{"rank": 2}]), "has no rank 2", 3),
    "an input of no rank": (relation(inputs={"xx": {}}), "'xx': no rank has such a value", 3),
    "a value of no source": (relation(inputs={"x": {"of": "z"}}), "the source has no such value 'z'", 3),
    "an output of no source": (relation(outputs={"loss": {"of": "cost"}}), "the source has no such value 'cost'", 3),
    "two ways": (relation(inputs={"x": {"split": ["dp", ""], "box": [[0, 1]]}}), "of split, box and pieces", 3),
    "an axis of no mesh": (relation(inputs={"x": {"split": ["tp", ""]}}), "names no axis of the mesh", 3),
    "a part of another shape": (relation(inputs={"x": {"split": ["dp", ""]}}), "and by .* it is", 3),
    "a box outside": (relation(inputs={"x": {"box": [[0, 999], [0, 32]]}}), "is not inside", 3),
    "samples of a state": (relation(inputs={"fc1.weight": {"own": True}}), "does not belong to the batch", 3),
    "a sum and a mean": (relation(outputs={"loss": {"sum": "dp", "mean": "dp"}}), "a sum and a mean", 3),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_relation_is_refused_with_what_to_do(case, tmp_path):
    document, message, code = WRONG[case]
    ranks = written(tmp_path, [data_parallel] * 2)
    with pytest.raises(GoptError, match=message) as caught:
        gopt.prove(STEP, ranks=ranks, relation=document)
    assert caught.value.exit_code == code and caught.value.hints


def test_another_operator_set_is_refused(tmp_path):
    def older(model: ModelProto) -> None:
        data_parallel(model)
        model.opset_import[0].version -= 1

    with pytest.raises(InputError, match="is of operator set") as caught:
        gopt.prove(STEP, ranks=written(tmp_path, [older] * 2), relation=relation())
    assert "version_converter" in caught.value.hints[0]


def test_an_output_of_another_name_is_asked_for(tmp_path):
    source = saved(tmp_path / "source.onnx", forward(BOTH, X, Y, TERMS))
    nodes = [*BOTH[:2], helper.make_node("Add", ["xa", "xb"], ["z"])]
    rank = saved(tmp_path / "rank.onnx", forward(nodes, X, {"z": [2, 3]}, TERMS))
    with pytest.raises(InputError, match="no rank has the source's output 'y'") as caught:
        gopt.prove(source, ranks=[rank], relation=relation("tp=2"))
    assert "[outputs.z]" in caught.value.hints[0]
    assert gopt.prove(source, ranks=[rank], relation=relation("tp=2", outputs={"z": {"of": "y"}})).proven


def test_a_part_of_an_output_is_not_all_of_it(tmp_path):
    source = saved(tmp_path / "source.onnx", forward(BOTH, X, Y, TERMS))
    nodes = [
        *BOTH[:2], helper.make_node("Add", ["xa", "xb"], ["z"]), helper.make_node("Reshape", ["z", "flat"], ["f"]),
        helper.make_node("Slice", ["f", "from", "to"], ["y"]),
    ]  # fmt: skip
    ends = {"flat": np.array([-1]), "from": np.array([0]), "to": np.array([4])}
    rank = saved(tmp_path / "rank.onnx", forward(nodes, X, {"y": [4]}, {**TERMS, **ends}))
    pieces = {"pieces": [{"tensor": "y", "start": 0, "stop": 4}]}
    proof = gopt.prove(source, ranks=[rank], relation=relation("tp=2", outputs={"y": pieces}))
    assert verdicts(proof) == {"y": "unproven"}, "a rank would have to have elements 4 and 5"


def test_a_term_that_a_rank_lacks_is_named(tmp_path):
    source = saved(tmp_path / "source.onnx", forward(BOTH, X, Y, TERMS))
    ranks = [{"rank": 0, "outputs": {"y": {"sum": "tp"}}}]
    with pytest.raises(InputError, match="is a term of 'y', and rank 1 has no such term"):
        gopt.prove(source, ranks=[term("a", tmp_path), term("b", tmp_path)], relation=relation("tp=2", ranks=ranks))


def test_the_command_says_what_it_takes(tmp_path, capsys):
    ranks = [str(path) for path in written(tmp_path, [data_parallel] * 2)]
    file = tmp_path / "relation.toml"
    file.write_text('format = "gopt-relation/1"\n\n[mesh]\ndp = 2\n')
    command = ["prove", str(STEP), *ranks]
    assert main([*command, "--relation", str(file)]) == 0
    assert "proven: 9 of 9 values are proven" in capsys.readouterr().out
    assert main([*command, "--relation", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["proven"] is True
    assert main(command) == 2 and "--relation FILE" in capsys.readouterr().err
    assert main([*command[:2], "--relation", str(file)]) == 2
    assert main([*command, "--relation", str(tmp_path / "none.toml")]) == 3
    assert main([*command, "--relation", ranks[0]]) == 2 and "neither TOML nor JSON" in capsys.readouterr().err


# --- ranks with parts of dimensions -----------------------------------------------------------------------------------

WEIGHTS = {
    name: GENERATOR.standard_normal(shape).astype(np.float32) * 0.3 for name, shape in (("w1", (6, 8)), ("w2", (8, 4)))
}
COLUMNS_AND_ROWS = {"w1": {"split": ["", "tp"]}, "w2": {"split": ["tp", ""]}}


def two_layers(path: Path, calls: Sequence[NodeProto] = (), rank: int | None = None) -> Path:
    """A step of gradient descent on two layers, or a rank's with half of the inner features; ``calls``: from the second
    product p to s."""
    node, inner = helper.make_node, 8 if rank is None else 4
    part = slice(None) if rank is None else slice(4 * rank, 4 * rank + 4)
    weights = {"w1": WEIGHTS["w1"][:, part], "w2": WEIGHTS["w2"][part]}
    nodes = [
        node("MatMul", ["x", "w1"], ["h"], "h"), node("Relu", ["h"], ["r"], "r"),
        node("MatMul", ["r", "w2"], ["p"], "p"), *(calls or [node("Identity", ["p"], ["s"], "s")]),
        node("Sub", ["s", "t"], ["d"], "d"), node("Mul", ["d", "d"], ["dd"], "dd"),
        node("ReduceMean", ["dd"], ["loss"], "mean", keepdims=0), node("Mul", ["d", "scale"], ["ds"], "ds"),
        node("Transpose", ["r"], ["rt"], "rt", perm=[1, 0]), node("MatMul", ["rt", "ds"], ["g2"], "g2"),
        node("Transpose", ["w2"], ["w2t"], "w2t", perm=[1, 0]), node("MatMul", ["ds", "w2t"], ["dr"], "dr"),
        node("Greater", ["h", "zero"], ["on"], "on"), node("Where", ["on", "dr", "zero"], ["dh"], "dh"),
        node("Transpose", ["x"], ["xt"], "xt", perm=[1, 0]), node("MatMul", ["xt", "dh"], ["g1"], "g1"),
        node("Mul", ["g1", "lr"], ["u1"], "u1"), node("Mul", ["g2", "lr"], ["u2"], "u2"),
        node("Sub", ["w1", "u1"], ["w1.new"], "new1"), node("Sub", ["w2", "u2"], ["w2.new"], "new2"),
    ]  # fmt: skip
    shapes = {"w1": [6, inner], "w2": [inner, 4]}
    constants = {"scale": np.array(2 / 20, np.float32), "zero": np.array(0, np.float32)}
    inputs = {"x": [5, 6], "t": [5, 4], "lr": [], **shapes}
    outputs = {"loss": [], **{f"{name}.new": shape for name, shape in shapes.items()}}
    return saved(path, forward(nodes, inputs, outputs, {**weights, **constants}))


def complete(how: str = "sum", group: str = "tp", source: str = "p", target: str = "s") -> NodeProto:
    return all_reduce(source, target, "gopt.comm", group=group, reduce=how)


def test_a_step_with_columns_and_rows_is_proven(tmp_path):
    source = two_layers(tmp_path / "step.onnx")
    ranks = [two_layers(tmp_path / f"rank{rank}.onnx", [all_reduce("p", "s")], rank) for rank in range(2)]
    document = relation("tp=2", inputs=COLUMNS_AND_ROWS)
    proof = gopt.prove(source, ranks=ranks, relation=document)
    assert proof.proven and verdicts(proof) == dict.fromkeys(("w1", "w2", "loss"), "proven")
    boxes = [
        {"rank": rank, "inputs": {"w1": {"box": [[0, 6], ends]}, "w2": {"box": [ends, [0, 4]]}}}
        for rank, ends in enumerate(([0, 4], [4, 8]))
    ]
    assert gopt.prove(source, ranks=ranks, relation=relation("tp=2", ranks=boxes)).proven
    swapped = gopt.prove(source, ranks=ranks[::-1], relation=document)
    assert {claim.kind for claim in swapped.open()} == {"start value"}, "each rank has the other's values"


MISTAKES: dict[str, list[NodeProto]] = {
    "no call": [helper.make_node("Identity", ["p"], ["s"], "s")],
    "a call over another axis": [complete(group="rep")],
    "a call over one axis too many": [complete(group="tp+rep")],
    "a mean": [complete("mean")],
    "two calls": [complete(target="once"), complete(source="once")],
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_completion_is_different_and_named(mistake, tmp_path):
    source = two_layers(tmp_path / "step.onnx")

    def prove(calls: list[NodeProto]) -> Any:
        ranks = [two_layers(tmp_path / f"rank{rank}.onnx", calls, rank // 2) for rank in range(4)]
        document = relation("tp=2,rep=2", axes={"rep": "replica"}, inputs=COLUMNS_AND_ROWS)
        return gopt.prove(source, ranks=ranks, relation=document)

    assert prove([complete()]).proven
    proof = prove(MISTAKES[mistake])
    assert proof.verdict is ProofVerdict.DIFFERENT
    nodes = {claim.name: claim.mismatch.node for claim in proof.open()}
    assert nodes["w1"] == nodes["w2"] and nodes["w1"] in {"p", "s", "once"}


# --- files of Polygraphy ----------------------------------------------------------------------------------------------

TENSOR = {"gate": {"split": ["", "tp"]}, "up": {"split": ["", "tp"]}, "down": {"split": ["tp", ""]}}


def test_what_polygraphy_shards_is_proven():
    ranks = [TOOL / f"mlp_tp2_rank{rank}.onnx" for rank in range(2)]
    proof = gopt.prove(TOOL / "mlp.onnx", ranks=ranks, relation=relation("tp=2", inputs=TENSOR))
    assert {name: verdict for name, verdict in verdicts(proof).items() if name != "y"} == dict.fromkeys(
        TENSOR, "proven"
    )
    swapped = gopt.prove(TOOL / "mlp.onnx", ranks=ranks[::-1], relation=relation("tp=2", inputs=TENSOR))
    assert {claim.name for claim in swapped.open()} >= set(TENSOR), "each rank has the other's weights"
    model, ranks = TOOL / "attention.onnx", [TOOL / "attention_cp2.onnx"]
    proof = gopt.prove(model, ranks=ranks, relation=relation("cp=2", outputs={"shard_10": {"of": "y"}}))
    assert proof.proven and verdicts(proof) == {"y": "proven"}
    with pytest.raises(InputError, match="is for 2 ranks, its group in the mesh cp=4 has 4"):
        gopt.prove(model, ranks=ranks, relation=relation("cp=4"))
