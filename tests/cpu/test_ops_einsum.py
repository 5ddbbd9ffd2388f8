"""einsum, tensordot, outer against NumPy in f64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tessera as ts
from tessera import Tensor, f32, sym
from tessera.errors import ArgumentError, AxisError, ShapeError
from tessera.graph.ops.einsum import EinsumSpec, contraction_path, parse_spec
from tolerance import assert_close

EXTENTS = dict(zip("ijklbhmn", (2, 3, 4, 5, 2, 3, 4, 1), strict=True))
SPECS = [
    "ij->ij", "ij->ji", "ij->", "ij->i", "ij", "ji", "ii", "ii->i", "iji->ij", "iij->j", "iiii",
    "ij,jk->ik", "ij,jk", "ij,kj->ik", "ij,ij->", "ij,ij->ij", "ij,ij->i", "ij,jk->", "i,j->ij",
    "i,i", "i,i->i", ",ij->ij", ",", "bij,bjk->bik", "bhij,bhjk->bhik", "bij,jk->bik",
    "bhik,bhjk->bhij", "ij,jk,kl->il", "i,i,i->i", "i,j,k->kji", "ij,ik,il->jkl", "bmk,hk,bl->hml",
    "ii,jj->ij", "iij,j->i", "ijk,kl->", " i j , j k -> k i ", "in,nj->ij",
]


def operands(spec: str, rng: np.random.Generator) -> list[np.ndarray]:
    left = spec.replace(" ", "").split("->")[0]
    return [rng.standard_normal([EXTENTS[c] for c in t]) for t in left.split(",")]


@pytest.mark.parametrize("spec", SPECS)
def test_einsum_is_numpys(spec: str, rng: np.random.Generator) -> None:
    xs = operands(spec, rng)
    for run in (lambda f: f, ts.jit):
        got = run(lambda *a: ts.einsum(spec, *a))(*xs)
        assert_close(got, np.einsum(spec, *xs), dtype="f64", n=60, scale=10.0)


@pytest.mark.parametrize(
    ("spec", "shapes"),
    [
        ("...ij,...jk->...ik", [(2, 3, 4), (2, 4, 5)]),
        ("...ij,...jk->...ik", [(6, 1, 3, 4), (2, 4, 5)]),
        ("...ij,jk", [(2, 3, 4), (4, 5)]),
        ("...,...", [(2, 3), (3,)]),
        ("i...,i...->...", [(4, 2, 3), (4, 3)]),
        ("...ii->...i", [(2, 3, 3)]),
        ("...i->i...", [(2, 5, 3)]),
        ("i...->...", [(4,)]),
        ("b...d,d...->b...", [(2, 3, 4), (4, 1)]),
        ("ij,jk", [(2, 1), (3, 4)]),
        ("...a,a...->...", [(1, 4), (4, 5)]),
        ("ij->...ij", [(2, 3)]),
    ],
)
def test_ellipsis_and_stretching(spec: str, shapes: list, rng: np.random.Generator) -> None:
    if spec == "ij->...ij":
        with pytest.raises(ArgumentError, match="no operand has one"):
            ts.einsum(spec, ts.zeros(shapes[0]))
        return
    xs = [rng.standard_normal(s) for s in shapes]
    assert_close(ts.einsum(spec, *xs), np.einsum(spec, *xs), dtype="f64", n=20, scale=5.0)


@given(st.lists(st.text("abcd", max_size=4), min_size=1, max_size=4), st.data())
def test_random_expressions(inputs: list[str], data: st.DataObject) -> None:
    letters = sorted(set("".join(inputs)))
    output = "".join(data.draw(st.permutations(letters)))[: data.draw(st.integers(0, 4))]
    sizes = {c: data.draw(st.sampled_from([1, 2, 3])) for c in letters}
    rng = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    xs = [rng.standard_normal([sizes[c] for c in t]) for t in inputs]
    spec = ",".join(inputs) + "->" + output
    assert_close(ts.einsum(spec, *xs), np.einsum(spec, *xs), dtype="f64", n=300,
                 scale=300.0)


def test_einsum_gradient_and_vmap(rng: np.random.Generator) -> None:
    """d/da sum(w * einsum) is an einsum again."""
    a, b = rng.standard_normal((2, 3, 4)), rng.standard_normal((2, 4, 5))
    w = rng.standard_normal((3, 2, 5))
    da, db = ts.grad(lambda a, b: ts.sum(ts.einsum("bij,bjk->ibk", a, b) * w), argnums=(0, 1))(a, b)
    assert_close(da, np.einsum("ibk,bjk->bij", w, b), n=10)
    assert_close(db, np.einsum("ibk,bij->bjk", w, a), n=10)
    diagonal = ts.grad(lambda m: ts.einsum("ii", m))(np.ones((3, 3)))
    np.testing.assert_array_equal(diagonal, np.eye(3))
    rows = ts.vmap(lambda x: ts.einsum("ij,j->i", x, np.ones(4)))(a)
    assert_close(rows, a.sum(-1), n=4)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "fp8_e4m3", "int8"])
def test_einsum_computes_wide_and_rounds_once(dtype: str, rng: np.random.Generator) -> None:
    xs = [ts.cast(rng.integers(-4, 5, s).astype(np.float32), dtype)
          for s in ((3, 40), (40, 2), (2, 5))]
    out = ts.einsum("ij,jk,kl->il", *xs)
    exact = np.einsum("ij,jk,kl->il", *[x.array.astype(np.float64) for x in xs])
    if dtype == "int8":
        assert out.dtype.name == "int32"
        np.testing.assert_array_equal(out, exact.astype(np.int32))
    else:
        want = ts.cast(exact.astype(np.float32), dtype).array
        np.testing.assert_array_equal(out.array.astype(np.float32), want.astype(np.float32))


def test_einsum_with_symbolic_extents() -> None:
    B, S = sym("B S")
    attend = ts.jit(lambda q, k: ts.einsum("bshd,bthd->bhst", q, k))
    kind = Tensor["B", "S", 8, 64, f32]
    assert attend.infer(kind, kind).shape == (B, 8, S, S)
    chain = ts.jit(lambda x, a, b: ts.einsum("...i,ij,jk->...k", x, a, b))
    assert chain.infer(Tensor["B", "S", 16, f32], Tensor[16, 2, f32], Tensor[2, 16, f32]).shape \
        == (B, S, 16)
    with pytest.raises(ShapeError, match="letter 'j' is S and, in operand 1"):
        ts.jit(lambda a, b: ts.einsum("ij,jk", a, b)).infer(Tensor["B", "S", f32],
                                                           Tensor["B", 2, f32])


def test_contraction_order_avoids_the_large_intermediate() -> None:
    """(ij,jk),kl with a long j: contracting jk,kl first would cost 100 times as much."""
    spec = EinsumSpec(("ij", "jk", "kl"), "il")
    sizes = {"i": 2, "j": 1000, "k": 2, "l": 1000}
    assert sorted(contraction_path(spec, sizes, "auto")[0]) == [0, 1]
    sizes = {"i": 1000, "j": 2, "k": 1000, "l": 2}
    assert sorted(contraction_path(spec, sizes, "auto")[0]) == [1, 2]


def test_parse() -> None:
    assert parse_spec("ij,jk", [2, 2]) == EinsumSpec(("ij", "jk"), "ik")
    assert parse_spec("...j,j->...", [3, 1]) == EinsumSpec(("ABj", "j"), "AB")
    assert parse_spec("...b,A...", [2, 3]) == EinsumSpec(("Cb", "ABC"), "BCAb")


@pytest.mark.parametrize(
    ("spec", "shapes", "error", "text"),
    [
        ("ij,jk->i?", [(2, 3), (3, 4)], ArgumentError, "letters, commas"),
        ("ij->jk->ij", [(2, 3)], ArgumentError, "letters, commas"),
        ("ij,jk->ik", [(2, 3)], ArgumentError, "names 2 operands, 1 are given"),
        ("ijk,jk->ik", [(2, 3), (3, 4)], ArgumentError, "operand 0 has 2 axes, 'ijk' names 3"),
        ("i,jk->ik", [(2, 3), (3, 4)], ArgumentError, "operand 0 has 2 axes, 'i' names 1"),
        ("...ijk->i", [(2, 3)], ArgumentError, r"'\.\.\.ijk' names 3 or more"),
        ("ij,jk->il", [(2, 3), (3, 4)], ArgumentError, "'l' is in no operand"),
        ("ij,jk->ii", [(2, 3), (3, 4)], ArgumentError, "'i' stands twice"),
        ("ij,jk->ik", [(2, 3), (4, 5)], ShapeError, "letter 'j' is 3 and, in operand 1"),
        ("ii", [(2, 3)], ShapeError, "not square"),
        ("......", [(2,)], ArgumentError, "at most one ellipsis"),
    ],
)
def test_einsum_errors(spec: str, shapes: list, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        ts.einsum(spec, *[ts.zeros(s) for s in shapes])


def test_einsum_needs_its_expression_first() -> None:
    with pytest.raises(ArgumentError, match="first argument is the expression"):
        ts.einsum(ts.zeros((2,)), "i->i")
    with pytest.raises(ArgumentError, match="needs operands"):
        ts.einsum("i->i")


@pytest.mark.parametrize("axes", [0, 1, 2, ((1,), (0,)), ((2, 0), (1, 2)), (2, 1)], ids=str)
def test_tensordot(axes: Any, rng: np.random.Generator) -> None:
    shapes = {"0": [(2, 3), (4,)], "1": [(2, 3), (3, 4)], "2": [(5, 2, 3), (2, 3, 4)],
              "((1,), (0,))": [(2, 3), (3, 4)], "((2, 0), (1, 2))": [(2, 3, 4), (5, 4, 2)],
              "(2, 1)": [(2, 3, 4), (5, 4, 2)]}[str(axes)]
    a, b = (rng.standard_normal(s) for s in shapes)
    assert_close(ts.tensordot(a, b, axes), np.tensordot(a, b, axes), n=10)


def test_tensordot_and_outer_errors() -> None:
    a, b = ts.zeros((2, 3)), ts.zeros((4, 5))
    with pytest.raises(ShapeError, match="axis 1 of .* and axis 0"):
        ts.tensordot(a, b, 1)
    with pytest.raises(AxisError, match="over 3 axes"):
        ts.tensordot(a, b, 3)
    with pytest.raises(ArgumentError, match="axes of a, axes of b"):
        ts.tensordot(a, b, "ij")
    with pytest.raises(AxisError, match="as many different axes"):
        ts.tensordot(a, b, ((0, 1), (0,)))
    with pytest.raises(ShapeError, match="takes vectors"):
        ts.outer(a, b)


def test_outer(rng: np.random.Generator) -> None:
    a, b = rng.standard_normal(3).astype(np.float32), rng.standard_normal(4).astype(np.float32)
    np.testing.assert_array_equal(ts.outer(a, b), np.outer(a, b))
