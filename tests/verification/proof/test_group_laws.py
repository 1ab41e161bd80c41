"""Convolutions of groups of channels, drawn: some groups are proven, and kernels in another order are not."""

from __future__ import annotations

import random
from pathlib import Path

import onnx
import pytest
from products import part
from test_split_holes import model

import gopt


@pytest.mark.parametrize("seed", part(range(120), 24))
def test_some_groups_of_a_convolution_are_proven_in_order_alone(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    members, groups, read, made = draw.choice([2, 3]), draw.choice([1, 2, 4]), draw.choice([1, 2]), draw.choice([2, 3])
    size, kernel, step, transposed = (
        draw.choice([6, 7]),
        draw.choice([1, 2, 3]),
        draw.choice([1, 2]),
        draw.random() < 0.4,
    )
    pads = "" if transposed else f", pads=[{draw.randint(0, kernel - 1)}, {draw.randint(0, kernel - 1)}]"

    def text(count: int, order: str = "w") -> tuple[str, str]:
        op = "ConvTranspose" if transposed else "Conv"
        rows = (count * read, made, kernel) if transposed else (count * made, read, kernel)
        shape = (
            f"(float[2,{count * read},{size}] x, float[{','.join(map(str, rows))}] w) => (float[2,{count * made},n] o)"
        )
        turned = "f = Slice(w,a,e,z) l = Slice(w,z,a,z) v = Concat<axis=0>(f,l) " if order == "v" else ""
        return shape, f"{turned}q = {op}<group={count}, strides=[{step}]{pads}>(x,{order}) o = Tanh(q)"

    onnx.save(model(*text(groups * members)), tmp_path / "source.onnx")
    places = {"split": ["", "tp", ""]}
    keys = {
        "format": "gopt-relation/1", "forward": True, "mesh": {"tp": members},
        "inputs": {"x": places, "w": {"split": ["tp", "", ""]}}, "outputs": {"o": places},
    }  # fmt: skip
    rows = groups * (read if transposed else made)
    for order in ("w", "v") if rows > 1 else ("w",):
        ends = f"int64[1] z={{0}}, int64[1] a={{1}}, int64[1] e={{{rows}}}" if order == "v" else ""
        paths = [tmp_path / f"{order}_{rank}.onnx" for rank in range(members)]
        for path in paths:
            onnx.save(model(*text(groups, order), ends), path)
        assert gopt.prove(tmp_path / "source.onnx", ranks=paths, relation=keys).proven == (order == "w")
