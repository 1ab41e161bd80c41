"""Ranks as people write them by hand: cumulative sums by offsets, experts by all-to-all, merged parts of a softmax."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from onnx import ModelProto
from verification.proof.test_split_holes import model, proof

from gopt.verification.proof.result import ProofVerdict


def gathered(value: str, result: str, axis: int, sizes: str) -> str:
    return f'{result} = gopt.comm.AllGather <group="tp", axis={axis}, sizes={sizes}>({value}) '


def reduced(value: str, result: str, how: str = "sum") -> str:
    return f'{result} = gopt.comm.AllReduce <group="tp", reduce="{how}">({value}) '


# --- cumulative sums --------------------------------------------------------------------------------------------------


def running(how: str, axis: int, parts: tuple[int, int] | None = None) -> ModelProto:
    """A cumulative sum, or a rank's, which adds the sums of some ``parts`` of both."""
    rows = 8 if parts is None else 4
    shape = f"{rows},3" if axis == 0 else f"3,{rows}"
    signature, constants = f"(float[{shape}] x) => (float[{shape}] o)", f"int64 z={{{axis}}}"
    if parts is None:
        return model(signature, f"o = CumSum{how}(x,z)", constants)
    text = f"c = CumSum{how}(x,z) t = ReduceSum(x,a) {gathered('t', 'ts', axis, '[1,1]')}"
    constants += f", int64[1] a={{{axis}}}, int64[1] s={{{parts[0]}}}, int64[1] e={{{parts[1]}}}"
    return model(signature, f"{text} p = Slice(ts,s,e,a) q = ReduceSum(p,a) o = Add(c,q)", constants)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("exclusive", [0, 1])
@pytest.mark.parametrize("reverse", [0, 1])
def test_a_cumulative_sum_by_offsets_is_proven_and_a_wrong_offset_different(
    axis: int, exclusive: int, reverse: int, tmp_path: Path
) -> None:
    how = f"<exclusive={exclusive},reverse={reverse}>"
    split = {"x": {"split": ["tp", ""] if axis == 0 else ["", "tp"]}}
    relation = {"inputs": split, "outputs": {"o": split["x"]}}
    right = ((1, 2), (2, 2)) if reverse else ((0, 0), (0, 1))
    for parts in itertools.product([(0, 0), (0, 1), (1, 2), (0, 2), (2, 2)], repeat=2):
        ranks = [running(how, axis, part) for part in parts]
        verdict = proof(running(how, axis), ranks, relation, tmp_path).verdict
        equal = all(one == due or (one[0] == one[1] and due[0] == due[1]) for one, due in zip(parts, right))
        assert verdict is (ProofVerdict.PROVEN if equal else ProofVerdict.DIFFERENT), parts


# --- experts ----------------------------------------------------------------------------------------------------------

EXPERTS = {"x": {"split": ["tp", "", ""]}, "d": {"split": ["tp", "", "", ""]}, "w": {"split": ["tp", "", ""]}}


def routed(groups: int, dispatch: str = "", behind: str = "") -> ModelProto:
    """Tokens on their way to experts and back, of as many groups; ``dispatch``, ``behind``: calls of ranks."""
    experts = 4 if groups == 2 else 2
    signature = f"(float[{groups},4,4] x, float[{groups},4,4,3] d, float[{experts},4,6] w) => (float[{groups},4,6] o)"
    return model(
        signature,
        'e = Einsum<equation="gtd,gtec->gecd">(x,d) et = Transpose<perm=[1,0,2,3]>(e) es = Reshape(et,s1) '
        f"{dispatch or 'a = Identity(es)'} h = MatMul(a,w) {behind or 'b = Identity(h)'} hr = Reshape(b,s2) "
        'ht = Transpose<perm=[1,0,2,3]>(hr) o = Einsum<equation="gecd,gtec->gtd">(ht,d)',
        f"int64[3] s1={{4,{3 * groups},4}}, int64[4] s2={{4,{groups},3,6}}",
    )


def exchanged(value: str, result: str, split: str, concat: str) -> str:
    (at, sizes), (onto, joined) = split.split(":"), concat.split(":")
    return (
        f'{result} = gopt.comm.AllToAll <group="tp", split_axis={at}, split_sizes={sizes}, concat_axis={onto}, '
        f"concat_sizes={joined}>({value}) "
    )


@pytest.mark.parametrize("wrong", ["", "experts turned", "groups turned"])
def test_tokens_that_go_to_experts_and_back_are_proven(wrong: str, tmp_path: Path) -> None:
    dispatch, behind = exchanged("es", "a", "0:[2,2]", "1:[3,3]"), exchanged("h", "b", "1:[3,3]", "0:[2,2]")
    if wrong == "experts turned":
        dispatch = f"u,v = Split<axis=0, num_outputs=2>(es) y = Concat<axis=0>(v,u) {dispatch.replace('(es)', '(y)')}"
    if wrong == "groups turned":
        behind = f"u,v = Split<axis=1, num_outputs=2>(h) y = Concat<axis=1>(v,u) {behind.replace('(h)', '(y)')}"
    relation = {"inputs": EXPERTS, "outputs": {"o": {"split": ["tp", "", ""]}}}
    verdict = proof(routed(2), [routed(1, dispatch, behind)] * 2, relation, tmp_path).verdict
    assert verdict is (ProofVerdict.DIFFERENT if wrong else ProofVerdict.PROVEN)


# --- attention --------------------------------------------------------------------------------------------------------

OWN = "kt = Transpose<perm=[1,0]>(k) s = MatMul(x,kt) m = ReduceMax(s,a) "
SUMS = "d = Sub(s,m) e = Exp(d) l = ReduceSum(e,a) y = MatMul(e,v) "
MERGED = {
    "the largest of all": OWN.replace("m =", "n =") + reduced("n", "m", "max") + SUMS + reduced("l", "ls")
    + reduced("y", "ys") + "o = Div(ys,ls)",
    "the largest of each": OWN + SUMS + reduced("m", "g", "max")
    + "c = Sub(m,g) f = Exp(c) lf = Mul(l,f) yf = Mul(y,f) "
    + reduced("lf", "ls") + reduced("yf", "ys") + "o = Div(ys,ls)",
}  # fmt: skip


@pytest.mark.parametrize("name", MERGED)
def test_merged_parts_of_attention_are_never_different(name: str, tmp_path: Path) -> None:
    constants = "int64[1] a={1}"
    text = "kt = Transpose<perm=[1,0]>(k) s = MatMul(x,kt) p = Softmax<axis=-1>(s) o = MatMul(p,v)"
    source = model("(float[4,8] x, float[6,8] k, float[6,5] v) => (float[4,5] o)", text)
    keys = {"inputs": {name: {"split": ["tp", ""]} for name in "kv"}}
    signature = "(float[4,8] x, float[3,8] k, float[3,5] v) => (float[4,5] o)"
    right = model(signature, MERGED[name], constants)
    assert proof(source, [right] * 2, keys, tmp_path).verdict is not ProofVerdict.DIFFERENT
    text = MERGED[name].replace(reduced("l", "ls"), "ls = Identity(l) ").replace("Mul(l,f)", "Mul(l,m)")
    assert proof(source, [model(signature, text, constants)] * 2, keys, tmp_path).verdict is ProofVerdict.DIFFERENT


# --- sums of shares ---------------------------------------------------------------------------------------------------

SHARES = "q = Div(e,s) w = Mul(q,y) {} o = Mul(q,t)"


@pytest.mark.parametrize("wrong", ["", "t = Identity(u)", reduced("u", "t", "mean"), reduced("q", "t"), "t = Add(u,u)"])
def test_the_sum_of_a_softmax_is_the_sum_of_the_shares_of_all_ranks(wrong: str, tmp_path: Path) -> None:
    """Each share is divided by the sum of which a rank has some terms, as in the gradient of a log-softmax."""
    axis, rest = "int64[1] a={1}", "float[4,1] y) => (float[4,{}] o)"
    text = "e = Exp(x) s = ReduceSum(e,a) " + SHARES.format("t = ReduceSum(w,a)")
    source = model(f"(float[4,8] x, {rest.format(8)}", text, axis)
    call = f"u = ReduceSum(w,a) {wrong or reduced('u', 't')}"
    rank = model(f"(float[4,4] x, {rest.format(4)}", f"e = Exp(x) l = ReduceSum(e,a) {reduced('l', 's')}"
                 + SHARES.format(call), axis)  # fmt: skip
    columns = {"split": ["", "tp"]}
    verdict = proof(source, [rank] * 2, {"inputs": {"x": columns}, "outputs": {"o": columns}}, tmp_path).verdict
    assert verdict is (ProofVerdict.DIFFERENT if wrong else ProofVerdict.PROVEN)


# --- choices ----------------------------------------------------------------------------------------------------------

CHOICES = {
    "the choice of the mean": (f"{reduced('t', 'm', 'mean')} o = Where(c,m,r)", True),
    "the mean of choices": (f"m = Where(c,t,r) {reduced('m', 'o', 'mean')}", True),
    "half the sum of choices": (f"m = Where(c,t,r) {reduced('m', 's')} o = Mul(s,h)", True),
    "the choice of the sum": (f"{reduced('t', 'm')} o = Where(c,m,r)", False),
    "the sum of choices": (f"m = Where(c,t,r) {reduced('m', 'o')}", False),
    "the other choice": (f"{reduced('t', 'm', 'mean')} o = Where(c,r,m)", False),
    "the largest of choices": (f"m = Where(c,t,r) {reduced('m', 'o', 'max')}", False),
    "another choice of each": (f"b = Less(t,r) {reduced('t', 'm', 'mean')} o = Where(b,m,r)", False),
    "half of what is kept": (f"k = Mul(r,h) m = Where(c,t,k) {reduced('m', 'o', 'mean')}", False),
}


@pytest.mark.parametrize("name", CHOICES)
def test_the_mean_of_what_all_members_choose_alike_is_the_choice_of_the_mean(name: str, tmp_path: Path) -> None:
    text, right = CHOICES[name]
    signature = "(float[4] x, float[4] r, bool[4] c) => (float[4] o)"
    source = model(signature, "t = Tanh(x) o = Where(c,t,r)")
    relation = {"mesh": {"dp": 2}, "inputs": {"x": {"own": True}}, "outputs": {"o": {"mean": "dp"}}}
    rank = model(signature, f"t = Tanh(x) {text.replace('tp', 'dp')}", "float h={0.5}")
    verdict = proof(source, [rank] * 2, relation, tmp_path).verdict
    assert verdict is (ProofVerdict.PROVEN if right else ProofVerdict.DIFFERENT)
