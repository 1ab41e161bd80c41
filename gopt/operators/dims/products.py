"""Dimensions of products: matrices, convolutions, attention."""

from __future__ import annotations

from collections.abc import Iterator

from gopt.operators.dims.link import DimFactor, Index, OperatorUse, Where, given_of, made_of, meets


def matmul(operator: OperatorUse) -> Iterator[DimFactor]:
    """Rows, columns, samples; and the contracted index, summed over members' products."""
    a, b, out = operator.dims(0), operator.dims(1), operator.made()
    rows, columns = len(a) > 1, len(b) > 1
    # Where samples are broadcast, or an operand is one row, runtimes are wrong about empty operands.
    filled = not (rows and columns and b[:-2] in (a[:-2], ()))
    samples = out[: len(out) - rows - columns]
    for dim in range(len(samples)):
        yield DimFactor((meets(a[:-2], samples, dim), meets(b[:-2], samples, dim)), (dim,), filled=filled)
    if rows:
        yield DimFactor((len(a) - 2, None), (len(samples),), filled=filled)
    if columns:
        yield DimFactor((None, len(b) - 1), (len(out) - 1,), filled=filled)
    # Of a product with a transposed operand, runtimes leave all matrices but the first as they find them.
    yield DimFactor((len(a) - 1, len(b) - 2 if columns else 0), (None,), "sum", filled=filled or len(b) > 2)


def gemm(operator: OperatorUse) -> Iterator[DimFactor]:
    """As a product; the contracted index only without an addend, which each member would add."""
    row_a, row_b = (1 if operator.attributes.get(name, 0) else 0 for name in ("transA", "transB"))
    added, out = operator.dims(2), operator.made()
    yield DimFactor(given_of(operator, row_a, None, meets(added, out, 0)), (0,))
    yield DimFactor(given_of(operator, None, 1 - row_b, meets(added, out, 1)), (1,))
    if not operator.has(2):
        yield DimFactor(given_of(operator, 1 - row_a, row_b, None), (None,), "sum")


def einsum(operator: OperatorUse) -> Iterator[DimFactor]:
    """A link per letter of the equation. A letter twice in a term is a diagonal: no link.

    Runtimes fail on empty operands: every member has some elements.
    """
    terms_text, arrow, right = str(operator.attributes["equation"]).replace(" ", "").partition("->")
    terms = terms_text.split(",")
    letters = dict.fromkeys(terms_text.replace(",", ""))
    if "." in terms_text or any(len(set(term)) < len(term) for term in terms):
        return
    if not arrow:
        right = "".join(sorted(letter for letter in letters if terms_text.count(letter) == 1))
    for letter in letters:
        sizes = [operator.size(index, term.index(letter)) for index, term in enumerate(terms) if letter in term]
        row = tuple(
            term.index(letter) if letter in term and operator.size(index, term.index(letter)) == max(sizes) else None
            for index, term in enumerate(terms)
        )
        is_kept = letter in right
        yield DimFactor(row, (right.index(letter) if is_kept else None,), "" if is_kept else "sum", filled=True)


def convolution(operator: OperatorUse) -> Iterator[DimFactor]:
    """Samples; channels made; channels read, where no bias is added, which each member would add. With groups:
    channels by whole groups.

    Some runtimes never return from a convolution without channels: every member has some.
    """
    groups, transposed = int(operator.attributes.get("group", 1)), operator.op_type == "ConvTranspose"
    weight, bias = operator.dims(1), operator.has(2)
    yield DimFactor(given_of(operator, 0, None, None), (0,))
    if groups > 1:
        outputs, inner = weight[0] // groups, weight[1]
        read, results = (outputs, inner) if transposed else (inner, outputs)
        row = given_of(operator, Index(1, read), Index(0, outputs), Index(0, results))
        yield DimFactor(row, (Index(1, results),), filled=True)
        return
    made_dim, read_dim = (1, 0) if transposed else (0, 1)
    yield DimFactor(given_of(operator, None, made_dim, 0), (1,), filled=True)
    if not bias:
        yield DimFactor(given_of(operator, 1, read_dim, None), (None,), "sum", filled=True)


def attention(operator: OperatorUse) -> Iterator[DimFactor]:
    """Samples; heads, queries' by the groups sharing keys; queries, where no order masks them."""
    shapes = [operator.dims(index) for index in range(3)]
    flat = len(shapes[0]) == 3  # heads and their elements share one dimension
    if flat:
        queries, keys = (int(operator.attributes[f"{name}_num_heads"]) for name in ("q", "kv"))
        units = [shapes[0][2] // queries, shapes[1][2] // keys, shapes[2][2] // keys]
    else:
        queries, keys, units = shapes[0][1], shapes[1][1], [1, 1, 1]
    at, heads = (2, 1) if flat else (1, 2)
    shared = queries // keys
    past = operator.size(4, 2) if operator.has(4) else 0
    scores = (shapes[0][0], queries, shapes[0][heads], shapes[1][heads] + past)
    mask = operator.dims(3)

    def masked(dim: int, unit: int = 1) -> Where:
        aligned = meets(mask, scores, dim)
        return None if aligned is None else Index(aligned, unit)

    yield DimFactor(given_of(operator, 0, 0, 0, masked(0), 0, 0, 0), made_of(operator, 0, 0, 0, 0), filled=True)
    if keys > 1:
        q, k, v = (Index(at, unit * more) for unit, more in zip(units, (shared, 1, 1)))
        y = Index(at, units[2] * shared)
        yield DimFactor(
            given_of(operator, q, k, v, masked(1, shared), 1, 1, None),
            made_of(operator, y, 1, 1, Index(1, shared)), filled=True,
        )  # fmt: skip
    else:  # all queries read the same keys, which stay whole
        yield DimFactor(
            given_of(operator, Index(at, units[0]), None, None, masked(1), None, None, None),
            made_of(operator, Index(at, units[2]), None, None, 1), filled=True,
        )  # fmt: skip
    if not operator.attributes.get("is_causal", 0):
        yield DimFactor(
            given_of(operator, heads, None, None, masked(2), None, None, None),
            made_of(operator, heads, None, None, 2), filled=True,
        )  # fmt: skip


def rotary(operator: OperatorUse) -> Iterator[DimFactor]:
    """Samples and places, with the angles; heads."""
    flat, cached = operator.rank(0) == 3, operator.rank(1) == 3
    dim_of_heads = 1 if flat else 2

    def angles(dim: int) -> tuple[Where, ...]:
        row = dim if cached else None
        return given_of(operator, None, row, row, dim)[1:]

    yield DimFactor((0, *angles(0)), (0,))
    yield DimFactor((dim_of_heads, *angles(1)), (dim_of_heads,))
    heads = int(operator.attributes.get("num_heads", 0)) if flat else operator.size(0, 1)
    if heads:
        at = Index(2, operator.size(0, 2) // heads) if flat else Index(1)
        yield DimFactor((at, *[None] * (len(operator.operands) - 1)), (at,), filled=flat)
