"""Rows written or added at constant places, and padded rows: ranks hold some of the rows, or make them otherwise."""

from __future__ import annotations

import pytest
from verification.proof.test_split_holes import model, proof

from gopt.verification.proof.result import ProofVerdict

PROVEN, DIFFERENT, UNPROVEN = ProofVerdict.PROVEN, ProofVerdict.DIFFERENT, ProofVerdict.UNPROVEN
DATA = "(float[6{0}] x, float[2{0}] y) => (float[6{0}] o)"


@pytest.mark.parametrize("columns", ["", ",3"])
@pytest.mark.parametrize(
    ("start", "how", "verdict"), [(1, "none", PROVEN), (2, "none", DIFFERENT), (1, "add", DIFFERENT)]
)
def test_rows_written_into_data_are_the_rows_between_rows_of_the_data(start, how, verdict, columns, tmp_path):
    source = model(DATA.format(columns), "n = ScatterND(x,i,y) o = Exp(n)", "int64[2,1] i={1,2}")
    written = model(
        DATA.format(columns), f'n = ScatterND<reduction="{how}">(x,i,y) o = Exp(n)',
        f"int64[2,1] i={{{start},{start + 1}}}",
    )  # fmt: skip
    joined = model(
        DATA.format(columns), "f = Slice(x,z,p) b = Slice(x,q,e) n = Concat<axis=0>(f,y,b) o = Exp(n)",
        f"int64[1] z={{0}}, int64[1] p={{{start}}}, int64[1] q={{{start + 2}}}, int64[1] e={{6}}",
    )  # fmt: skip
    for rank in (written, joined) if how == "none" else (written,):
        assert proof(source, [rank] * 2, {}, tmp_path).verdict is verdict


def test_columns_of_rows_written_into_data_are_columns(tmp_path):
    text, places = "n = ScatterND(x,i,y) o = Exp(n)", "int64[2,1] i={1,3}"
    split = {"split": ["", "tp"]}
    relation = {"inputs": {"x": split, "y": split}, "outputs": {"o": split}}
    source = model("(float[6,4] x, float[2,4] y) => (float[6,4] o)", text, places)
    for at, verdict in (("{1,3}", PROVEN), ("{1,4}", DIFFERENT)):
        rank = model("(float[6,2] x, float[2,2] y) => (float[6,2] o)", text, f"int64[2,1] i={at}")
        assert proof(source, [rank] * 2, relation, tmp_path).verdict is verdict


def table(rows: int, flags: list[int], places: list[int]):
    """A rank's rows of a table, less what is added to them; flags: the present ones of four added rows."""
    return model(
        f"(float[{rows},2] t, float[4,2] u) => (float[{rows},2] o)",
        'n = ConstantOfShape(s) v = Where(m,u,f) g = ScatterND<reduction="add">(n,i,v) o = Sub(t,g)',
        f"int64[2] s={{{rows},2}}, bool[4,1] m={{{','.join(map(str, flags))}}}, float f={{0}}, "
        f"int64[4,1] i={{{','.join(map(str, places))}}}",
    )


TABLE = model(
    "(float[9,2] t, float[4,2] u) => (float[9,2] o)",
    'n = ConstantOfShape(s) g = ScatterND<reduction="add">(n,i,u) o = Sub(t,g)',
    "int64[2] s={9,2}, int64[4,1] i={2,3,2,3}",
)
ROWS = {"mesh": {"tp": 3}, "inputs": {"t": {"split": ["tp", ""]}}, "outputs": {"o": {"split": ["tp", ""]}}}
RIGHT = [([1, 0, 1, 0], [2, 0, 2, 0]), ([0, 1, 0, 1], [0, 0, 0, 0]), ([0, 0, 0, 0], [0, 0, 0, 0])]


@pytest.mark.parametrize(
    ("rank", "wrong"),
    [(0, None), (0, ([1, 0, 0, 0], [2, 0, 2, 0])), (0, ([1, 0, 1, 0], [1, 0, 1, 0])), (1, ([1, 1, 1, 1], [0, 0, 0, 0])),
     (2, ([0, 0, 0, 1], [0, 0, 0, 0]))],
)  # fmt: skip
def test_rows_added_to_a_table_that_has_more_rows_than_are_read(rank, wrong, tmp_path):
    rows = [wrong if wrong is not None and at == rank else row for at, row in enumerate(RIGHT)]
    verdict = proof(TABLE, [table(3, *row) for row in rows], ROWS, tmp_path).verdict
    assert verdict is PROVEN if wrong is None else verdict is not PROVEN


PADDED = model(
    "(float[2,2,8] x) => (float[2,2,11] o)",
    "v = Reshape(x,r) p = Pad(v,b,c) o = Reshape(p,s)",
    "int64[2] r={4,8}, int64[4] b={0,0,0,3}, float c={0}, int64[3] s={2,2,11}",
)


def window(text: str, place: str = "4"):
    """A rank's rows, padded: the first places, or the last and a border."""
    return model(
        "(float[2,1,8] x) => (float[2,1,11] o)",
        f'v = Reshape(x,r) {text} p = Pad(w,b,c) q = gopt.comm.AllGather <group="cp", axis=1, sizes=[4,7]>(p) '
        "o = Reshape(q,s)",
        f"int64[2] r={{2,8}}, int64[4] b={{0,0,0,0}}, float c={{0}}, int64[3] s={{2,1,11}}, int64[1] z={{0}}, "
        f"int64[1] f={{{place}}}, int64[1] e={{8}}, int64[1] a={{1}}, float[2,3] k={{0,0,0,0,0,0}}",
    )


FIRST, LAST = "w = Slice(v,z,f,a)", "l = Slice(v,f,e,a) w = Concat<axis=1>(l,k)"


@pytest.mark.parametrize(("last", "verdict"), [(LAST, PROVEN), (LAST.replace("(l,k)", "(k,l)"), DIFFERENT)])
def test_rows_of_several_ranges_padded_along_another_dimension(last, verdict, tmp_path):
    split = {"split": ["", "tp", ""]}
    relation = {"mesh": {"tp": 2, "cp": 2}, "inputs": {"x": split}, "outputs": {"o": split}}
    ranks = [window(FIRST), window(last)] * 2
    assert proof(PADDED, ranks, relation, tmp_path).verdict is verdict


AGAIN = model(
    "(float[6,2] x, float[6,2] y) => (float[6,2] o)", "n = ScatterND(x,i,y) o = Exp(n)", "int64[6,1] i={0,1,2,3,4,5}"
)
HALVES = {"mesh": {"tp": 2}, "inputs": {"x": {"split": ["tp", ""]}}, "outputs": {"o": {"split": ["tp", ""]}}}


@pytest.mark.parametrize(
    ("places", "start", "right"),
    [("0,1,2,3,3,3", 0, True), ("0,2,1,3,3,3", 0, False), ("0,1,2,3,3,3", 1, False), ("0,1,1,3,3,3", 0, False)],
)
def test_a_row_that_rows_of_other_ranks_are_written_to_is_cut_off(places, start, right, tmp_path):
    def rank(places, start):
        return model(
            "(float[3,2] x, float[6,2] y) => (float[3,2] o)",
            "l = Pad(x,b,c) s = ScatterND(l,i,y) n = Slice(s,z,e,z0) o = Exp(n)",
            f"int64[4] b={{0,0,1,0}}, float c={{0}}, int64[6,1] i={{{places}}}, int64[1] z={{{start}}}, "
            f"int64[1] e={{{start + 3}}}, int64[1] z0={{0}}",
        )

    ranks = [rank(places, start), rank("3,3,3,0,1,2", 0)]
    assert (proof(AGAIN, ranks, HALVES, tmp_path).verdict is PROVEN) == right


CHOICE = model(
    "(float[4,3] x, float[4,6] w) => (float[4,6] o)", "c = Concat<axis=1>(f,x) n = Where(m,c,w) o = Exp(n)",
    f"float[4,3] f={{{','.join(['0'] * 12)}}}, bool[4,1] m={{1,0,1,1}}",
)  # fmt: skip
COLUMNS = {"mesh": {"tp": 2}, "inputs": {"w": {"split": ["", "tp"]}}, "outputs": {"o": {"split": ["", "tp"]}}}


@pytest.mark.parametrize(
    ("chosen", "right"), [("fx", True), ("ff", False), ("xx", False), ("xf", False)]
)  # fmt: skip
def test_zeros_in_a_choice_are_the_zeros_of_a_row_of_the_source(chosen, right, tmp_path):
    ranks = [model("(float[4,3] x, float[4,3] w) => (float[4,3] o)", f"n = Where(m,{name},w) o = Exp(n)",
                   f"float[4,3] f={{{','.join(['0'] * 12)}}}, bool[4,1] m={{1,0,1,1}}") for name in chosen]  # fmt: skip
    assert (proof(CHOICE, ranks, COLUMNS, tmp_path).verdict is PROVEN) == right
